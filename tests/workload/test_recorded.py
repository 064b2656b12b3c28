"""A demand that names a trace is planned as what the trace holds."""

import gzip
import json

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.cli.source import Source
from fabrictool.domain.plan import inputs_digest
from fabrictool.planner.build import build_problem
from fabrictool.workload.arrivals import CVS, arrivals

INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites: {s: {provider: p}}
clusters: {c: {site: s, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 2}}}}
"""
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    demand: {trace: TRACE}
"""


def lines(count=400, rate=4.0, model=None, seed=0):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    more = {} if model is None else {"model": model}
    rows = [{"t": float(t), "in": int(rng.integers(100, 900)), "out": int(rng.integers(10, 200))} | more for t in times]
    return "\n".join(map(json.dumps, rows)) + "\n"


def source(folder, text, name="october.jsonl"):
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("TRACE", name))
    if text is not None:
        (folder / "october.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Source(folder / "blueprint.yaml")


def test_what_was_asked_of_an_adapter_is_demand_of_its_base(tmp_path):
    folder, alone = tmp_path / "adapters", tmp_path / "alone"
    for where in (folder, alone):
        where.mkdir()
    mixed = lines(model="m").splitlines() + lines(model="law", seed=1).splitlines() + lines(model="x").splitlines()
    source(folder, "\n".join(sorted(mixed, key=lambda line: json.loads(line)["t"])))
    text = (folder / "blueprint.yaml").read_text()
    (folder / "blueprint.yaml").write_text(text + "    adapters: {law: {source: file:///law}}\n")
    both = Source(folder / "blueprint.yaml").blueprint.models["m"].demand
    alone = source(alone, lines(model="m")).blueprint.models["m"].demand
    assert float(both.rate) == pytest.approx(2 * float(alone.rate), rel=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_its_statistics_are_the_demand(tmp_path, packed):
    text = lines()
    there = source(tmp_path, gzip.compress(text.encode()) if packed else text)
    problem, tables = build_problem(there.blueprint, there.inventory, usable=["c"], unseen=(), current={})
    found = tables.demands["m"]
    assert problem.needs[0].rate == found.rate == pytest.approx(4.0, rel=0.15)
    assert found.input == pytest.approx(500, rel=0.1)
    assert found.output == pytest.approx(105, rel=0.1)
    assert found.input_p95 > 1.3 * found.input


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_its_bursts_are_the_demands(tmp_path, cv):
    times = arrivals("gamma", 4.0, 4000, np.random.default_rng(0), cv=cv)
    text = "\n".join(json.dumps({"t": float(t), "in": 500, "out": 100}) for t in times) + "\n"
    found = source(tmp_path, text).blueprint.models["m"].demand.cv
    assert found == pytest.approx(cv, rel=0.1)
    assert found == float(f"{found:.2g}")


def test_a_trace_of_equal_gaps_is_as_even_as_arrivals_can_be(tmp_path):
    text = "\n".join(json.dumps({"t": t / 4, "in": 500, "out": 100}) for t in range(50)) + "\n"
    assert source(tmp_path, text).blueprint.models["m"].demand.cv == CVS[0]


def test_only_requests_of_the_model_count(tmp_path):
    there = source(tmp_path, lines(300, 3.0, "m") + lines(300, 30.0, "other", 1))
    assert float(there.blueprint.models["m"].demand.rate) == pytest.approx(3.0, rel=0.2)


def test_another_trace_is_another_blueprint(tmp_path):
    digests = []
    for rate in (4.0, 5.0, 4.0):
        there = source(tmp_path, lines(rate=rate))
        digests.append(inputs_digest(there.blueprint, there.inventory))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "october.jsonl"),
        (b"\xff\xfe", "is not text"),
        ("t,in\n1,2\n", ""),
        (lines(3), "has 3 requests"),
        (lines(100, model="other"), "0 requests for m"),
    ],
)
def test_what_cannot_be_used_is_refused_at_its_place(tmp_path, text, words):
    with pytest.raises(InvalidInputError) as found:
        _ = source(tmp_path, text).blueprint
    (complaint,) = found.value.problems
    assert complaint.code == "FT1127"
    assert words in complaint.message
    assert (complaint.place.line, complaint.place.file[-14:]) == (9, "blueprint.yaml")
