"""What ``recommend`` asks the simulator, and how the answer is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.units import Duration, UnitError
from fabrictool.catalog import accelerators, engines, model
from fabrictool.cli.calibration_files import read_calibrations
from fabrictool.cli.forecast_answers import PickedPoint, RecommendationAnswer, RecommendedPoint, RefusedSetting
from fabrictool.cli.interpreted import say_if_interpreted
from fabrictool.cli.interrupts import Interrupts
from fabrictool.cli.output import seconds_text, table
from fabrictool.cli.simulating import DESCRIPTIONS, described, progress, stoppable
from fabrictool.cli.simulation_output import plottable
from fabrictool.domain.blueprint import Slo
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.capacity import basis
from fabrictool.simulator.frontier import EVEN, Question, explore, targets
from fabrictool.simulator.slo import METRICS, PERCENTILES, criteria
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS, Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.simulator.frontier import Point, Recommendation, Setting

TARGETS = tuple(f"{metric}_p{percentile}" for metric in METRICS for percentile in PERCENTILES)
_HULL = {
    "concurrency": "{:,.0f} to {:,.0f} requests at once",
    "input_len": "prompts of {:,.0f} to {:,.0f} tokens",
    "output_len": "answers of {:,.0f} to {:,.0f} tokens",
    "devices": "{:,.0f} to {:,.0f} devices",
}


# Wide: each is an option of the command. Long: each is checked.
def question(
    name: str,
    wanted: Sequence[str],
    engine_ids: Sequence[str],
    precisions: Sequence[str],
    lengths: tuple[int, int],
    *,
    devices: int,
    slo: str | None,
    confidence: float,
    kv_precision: str,
) -> Question:
    """`lengths` are the means of prompts and answers. Raises UsageError FT9001 for what no option may be, FT1411 for an
    unknown model.
    """
    pairs = [_device(text) for text in wanted]
    twice = [device.id for number, (device, _) in enumerate(pairs) if device in [other for other, _ in pairs[:number]]]
    if twice:
        raise UsageError.of("FT9001", f"--device {twice[0]} is given twice", hint="give each device once")
    for engine in engine_ids:
        _known(engine, engines(), "engine")
    usable = sorted({name for engine in engine_ids for name in engines()[engine].weight_bytes if name in OCTETS})
    for precision in precisions:
        _known(precision, usable, "precision")
    _known(kv_precision, KV_OCTETS, "precision of the cache")
    priced = [price for _, price in pairs if price]
    if priced and len(priced) < len(pairs):
        raise UsageError.of("FT9001", "some devices have a price and some have none", hint="give all of them one")
    wanted_slo = None if slo is None else _slo(slo)
    if lengths[1] == 1 and any(metric == "tpot" for metric, _, _ in targets(wanted_slo)):
        raise UsageError.of("FT9001", "--slo: an answer of one token has no TPOT", hint="--output 2 or more")
    return Question(
        model=_model(name),
        devices=[device for device, _ in pairs],
        engines=list(dict.fromkeys(engine_ids)),
        precisions=list(dict.fromkeys(precisions)),
        input_len=lengths[0],
        output_len=lengths[1],
        most_devices=devices,
        slo=wanted_slo,
        confidence=float(confidence),
        prices=priced,
        kv_precision=kv_precision,
    )


def answer(asked: Question, calibrations: Path | None) -> Recommendation:
    """Tries all settings, and shows how far that is. Raises InvalidInputError FT2111 when the model fits none."""
    known = [*read_calibrations(calibrations), *shipped()]
    say_if_interpreted()
    with Interrupts(at_once=True) as stop:
        tried = explore(asked, known, stoppable(progress("settings"), stop))
    if not tried.points:
        why = next(iter(tried.refused.values()), "no engine holds weights in these precisions")
        raise InvalidInputError.of("FT2111", f"no setting can run: {why}", hint="more --devices, or a lower precision")
    return tried


def text(tried: Recommendation) -> str:
    """The front, fastest for a user first; the picks are marked."""
    asked = tried.question
    quantiles = _quantiles(asked.slo)
    heads = ["", "ENGINE", "DEVICES", "WEIGHTS", "CUT", "AT ONCE"]
    heads += [f"{metric.upper()} {quantile}" for metric, quantile in quantiles]
    heads += ["TOK/S", "A DEVICE", "J/TOK", *(["COST/MTOK"] if asked.prices else []), "KEEPS TARGETS"]
    rows = []
    sure, even = tried.pick, tried.best(EVEN)
    shown = [*tried.front, *(p for p in (sure, even) if p is not None)]
    for point in sorted({id(p): p for p in shown}.values(), key=lambda p: p.tpot):
        report = point.prediction.report
        rows.append([
            "*" if point is sure else "+" if point is even else "",
            point.setting.engine,
            f"{point.setting.cut.devices} {point.setting.device.id}",
            point.setting.precision,
            cut_text(point.setting),
            str(point.max_num_seqs),
            *(_latency_text(report.latency[metric][quantile]) for metric, quantile in quantiles),
            _amount_text(point.prediction.estimate.tokens_per_s),
            _amount_text(point.tokens_per_device),
            f"{report.joules_per_token:.2g}",
            *([f"{report.cost_per_million_tokens:.3g}"] if asked.prices else []),
            _verdict(point, asked),
        ])  # fmt: skip
    return table(heads, rows)


def notes(tried: Recommendation) -> Iterator[str]:
    """The recommendation in words, and what one must know to believe it."""
    asked, sure, even = tried.question, tried.pick, tried.best(EVEN)
    load = f"{asked.model.id}, {asked.input_len:,} tokens in, {asked.output_len:,} out"
    percent = f"{asked.confidence:.0%}"
    if sure is None:
        nearest = tried.nearest
        if nearest is not None:
            over = nearest.worst(asked.slo, asked.confidence)
            yield f"{load}: nothing keeps the targets with {percent} confidence; nearest, ×{over:.2g} over them:"
            yield f"  {_setting_text(nearest)}"
    else:
        yield f"* recommended for {load}: {_setting_text(sure)}"
        for line in _limits(sure, tried):
            yield f"    {line}"
        if sure.setting.declarable:
            yield f"    in a blueprint: {_blueprint_text(sure)}"
        else:
            started = engines()[sure.setting.engine].started
            why = "a blueprint has no words for ep and dp" if started else f"plans do not start {sure.setting.engine}"
            yield f"    {why}: start it with the engine's own flags, and `adopt` it"
            plain = tried.best(asked.confidence, declarable=True)
            if plain is not None:
                lost = 1.0 - plain.worth / sure.worth
                yield f"    the best that a blueprint can say, {lost:.0%} fewer tokens: {_blueprint_text(plain)}"
    if even is not None and even is not sure:
        gain = even.worth / sure.worth - 1.0 if sure is not None else math.nan
        more = f", {gain:.0%} more tokens" if gain > 0 else ""
        yield f"+ by the forecast as it is, without room for its error{more}: {_setting_text(even)}"
    yield from _doubts(tried)
    sources = dict.fromkeys(basis(p.prediction.calibration) for p in (sure, even, tried.nearest) if p is not None)
    yield f"basis: {'; '.join(sources)}"
    if tried.refused:
        yield f"{len(tried.refused)} settings cannot run, such as: {next(iter(tried.refused.values()))}"


def _doubts(tried: Recommendation) -> Iterator[str]:
    """What one must know of the picks before one believes them."""
    asked, sure = tried.question, tried.pick
    if asked.slo is not None and sure is not None:
        yield (
            f"{asked.confidence:.0%} is for each target by itself, by how far means were off; how often such picks"
            " kept a limit on models that nothing was learned from: docs/reference/simulator-accuracy.md"
        )
    for point in {id(p): p for p in (sure, tried.best(EVEN)) if p is not None}.values():
        mark = "*" if point is sure else "+"
        if point.limited:
            yield f"{mark} has the largest batch limit that was tried; a larger one may serve more"
        outside = point.prediction.outside.items()
        if outside and point.prediction.calibration.points:
            ranges = ", ".join(_HULL[name].format(*limits) for name, limits in outside)
            yield f"{mark} lies outside of what was measured ({ranges}): its bands are widened"
        machine = Machine.of(point.setting.device)
        if point.setting.cut.devices > machine.per_node:
            wire = f"{machine.network / 1e9:.0f} GB/s for each device"
            yield f"{mark} spans nodes of {machine.per_node}; between them {wire} were reckoned with"
    if asked.kv_precision != "bf16":
        yield f"the cache is kept in {asked.kv_precision}: say so to the engine (vllm: --kv-cache-dtype)"


def document(tried: Recommendation) -> RecommendationAnswer:
    asked = tried.question

    def picked(confidence: float) -> PickedPoint | None:
        point = tried.best(confidence)
        rate = tried.rates.get(confidence)
        return None if point is None else PickedPoint(**_plain(point, tried), requests_per_s_within_targets=rate)

    return RecommendationAnswer(
        model=asked.model.id,
        input_len=asked.input_len,
        output_len=asked.output_len,
        targets={f"{m}_{q}": limit for m, q, limit in targets(asked.slo)},
        confidence=asked.confidence,
        kv_precision=asked.kv_precision,
        pick=picked(asked.confidence),
        by_forecast=picked(EVEN),
        front=[RecommendedPoint(**_plain(point, tried)) for point in tried.front],
        points=[RecommendedPoint(**_plain(point, tried)) for point in tried.points],
        refused=[RefusedSetting(**_widths(setting), why=why) for setting, why in tried.refused.items()],
    )


def write_plot(path: Path, tried: Recommendation) -> None:
    """Speed for each user against tokens for each device; a line a setting. Raises as `plottable` does."""
    plottable(path)
    from matplotlib.figure import Figure

    asked, sure, even = tried.question, tried.pick, tried.best(EVEN)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axis = figure.subplots()
    for setting in dict.fromkeys(p.setting for p in tried.points):
        mine = sorted((p for p in tried.points if p.setting is setting), key=lambda p: p.max_num_seqs)
        axis.plot(*_axes(mine), color="0.8", linewidth=1, zorder=1)
    front = tried.front
    axis.plot(*_axes(front), color="tab:blue", marker="o", markersize=4, label="best of both", zorder=2)
    labelled: set[Setting] = set()
    for point in front:
        if point.setting not in labelled:
            labelled.add(point.setting)
            x, y = _axes([point])
            axis.annotate(_short(point), (x[0], y[0]), fontsize=7, xytext=(5, 5), textcoords="offset points")
    for pick, colour, label in ((sure, "tab:green", "recommended"), (even, "tab:orange", "by the forecast as it is")):
        if pick is not None:
            name = f"{label}: {_short(pick)}, {pick.max_num_seqs} at once"
            axis.scatter(*_axes([pick]), s=110, marker="*", color=colour, label=name, zorder=3)
    speed = "output tokens/s (1 / TPOT)" if asked.output_len > 1 else "answers of one token/s (1 / TTFT)"
    axis.set_xlabel(f"speed for each user: {speed}")
    axis.set_ylabel("output tokens for each unit of money" if asked.prices else "output tokens/s of each device")
    axis.grid(alpha=0.3)
    axis.margins(x=0.12)  # for the last label
    axis.legend(fontsize=8)
    axis.set_title(f"{asked.model.id}, {asked.input_len:,} tokens in, {asked.output_len:,} out", fontsize=10)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise file_error(error, path) from error


def cut_text(setting: Setting) -> str:
    """Widths above 1, such as ``tp 4 pp 2``."""
    cut = setting.cut
    widths = [f"{name} {value}" for name, value in _cut(cut).items() if value > 1]
    return " ".join(widths) or "one device"


def _axes(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    pairs = [(1.0 / p.tpot, p.worth) for p in points]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _short(point: Point) -> str:
    setting = point.setting
    return f"{setting.engine} {setting.precision} {cut_text(setting)}, {setting.device.id}"


def _setting_text(point: Point) -> str:
    setting = point.setting
    many = setting.cut.devices > 1
    on = f"{setting.cut.devices} × {setting.device.id} ({cut_text(setting)})" if many else setting.device.id
    groups = setting.cut.dp
    share = f" ({point.max_num_seqs // groups} for each of dp {groups})" if groups > 1 else ""
    return f"{setting.engine} on {on}, {setting.precision}, up to {point.max_num_seqs} requests at once{share}"


def _blueprint_text(point: Point) -> str:
    cut = point.setting.cut
    widths = ", ".join(f"{name}: {value}" for name, value in (("tp", cut.tp), ("pp", cut.pp)) if value > 1)
    words = [f"engine: {point.setting.engine}", f"variant: {{precision: {point.setting.precision}}}"]
    words += [f"parallelism: {{{widths}}}"] if widths else []
    return ", ".join([*words, f"max_num_seqs: {point.max_num_seqs}"])


def _limits(point: Point, tried: Recommendation) -> Iterator[str]:
    asked, figures = tried.question, []
    for metric, quantile in _quantiles(asked.slo):
        middle, high = (point.latency(metric, quantile, confidence) for confidence in (EVEN, asked.confidence))
        if not math.isnan(middle):
            sure = f"{asked.confidence:.0%}: below {_latency_text(high)}"
            figures.append(f"{metric.upper()} {quantile} {_latency_text(middle)} ({sure})")
    yield ", ".join(figures)
    tokens = _amount_text(point.prediction.estimate.tokens_per_s)
    yield f"one replica with its batch always full: {tokens} output tokens/s, {tried.full_rate(point):.3g} requests/s"
    rate = tried.rates.get(asked.confidence)
    if rate is not None:
        percent = f"{asked.confidence:.0%}"
        yield f"of requests that come at random: up to {rate:.3g}/s within the targets, with the same {percent}"


def _verdict(point: Point, asked: Question) -> str:
    if not criteria(asked.slo):
        return "–"
    if point.worst(asked.slo, asked.confidence) <= 1.0:
        return "yes"
    return "likely" if point.worst(asked.slo, EVEN) <= 1.0 else "no"


def _quantiles(slo: Slo | None) -> list[tuple[str, str]]:
    return [(metric, quantile) for metric, quantile, _ in targets(slo)] or [("ttft", "p95"), ("tpot", "p95")]


def _latency_text(seconds: float) -> str:
    """Three figures below a tenth of a second, where settings differ by less than a millisecond."""
    if math.isnan(seconds):
        return "–"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.1 else seconds_text(seconds)


def _amount_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cut(cut: Any) -> dict[str, int]:
    return {name: getattr(cut, name) for name in ("tp", "pp", "ep", "dp")}


def _widths(setting: Setting) -> dict[str, Any]:
    plain = {"engine": setting.engine, "device": setting.device.id, "precision": setting.precision}
    return {**plain, **_cut(setting.cut), "devices": setting.cut.devices}


def _plain(point: Point, tried: Recommendation) -> dict[str, Any]:
    asked, report, estimate = tried.question, point.prediction.report, point.prediction.estimate
    latencies = {
        f"{metric}_{quantile}_s": _finite(point.latency(metric, quantile, EVEN))
        for metric, quantile in _quantiles(asked.slo)
    }
    return {
        **_widths(point.setting),
        "max_num_seqs": point.max_num_seqs,
        "ttft_s": estimate.ttft,
        "tpot_s": estimate.tpot or None,
        "e2e_s": estimate.e2e,
        **latencies,
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_per_device": point.tokens_per_device,
        "requests_per_s": tried.full_rate(point),
        "joules_per_token": _finite(report.joules_per_token),
        "cost_per_million_tokens": _finite(report.cost_per_million_tokens) if asked.prices else None,
        "worst_over_target": point.worst(asked.slo, EVEN),
        "worst_over_target_with_confidence": point.worst(asked.slo, asked.confidence),
        "outside_of_measured": sorted(point.prediction.outside),
        "basis": basis(point.prediction.calibration),
    }


def _device(given: str) -> tuple[Accelerator, float]:
    name, equals, price = given.partition("=")
    _known(name, accelerators(), "device")
    if not equals:
        return accelerators()[name], 0.0
    try:
        value = float(price)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise UsageError.of("FT9001", f"--device {given}: {price!r} is no price", hint="such as h100-sxm=2.50")
    return accelerators()[name], value


def _known(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        raise UsageError.of("FT9001", f"unknown {what} {name!r}", hint=f"one of: {', '.join(sorted(known))}")


def _model(name: str) -> ModelArchitecture:
    if name.endswith(DESCRIPTIONS):
        return described(name)
    entry = model(name)
    if entry is None:
        hint = "ids are those of Hugging Face; or give the path of its config.json, or of a part that describes it"
        raise InvalidInputError.of("FT1411", f"the model {name!r} is not in the catalogue", hint=hint)
    return entry


def _slo(given: str) -> Slo:
    limits = {}
    for part in given.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in TARGETS or not equals:
            hint = f"KEY=TIME,…; KEY is one of: {', '.join(TARGETS)}"
            raise UsageError.of("FT9001", f"--slo: {part.strip()!r} is no target", hint=hint)
        if key in limits:
            raise UsageError.of("FT9001", f"--slo: {key} is given twice")
        try:
            limits[key] = Duration.parse(value)
        except UnitError as error:
            raise UsageError.of("FT9001", f"--slo {key}: {error.message}", hint=error.hint) from error
        if not limits[key] > 0:
            raise UsageError.of("FT9001", f"--slo {key}: {value} is no time that a request can keep")
    return Slo.model_validate(limits)
