"""Forecasts for many single configurations: one replica (or a prefill/decode pair), one load, three latencies.

Reading of a case, as serving benchmarks measure it: `agg` and `disagg` keep `concurrency` requests in flight from a
burst at the start, ten times as many in all, with lengths uniform between 80 and 100 % of the given ones (the
convention of the public InferenceX runs); `closed` is the same with lengths of ±10 % around the given ones; in `open`
requests come at `rate` as a Poisson process, whatever is still in flight, with lengths as in `closed`; in `batch` all
requests start together and have exactly the given lengths. Means over all requests.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import engines
from fabrictool.routing.policies import RoundRobinPolicy
from fabrictool.simulator.calibration import METRICS, choose
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room, weight_octets
from fabrictool.simulator.network import HAND_LATENCY_S
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.report import Hardware, report
from fabrictool.simulator.slo import LatencyTarget
from fabrictool.simulator.stand import factors_on
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS, Machine, StepModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.simulator.calibration import Calibration, Scope
    from fabrictool.simulator.fleet import Outcome
    from fabrictool.simulator.memory import ReplicaMemory
    from fabrictool.simulator.report import Report
    from fabrictool.simulator.stepmodel import Drafts, Factors

Mode = Literal["batch", "closed", "agg", "disagg", "open"]
MODES: tuple[Mode, ...] = ("batch", "closed", "agg", "disagg", "open")
ROUNDS = 10
"""Requests for each one in flight."""
MOST_REQUESTS = 20_000
OPEN_REQUESTS = 4_000
"""That come in an open loop; where more come than are served, the longer it went on the longer they would wait."""
MOST_RATE = 1e6
MOST_IN_FLIGHT = 100_000
"""And thus of requests of one case; with those below it keeps a slip of the pen from filling the memory."""
MOST_AT_ONCE = 4_096
"""Requests that one replica computes at once: engines' own limits are lower, and step times are tabled up to it."""
MOST_BATCHED = 1 << 20
"""Tokens of one step of all `dp` together; step times are tabled up to it."""
MOST = {"concurrency": MOST_IN_FLIGHT, "max_num_seqs": MOST_AT_ONCE}
MOST_DRAFTED = 64
"""Tokens guessed for one step; tables of a step are that much longer."""
MOST_WORKERS = 1_000
MOST_DEVICES = 1_024
HAND_LINK = 50e9
"""Octets/s at which a prefill replica hands its cache over: one 400 Gbit/s port."""


@dataclass(frozen=True, slots=True)
class PhaseWorkers:
    """The replicas of one phase of a disaggregated case."""

    cut: Parallelism
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration and its load."""

    device: Accelerator
    model: ModelArchitecture
    engine: str
    precision: str
    kv_precision: str
    cut: Parallelism
    input_len: int
    output_len: int
    concurrency: int
    """Requests in flight; of an open loop 0."""
    mode: Mode = "agg"
    prefill: PhaseWorkers | None = None
    decode: PhaseWorkers | None = None
    rate: float = 0.0
    """Requests/s, of an open loop only."""
    max_num_seqs: int = 0
    """Requests that one replica computes at once; 0: as many as are in flight, in an open loop the engine's default,
    which it has for each of `dp`."""
    max_num_batched_tokens: int = 0
    """Of one step of each of `dp`; 0: the engine's default."""
    gpu_memory_utilization: float = 0.0
    """Share of a device's memory that the engine takes; 0: nine tenths, or more where weights would not fit."""
    recv_interval: int = 1
    """Decode steps from one look for new requests to the next (SGLang: ``scheduler-recv-interval``)."""
    target: LatencyTarget | None = None
    """What a request has to keep, for the share of those that do."""
    price: float = 0.0
    """Of one device for an hour, for what tokens cost."""
    drafts: Drafts | None = None
    """Speculative decoding, of which a prefill replica does nothing."""
    settled: bool = False
    """Whether the first wave of a closed loop stays out of the figures: benchmarks count it, servers see it once."""

    @property
    def scope(self) -> Scope:
        """Which kind of calibration holds."""
        return "static" if self.mode == "batch" else "online"

    @property
    def devices(self) -> int:
        if self.prefill and self.decode:
            return self.prefill.cut.devices * self.prefill.workers + self.decode.cut.devices * self.decode.workers
        return self.cut.devices

    def room(self, cut: Parallelism) -> ReplicaMemory:
        """Memory of a replica that is cut so."""
        memory = reported_memory(self.device)
        reserved = engines()[self.engine].reserved(memory)
        return room(
            self.model,
            cut,
            memory,
            weights=self.precision,
            kv=self.kv_precision,
            usable=self.gpu_memory_utilization or None,
            reserved=reserved,
            # The head that drafts is a layer like the others.
            beside=weight_octets(self.model, cut, self.precision) / self.model.layers if self.drafts else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means over the requests of a case, seconds."""

    ttft: float
    tpot: float
    e2e: float
    tokens_per_s: float
    """Output tokens of the whole case over its whole time."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """An estimate with its 90 % band and where it comes from."""

    estimate: Estimate
    report: Report
    """All that is known of the requests; without a `target` all of them are in time."""
    bands: Mapping[str, tuple[float, float]]
    calibration: Calibration
    outside: Mapping[str, tuple[float, float]]
    """In what the case is unlike those that the calibration was learned from, and their range; bands are wider then."""


def predict(case: Case, calibrations: Sequence[Calibration]) -> Prediction:
    """Estimate and band of one case. Raises InvalidInputError FT2110-FT2113 for what cannot run."""
    chosen = choose(calibrations, case.device.id, case.device.vendor, case.engine, case.scope)
    specs, outcome = _play(case, factors_on(case.device, chosen, case.precision))
    means = _summary(outcome)
    outside = chosen.hull.outside(
        concurrency=case.concurrency or case.rate * means.e2e,
        input_len=case.input_len,
        output_len=case.output_len,
        devices=case.devices,
    )
    bands = {}
    for metric in METRICS:
        spread = chosen.spread(metric, case.model.id, inside=not outside)
        value = getattr(means, metric)
        bands[metric] = (value * math.exp(spread.low), value * math.exp(spread.high))
    hardware = _hardware(case, len(specs))
    full = report(outcome, specs, hardware, case.target or LatencyTarget(), [chosen], case.model.id)
    return Prediction(means, full, bands, chosen, outside)


def estimate(case: Case, factors: Factors) -> Estimate:
    """The simulation behind `predict`, with explicit factors."""
    return _summary(_play(case, factors)[1])


def _play(case: Case, factors: Factors) -> tuple[list[ReplicaSpec], Outcome]:
    check(case)
    alone = case.mode != "disagg"
    specs = [_replica(case, factors, case.cut, case.concurrency)] if alone else _pair(case, factors)
    stream, clients = _load(case)
    outcome = simulate(specs, stream, RoundRobinPolicy(), clients=clients)
    if len(outcome.refused):
        prompt, answer = (int(column.max()) for column in (stream.prompt, stream.output))
        raise InvalidInputError.of(
            "FT2111",
            f"the longest request, {prompt} + {answer} tokens, does not fit in the replica's cache",
            hint="more devices, a lower precision of the cache, or shorter lengths",
        )
    return specs, outcome.settled(clients) if case.settled else outcome


def _hardware(case: Case, replicas: int) -> Hardware:
    pools = [pool for pool in (case.prefill, case.decode) if pool and case.mode == "disagg"]
    devices = [pool.cut.devices for pool in pools for _ in range(pool.workers)] or [case.cut.devices]
    return Hardware(tuple(devices), (case.device.tdp_w,) * replicas, tuple(case.price * count for count in devices))


def check(case: Case) -> None:
    """Raises InvalidInputError FT2110 for lengths and loads, FT2112 for cuts that make no sense."""
    for name in ("input_len", "output_len") if case.mode == "open" else ("input_len", "output_len", "concurrency"):
        if getattr(case, name) < 1:
            raise InvalidInputError.of("FT2110", f"{name} is {getattr(case, name)}", hint="give at least 1")
    if case.mode == "open" and not 0 < case.rate <= MOST_RATE:
        hint = f"requests/s, above 0 and at most {MOST_RATE:g}"
        raise InvalidInputError.of("FT2110", f"rate is {case.rate:g} in mode open", hint=hint)
    _check_sizes(case)
    if case.input_len + case.output_len > case.model.max_context:
        asked = f"{case.input_len} + {case.output_len} tokens"
        raise InvalidInputError.of(
            "FT2110", f"{asked} do not fit in the context of {case.model.id}: {case.model.max_context}"
        )
    cuts = [p.cut for p in (case.prefill, case.decode) if p] if case.mode == "disagg" else [case.cut]
    if case.mode == "disagg" and len(cuts) < 2:
        raise InvalidInputError.of("FT2110", "a disagg case needs prefill and decode columns")
    for cut in cuts:
        wrong = _impossible(case, cut)
        if wrong:
            raise InvalidInputError.of("FT2112", wrong)
    _check_step(case, max(cut.dp for cut in cuts))


def _check_sizes(case: Case) -> None:
    """Raises InvalidInputError FT2110 for numbers that would fill the memory, or that nobody can mean."""
    for name, most in MOST.items():
        if getattr(case, name) > most:
            raise InvalidInputError.of("FT2110", f"{name} is {getattr(case, name)}; at most {most} is allowed")
    for pool in (case.prefill, case.decode):
        if pool and pool.workers > MOST_WORKERS:
            raise InvalidInputError.of(
                "FT2110", f"{pool.workers} workers in one pool; at most {MOST_WORKERS} are allowed"
            )
    if case.drafts and not 1 <= case.drafts.tokens <= MOST_DRAFTED:
        raise InvalidInputError.of("FT2110", f"draft_tokens is {case.drafts.tokens}; 1 to {MOST_DRAFTED} are allowed")


def _check_step(case: Case, groups: int) -> None:
    """Raises InvalidInputError FT2110 for limits of a step that engines refuse or that are too much to table."""
    if case.max_num_batched_tokens * groups > MOST_BATCHED:
        of_all = f" for each of dp {groups}" if groups > 1 else ""
        raise InvalidInputError.of(
            "FT2110",
            f"max_num_batched_tokens is {case.max_num_batched_tokens}{of_all}; at most {MOST_BATCHED} in all",
        )
    if 0 < case.max_num_batched_tokens < case.max_num_seqs / groups and not engines()[case.engine].prefill_first:
        raise InvalidInputError.of(
            "FT2110",
            f"max_num_batched_tokens is {case.max_num_batched_tokens}, less than max_num_seqs, {case.max_num_seqs}",
            hint="a step computes at least one token of each request",
        )


def _impossible(case: Case, cut: Parallelism) -> str:
    """Why a replica of the case's model cannot be cut like this; empty when it can."""
    model = case.model
    if min(cut.tp, cut.pp, cut.ep, cut.dp) < 1 or cut.pp > model.layers:
        given = f"tp {cut.tp}, pp {cut.pp}, ep {cut.ep}, dp {cut.dp}"
        return f"{given}: each must be at least 1, and pp at most {model.layers}, the layers of {model.id}"
    if cut.devices > MOST_DEVICES:
        return f"{cut.devices} devices in one replica; at most {MOST_DEVICES} are allowed"
    if cut.ep > 1 and not model.experts:
        return f"{model.id} has no experts to spread over ep {cut.ep}"
    if cut.tp * cut.dp % cut.ep:
        return f"ep {cut.ep} does not divide tp {cut.tp} × dp {cut.dp}"
    if cut.ep > max(1, model.experts):
        return f"ep {cut.ep} is more than the {model.experts} experts of {model.id}"
    return engines()[case.engine].unsplittable(model, cut.tp, cut.ep, case.precision)


def _replica(case: Case, factors: Factors, cut: Parallelism, sequences: int) -> ReplicaSpec:
    machine = Machine.of(case.device)
    whole = cut
    engine = engines()[case.engine]
    if engine.layer_split:  # more memory, no more speed
        cut = Parallelism(pp=1)
    if case.precision not in OCTETS or case.kv_precision not in KV_OCTETS:
        raise InvalidInputError.of(
            "FT2113", f"unknown precision {case.precision!r}, or unknown KV precision {case.kv_precision!r}"
        )
    space = case.room(whole)
    if not space.fits:
        raise InvalidInputError.of(
            "FT2111",
            f"{case.model.id} at {case.precision} needs {space.weights / 1e9:.0f} GB for weights alone;"
            f" {cut.devices} × {case.device.id} have {space.usable / 1e9:.0f} GB of usable memory",
            hint="more devices, or a lower precision",
        )
    model = StepModel.of(
        case.model, machine, cut, factors, weights=case.precision, kv=case.kv_precision, drafts=case.drafts
    )
    budget = (case.max_num_batched_tokens or engine.token_budget) * cut.dp
    most = case.max_num_seqs or (engine.default_max_num_seqs * cut.dp if case.mode == "open" else sequences)
    slots = max(1, min(sequences or most, most, MOST_AT_ONCE))
    if case.mode == "batch":
        budget = max(budget, slots)
    hand = kv_elements_per_token(case.model, cut) * KV_OCTETS[case.kv_precision] / (HAND_LINK * cut.devices)
    return ReplicaSpec(
        times=model.times(slots, budget, hand, HAND_LATENCY_S),
        max_num_seqs=slots,
        token_budget=budget,
        kv_tokens=space.kv_tokens,
        beside=space.beside,
        whole_prompts=case.mode == "batch",  # static batches were measured on engines of 2024
        lanes=model.lanes,
        prefill_first=engine.prefill_first,
        recv_interval=case.recv_interval,
        balance_steps=engine.balance_steps,
        spared=engine.cache_spared,
        frontend=factors.request,
        frontend_stream=factors.stream,
        frontend_token=factors.prompt_token,
        step=model,
    )


def _pair(case: Case, factors: Factors) -> list[ReplicaSpec]:
    if case.prefill is None or case.decode is None:
        raise InvalidInputError.of("FT2110", "a disagg case needs prefill and decode columns")
    alone = replace(case, drafts=None)
    prefill = replace(_replica(alone, factors, case.prefill.cut, case.concurrency), role="prefill")
    decode = replace(_replica(case, factors, case.decode.cut, case.concurrency), role="decode")
    return [prefill] * case.prefill.workers + [decode] * case.decode.workers


def _load(case: Case) -> tuple[Stream, int]:
    if case.mode == "batch":
        count = case.concurrency
        fixed = np.full(count, 1, dtype=np.int64)
        return Stream(np.zeros(count), fixed * case.input_len, fixed * case.output_len), 0
    low, high = (0.9, 1.1) if case.mode in ("closed", "open") else (0.8, 1.0)
    count = max(case.concurrency, min(ROUNDS * case.concurrency, MOST_REQUESTS)) or OPEN_REQUESTS
    rng = np.random.default_rng(random.Random(0).randrange(1 << 32))

    def lengths(mean: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return rng.integers(max(1, int(mean * low)), max(1, int(mean * high)) + 1, count)

    prompt, output = lengths(case.input_len), lengths(case.output_len)
    arrival = np.cumsum(rng.exponential(1.0 / case.rate, count)) if case.mode == "open" else np.zeros(count)
    return Stream(arrival, prompt, output), case.concurrency


def _summary(outcome: Outcome) -> Estimate:
    ttft = float(outcome.ttft.mean())
    tpot = 0.0
    if (outcome.output > 1).any():
        tpot = float(np.nanmean(outcome.tpot))
    e2e = float(outcome.e2e.mean())
    length = float(np.nanmax(outcome.finish)) - float(np.nanmin(outcome.arrival))
    return Estimate(ttft, tpot, e2e, float(outcome.output.sum()) / length)
