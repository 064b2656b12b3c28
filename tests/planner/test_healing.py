"""What a look finds, what it heals, and what it leaves alone."""

import msgspec
import pytest

from fabrictool.applier.journal import Entry, failures
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import Away, ClusterFacts, ObservedUnit, Queue
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.state import Applied, State, operation_id
from fabrictool.planner.drift import stuck
from fabrictool.planner.healing import BACK_OFF_S, MOST_STARTS, WINDOW_S, heal

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


def seen(*units, known=True, wanted=True, away=(), **state):
    """A cluster that shows these units, and a state that wants one replica."""
    facts = ClusterFacts(
        cluster="c", known=known, reason="" if known else "no answer", units=units, scheduler="slurm 22.05",
        queues={"gpu": Queue(nodes=1, idle=1)}, away=away,
    )  # fmt: skip
    applied = {ADDRESS: Applied(cluster="c", spec=SPEC)} if wanted else {}
    memory = State(lineage=LINEAGE, serial=1, applied_units=applied, generations={ADDRESS: 1}, **state)
    specs = {unit.operation: SPEC for unit in units}
    return Evidence(fabric="f", lineage=LINEAGE, at=NOW, clusters={"c": facts}, specs=specs, state=memory)


def unit(state="running", **more):
    usual = {"ready": True, "begins_at": NOW - 3600, "ends_at": NOW + 20 * 3600, "spec_digest": spec_digest(SPEC)}
    return ObservedUnit(address=ADDRESS, operation=OPERATION, state=state, **(usual | {"job": "7"} | more))


def outcome(evidence, history=(), **more):
    healing = heal(evidence, failures(history), now=NOW, **more)
    return [d.kind for d in healing.drift], [(a.kind, a.former) for a in healing.plan.changes], healing.held


WINDOW = Away(name="maint", begin=NOW + 100, end=NOW + 7200)


@pytest.mark.parametrize(
    ("evidence", "drift", "healing"),
    [
        (seen(unit()), [], []),
        (seen(), ["missing"], [("create", "")]),
        (seen(unit("ended", reason="told to stop")), ["ended"], [("create", "")]),
        (seen(unit("killed", reason="NODE_FAIL")), ["ended"], [("create", "")]),
        (seen(unit("pending", ready=False)), [], []),
        (seen(unit("pending", job="", ready=False)), [], [("create", "")]),
        (seen(unit(ends_at=NOW + 60)), ["ending"], [("replace", OPERATION)]),
        (seen(unit(), away=(WINDOW,)), ["ending"], [("replace", OPERATION)]),
        (seen(unit(ends_at=NOW + 50), away=(WINDOW,)), ["ending"], [("replace", OPERATION)]),
        (seen(unit(silent_s=400, ready=False)), ["degraded"], [("replace", OPERATION)]),
        (seen(unit(ready=False, detail="engine loading")), ["degraded"], []),
        (seen(unit(spec_digest="another")), ["changed"], [("replace", OPERATION)]),
        (seen(known=False), ["unreachable"], []),
        (seen(unit(), wanted=False), ["orphan"], []),
    ],
)
def test_drift_and_what_heals_it(evidence, drift, healing):
    assert outcome(evidence)[:2] == (drift, healing)


@pytest.mark.parametrize(("stated", "drift"), [({}, []), ({"gpu": 6000.0}, ["ending"]), ({"other": 6000.0}, [])])
def test_a_wait_that_the_inventory_states_asks_for_the_successor_so_much_earlier(stated, drift):
    """Of twenty-one hours of an allocation an hour and a half are left: enough for a node that is idle."""
    evidence = seen(unit(begins_at=NOW - 19.5 * 3600, ends_at=NOW + 5400))
    facts = msgspec.structs.replace(evidence.clusters["c"], stated_waits=stated)
    assert outcome(msgspec.structs.replace(evidence, clusters={"c": facts}))[0] == drift


def test_before_maintenance_the_replica_leaves_first_and_else_its_successor_comes_first():
    (leaving,) = heal(seen(unit(), away=(WINDOW,)), {}, now=NOW).plan.changes
    (ending,) = heal(seen(unit(ends_at=NOW + 60)), {}, now=NOW).plan.changes
    assert (leaving.stop_first, ending.stop_first) == (True, False)
    assert "maint takes its nodes away" in leaving.reason


def test_an_orphan_is_stopped_only_when_asked_to():
    evidence = seen(unit(), wanted=False)
    assert "nobody asked for it" in outcome(evidence)[2][0]
    assert outcome(evidence, prune=True)[1] == [("delete", OPERATION)]


def test_the_next_attempt_has_a_number_of_its_own():
    (action,) = heal(seen(unit("ended")), {}, now=NOW).plan.changes
    assert action.operation == operation_id(LINEAGE, ADDRESS, 2)


def test_failures_in_a_row_are_followed_by_growing_pauses_and_a_success_forgets_them():
    def entries(*kinds):
        return [Entry(at=NOW - 100 + n, plan="p", kind=kind, address=ADDRESS) for n, kind in enumerate(kinds)]

    assert outcome(seen(), entries("failed"))[1] == [("create", "")]
    held = outcome(seen(), entries("failed", "failed", "failed"))
    assert held[1] == []
    assert "failed 3 times in a row" in held[2][0]
    assert BACK_OFF_S * 4 > 98
    assert outcome(seen(), entries("failed", "failed", "failed", "done"))[1] == [("create", "")]


def test_a_serving_replica_is_never_stopped_while_its_successor_waits_in_the_queue():
    successor = msgspec.structs.replace(
        unit("pending", ready=False), operation=operation_id(LINEAGE, ADDRESS, 2), job="8"
    )
    evidence = seen(unit(ends_at=NOW + 60), successor)
    assert outcome(evidence)[:2] == ([], [])


def test_two_looks_at_the_same_trouble_are_two_plans():
    first, second = (heal(seen(), {}, now=NOW + n).plan.id for n in (0, 1))
    assert first != second


def test_healing_starts_no_more_than_the_cap_within_an_hour():
    starts = {ADDRESS: [NOW - 10.0 * n for n in range(MOST_STARTS)]}
    healing = heal(seen(healed=starts), {}, now=NOW)
    assert (healing.plan.changes, healing.capped) == ((), (ADDRESS,))
    assert "6 new starts in the last hour" in healing.held[0]
    assert [action.kind for action in heal(seen(healed=starts), {}, now=NOW + WINDOW_S).plan.changes] == ["create"]


def test_short_allocations_are_renewed_as_often_as_they_end():
    short = msgspec.structs.replace(SPEC, walltime_s=600.0)
    evidence = seen(healed={ADDRESS: [NOW - 300.0 * n for n in range(MOST_STARTS)]})
    state = msgspec.structs.replace(evidence.state, applied_units={ADDRESS: Applied(cluster="c", spec=short)})
    evidence = msgspec.structs.replace(evidence, state=state)
    assert [action.kind for action in heal(evidence, {}, now=NOW).plan.changes] == ["create"]


def test_the_fabric_has_a_cap_too():
    starts = {f"replica/m/{n}": [NOW - 1.0] for n in range(20)}
    assert heal(seen(healed=starts), {}, now=NOW).capped == (ADDRESS,)


def test_a_requeued_job_is_taken_out_of_the_queue_and_replaced():
    evidence = seen(unit("pending", ready=False, requeued=True))
    (action,) = heal(evidence, {}, now=NOW).plan.changes
    assert (action.kind, action.former, action.stop_first) == ("replace", OPERATION, True)


def test_a_stuck_job_is_drift_and_is_left_where_it_is():
    evidence = seen(unit("pending", ready=False, blocked="held", detail="it is held (JobHeldAdmin)"))
    assert outcome(evidence) == (["stuck"], [], ())
    (problem,) = stuck(evidence).values()
    assert (problem.code, "JobHeldAdmin" in problem.message) == ("FT5111", True)


def test_the_clusters_clock_ends_no_certificate_and_ours_no_allocation():
    certified = unit(certificate_begins_at=NOW - 3600, certificate_ends_at=NOW + 25 * 3600)
    (facts,) = seen(certified).clusters.values()
    for wrong in (-86400.0, 86400.0):
        ahead = msgspec.structs.replace(facts, now=NOW + wrong, units=(without_end(certified),))
        assert heal(msgspec.structs.replace(seen(certified), clusters={"c": ahead}), {}, now=NOW).drift == ()
    late = msgspec.structs.replace(facts, now=NOW - 3600, units=(unit(ends_at=NOW - 3600 + 8 * 3600),))
    evidence = msgspec.structs.replace(seen(certified), clusters={"c": late})
    assert heal(evidence, {}, now=NOW).drift == ()


def without_end(unit):
    return msgspec.structs.replace(unit, ends_at=None)


ENDING = {
    "ends_at": None, "certificate_begins_at": NOW - 22.5 * 3600, "certificate_ends_at": NOW + 3.5 * 3600,
    "in_force": "current", "renewable": True,
}  # fmt: skip
LATER = NOW + 30 * 86400


@pytest.mark.parametrize(
    ("changes", "signs", "kind"),
    [
        ({}, {"p": LATER}, "update"),
        ({}, {"q": LATER}, "replace"),
        ({"renewable": False}, {"p": LATER}, "replace"),
        ({"in_force": ""}, {"p": LATER}, "replace"),
        ({"certificate_begins_at": NOW - 6.9 * 86400}, {"p": LATER}, "update"),
        ({"certificate_begins_at": NOW - 7.1 * 86400}, {"p": LATER}, "replace"),
        ({"certificate_ends_at": NOW - 10.0}, {"p": LATER}, "replace"),
        ({"certificate_ends_at": NOW + 5 * 3600}, {"p": LATER}, None),
        ({}, {"p": NOW + 3.5 * 3600}, None),
    ],
)
def test_a_certificate_is_renewed_where_that_can_be_done_and_a_successor_started_elsewhere(changes, signs, kind):
    evidence = msgspec.structs.replace(seen(unit(**(ENDING | changes))), signs=signs)
    found = heal(evidence, {}, now=NOW).plan.changes
    assert [(action.kind, action.renews is True) for action in found] == ([(kind, kind == "update")] if kind else [])


AHEAD = tuple(operation_id(LINEAGE, ADDRESS, number) for number in (2, 3, 4, 5))
FOLLOWED = msgspec.structs.replace(SPEC, walltime_s=86400.0, successors=3)


def followed(*units, signs=None):
    evidence = seen(*(msgspec.structs.replace(unit, spec_digest=spec_digest(FOLLOWED)) for unit in units))
    applied = {ADDRESS: Applied(cluster="c", spec=FOLLOWED)}
    return msgspec.structs.replace(
        evidence,
        specs={unit.operation: FOLLOWED for unit in units},
        state=msgspec.structs.replace(evidence.state, applied_units=applied),
        signs={"p": LATER} if signs is None else signs,
    )


@pytest.mark.parametrize(
    ("changes", "signs", "kinds"),
    [
        ({"followers": AHEAD[:3]}, None, []),
        ({"followers": AHEAD[:2]}, None, ["update"]),
        ({"followers": AHEAD[:0]}, {}, []),  # its provider's key is elsewhere
        ({"followers": AHEAD[:0]}, {"p": NOW + 2.5 * 86400}, ["update"]),
        ({"followers": AHEAD[:1]}, {"p": NOW + 2.5 * 86400}, []),  # no certificate lasts until another one's end
        ({"followers": AHEAD[:0], "in_force": ""}, None, []),  # of an earlier release, which is told nothing
    ],
)
def test_what_may_follow_a_job_from_inside_is_prepared_again(changes, signs, kinds):
    evidence = followed(unit(**({"in_force": "current"} | changes)), signs=signs)
    healing = heal(evidence, {}, now=NOW)
    assert [action.kind for action in healing.plan.changes] == kinds
    assert [action.renews is True for action in healing.plan.changes] == [False] * len(kinds)
    assert [drift.kind for drift in healing.drift] == ["changed"] * len(kinds)


def test_a_job_that_followed_from_inside_is_ours_and_the_former_one_leaves_when_it_serves():
    second = operation_id(LINEAGE, ADDRESS, 2)
    late = {"ends_at": NOW + 600, "in_force": "current", "followers": AHEAD[:2]}
    queued = msgspec.structs.replace(unit(state="pending", ready=False, ends_at=None), operation=second)
    assert heal(followed(unit(**late), queued), {}, now=NOW).plan.changes == ()
    serving = msgspec.structs.replace(unit(in_force="current", followers=AHEAD[1:3]), operation=second)
    (action,) = heal(followed(unit(**late), serving), {}, now=NOW).plan.changes
    assert (action.kind, action.operation, action.former) == ("replace", second, OPERATION)
