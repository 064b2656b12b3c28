"""Which way of running one replica is best: every engine, precision, cut and batch limit, and the front of those.

A setting is tried as a closed loop: as many requests in flight as its batch limit, so the limit is what is chosen
between speed for each user and tokens for each device. A pick has to keep each of its targets with a stated confidence,
which the bands of the forecasts turn into room to spare. Servers are not asked like that: their requests come when they
come, so the rate of those at which a pick still keeps its targets is found beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.catalog import engines
from fabrictool.simulator import cases
from fabrictool.simulator.cases import Case, check, predict
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.slo import criteria
from fabrictool.simulator.stepmodel import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.domain.blueprint import Slo
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.cases import Prediction

MOST_AT_ONCE = 1024
"""The largest batch limit that is tried, for each group of attention; engines' defaults are up to 512."""
SATURATED = 1.01
"""A batch limit twice as large that brings no more than this times the tokens is the last one that is tried."""
BAND = NormalDist().inv_cdf(0.95)
"""Standard deviations to the upper end of a 90 % band."""
EVEN = 0.5
"""Confidence of a forecast as it is."""
RATE_STEP = 1.02
"""How finely the rate of arrivals is looked for."""
LEAST_RATE = 1e-3
"""Of what a full batch serves: a pick whose targets do not hold at so few arrivals keeps them at none."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be served, and what it may run on."""

    model: ModelArchitecture
    devices: Sequence[Accelerator]
    engines: Sequence[str]
    precisions: Sequence[str]
    """Empty: that of the released weights, and of 16-bit ones 8 bits as well where the device multiplies in 8."""
    input_len: int
    output_len: int
    most_devices: int = 8
    """Of one replica."""
    slo: Slo | None = None
    confidence: float = 0.9
    """With which a pick has to keep the targets, 0.5 to below 1; 0.5: the forecast as it is."""
    prices: Sequence[float] = ()
    """Of an hour of each device, in the order of `devices`; empty: not to be counted."""
    kv_precision: str = "bf16"


@dataclass(frozen=True, eq=False)  # itself only: the catalogue's entries cannot be keys
class Setting:
    """How one replica runs, all but its batch limit."""

    device: Accelerator
    engine: str
    precision: str
    cut: Parallelism
    price: float = 0.0

    @property
    def declarable(self) -> bool:
        """Whether a blueprint can ask for it: it has words for the cut, and the engine is one that is started."""
        return self.cut.ep == self.cut.dp == 1 and engines()[self.engine].started


@dataclass(frozen=True, slots=True)
class Point:
    """A setting at one batch limit, and its forecast."""

    setting: Setting
    max_num_seqs: int
    prediction: Prediction

    @property
    def tokens_per_device(self) -> float:
        """Output tokens/s of each of the replica's devices."""
        return self.prediction.estimate.tokens_per_s / self.setting.cut.devices

    @property
    def worth(self) -> float:
        """Output tokens for each unit of money where the device has a price, else `tokens_per_device`."""
        return self.tokens_per_device * (3600 / self.setting.price if self.setting.price else 1.0)

    @property
    def tpot(self) -> float:
        """Seconds for each token that a user waits for; of answers of one token those until it is there."""
        return self.prediction.estimate.tpot or self.prediction.estimate.ttft

    @property
    def limited(self) -> bool:
        """Whether a larger batch limit may be better still, which was not tried."""
        return self.max_num_seqs >= _most_at_once(self.setting)

    def latency(self, metric: str, quantile: str, confidence: float) -> float:
        """Seconds that a quantile such as ``p95`` stays below with this confidence.

        Bands are those of means, because percentiles were measured too seldom to learn bands of their own.
        """
        estimate = getattr(self.prediction.estimate, metric)
        high = self.prediction.bands[metric][1] / estimate if estimate else 1.0
        spare = math.log(high) * NormalDist().inv_cdf(confidence) / BAND
        return self.prediction.report.latency[metric][quantile] * math.exp(spare)

    def worst(self, slo: Slo | None, confidence: float) -> float:
        """The largest of latencies over their targets; up to 1 all are kept, each with this confidence."""
        ratios = (self.latency(metric, quantile, confidence) / target for metric, quantile, target in targets(slo))
        return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=0.0)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All that was tried."""

    question: Question
    points: Sequence[Point]
    refused: dict[Setting, str] = field(default_factory=dict)
    """Settings that cannot run, and why."""
    rates: dict[float, float] = field(default_factory=dict)
    """Confidence → requests/s that may arrive at random so that the `best` with it still keeps the targets."""

    @property
    def pick(self) -> Point | None:
        """The best that keeps the targets with the question's confidence; None: there is none."""
        return self.best(self.question.confidence)

    def best(self, confidence: float, *, declarable: bool = False) -> Point | None:
        """The best that keeps the targets so surely; `declarable`: of those that a blueprint can say."""
        kept = [p for p in self.points if p.worst(self.question.slo, confidence) <= 1.0]
        kept = [p for p in kept if p.setting.declarable] if declarable else kept
        return max(kept, key=lambda p: p.worth, default=None)

    def full_rate(self, point: Point) -> float:
        """Requests/s of one replica with its batch always full."""
        return point.prediction.estimate.tokens_per_s / self.question.output_len

    @property
    def nearest(self) -> Point | None:
        """That misses the targets by least."""
        return min(self.points, key=lambda p: p.worst(self.question.slo, self.question.confidence), default=None)

    @property
    def front(self) -> list[Point]:
        """The points that no other one beats in both speed for a user and worth, fastest first."""
        front: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.tpot, -p.worth)):
            if not front or point.worth > front[-1].worth:
                front.append(point)
        return front


def targets(slo: Slo | None) -> list[tuple[str, str, float]]:
    """Metric, quantile such as ``p95``, and its most seconds."""
    return [(c.metric, f"p{c.share * 100:.0f}", getattr(c.target, c.metric)) for c in criteria(slo) if c.metric]


def explore(
    question: Question, calibrations: Sequence[Calibration], tell: Callable[[int, int], None] = lambda _done, _all: None
) -> Recommendation:
    """Tries all settings; `tell` hears how many of how many are done. Raises FT2110 for lengths that do not fit."""
    every = list(settings(question))
    points: list[Point] = []
    refused: dict[Setting, str] = {}
    for number, setting in enumerate(every, 1):
        case = _case(question, setting)
        try:
            check(case)
            points += _sweep(case, setting, calibrations)
        except FabrictoolError as error:
            if error.problems[0].code == "FT2110":
                raise
            refused[setting] = error.problems[0].message
        tell(number, len(every))
    points += list(_refined(question, points, calibrations))
    different = {(point.setting, point.max_num_seqs): point for point in points}
    tried = Recommendation(question, list(different.values()), refused)
    for confidence in {question.confidence, EVEN} if question.slo else ():
        best = tried.best(confidence)
        if best is not None:
            tried.rates[confidence] = _sustained(tried, best, calibrations, confidence)
    return tried


def settings(question: Question) -> Iterator[Setting]:
    """Every combination that makes sense, whether it fits or not."""
    prices = question.prices or [0.0] * len(question.devices)
    for device, price in zip(question.devices, prices, strict=True):
        usual = [question.model.released] if question.model.released else _usual(device)
        for engine in question.engines:
            for precision in question.precisions or usual:
                if precision in engines()[engine].weight_bytes:
                    for cut in cuts(question.model, engine, question.most_devices, Machine.of(device).per_node):
                        yield Setting(device, engine, precision, cut, price)


def _usual(device: Accelerator) -> list[str]:
    return ["bf16" if "bf16" in device.flops else "fp16", *(["fp8"] if "fp8" in device.flops else [])]


def cuts(model: ModelArchitecture, engine: str, most_devices: int, node: int) -> Iterator[Parallelism]:
    """Of one replica, over a power of two of devices: tensors within a node of so many, stages over any number of them.

    Of a mixture of experts also with the experts dealt out, and with attention in groups of devices that share them.
    """
    if engines()[engine].layer_split:
        yield from (Parallelism(pp=n) for n in _powers(min(most_devices, model.layers)))
        return
    for tp in _powers(min(most_devices, node, model.heads)):
        for pp in _powers(min(most_devices // tp, model.layers)):
            yield Parallelism(tp, pp)
        if not model.experts:
            continue
        for dp in _powers(most_devices // tp):
            if 1 < tp * dp <= model.experts:
                yield Parallelism(tp, ep=tp * dp, dp=dp)


def _powers(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2


def _case(question: Question, setting: Setting, at_once: int = 1) -> Case:
    return Case(
        setting.device,
        question.model,
        setting.engine,
        setting.precision,
        question.kv_precision,
        setting.cut,
        question.input_len,
        question.output_len,
        at_once,
        mode="closed",
        max_num_seqs=at_once,
        price=setting.price,
        settled=True,
    )


def _sweep(case: Case, setting: Setting, calibrations: Sequence[Calibration]) -> list[Point]:
    points: list[Point] = []
    turns = engines()[setting.engine].layer_split
    for at_once in _powers(_most_at_once(setting)):
        if at_once < setting.cut.dp * setting.cut.pp and not turns:
            continue  # some of its devices would never work
        sized = replace(case, concurrency=at_once, max_num_seqs=at_once)
        point = Point(setting, at_once, predict(sized, calibrations))
        if points and point.tokens_per_device < SATURATED * points[-1].tokens_per_device:
            break
        points.append(point)
    return points


def _most_at_once(setting: Setting) -> int:
    return min(MOST_AT_ONCE * setting.cut.dp, cases.MOST_AT_ONCE)


def _sustained(tried: Recommendation, point: Point, calibrations: Sequence[Calibration], confidence: float) -> float:
    """Requests/s that may arrive at random so that the targets are kept, at most as many as a full batch serves."""
    question, full = tried.question, tried.full_rate(point)
    case = replace(_case(question, point.setting, point.max_num_seqs), mode="open", concurrency=0, settled=False)

    def keeps(rate: float) -> bool:
        served = replace(point, prediction=predict(replace(case, rate=rate), calibrations))
        return served.worst(question.slo, confidence) <= 1.0

    if keeps(full):
        return full
    high, low = full, full / 2
    while not keeps(low):
        high, low = low, low / 2
        if low < LEAST_RATE * full:
            return 0.0
    while high > RATE_STEP * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _refined(question: Question, points: Sequence[Point], calibrations: Sequence[Calibration]) -> Iterator[Point]:
    """Between the last batch limit that keeps the targets and the first that does not, where that can be the best."""
    for confidence in (question.confidence, EVEN):
        kept = [p for p in points if p.worst(question.slo, confidence) <= 1.0]
        best = max((p.worth for p in kept), default=0.0)
        for setting in dict.fromkeys(p.setting for p in kept):
            mine = [p for p in points if p.setting == setting]
            low = max((p for p in kept if p.setting == setting), key=lambda p: p.max_num_seqs)
            above = [p for p in mine if p.max_num_seqs > low.max_num_seqs]
            if not above or max(p.worth for p in above) <= best:
                continue
            high = min(p.max_num_seqs for p in above)
            while high - low.max_num_seqs > max(1, low.max_num_seqs // 16):
                middle = (low.max_num_seqs + high) // 2
                point = Point(setting, middle, predict(_case(question, setting, middle), calibrations))
                if point.worst(question.slo, confidence) <= 1.0:
                    low = point
                else:
                    high = middle
            best = max(best, low.worth)
            yield low
