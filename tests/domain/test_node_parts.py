"""Parts of a partition's nodes, and the expressions in which sites name nodes."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fabrictool.domain.hostlist import MOST, hostlist, hostlist_of
from fabrictool.domain.node_parts import PartitionNodes, nodes_of
from fabrictool.domain.observed import NodeKind, Queue

NAMES = st.sets(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-ib|\.x)?", fullmatch=True), min_size=1, max_size=40)


@given(names=NAMES, of=st.integers(1, 8), gone=st.sets(st.integers(0, 39)))
def test_parts_are_disjoint_and_even_and_cover_what_there_is(names, of, gone):
    ordered = tuple(sorted(names))
    away = frozenset(name for at, name in enumerate(ordered) if at in gone)
    parts = PartitionNodes(ordered, away).parts(of)
    flat = [name for part in parts for name in part]
    assert len(parts) == of
    assert len(flat) == len(set(flat))
    assert set(flat) in (set(ordered), set(ordered) - away)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    there = len(ordered) - len(away)
    if there >= of:
        assert all(set(part) - away for part in parts), "each has a node that is there"
    else:
        assert set(flat) == set(ordered), "parts wait for their nodes"


@given(names=NAMES, of=st.integers(1, 8), data=st.data())
def test_parts_stay_when_nodes_go_away_that_no_part_lives_on(names, of, data):
    ordered = tuple(sorted(names))
    parts = PartitionNodes(ordered).parts(of)
    kept = {data.draw(st.sampled_from(part)) for part in parts if part}
    away = frozenset(data.draw(st.sets(st.sampled_from(ordered)))) - kept
    if len(ordered) >= of:
        assert PartitionNodes(ordered, away).parts(of) == parts


def test_only_nodes_with_as_many_devices_of_the_type_that_jobs_ask_for_are_dealt_out():
    kinds = (
        NodeKind(nodes="n[1-3]", devices=4, device="h100"),
        NodeKind(nodes="n4", devices=4, device="h100", away=True),
        NodeKind(nodes="old[1-2]", devices=2, device="h100"),
        NodeKind(nodes="a1", devices=4, device="a100"),
    )
    queue = Queue(nodes=7, devices=4, device="h100", kinds=kinds)
    nodes = nodes_of(queue, 4, frozenset({"n2"}))
    assert (nodes.names, nodes.away, nodes.others) == (("n1", "n3", "n4"), {"n4"}, {"n2", "old1", "old2", "a1"})
    assert len(nodes_of(queue, 0).names) == 7, "without accelerators any will do"


@given(NAMES)
def test_expressions_lead_back_to_their_names(names):
    assert set(hostlist(hostlist_of(names))) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[01-03,7],login2,a[1-2]-ib", ("n01", "n02", "n03", "n7", "login2", "a1-ib", "a2-ib")),
        ("r[1-2]n[8-9]", ("r1n8", "r1n9", "r2n8", "r2n9")),
        ("(null)", ()),
        ("", ()),
        ("n1;reboot,$(id),`id`,n 2,-w,n3", ("n3",)),
        ("n[1-x],n[3-1],n[,2]", ("n2",)),
    ],
)
def test_hostlists(text, names):
    assert hostlist(text) == names


def test_an_expression_of_hosts_without_end_is_cut():
    assert len(hostlist("n[1-999999999]")) == MOST
    assert len(hostlist("a[0-99999]b[0-99999]")) == MOST


def test_many_names_are_a_short_expression():
    assert hostlist_of(f"n{at:04d}" for at in range(5000)) == "n[0000-4999]"
    assert hostlist_of(["n9", "n10", "n11", "n12", "login", "x1-ib"]) == "login,x1-ib,n9,n[10-12]"
    odd = hostlist_of(f"nid{at:06d}" for at in range(1, 10_000, 2))
    assert len(odd) < 40_000, "every other of ten thousand fits a command line"
