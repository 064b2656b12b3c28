"""The fit behind the catalogue's calibrations: what a pair was never measured for it has from its relatives."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.cases import Case, estimate
from fabrictool.simulator.fitting import Observation
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Factors

_folder = Path(__file__).parents[1] / "bench" / "simulator"


def _module(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _folder / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


measured = _module("measured")
hierarchy = _module("hierarchy")
TRUTH = replace(Factors(), bandwidth=0.7)
OF_ENGINE = {"vllm": TRUTH, "tensorrt-llm": replace(TRUTH, kernel=4e-6, step=4e-3, sequence=3e-5)}


def observed(device, engine):
    """What a pair would show if its engine's factors were those above, on either device."""
    rows = []
    for name, widths in (("Llama-3.1-8B-Instruct", (1, 4)), ("Llama-3.1-70B-Instruct", (4, 8))):
        for tp in widths:
            for concurrency in (2, 16, 64):
                case = Case(
                    device=accelerators()[device],
                    model=models()[f"meta-llama/{name}"],
                    engine=engine,
                    precision="fp8",
                    kv_precision="fp8",
                    cut=Parallelism(tp=tp),
                    input_len=500,
                    output_len=100,
                    concurrency=concurrency,
                )
                found = estimate(case, OF_ENGINE[engine])
                rows.append(Observation(case, found.ttft, found.tpot))
    return rows


def size(rows, factors):
    return float(np.mean([abs(o.log_errors(factors)["tpot"]) for o in rows]))


def test_a_pair_that_was_never_measured_has_its_engine_from_another_device():
    known = [*observed("h100-sxm", "vllm"), *observed("h100-sxm", "tensorrt-llm"), *observed("h200", "vllm")]
    unseen = observed("h200", "tensorrt-llm")
    found = hierarchy.fit(known, rounds=6)
    device = accelerators()["h200"]
    borrowed = size(unseen, found.factors(device, "tensorrt-llm"))
    assert borrowed < 0.5 * size(unseen, Factors())
    assert borrowed < 0.6 * size(unseen, found.factors(device, "an engine that nobody measured"))


def test_no_row_that_says_something_else_than_what_was_computed_is_learned_from():
    """Marks are of sessions; these are their figures: no unmarked run's prompts take more than half of a peak."""
    rows = [o for o in measured.load("silicon") if o.case.mode == "agg"]
    assert len(measured.load("silicon", "speculative")) > 100
    assert len(measured.load("silicon", "cached")) > 10
    both = {mark: [_share_of_peak(o) for o in measured.load("silicon", mark)] for mark in ("", "cached")}
    assert max(_share_of_peak(o) for o in rows) < 0.5 < max(both["cached"])


def test_no_run_counts_twice():
    rows = [o for o in measured.load("silicon") if o.case.mode == "agg"]
    runs = {(o.case.device.id, o.case.engine, o.case.cut, o.case.concurrency, o.ttft, o.tpot) for o in rows}
    assert len(runs) > 0.99 * len(rows)


def _share_of_peak(row):
    """Time that the prompts in flight take at the peaks of the datasheet, over the time that they were in flight."""
    from fabrictool.simulator.physics import floors

    case = row.case
    prompts = case.concurrency / case.cut.dp * floors(case).ttft
    return prompts / (row.ttft + row.tpot * (0.9 * case.output_len - 1))


@pytest.mark.long
def test_a_pair_has_a_file_of_its_own_only_where_models_that_were_left_out_come_out_better():
    for scope, name, modes in (("online", "silicon", ("agg",)), ("static", "argonne", ("batch",))):
        rows = [o for o in measured.load(name) if o.case.mode in modes]
        allowed = hierarchy.blind(rows).own
        own = {
            (c.device, c.engine) for c in shipped() if c.scope == scope and c.device in accelerators() and c.points > 0
        }
        assert {pair for pair in own if pair[0] != "rtxpro6000"} <= allowed
