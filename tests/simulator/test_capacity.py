"""Laws that the closed form must keep, and that it agrees with the event loop where both are defined."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import RoundRobinPolicy, routing_policy
from fabrictool.simulator import capacity
from fabrictool.simulator.calibration import NONE, choose, shipped
from fabrictool.simulator.capacity import MAX_UTILISATION, MeanWorkload, decode_seconds, prefill_seconds, under_load
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.phases import decode_only, prefill_only, prefill_under_load
from fabrictool.simulator.stepmodel import Factors, Machine, StepModel
from tests.seeds import seeds

CHIP = accelerators()["h100-sxm"]
LLAMA = models()["meta-llama/Llama-3.1-8B-Instruct"]
SEVENTY = models()["meta-llama/Llama-3.1-70B-Instruct"]
DEMAND = MeanWorkload(1.0, 1000.0, 200.0, 4096)


def step(model=LLAMA, tp=1):
    return StepModel.of(model, Machine.of(CHIP), Parallelism(tp=tp), Factors())


def figures(model=LLAMA, tp=1, demand=DEMAND, slots=64, calibration=NONE):
    space = room(model, Parallelism(tp=tp), reported_memory(CHIP), weights="bf16", kv="bf16")
    return capacity.replica(step(model, tp), space, demand, slots, calibration)


ONE = figures()


MANY = seeds(80, drawn=20, long=1000)


@MANY
def test_more_work_takes_longer(seed):
    rng = random.Random(seed)
    batch, tp = rng.choice([1, 256, rng.randint(1, 256)]), rng.choice([1, 2, 4, 8])
    context = rng.choice([1.0, 8000.0, rng.uniform(1, 8000)])
    one = step(tp=tp)
    base = decode_seconds(one, batch, context)
    assert base >= 2.0 * LLAMA.active_parameters * batch / (tp * CHIP.flops["bf16"])
    assert base >= 2.0 * LLAMA.active_parameters / (tp * CHIP.memory_bandwidth)
    assert decode_seconds(one, batch + 1, context) >= base
    assert decode_seconds(one, batch, context + 100) >= base
    assert prefill_seconds(one, context + 100) >= prefill_seconds(one, context)


def test_a_replica_that_does_not_fit_says_so():
    assert not figures(SEVENTY).fits
    assert figures(SEVENTY, tp=4).fits
    assert not figures(demand=replace(DEMAND, context=10_000_000)).fits


@MANY
def test_more_load_is_never_faster_and_p95_never_below_the_mean(seed):
    rng = random.Random(seed)
    share, more = rng.choice([0.01, 0.89, rng.uniform(0.01, 0.89)]), rng.choice([0.001, 0.1, rng.uniform(0.001, 0.1)])
    light = under_load(ONE, DEMAND, share * ONE.capacity)
    heavy = under_load(ONE, DEMAND, min(MAX_UTILISATION, share + more) * ONE.capacity)
    assert heavy.ttft_p95 >= light.ttft_p95 >= light.ttft_mean
    assert heavy.tpot_p95 >= light.tpot_p95 >= light.tpot_mean
    assert heavy.e2e_p95 >= light.e2e_p95


def test_overload_is_reported_and_finite():
    latency = under_load(ONE, DEMAND, 10 * ONE.capacity)
    assert latency.utilisation == pytest.approx(10.0)
    assert math.isfinite(latency.e2e_p95)


def test_saturation_and_a_lone_request_are_those_of_the_event_loop():
    one = step()
    spec = ReplicaSpec(one.times(64, 8192), 64, 8192, int(ONE.free))
    count = 600
    full = Stream(np.zeros(count), np.full(count, 1000), np.full(count, 200))
    busy = simulate([spec], full, routing_policy("random", random.Random(0)))
    assert count / busy.end == pytest.approx(ONE.capacity, rel=0.1)
    lone = Stream(np.array([0.0]), np.array([1000]), np.array([200]))
    alone = simulate([spec], lone, routing_policy("random", random.Random(0)))
    assert alone.ttft[0] == pytest.approx(ONE.prefill_s, rel=0.01)
    assert alone.tpot[0] == pytest.approx(ONE.step_alone_s, rel=0.01)


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize(
    ("model", "tp", "prompt", "answer", "slots"),
    [(LLAMA, 1, 512, 128, 256), (LLAMA, 1, 2000, 400, 256), (SEVENTY, 4, 1000, 200, 256), (LLAMA, 1, 200, 900, 32)],
)
def test_latency_under_load_is_that_of_the_event_loop(model, tp, prompt, answer, slots, load):
    known = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online")
    one = StepModel.of(model, Machine.of(CHIP), Parallelism(tp=tp), known.factors)
    space = room(model, Parallelism(tp=tp), reported_memory(CHIP), weights="bf16", kv="bf16")
    demand = MeanWorkload(1.0, prompt, answer, 4096)
    found = capacity.replica(one, space, demand, slots, known)
    rate, count = load * found.capacity, 6000
    arrival = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    late = known.factors
    outside = {"frontend": late.request, "frontend_stream": late.stream, "frontend_token": late.prompt_token}
    spec = ReplicaSpec(one.times(slots, 8192), slots, 8192, int(space.kv_tokens), **outside)
    played = simulate([spec], Stream(arrival, np.full(count, prompt), np.full(count, answer)), RoundRobinPolicy())
    forecast = under_load(found, demand, rate)
    # 10 % off where prompts are most of the work: a prompt costs less beside a batch that is not full.
    assert forecast.tpot_mean == pytest.approx(np.nanmean(played.tpot), rel=0.12)
    assert forecast.tpot_p95 == pytest.approx(np.nanquantile(played.tpot, 0.95), rel=0.15)
    assert forecast.e2e_p95 == pytest.approx(np.quantile(played.e2e, 0.95), rel=0.15)
    assert forecast.in_system == pytest.approx(rate * played.e2e.mean(), rel=0.1)
    if played.ttft.mean() < 3 * found.prefill_s + found.first_s:  # a queue for places has a longer tail than that
        assert forecast.ttft_mean == pytest.approx(played.ttft.mean(), rel=0.2)
        assert forecast.ttft_p95 == pytest.approx(np.quantile(played.ttft, 0.95), rel=0.45)


def test_figures_say_where_they_come_from():
    assert "uncalibrated" in ONE.basis
    known = figures(calibration=choose(shipped(), "h100-sxm", "nvidia", "vllm", "online"))
    assert known.basis.startswith("calibrated: vllm on h100-sxm")
    assert known.bands[1][0] < 1 < known.bands[1][1]


def test_a_pair_of_phases_alone_takes_what_the_loop_says():
    """One request: both front ends and the way are in TTFT, and no step is counted twice."""
    known = replace(NONE, factors=replace(Factors(), request=0.03, stream=1e-9))
    demand = MeanWorkload(1e-6, 1000.0, 30.0, 4096)
    one = figures(demand=demand, calibration=known)
    first = prefill_under_load(prefill_only(one, step(), demand), 1e-6)
    then = under_load(decode_only(one, demand), demand, 1e-6)
    times, moving = step().times(64, 8192, hand_latency=0.2), 0.2
    both = [
        ReplicaSpec(times, 64, 8192, 1 << 20, role=role, frontend=0.03, frontend_token=Factors().prompt_token)
        for role in ("prefill", "decode")
    ]
    played = simulate(both, Stream(np.zeros(1), np.array([1000]), np.array([30])), RoundRobinPolicy())
    assert played.ttft[0] > 0.2 + 2 * 0.03
    assert first.ttft_mean + moving + then.ttft_mean == pytest.approx(played.ttft[0], rel=0.01)
    assert then.tpot_mean == pytest.approx(played.tpot[0], rel=0.01)
    assert first.e2e_p95 + moving + then.e2e_p95 == pytest.approx(played.e2e[0], rel=0.02)
