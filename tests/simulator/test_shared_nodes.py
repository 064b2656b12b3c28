"""Shared nodes in virtual time, on the example's workload made small."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "llm-mesh" / "sharing.py"


@pytest.fixture(scope="module")
def paper():
    spec = importlib.util.spec_from_file_location("llm_mesh_sharing", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_profile_says_what_the_paper_measured(paper):
    cpu = {size: paper.TABLES[size, "cpu"] for size in paper.SIZES}
    assert cpu["7B"].decode_s(16, 1024) / cpu["7B"].decode_s(1, 1024) == pytest.approx(1.69, rel=0.1)
    assert cpu["13B"].decode_s(32, 2048) / cpu["13B"].decode_s(32, 512) == pytest.approx(2.0, rel=0.05)
    assert cpu["13B"].decode_s(32, 2048) > 0.25 > cpu["13B"].decode_s(32, 512)
    for tokens in (1024, 2048, 4096):
        assert cpu["13B"].prefill_s(tokens) < max(2.0, tokens / 512)


@pytest.mark.parametrize("system", ["mesh", "sllm+cpu", "sllm", "no sharing"])
def test_every_request_is_answered_or_dropped(paper, system):
    outcome = paper.play(system, ("7B",) * 64, 10, 60, 0)
    assert outcome.requests > 200
    assert outcome.answered + outcome.dropped == outcome.requests
    assert outcome.in_time <= outcome.answered
    assert 0 < outcome.used["gpu"] <= 4
    assert outcome.counts.loads == outcome.counts.unloads


def test_shared_nodes_serve_more_in_time(paper):
    share = {
        system: paper.play(system, ("7B",) * 128, 10, 60, 0).attainment
        for system in ("mesh", "sllm+cpu", "sllm", "no sharing")
    }
    assert share["mesh"] > 1.1 * max(share["sllm+cpu"], share["sllm"], share["no sharing"])


def test_the_same_seed_comes_out_the_same(paper):
    first, second = (paper.play("mesh", ("3B",) * 32, 10, 60, 3) for _ in range(2))
    assert first == second


def test_one_model_a_node_where_nodes_are_exclusive(paper):
    outcome = paper.play("sllm", ("13B",) * 32, 10, 60, 1)
    assert set(outcome.used) == {"gpu"}
    assert outcome.counts.resizes == outcome.counts.moved == 0
