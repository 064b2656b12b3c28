"""What ``simulate`` played, as a person or a program reads it: table, notes, JSON, bars, plots, Chrome traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error, write_output
from fabrictool.base.units import Duration
from fabrictool.cli.forecast_answers import (
    FigureOfSeeds,
    PlayedEvent,
    SimulatedModel,
    SimulatedSpread,
    Simulation,
)
from fabrictool.cli.output import json_document, seconds_text, table, terminal_columns
from fabrictool.simulator.report import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fabrictool.cli.simulating import ScenarioPlay, ShownPlay
    from fabrictool.cli.sweeping import SeedSpread


def _fine(seconds: float) -> str:
    """With three figures: seeds differ little."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    **{
        f"{metric}_{quantile}_s": (f"{metric.upper()} {quantile}", _fine)
        for metric in ("ttft", "tpot", "e2e")
        for quantile in ("p50", "p95", "p99")
    },
    "attainment": ("SLO met", "{:.2%}".format),
    "goodput": ("good req/s", "{:.4g}".format),
    "output_tokens_per_s": ("tok/s", "{:.4g}".format),
    "utilisation": ("busy", "{:.1%}".format),
    "kv_use": ("KV", "{:.1%}".format),
    "cost_per_million_tokens": ("cost/Mtok", "{:.3g}".format),
    "joules_per_token": ("J/token", "{:.3g}".format),
    "refused": ("refused", "{:.4g}".format),
    "lost": ("lost", "{:.4g}".format),
    "unserved": ("in vain", "{:.4g}".format),
}
"""Title and form of each figure of `sweeping.figures_of`."""
ALWAYS = FIGURES.keys() - {"refused", "lost", "unserved"}
"""The others are shown where there are any."""
SPEEDS = 9
"""Columns of the table that say what clients see, with the model's name."""
EVENT_WORDS = {"up": "is up from {at}", "drain": "gets no new requests from {at}", "down": "is lost at {at}"}


def document(runs: Sequence[ShownPlay], seed: int, spreads: Sequence[SeedSpread] = ()) -> Simulation:
    """Every play; behind them, where there were several seeds, how far they differ."""
    models = [
        SimulatedModel(
            model=run.model,
            scenario=run.scenario or None,
            trace=run.trace or None,
            seed=run.seed,
            events=[
                PlayedEvent(kind=event.kind, replica=event.replica, at_s=event.at, happened=happened)
                for event, happened in run.events
            ],
            unserved=run.unserved,
            **run.report.to_json(),
        )
        for run in runs
    ]
    differing = [
        SimulatedSpread(
            model=spread.first.model,
            scenario=spread.first.scenario or None,
            trace=spread.first.trace or None,
            seeds=spread.seeds,
            figures={name: FigureOfSeeds(**asdict(figure)) for name, figure in spread.figures.items()},
        )
        for spread in spreads
    ]
    return Simulation(seed=seed, models=models, spreads=differing)


def spread_table(spreads: Sequence[SeedSpread]) -> str:
    """A line a figure: what it is on average over the seeds, and how far single ones are from it."""
    rows = []
    for spread in spreads:
        for name, figure in spread.figures.items():
            title, text = FIGURES[name]
            if name not in ALWAYS and not figure.most:
                continue
            cells = (figure.mean, figure.deviation, figure.least, figure.most)
            rows.append([spread.first.title, title, *map(text, cells)])
    return table(("model", "figure", "mean", "std dev", "least", "most"), rows)


def lines_of(runs: Sequence[ShownPlay], spreads: Sequence[SeedSpread]) -> tuple[str, list[str]]:
    """(table, notes): of the spreads where there are any, with the bands that all seeds have in common."""
    if not spreads:
        return table_of(runs), list(notes(runs))
    lines = []
    for spread in spreads:
        seeds = f"{spread.seeds} seeds from {spread.first.seed} on"
        lines.append(f"{spread.first.title}: {seeds}; {_bands(spread.first)}")
    return spread_table(spreads), lines


def table_of(runs: Sequence[ShownPlay]) -> str:
    """One line a model; on a terminal that is too narrow two, what clients see and what that takes."""
    headings = (
        "model", "requests", "req/s", "TTFT p50", "p95", "TPOT p50", "p95", "E2E p95", "SLO met", "busy", "KV",
        "tok/s", "cost/Mtok", "J/token",
    )  # fmt: skip
    rows = []
    for run in runs:
        figures = run.report
        latency = figures.latency
        rows.append((
            run.title,
            f"{figures.finished}/{figures.requests}",
            f"{figures.rate:.3g}",
            seconds_text(latency["ttft"]["p50"]),
            seconds_text(latency["ttft"]["p95"]),
            seconds_text(latency["tpot"]["p50"]),
            seconds_text(latency["tpot"]["p95"]),
            seconds_text(latency["e2e"]["p95"]),
            f"{figures.attainment:.1%}",
            f"{max(figures.utilisation):.0%}",
            f"{max(figures.kv_use):.0%}",
            f"{figures.output_tokens_per_s:.4g}",
            f"{figures.cost_per_million_tokens:.3g}" if figures.cost else "–",
            f"{figures.joules_per_token:.3g}",
        ))  # fmt: skip
    whole, edge = table(headings, rows), terminal_columns()
    if edge is None or len(whole.partition("\n")[0]) <= edge:
        return whole
    parts = [(headings[0], *headings[1:SPEEDS]), (headings[0], *headings[SPEEDS:])]
    first, second = ([(row[0], *row[1:SPEEDS]) for row in rows], [(row[0], *row[SPEEDS:]) for row in rows])
    return f"{table(parts[0], first)}\n\n{table(parts[1], second)}"


def notes(runs: Sequence[ShownPlay]) -> Iterator[str]:
    """What one must know to believe the table."""
    for run in runs:
        figures = run.report
        yield f"{run.title}: {_bands(run)}"
        for event, happened in run.events:
            missed = "" if happened else ": not reached, the last answer came before"
            yield f"{run.title}: {event.replica} {EVENT_WORDS[event.kind].format(at=Duration(event.at))}{missed}"
        if figures.refused or figures.lost or figures.retried or run.unserved or figures.preemptions:
            fates = [
                f"{figures.refused} requests that found no replica",
                f"{figures.lost} lost in the middle of an answer",
                f"{figures.retried} started again elsewhere",
                f"{run.unserved or 0} waited in vain",
                f"{figures.preemptions} preemptions",
            ]
            yield f"{run.title}: {', '.join(fates)}"
        if not figures.complete:
            yield f"{run.title}: interrupted; the figures cover only what was simulated until then"


def _bands(run: ShownPlay) -> str:
    figures = run.report
    bands = ", ".join(f"{metric.upper()} ×{low:.2g}-{high:.2g}" for metric, (low, high) in figures.bands.items())
    return f"90 % of measurements lie within {bands}; {figures.basis}"


def terminal_chart(runs: Sequence[ScenarioPlay], width: int = 60) -> str:
    """Latency quantiles as bars."""
    lines = []
    for metric in ("ttft", "tpot", "e2e"):
        # One output token has no TPOT: NaN, which is not above anything.
        longest = max((v for run in runs if (v := run.play.report.latency[metric]["p99"]) > 0), default=1.0)
        lines.append(metric.upper())
        for run in runs:
            for name in QUANTILES:
                value = run.play.report.latency[metric][name]
                bar = "█" * max(1, round(width * value / longest)) if value > 0 else ""
                lines.append(f"  {run.title[:24]:<24} {name:>4} {bar} {seconds_text(value)}")
    return "\n".join(lines)


def write_json(path: Path, answer: Simulation) -> None:
    write_output(path, (json_document(answer) + "\n").encode())


def plottable(path: Path) -> None:
    """Raises InvalidInputError FT2145 for a name that is no plot's, or without matplotlib."""
    if path.suffix not in (".svg", ".png"):
        raise InvalidInputError.of("FT2145", f"{path} is neither .svg nor .png")
    if find_spec("matplotlib") is None:
        raise InvalidInputError.of("FT2145", "plots need matplotlib", hint="pip install 'fabrictool[simulator]'")


def write_plot(path: Path, runs: Sequence[ScenarioPlay]) -> None:
    """Latency CDFs, running and waiting requests, cache use. Raises as `plottable` does."""
    plottable(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    for run in runs:
        outcome = run.play.outcome
        for axis, (title, values) in zip(
            axes, (("TTFT, s", outcome.ttft), ("TPOT, s", outcome.tpot), ("E2E, s", outcome.e2e)), strict=False
        ):
            known = np.sort(values[np.isfinite(values)])
            axis.plot(known, np.linspace(0, 1, len(known)), label=run.title)
            axis.set_xlabel(title)
            axis.set_ylabel("share of requests")
            axis.grid(alpha=0.3)
        samples = outcome.samples
        if not len(samples):
            continue
        for axis, (offset, title) in zip(
            axes[3:], ((1, "running requests"), (2, "waiting requests"), (3, "KV cache in use")), strict=True
        ):
            series = samples[:, offset::3]
            axis.plot(samples[:, 0], series.mean(axis=1) if offset == 3 else series.sum(axis=1), label=run.title)
            axis.set_xlabel("time, s")
            axis.set_ylabel(title)
            axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle("fabrictool simulate: latencies and timeline")
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise file_error(error, path) from error


def write_chrome_trace(path: Path, runs: Sequence[ScenarioPlay]) -> None:
    """Each request as two asynchronous slices, waiting+prefill and decode, on a track of its own.

    Slices of one thread would have to nest; those of requests that run together do not.
    """
    events: list[dict[str, Any]] = []
    for process, run in enumerate(runs):
        outcome = run.play.outcome
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": run.title}})
        for i in np.flatnonzero(np.isfinite(outcome.finish)):
            mark = f"{process}.{i}"
            common = {"pid": process, "tid": int(outcome.replica[i]), "cat": "request", "id": mark}
            arrival, first, finish = (1e6 * float(x[i]) for x in (outcome.arrival, outcome.first, outcome.finish))
            arguments = {"prompt": int(outcome.prompt[i]), "output": int(outcome.output[i])}
            for name, begin, end in (("to first token", arrival, first), ("decode", first, finish)):
                events.append(common | {"name": name, "ph": "b", "ts": begin, "args": arguments})
                events.append(common | {"name": name, "ph": "e", "ts": end})
    write_output(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
