"""Mélange's problems: read with a word for each mistake, solved as by brute force, never dearer than slices."""

import importlib.util
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from fabrictool.base.errors import InfeasibleError, InvalidInputError
from fabrictool.cli.main import main
from fabrictool.planner.instances.melange import GpuType, Instance, read, solve

BENCH = Path(__file__).parents[1] / "bench" / "planner" / "p4.py"
EXAMPLE = {
    "gpu_info": {
        "small": {"cost": 1.01, "tputs": [[2, 1], [5, 2]]},
        "large": {"cost": 3.67, "tputs": [[20, 20], [40, 20]]},
    },
    "workload_distribution": [[0.2, 0.1], [0.5, 0.2]],
    "total_request_rate": 30.0,
    "slice_factor": 2,
}


def random_problem(rng, types=2, slices=2):
    buckets = rng.randint(1, 4)
    gpus = tuple(
        GpuType(f"g{j}", rng.choice([1.0, 2.5, 4.0]), tuple(rng.choice([0.0, 1.0, 2.0, 7.0]) for _ in range(buckets)))
        for j in range(types)
    )
    rates = tuple(rng.choice([0.0, 0.5, 3.0]) if any(g.throughputs[b] for g in gpus) else 0.0 for b in range(buckets))
    return Instance(gpus, rates, slices)


def cheapest_of_two(instance):
    """All counts of the first type, filled with what it is best at; the rest decides the second's."""
    first, second = instance.gpus
    load = [(r / f if f else math.inf, r / s if s else math.inf) for r, f, s in zip(
        instance.rates, first.throughputs, second.throughputs, strict=True) if r]  # fmt: skip
    load.sort(key=lambda pair: pair[0] / pair[1] if math.isfinite(pair[1]) else 0.0)
    best = math.inf
    for count in range(math.ceil(sum(a for a, _ in load if math.isfinite(a))) + 1):
        room, other = float(count), 0.0
        for on_first, on_second in load:
            share = min(1.0, room / on_first) if on_first else 1.0
            room -= share * on_first if math.isfinite(on_first) else 0.0
            other += (1 - share) * on_second if share < 1 else 0.0
        if math.isfinite(other):
            best = min(best, count * first.cost + math.ceil(other - 1e-9) * second.cost)
    return best


def cheapest_sliced(instance):
    """Every way to give each bucket's slices to GPU types."""
    ways = []
    for b, rate in enumerate(instance.rates):
        if rate:
            serving = [j for j, g in enumerate(instance.gpus) if g.throughputs[b]]
            each = [rate / instance.slices / instance.gpus[j].throughputs[b] for j in serving]
            deals = itertools.combinations_with_replacement(range(len(serving)), instance.slices)
            ways.append([[(serving[k], each[k]) for k in deal] for deal in deals])
    best = math.inf
    for deal in itertools.product(*ways):
        loads = [0.0] * len(instance.gpus)
        for j, load in itertools.chain(*deal):
            loads[j] += load
        best = min(best, sum(math.ceil(v - 1e-9) * g.cost for v, g in zip(loads, instance.gpus, strict=True)))
    return best


def test_equals_brute_force():
    for seed in range(150):
        instance = random_problem(random.Random(seed))
        exact, sliced = (solve(instance, kind, seconds=20, seed=0) for kind in ("exact", "sliced"))
        assert exact.optimal
        assert exact.cost == pytest.approx(cheapest_of_two(instance), abs=1e-5), seed
        assert sliced.cost == pytest.approx(cheapest_sliced(instance), abs=1e-5), seed
        for found in (exact, sliced):
            assert found.bound <= found.cost
            assert all(load <= count + 1e-5 for load, count in zip(found.loads, found.counts, strict=True))


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD:DeprecationWarning")
def test_never_dearer_than_slices_and_slices_cost_what_melange_says():
    spec = importlib.util.spec_from_file_location("bench_p4", BENCH)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    for seed in range(10):
        instance = random_problem(random.Random(seed), types=3, slices=3)
        exact, sliced = (solve(instance, kind, seconds=20, seed=0).cost for kind in ("exact", "sliced"))
        assert exact <= sliced + 1e-6
        assert sliced == pytest.approx(bench.theirs(instance, 60.0).cost, abs=1e-5)


def test_the_documents_form_is_read():
    found = read(json.dumps(EXAMPLE), "f.json")
    assert found.rates == pytest.approx((6.0, 3.0, 15.0, 6.0))
    assert found.gpus[1] == GpuType("large", 3.67, (20.0, 20.0, 40.0, 20.0))
    assert found.slices == 2


def changed(**fields):
    return {**EXAMPLE, **fields}


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "the document is not an object"),
        (changed(gpu_info={}), "gpu_info is not an object with GPU types"),
        (changed(gpu_info={"a": 1}), "gpu_info.a is not an object"),
        (changed(gpu_info={"a": {"cost": -1, "tputs": [[1, 1], [1, 1]]}}), "gpu_info.a.cost is -1"),
        (changed(gpu_info={"a": {"cost": 1, "tputs": [[1, 1]]}}), "gpu_info.a.tputs is 1 × 2, the histogram is 2 × 2"),
        (changed(gpu_info={"a": {"cost": 1, "tputs": [[1, "x"], [1, 1]]}}), 'gpu_info.a.tputs[0][1] is "x"'),
        (changed(workload_distribution=[[1], [1, 2]]), "workload_distribution is not a matrix"),
        (changed(total_request_rate=True), "total_request_rate is true"),
        (changed(total_request_rate=float("nan")), "total_request_rate is NaN"),
        (changed(slice_factor=0), "slice_factor is 0"),
        (changed(extra=1), "extra is not a field"),
    ],
)
def test_each_mistake_is_named(document, complaint):
    with pytest.raises(InvalidInputError) as refused:
        read(json.dumps(document), "f.json")
    found = [one for one in refused.value.problems if complaint in one.message]
    assert found
    assert found[0].code == "FT2021"
    assert found[0].place.file == "f.json"
    assert refused.value.problems[0].hint


def test_a_bucket_that_nobody_serves_is_infeasible():
    with pytest.raises(InfeasibleError) as refused:
        solve(Instance((GpuType("g", 1.0, (1.0, 0.0)),), (1.0, 2.0), 1), "exact", seconds=9, seed=0)
    assert refused.value.problems[0].code == "FT2022"
    assert "bucket 1" in refused.value.problems[0].message


def test_the_command_prints_counts_cost_and_proof(tmp_path, capsys):
    (tmp_path / "f.json").write_text(json.dumps(EXAMPLE))
    assert main(["instance", str(tmp_path / "f.json")]) == 0
    text = capsys.readouterr().out
    assert "cost 4.68 per hour, at least 4.68 (gap 0.00%, optimal)" in text
    assert main(["instance", str(tmp_path / "f.json"), "--solver", "sliced", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost_per_hour"] == pytest.approx(sum(
        EXAMPLE["gpu_info"][name]["cost"] * count for name, count in found["gpus"].items()))  # fmt: skip
    assert found["cost_per_hour"] >= 4.68


@pytest.mark.parametrize(("content", "code"), [(b"{", "FT2020"), (b"\xff\xfe", "FT2020"), (b"{}", "FT2021")])
def test_a_wrong_file_is_an_error_with_a_code(tmp_path, capsys, content, code):
    (tmp_path / "f.json").write_bytes(content)
    assert main(["instance", str(tmp_path / "f.json")]) == 65
    assert code in capsys.readouterr().err
