"""Floors that no server can beat, by hand; and what is measured stays above them."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from fabrictool.catalog import accelerators
from fabrictool.catalog.tables import model
from fabrictool.simulator import sheet
from fabrictool.simulator.cases import Case
from fabrictool.simulator.fitting import Observation
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.physics import floors, forbidden

MODEL = model("meta-llama/Llama-3.1-8B")
H100 = accelerators()["h100-sxm"]
CASE = Case(H100, MODEL, "vllm", "bf16", "bf16", Parallelism(), 1000, 101, 8, "closed")


def test_a_step_reads_the_weights_and_the_cache_once():
    embedding = MODEL.vocab * MODEL.hidden  # a look-up of one row
    weights = 2.0 * (8.03e9 - embedding)
    cache = 2 * 2.0 * 32 * 8 * 128 * 1000
    assert floors(CASE).tpot == pytest.approx((weights + cache) / 3.35e12, rel=0.01)
    assert floors(replace(CASE, cut=Parallelism(tp=4))).tpot == pytest.approx(floors(CASE).tpot / 4, rel=0.01)
    assert floors(replace(CASE, precision="fp8")).tpot < 0.6 * floors(CASE).tpot


def test_a_prompt_takes_its_products():
    matrices = 8.03e9 - 2 * MODEL.vocab * MODEL.hidden
    assert floors(CASE).ttft == pytest.approx(2 * matrices * 1000 / 989.4e12, rel=0.02)
    assert floors(replace(CASE, mode="agg")).ttft == pytest.approx(0.9 * floors(CASE).ttft, rel=0.01)


def test_of_experts_a_token_reads_those_that_it_chooses():
    mixture = model("Qwen/Qwen3-30B-A3B")
    tpot = floors(replace(CASE, model=mixture)).tpot
    assert 2 * 2.5e9 / 3.35e12 < tpot < 2 * 4e9 / 3.35e12, "3.3 of 30.5 billion"


@pytest.mark.parametrize(
    ("share", "metric"),
    [(0.9, "tpot"), (0.9, "ttft"), (0.9, "e2e"), (0.98, ""), (1.5, "")],
)
def test_what_is_below_a_floor_is_named(share, metric):
    least = floors(CASE)
    times = {name: 2 * getattr(least, name) for name in ("ttft", "tpot", "e2e")}
    times |= {name: share * getattr(least, name) for name in ([metric] if metric else times)}
    why = forbidden(Observation(CASE, **times))
    assert why.startswith(f"{metric.upper()} of ") if metric else why == ""
    assert not metric or "h100-sxm takes" in why


def test_what_was_not_measured_is_not_looked_at():
    assert forbidden(Observation(CASE)) == ""


@pytest.mark.parametrize("name", ["silicon", "argonne"])
def test_no_row_of_the_slices_is_below(name):
    """Of as many as these some would be, if a floor stood too high."""
    with gzip.open(Path(__file__).parents[1] / f"data/measured/{name}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))[::7]
    assert len(rows) > 200
    told = []
    for row in rows:
        seconds = {m: float(row[f"{m}_ms"] or "nan") / 1e3 for m in ("ttft", "tpot", "e2e")}
        told.append(forbidden(Observation(sheet.case_of(row), **seconds)))
    assert set(told) == {""}
