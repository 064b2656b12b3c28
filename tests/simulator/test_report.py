"""Costs and energy of what was held, told so that one may compare them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.catalog import accelerators, model
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.power import BUSY_SHARE, IDLE_SHARE, computing_watts
from fabrictool.simulator.report import Hardware, report
from fabrictool.simulator.slo import LatencyTarget
from fabrictool.simulator.stepmodel import Machine, StepModel

CALIBRATION = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online")
MODEL = "meta-llama/Llama-3.1-8B"


STEP = StepModel.of(model(MODEL), Machine.of(accelerators()["h100-sxm"]), Parallelism(), CALIBRATION.factors)


def reported(*lives):
    """Two hours of a request each ten seconds on replicas for 3 an hour; `lives` are what is said of each."""
    outcome, specs = played(*lives)
    hardware = Hardware((1,) * len(specs), (700.0,) * len(specs), (3.0,) * len(specs))
    return report(outcome, specs, hardware, LatencyTarget(), [CALIBRATION], MODEL)


def played(*lives):
    spec = ReplicaSpec(STEP.times(64, 2048), 64, 2048, 100_000, MODEL)
    specs = [replace(spec, **life) for life in lives]
    count = 721
    stream = Stream(10.0 * np.arange(count), np.full(count, 100), np.full(count, 20), models=(MODEL,))
    return simulate(specs, stream, routing_policy("least-loaded", random.Random(0))), specs


def test_cost_is_of_the_hours_that_devices_were_held():
    alone = reported({})
    assert alone.cost == pytest.approx(3.0 * alone.span_s / 3600)
    # Gone after an hour, and starting for half of one: held from the start to the end.
    both = reported({}, {"up": 1800.0, "down": 3600.0})
    assert both.cost == pytest.approx(3.0 * both.span_s / 3600 + 3.0, rel=1e-3)


def test_cost_of_a_million_tokens():
    alone = reported({})
    assert alone.cost_per_million_tokens == pytest.approx(1e6 * alone.cost / (20 * 721))
    assert reported({}, {"down": 3600.0}).cost_per_million_tokens == pytest.approx(
        1.5 * alone.cost_per_million_tokens, rel=1e-3
    )


def test_energy_is_of_idle_and_busy_time():
    alone = reported({})
    busy = alone.utilisation[0] * alone.span_s
    assert 0 < busy < alone.span_s / 10
    expected = 700 * (IDLE_SHARE * alone.span_s + (BUSY_SHARE - IDLE_SHARE) * busy)
    assert alone.energy_j == pytest.approx(expected, rel=1e-6)
    assert alone.joules_per_token == pytest.approx(alone.energy_j / (20 * 721))


def test_energy_adds_up_over_replicas_that_compute_and_wait():
    outcome, specs = played({"step": STEP}, {"step": STEP, "down": 3600.0}, {})

    def energy(*watts):
        hardware = Hardware((1, 2, 4), watts, (0.0,) * 3)
        return report(outcome, specs, hardware, LatencyTarget(), [CALIBRATION], MODEL).energy_j

    alone = [energy(700.0, 0.0, 0.0), energy(0.0, 700.0, 0.0), energy(0.0, 0.0, 700.0)]
    assert energy(700.0, 700.0, 700.0) == pytest.approx(sum(alone))
    busy, held = outcome.accounts.busy, (outcome.end, 3600.0, outcome.end)
    assert (busy > 0).all()
    for r, count in enumerate((1, 2, 4)):
        idle = IDLE_SHARE * 700 * (held[r] - busy[r])
        computing = computing_watts(specs[r].step, outcome.accounts, r, count, 700.0) * busy[r]
        assert alone[r] == pytest.approx(count * (idle + computing))
        assert count * IDLE_SHARE * 700 * held[r] < alone[r] < count * 700 * held[r]


def test_nothing_finished_costs_no_number_a_token():
    found = reported({"drain": 1e-9, "down": 1e-3})
    assert found.finished == 0
    assert found.to_json()["cost_per_million_tokens"] is None
