"""Laws that any roofline must keep; figures are not asserted, since nothing here is calibrated."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.simulator.roofline import (
    MAX_UTILISATION,
    Architecture,
    Demand,
    Device,
    prefill_seconds,
    replica,
    step_seconds,
    under_load,
)

H100 = Device("h100-sxm", 80e9, 3.35e12, 989e12, link=450e9)
LLAMA = Architecture(8.03e9, 8.03e9, 32, 4096, 8, 128)
DEMAND = Demand(1.0, 1000.0, 200.0, 4096)
BATCH = st.integers(1, 256)
TP = st.sampled_from([1, 2, 4, 8])


@given(BATCH, st.floats(1, 8000), TP)
def test_never_faster_than_the_physics(batch, context, tp):
    seconds = step_seconds(H100, LLAMA, batch, context, tp=tp, weight_octets=2.0)
    assert seconds >= 2 * LLAMA.active_parameters * batch / (tp * H100.flops)
    assert seconds >= LLAMA.parameters * 2.0 / (tp * H100.bandwidth)


@given(BATCH, st.floats(1, 8000), TP)
def test_more_work_takes_longer(batch, context, tp):
    base = step_seconds(H100, LLAMA, batch, context, tp=tp, weight_octets=2.0)
    assert step_seconds(H100, LLAMA, batch + 1, context, tp=tp, weight_octets=2.0) >= base
    assert step_seconds(H100, LLAMA, batch, context + 100, tp=tp, weight_octets=2.0) >= base
    assert step_seconds(replace(H100, bandwidth=1e12), LLAMA, batch, context, tp=tp, weight_octets=2.0) >= base
    assert prefill_seconds(H100, LLAMA, context + 100, tp=tp, weight_octets=2.0) >= prefill_seconds(
        H100, LLAMA, context, tp=tp, weight_octets=2.0
    )


def test_a_replica_that_does_not_fit_says_so():
    seventy = replace(LLAMA, parameters=70e9, active_parameters=70e9, layers=80)
    assert not replica(H100, seventy, DEMAND, tp=1, weight_octets=2.0, max_num_seqs=64).fits
    assert replica(H100, seventy, DEMAND, tp=4, weight_octets=2.0, max_num_seqs=64).fits
    long = replace(DEMAND, context=10_000_000)
    assert not replica(H100, LLAMA, long, tp=1, weight_octets=2.0, max_num_seqs=64).fits


def test_kv_octets_include_the_layers_and_grouped_heads():
    """Llama-3-8B: 2 × 32 layers × 8 heads × 128 × 2 octets = 128 KiB a token."""
    assert LLAMA.kv_octets_per_token() == 128 * 1024


@given(st.floats(0.01, 0.89), st.floats(0.001, 0.1))
def test_more_load_is_never_faster_and_p95_never_below_the_mean(share, more):
    figures = replica(H100, LLAMA, DEMAND, tp=1, weight_octets=2.0, max_num_seqs=64)
    light = under_load(figures, DEMAND, share * figures.capacity)
    heavy = under_load(figures, DEMAND, min(MAX_UTILISATION, share + more) * figures.capacity)
    assert heavy.ttft_p95 >= light.ttft_p95 >= light.ttft_mean
    assert heavy.tpot_p95 >= light.tpot_p95 >= light.tpot_mean
    assert heavy.e2e_p95 >= light.e2e_p95


def test_overload_is_reported_and_finite():
    figures = replica(H100, LLAMA, DEMAND, tp=1, weight_octets=2.0, max_num_seqs=64)
    latency = under_load(figures, DEMAND, 10 * figures.capacity)
    assert latency.utilisation == pytest.approx(10.0)
    assert math.isfinite(latency.e2e_p95)
