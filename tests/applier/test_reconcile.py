"""What a look finds, what it heals, and what it leaves alone."""

import msgspec
import pytest

from fabrictool.applier.fabric import _believed
from fabrictool.applier.journal import Entry
from fabrictool.applier.reconcile import BACK_OFF_S, look
from fabrictool.applier.state import Applied, State, operation_id
from fabrictool.domain.observed import Away, ClusterFacts, Observed, ObservedUnit, Queue
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec

NOW = 1_800_000_000.0
LINEAGE = "0123456789abcdef"
SPEC = AgentSpec(
    fabric="f",
    provider="p",
    site="s",
    cluster="c",
    partition="gpu",
    replica="m/0",
    model="m",
    source="x",
    engine="vllm",
)
ADDRESS = "replica/m/0"
OPERATION = operation_id(LINEAGE, ADDRESS, 1)


class FakeFabric:
    """A cluster that shows what it is given, and a state that wants one replica."""

    name = "f"
    lineage = LINEAGE

    def __init__(self, *units, known=True, wanted=True, away=(), **state):
        self.facts = ClusterFacts(
            cluster="c", known=known, reason="" if known else "no answer", units=units, scheduler="slurm 22.05",
            queues={"gpu": Queue(nodes=1, idle=1)}, away=away,
        )  # fmt: skip
        applied = {ADDRESS: Applied(cluster="c", spec=SPEC)} if wanted else {}
        self.state = State(lineage=LINEAGE, serial=1, applied_units=applied, generations={ADDRESS: 1}, **state)
        self.folder = self.clusters = self

    def observe(self):
        return Observed(clusters={"c": self.facts})

    def read_state(self):
        return self.state

    def __getitem__(self, name):
        return self

    def spec(self, operation):
        return SPEC


def unit(state="running", **more):
    usual = {"ready": True, "begins_at": NOW - 3600, "ends_at": NOW + 20 * 3600, "spec_digest": spec_digest(SPEC)}
    return ObservedUnit(address=ADDRESS, operation=OPERATION, state=state, **(usual | {"job": "7"} | more))


def found(fabric, history=(), **more):
    seen = look(fabric, history, now=NOW, **more)
    return [d.kind for d in seen.drift], [(a.kind, a.former) for a in seen.plan.changes], seen.held


WINDOW = Away(name="maint", begin=NOW + 100, end=NOW + 7200)


@pytest.mark.parametrize(
    ("fabric", "drift", "healing"),
    [
        (FakeFabric(unit()), [], []),
        (FakeFabric(), ["missing"], [("create", "")]),
        (FakeFabric(unit("ended", reason="told to stop")), ["ended"], [("create", "")]),
        (FakeFabric(unit("killed", reason="NODE_FAIL")), ["ended"], [("create", "")]),
        (FakeFabric(unit("pending", ready=False)), [], []),
        (FakeFabric(unit("pending", job="", ready=False)), [], [("create", "")]),
        (FakeFabric(unit(ends_at=NOW + 60)), ["ending"], [("replace", OPERATION)]),
        (FakeFabric(unit(), away=(WINDOW,)), ["ending"], [("replace", OPERATION)]),
        (FakeFabric(unit(ends_at=NOW + 50), away=(WINDOW,)), ["ending"], [("replace", OPERATION)]),
        (FakeFabric(unit(silent_s=400, ready=False)), ["degraded"], [("replace", OPERATION)]),
        (FakeFabric(unit(ready=False, detail="engine loading")), ["degraded"], []),
        (FakeFabric(unit(spec_digest="another")), ["changed"], [("replace", OPERATION)]),
        (FakeFabric(known=False), ["unreachable"], []),
        (FakeFabric(unit(), wanted=False), ["orphan"], []),
    ],
)
def test_drift_and_what_heals_it(fabric, drift, healing):
    assert found(fabric)[:2] == (drift, healing)


def test_before_maintenance_the_replica_leaves_first_and_else_its_successor_comes_first():
    (leaving,) = look(FakeFabric(unit(), away=(WINDOW,)), (), now=NOW).plan.changes
    (ending,) = look(FakeFabric(unit(ends_at=NOW + 60)), (), now=NOW).plan.changes
    assert (leaving.stop_first, ending.stop_first) == (True, False)
    assert "maint takes its nodes away" in leaving.reason


def test_an_orphan_is_stopped_only_when_asked_to():
    fabric = FakeFabric(unit(), wanted=False)
    assert "nobody asked for it" in found(fabric)[2][0]
    assert found(fabric, prune=True)[1] == [("delete", OPERATION)]


def test_the_next_attempt_has_a_number_of_its_own():
    (action,) = look(FakeFabric(unit("ended")), (), now=NOW).plan.changes
    assert action.operation == operation_id(LINEAGE, ADDRESS, 2)


def test_failures_in_a_row_are_followed_by_growing_pauses_and_a_success_forgets_them():
    def entries(*kinds):
        return [Entry(at=NOW - 100 + n, plan="p", kind=kind, address=ADDRESS) for n, kind in enumerate(kinds)]

    assert found(FakeFabric(), entries("failed"))[1] == [("create", "")]
    held = found(FakeFabric(), entries("failed", "failed", "failed"))
    assert held[1] == []
    assert "failed 3 times in a row" in held[2][0]
    assert BACK_OFF_S * 4 > 98
    assert found(FakeFabric(), entries("failed", "failed", "failed", "done"))[1] == [("create", "")]


def test_a_serving_replica_is_never_stopped_while_its_successor_waits_in_the_queue():
    successor = msgspec.structs.replace(
        unit("pending", ready=False), operation=operation_id(LINEAGE, ADDRESS, 2), job="8"
    )
    fabric = FakeFabric(unit(ends_at=NOW + 60), successor)
    assert found(fabric)[:2] == ([], [])


def test_two_looks_at_the_same_trouble_are_two_plans():
    first, second = (look(FakeFabric(), (), now=NOW + n).plan.id for n in (0, 1))
    assert first != second


@pytest.mark.parametrize(("here", "started", "known"), [(True, True, True), (False, False, True), (False, True, False)])
def test_a_cluster_whose_folder_of_units_is_gone_is_unknown_and_not_empty(here, started, known):
    facts = ClusterFacts(cluster="c", known=True, here=here)
    assert _believed(facts, started).known is known
