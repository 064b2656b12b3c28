"""Traces on disk and in words, for the commands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import UsageError
from fabrictool.base.files import file_error, write_output
from fabrictool.cli.output import data, table
from fabrictool.workload import servegen
from fabrictool.workload.arrivals import PROCESSES
from fabrictool.workload.generate import Recipe, generate, popular
from fabrictool.workload.lengths import LONGEST, SHAPES, Lengths
from fabrictool.workload.trace import dumps

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.workload.statistics import Statistics
    from fabrictool.workload.trace import Trace

MOST_MODELS = 10_000
MOST_REQUESTS = 5_000_000
"""Of a trace that is made up: about as many as the longest public one has; they are held in memory."""


def drawn(folder: Path, seed: int, hours: str | None, rate: float | None) -> Trace:
    """Requests of the clients in a ServeGen folder."""
    try:
        clients = servegen.read(folder, None if hours is None else _hours(hours))
    except OSError as error:
        raise file_error(error, folder) from error
    return servegen.draw(clients, seed, rate)


def _hours(text: str) -> tuple[float, float]:
    wrong = UsageError.of("FT9001", f"--hours is {text!r}", hint="FROM:TO, hours of the recording, such as 10:12.5")
    try:
        low, high = map(float, text.split(":"))
    except ValueError as error:
        raise wrong from error
    if not 0 <= low < high < math.inf:
        raise wrong
    return low, high


def write(trace: Trace, output: Path | None) -> None:
    """Our own lines, to a file or to stdout."""
    if output is None:
        for line in dumps(trace):
            data(line)
        return
    write_output(output, ("\n".join(dumps(trace)) + "\n").encode())


def generated(text: str, count: int, seed: int, rate: float | None = None) -> Trace:
    """A trace after a recipe such as ``gamma,rate=4,cv=3,input=lognormal:900:700,output=200``."""
    process, *rest = [part.strip() for part in text.split(",")]
    if process not in PROCESSES:
        raise UsageError.of("FT9001", f"{process!r} is not an arrival process", hint=f"one of: {', '.join(PROCESSES)}")
    if count > MOST_REQUESTS:
        raise UsageError.of("FT9001", f"{count} requests cannot be made at once", hint=f"at most {MOST_REQUESTS}")
    given = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name not in ("rate", "cv", "on", "off", "input", "output", "models", "skew"):
            raise UsageError.of(
                "FT9001", f"{part!r} is not part of a workload", hint="fabrictool trace generate --help"
            )
        given[name] = value
    recipe = Recipe(
        rate=rate if rate is not None else _number(given, "rate", 1.0),
        input=_lengths(given.get("input"), 512.0),
        output=_lengths(given.get("output"), 128.0),
        process=process,
        cv=_number(given, "cv", 1.0),
        on=_number(given, "on", 10.0),
        off=_number(given, "off", 30.0),
    )
    models = _number(given, "models", 0)
    if models:
        if models not in range(1, MOST_MODELS + 1):
            raise UsageError.of("FT9001", f"models is {given['models']!r}", hint=f"a whole number up to {MOST_MODELS}")
        names = tuple(f"model-{i}" for i in range(int(models)))
        return popular(
            names, recipe.rate, count, seed, recipe, _number(given, "skew", 0.0) if "skew" in given else None
        )
    return generate(recipe, count, seed)


def text(statistics: Statistics) -> str:
    """Statistics as a table."""

    def numbers(values: dict[str, float]) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in values.items())

    rows = [
        ("requests", f"{statistics.requests} in {statistics.span_s:.0f} s, {statistics.rate:.4g} req/s"),
        ("gaps", f"coefficient of variation {statistics.gap_cv:.3g}"),
        ("input tokens", numbers(statistics.input)),
        ("output tokens", numbers(statistics.output)),
        ("busiest minute", f"{statistics.peak_to_mean:.3g} × the mean of active minutes, in tokens"),
        (
            "input/output",
            "  ".join("–" if math.isnan(x) else f"{x:.3g}" for x in statistics.io_ratio) + "  by tenths of time",
        ),
        ("prefix reuse", f"{statistics.prefix_reuse:.1%} of the prompt tokens"),
    ]
    if len(statistics.popularity) > 1:
        leading = ", ".join(f"{name} {share:.1%}" for name, share in list(statistics.popularity.items())[:5])
        rows.append(
            ("models", f"{len(statistics.popularity)}: {leading}; the top tenth gets {statistics.top_tenth:.1%}")
        )
    if statistics.latency:
        rows.append(("measured latency", numbers(statistics.latency) + "  s"))
    rows.append(("dropped", ", ".join(f"{n} {why}" for why, n in sorted(statistics.dropped.items())) or "none"))
    return table(("what", "value"), rows)


def plain(value: Any) -> Any:
    """Without NaN, for JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(given: dict[str, str], name: str, default: float) -> float:
    try:
        return float(given.get(name, default))
    except ValueError as error:
        raise UsageError.of("FT9001", f"{name} is {given[name]!r}, not a number") from error


def _lengths(text: str | None, default: float) -> Lengths:
    if text is None:
        return Lengths("lognormal", default, default)
    shape, *rest = text.split(":")
    hint = f"tokens, or SHAPE:MEAN:SD[:MIN:MAX] with SHAPE one of {', '.join(SHAPES)}"
    wrong = UsageError.of("FT9001", f"{text!r} is not a length", hint=hint)
    try:
        numbers = [float(part) for part in (rest or [shape])]
    except ValueError as error:
        raise wrong from error
    if not rest:
        return Lengths("fixed", numbers[0])
    if shape not in SHAPES or len(numbers) not in (1, 2, 4):
        raise wrong
    mean, sd = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    bounds = numbers[2:] or [1.0, float(LONGEST)]
    if not all(bound.is_integer() for bound in bounds):
        raise wrong
    least, most = map(int, bounds)
    return Lengths(shape, mean, sd, least, most)
