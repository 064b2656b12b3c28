"""What is said of a job whose part of the nodes is away, and what is too long for a command line."""

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.schedulers.apart import LONGEST, avoided, awaited
from fabrictool.clusters.schedulers.protocol import Apart, Job, SchedulerFacts
from fabrictool.domain.observed import NodeKind, Queue
from fabrictool.domain.specs import NodePart


def job(part, nodes=1, **more):
    return Job(
        operation="o", address="replica/m/1", fabric="f", lineage="l", serial=1, folder="/x", home="/h", command=("x",),
        partition="gpu", nodes=nodes, apart=Apart(part, devices=4, **more),
    )  # fmt: skip


def facts(there, away=""):
    kinds = [NodeKind(nodes=there, devices=4)] + ([NodeKind(nodes=away, devices=4, away=True)] if away else [])
    return SchedulerFacts(queues={"gpu": Queue(nodes=1, devices=4, kinds=tuple(kinds))})


@pytest.mark.parametrize(
    ("seen", "wanted", "words"),
    [
        (facts("n[1-2]"), job(NodePart((1,), 2)), ""),
        (facts("n1", "n2"), job(NodePart((0,), 2)), ""),
        (facts("n1", "n2"), job(NodePart((1,), 2)), "part 2 of 2 of the nodes of gpu, n2, is down or drained"),
        (facts("n[1,3]", "n[2,4]"), job(NodePart((1,), 2)), ""),
        (facts("n[1-2]", "n[3-4]"), job(NodePart((1, 2), 3), nodes=2), "parts 2, 3 of 3 of the nodes of gpu"),
        (facts("n1"), job(NodePart((1,), 2)), ""),
        (SchedulerFacts(), job(NodePart((1,), 2)), ""),
    ],
    ids=["there", "other part away", "own part away", "dealt out anew", "one of two away", "too few", "no such queue"],
)
def test_a_job_whose_nodes_are_away_waits_and_that_is_said(seen, wanted, words):
    text = awaited(seen, wanted)
    assert bool(text) == bool(words)
    assert words in text


def test_names_that_no_command_line_takes_are_refused():
    names = ",".join(f"n{at}x" for at in range(2 * LONGEST // 6))
    with pytest.raises(FabrictoolError, match="octets long, more than a command takes"):
        avoided(facts(names), job(NodePart((0,), 2)))


def test_a_queue_that_is_not_known_has_no_nodes_to_leave_out():
    with pytest.raises(FabrictoolError, match="does not name all nodes of gpu"):
        avoided(SchedulerFacts(), job(NodePart((0,), 2)))
