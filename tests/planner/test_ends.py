"""When jobs end: what the inventory, schedulers and running units say of it."""

from dataclasses import replace

import msgspec
import pytest

from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, Queue
from fabrictool.domain.state import State
from fabrictool.planner.ends import job_ends
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.situation import running_options
from tests.planner.fabrics import applied, situation

NOW = 1_800_000_000.0
HOUR = 3600.0


def with_kind(inventory, kind, **changes):
    """With clusters of that kind, and `changes` in the partition of the cheap one."""
    clusters = {name: cluster.model_copy(update={"kind": kind}) for name, cluster in inventory.clusters.items()}
    partition = clusters["cheap"].partitions["gpu"].model_copy(update=changes)
    clusters["cheap"] = clusters["cheap"].model_copy(update={"partitions": {"gpu": partition}})
    return inventory.model_copy(update={"clusters": clusters})


@pytest.fixture
def there(tmp_path):
    """On slurm, with jobs of ten hours on the cheap cluster."""
    its = situation(tmp_path)
    return replace(its, inventory=with_kind(its.inventory, "slurm", walltime=10 * HOUR))


@pytest.fixture
def evidence(there):
    """What is best runs: on the cheap cluster, and on spot, where no job ends."""
    facts = {name: ClusterFacts(cluster=name, known=True) for name in there.inventory.clusters}
    empty = Evidence(fabric="f", lineage="l", at=NOW, clusters=facts, specs={}, state=State(fabric="f"))
    whole = plan(there.blueprint, there.inventory, empty, PlanOptions(work_s=2.0), now=NOW)
    return msgspec.structs.replace(applied(there, whole), at=NOW)


def changed(evidence, **facts_or_unit):
    """All units with some fields, and all facts with those that are of facts."""
    of_facts = {name: its for name, its in facts_or_unit.items() if name in ("now", "queues")}
    of_units = {name: its for name, its in facts_or_unit.items() if name not in of_facts}
    clusters = {
        name: msgspec.structs.replace(
            facts, units=tuple(msgspec.structs.replace(unit, **of_units) for unit in facts.units), **of_facts
        )
        for name, facts in evidence.clusters.items()
    }
    return msgspec.structs.replace(evidence, clusters=clusters)


def ends_of(there, evidence, begin=NOW):
    return job_ends(there.blueprint, there.inventory, evidence, begin)


def test_a_job_lasts_as_the_inventory_says_and_no_longer_than_the_scheduler_grants(there, evidence):
    assert ends_of(there, evidence).lengths == {("cheap", "gpu"): 10 * HOUR}
    limited = changed(evidence, queues={"gpu": Queue(longest_s=6 * HOUR)})
    assert ends_of(there, limited).lengths == {(name, "gpu"): 6 * HOUR for name in ("dear", "cheap", "spot")}


def test_what_runs_ends_when_the_scheduler_says_by_our_clock(there, evidence):
    every = running_options(there.blueprint, evidence)
    assert {key[1] for key in every.values()} == {"cheap", "spot"}
    seen = changed(evidence, ends_at=NOW + 5 * HOUR + 90.0, now=NOW + 90.0)
    known = ends_of(there, seen).known
    assert known == {key: (NOW + 5 * HOUR,) * list(every.values()).count(key) for key in every.values()}
    assert ends_of(there, evidence).known == {}, "nothing says when these end"


def test_what_has_ended_before_the_horizon_was_followed_by_others_until_then(there, evidence):
    """Jobs of ten hours last nine and a quarter on the average."""
    seen = changed(evidence, ends_at=NOW + HOUR)
    (end, *_), *_ = ends_of(there, seen, NOW + 25 * HOUR).known.values()
    assert end == NOW + HOUR + 3 * 9.25 * HOUR
    inventory = with_kind(there.inventory, "slurm", walltime=None)
    assert job_ends(there.blueprint, inventory, seen, NOW + 25 * HOUR).known == {}
    (end, *_), *_ = job_ends(there.blueprint, inventory, seen, NOW).known.values()
    assert end == NOW + HOUR


@pytest.mark.parametrize("begins", [None, NOW + HOUR])
def test_a_job_in_the_queue_ends_so_long_after_it_has_begun(there, evidence, begins):
    seen = changed(evidence, state="pending", begins_at=begins, job="7")
    (end, *_), *_ = ends_of(there, seen).known.values()
    assert end == (begins or NOW) + 9.25 * HOUR


@pytest.mark.parametrize(("kind", "asked"), [("slurm", True), ("kubernetes", True), ("local", False)])
def test_where_there_is_no_scheduler_nobody_asks_before_the_end(there, evidence, kind, asked):
    inventory = with_kind(there.inventory, kind)
    assert (("cheap", "gpu") not in job_ends(there.blueprint, inventory, evidence, NOW).unasked) == asked


def test_nodes_that_joined_are_their_owners_business(there, evidence):
    inventory = with_kind(there.inventory, "joined")
    ends = job_ends(there.blueprint, inventory, changed(evidence, ends_at=NOW + HOUR), NOW)
    assert (ends.lengths, ends.known) == ({}, {})
