"""SLOs that are to be met within the forecast's error band, too."""

import random

import pytest

from fabrictool.blueprint import load
from fabrictool.cli.plan_text import render
from fabrictool.domain.blueprint import Slo
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import decode_plan, inputs_digest
from fabrictool.domain.state import State
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.targets import slo_excess, slo_misses
from fabrictool.simulator.capacity import Latency
from fabrictool.simulator.slo import criteria, spared, tightened
from fabrictool.state.planfile import encode_file
from tests.planner.fabrics import INVENTORY
from tests.seeds import seeds

BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://Qwen/Qwen3-32B
    demand: {rate: 20 req/s, input: 500 tok, output: 200 tok}
    slo: {TARGETS}
    replicas: {min: 1, max: 40}
"""
TARGETS = "ttft_p95: 300ms, tpot_p95: 45ms"
WIDE, NARROW = ((0.5, 4.0), (0.8, 1.5), (0.8, 1.5)), ((0.5, 3.0), (0.8, 2.0), (0.8, 1.2))


def loaded(folder, more):
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("TARGETS", TARGETS + more))
    return load(folder / "blueprint.yaml", environment={})


def planned(folder, more=""):
    there = loaded(folder, more)
    clusters = {name: ClusterFacts(cluster=name, known=True) for name in there.inventory.clusters}
    evidence = Evidence(fabric="f", lineage="l", at=0.0, clusters=clusters, specs={}, state=State(fabric="f"))
    whole = plan(there.blueprint, there.inventory, evidence, PlanOptions(work_s=20.0), now=0.0)
    return whole, render(whole, evidence.observed)


@pytest.mark.parametrize(
    ("band", "factors"), [("100%", (4.0, 2.0, 1.5)), ("50%", (2.5, 1.5, 1.25)), (None, (1.0, 1.0, 1.0))]
)
def test_so_much_of_the_widest_band_is_spared(band, factors):
    slo = Slo(ttft_p95="1 s", **({} if band is None else {"band": band}))
    assert spared(slo, [WIDE, NARROW]) == pytest.approx(factors)
    assert spared(slo, []) == spared(None, [WIDE]) == (1.0, 1.0, 1.0)


@seeds(10, drawn=10, long=100)
def test_longer_latencies_and_shorter_targets_are_the_same(seed):
    rng = random.Random(seed)
    factors = (rng.uniform(1, 4), rng.uniform(1, 2), rng.uniform(1, 2))
    targets = {"ttft_p95": rng.uniform(0.1, 3), "tpot_p95": rng.uniform(0.01, 0.1), "e2e_p99": rng.uniform(2, 20)}
    metrics = (name.partition("_")[0] for name in targets)
    shorter = {name: value / f for (name, value), f in zip(targets.items(), factors, strict=True)}
    assert list(metrics) == ["ttft", "tpot", "e2e"]
    slo, strict = (Slo(**{name: f"{value:.12g} s" for name, value in its.items()}) for its in (targets, shorter))
    ttft, tpot, e2e = rng.uniform(0.05, 2), rng.uniform(0.01, 0.08), rng.uniform(2, 15)
    latency = Latency(1.0, ttft * 0.6, ttft, tpot * 0.9, tpot, e2e, 1.0)
    assert slo_excess(slo, latency, factors=factors) == pytest.approx(slo_excess(strict, latency), rel=1e-6, abs=1e-6)
    assert len(slo_misses(slo, latency, factors)) == len(slo_misses(strict, latency))
    for judged, wanted in zip(tightened(criteria(slo), factors), criteria(strict), strict=True):
        assert (judged.share, judged.metric) == (wanted.share, wanted.metric)
        assert judged.target.ttft == pytest.approx(wanted.target.ttft)
        assert judged.target.tpot == pytest.approx(wanted.target.tpot)
        assert judged.target.e2e == pytest.approx(wanted.target.e2e)


@pytest.mark.usefixtures("kept_calibrations")
def test_a_verdict_within_the_band_holds_at_the_edge_that_is_shown(tmp_path):
    plain, text = planned(tmp_path)
    wary, wary_text = planned(tmp_path, ", band: 100%")
    (before,), (after,) = plain.forecast.models, wary.forecast.models
    assert before.slo == after.slo == "meets"
    assert before.ttft_p95_s.high > 0.3, "this one could miss"
    assert after.ttft_p95_s.high <= 0.3 * 1.05, "its upper edge, but for what chance leaves open of the replay"
    assert after.tpot_p95_s.high <= 0.045 * 1.05
    assert wary.forecast.cost_per_hour > plain.forecast.cost_per_hour
    assert "judged as if" in wary_text
    assert "judged as if" not in text
    assert decode_plan(encode_file(wary)).forecast == wary.forecast
    assert b"spared" not in encode_file(plain)


@pytest.mark.usefixtures("kept_calibrations")
def test_what_is_missed_is_told_by_the_targets_as_they_were_asked_for(tmp_path):
    whole, _ = planned(tmp_path, ", e2e_p95: 1s, band: 100%")
    (model,) = whole.forecast.models
    assert model.slo == "misses"
    assert any("E2E if " in miss and " times as long within 1s" in miss for miss in model.misses), model.misses


def test_a_plan_without_it_has_the_digest_that_it_had(tmp_path):
    there = loaded(tmp_path, "")
    wary = loaded(tmp_path, ", band: 100%")
    assert inputs_digest(there.blueprint, there.inventory) != inputs_digest(wary.blueprint, there.inventory)
