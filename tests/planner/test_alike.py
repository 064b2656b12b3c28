"""Models whose replicas do the same share their tables, and come out as if each had its own."""

import pytest

from fabrictool.base.canonical import LateDigest, digest
from fabrictool.blueprint import load
from fabrictool.domain.state import load_key
from fabrictool.planner import build
from fabrictool.planner.variants import alike
from tests.planner.fabrics import INVENTORY, write_fabric

WALLTIME = INVENTORY.replace("price: 8 CHF/h", "price: 8 CHF/h, walltime: 1h")
STARTS = {load_key("m", "cheap", "default"): [300.0], load_key("other", "dear", "default"): [700.0]}


@pytest.fixture
def built(tmp_path, monkeypatch):
    def build_of(rules, *, apart):
        groups = []

        def grouped(every):
            groups.extend([{name: its} for name, its in every.items()] if apart else alike(every))
            return groups

        monkeypatch.setattr(build, "alike", grouped)
        loaded = load(write_fabric(tmp_path, rules, inventory=WALLTIME), environment={})
        problem, _ = build.build_problem(
            loaded.blueprint, loaded.inventory, usable=("dear", "cheap", "spot"), unseen=(), current={}, loads=STARTS
        )
        return problem, [set(group) for group in groups]

    return build_of


@pytest.mark.parametrize(
    ("rules", "together"),
    [
        ("", True),
        ("trust: [alpha]", True),
        ("tier: owned", True),
        ("place: {prefer: [dear]}", True),
        ("parallelism: {tp: 2}", True),
        ("parallelism: {pp: 2}", True),
        ("phases: any", True),
        ("phases: any\nhandover: fp8", True),
        ("slo: {ttft_p95: 300ms}", False),
        ("max_num_seqs: 8", False),
        ("adapters: {law: {source: file:///law, rank: 8}}", False),
        ("variants: [{precision: bf16}, {precision: fp8}]", False),
    ],
)
def test_what_is_shared_is_what_each_would_have_alone(built, rules, together):
    shared, groups = built(rules, apart=False)
    alone, _ = built(rules, apart=True)
    assert (groups == [{"m", "other"}]) == together
    assert shared.options == alone.options
    assert shared.tables_sha256 == alone.tables_sha256
    for model in ("m", "other"):
        stages = [(shared.pools[0], 2), (shared.pools[1], 4)]
        assert shared.columns[model].mixed(stages, "unified") == alone.columns[model].mixed(stages, "unified")
        assert shared.columns[model].refusals() == alone.columns[model].refusals()


def test_equal_tables_are_the_same_ones(built):
    problem, _ = built("", apart=False)
    by_key = {option.key: option for option in problem.options}
    ours = [by_key[key] for key in by_key if key[0] == "m" and key[1] == "spot"]
    assert ours
    assert all(by_key["other", *option.key[1:]].levels is option.levels for option in ours)


def test_a_late_digest_asks_once_and_only_when_it_is_asked():
    asked = []
    late = LateDigest(lambda: asked.append(1) or ["tables"])
    assert not asked
    assert late.sha256 == late.sha256 == digest(["tables"])
    assert len(asked) == 1
