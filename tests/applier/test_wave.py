"""The machine behind apply, in virtual time: no cluster, no clock, no thread."""

import random

import pytest

from fabrictool.applier.course import Course
from fabrictool.applier.events import (
    Ended,
    Look,
    Looked,
    Notify,
    ReadTail,
    Start,
    Started,
    TailRead,
    Tell,
    TellFailed,
    Ticked,
    Update,
    Updated,
)
from fabrictool.applier.wave import READY_MARGIN_S, STOP_GRACE_S, TRANSITIONS, Wave
from fabrictool.base.errors import UnreachableError
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import Action
from fabrictool.domain.specs import AgentSpec

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m", source="x", engine="vllm",
    start_timeout_s=600.0,
)  # fmt: skip
QUEUE_WAIT = 900.0


def action(kind="create", number=0, **changes):
    names = {
        "operation": f"new{number}" if kind != "delete" else "",
        "former": "" if kind == "create" else f"old{number}",
    }
    spec = None if kind == "delete" else SPEC
    return Action(kind=kind, address=f"replica/m/{number}", cluster="c", summary="", spec=spec, **(names | changes))


def unit(operation, state="running", **changes):
    return ObservedUnit(address="replica/m/0", operation=operation, state=state, spec_digest="", **changes)


class Play:
    """A wave whose looks are given by hand; former units are on cluster `home`."""

    def __init__(self, *actions, queue_wait_s=QUEUE_WAIT, home="c"):
        homes = {a.former: home for a in actions}
        self.courses = [Course.of(a, homes) for a in actions]
        self.wave = Wave(self.courses, {"c": 5.0, "d": 5.0}, queue_wait_s, checked=True)
        self.now = 0.0
        self.effects = self.tick()

    def step(self, event):
        self.effects = self.wave.step(self.now, event)
        return self.effects

    def tick(self, seconds=0.0, presses=0):
        self.now += seconds
        return self.step(Ticked(presses))

    def start(self):
        """Until what is to be started was started."""
        (start,) = [effect for effect in self.effects if isinstance(effect, Start)]
        return self.step(Started("c", tuple(a.operation for a in start.actions)))

    def look(self, *units, after=0.0, known=True, cluster="c"):
        self.now += after
        return self.step(
            Looked(ClusterFacts(cluster=cluster, known=known, reason="" if known else "no answer", units=units))
        )

    @property
    def phases(self):
        return [course.phase for course in self.courses]

    def codes(self):
        return [c.error.problems[0].code for c in self.courses if c.error is not None]


def tells(effects):
    return [(effect.verb, effect.operations) for effect in effects if isinstance(effect, Tell)]


def test_a_replica_is_started_watched_and_done():
    play = Play(action())
    assert [type(effect) for effect in play.effects] == [Start]
    assert [type(effect) for effect in play.start()] == [Notify]
    for seen, phase in (((), "booting"), ((unit("new0"),), "booting"), ((unit("new0", ready=True),), "done")):
        assert play.tick(10.0) == [Look("c")]
        play.look(*seen)
        assert play.phases == [phase]
    assert play.tick() == [Ended(play.courses[0])]
    assert play.wave.over


def test_the_old_unit_is_stopped_only_when_the_new_one_serves():
    play = Play(action("replace"))
    play.start()
    assert tells(play.look(unit("old0"), unit("new0"))) == []
    assert tells(play.look(unit("old0"), unit("new0", ready=True))) == []
    assert play.phases == ["retiring"]
    assert tells(play.tick()) == [("stop", ("old0",))]
    assert tells(play.look(unit("old0", "ended"), unit("new0", ready=True))) == [("forget", ("old0",))]
    assert play.phases == ["done"]


def test_a_replica_that_serves_at_the_last_moment_costs_the_old_one_no_time():
    play = Play(action("replace"))
    play.start()
    play.look(unit("old0"), unit("new0"))
    late = SPEC.start_timeout_s + READY_MARGIN_S + 1
    assert tells(play.look(unit("old0"), unit("new0", ready=True), after=late)) == []
    assert play.phases == ["retiring"]
    assert tells(play.tick()) == [("stop", ("old0",))]
    assert tells(play.look(unit("old0"), unit("new0", ready=True), after=STOP_GRACE_S - 1)) == []


@pytest.mark.parametrize("known", [True, False])
def test_nobody_is_killed_or_given_up_who_was_not_asked_to_leave(known):
    """The successor serves on another cluster, after its time, and a look at the old one's comes in the same breath."""
    play = Play(action("replace"), home="d")
    play.start()
    play.look(unit("new0"))
    play.look(unit("new0", ready=True), after=SPEC.start_timeout_s + READY_MARGIN_S + 1)
    assert play.look(unit("old0"), cluster="d", known=known) == []
    assert play.codes() == []
    assert tells(play.tick()) == [("stop", ("old0",))]


def test_a_cluster_is_not_looked_at_until_it_is_known_how_its_start_went():
    play = Play(action())
    assert [type(effect) for effect in play.effects] == [Start]
    assert play.tick(5.0) == []
    play.step(Started("c", ("new0",), {"new0": UnreachableError.of("FT5404", "no")}))
    assert [type(effect) for effect in play.tick(5.0)] == [Ended]


def test_a_unit_that_nobody_has_seen_is_not_said_to_be_in_a_queue():
    play = Play(action())
    play.start()
    play.look(known=False, after=QUEUE_WAIT + 1)
    assert play.codes() == ["FT5106"]
    assert "does not answer" in str(play.courses[0].error)


def test_going_to_and_fro_between_engine_and_gateway_gains_no_time():
    play = Play(action())
    play.start()
    play.look(unit("new0", waits_for="engine"))
    for waits_for in ["gateway", "engine"] * 5:
        play.look(unit("new0", waits_for=waits_for), after=READY_MARGIN_S / 4)
    assert play.codes() == ["FT5106"]


def test_where_there_is_no_room_the_old_unit_leaves_first():
    play = Play(action("replace", stop_first=True))
    assert [type(effect) for effect in play.effects] == [Tell, Look]
    assert tells(play.effects) == [("stop", ("old0",))]
    assert play.look(unit("old0")) == []
    assert tells(play.look(unit("old0", "ended"))) == [("forget", ("old0",))]
    assert next(type(effect) for effect in play.tick()) is Start


def test_nothing_is_started_in_a_place_that_cannot_be_cleared():
    play = Play(action("replace", stop_first=True))
    play.look(unit("old0", "ended"))
    play.step(TellFailed(("old0",), UnreachableError.of("FT5406", "no rights")))
    assert not any(isinstance(effect, Start) for effect in play.tick())
    assert play.codes() == ["FT5406"]


def test_an_unanswered_look_at_a_queued_job_takes_no_time_from_its_start():
    """It once kept the queue's deadline, and a replica that loaded well failed with FT5106."""
    play = Play(action())
    play.start()
    play.look(unit("new0", "pending"), after=QUEUE_WAIT - 1)
    play.look(known=False, after=0.5)
    play.look(unit("new0", waits_for="engine"), after=0.4)
    play.look(unit("new0", waits_for="engine"), after=SPEC.start_timeout_s)
    assert play.phases == ["booting"]
    play.look(unit("new0", waits_for="engine"), after=READY_MARGIN_S + 1)
    assert play.codes() == ["FT5106"]


def test_a_job_that_goes_back_into_its_queue_waits_there_anew():
    play = Play(action())
    play.start()
    play.look(unit("new0"))
    play.look(unit("new0", "pending"), after=SPEC.start_timeout_s)
    play.look(unit("new0", "pending"), after=QUEUE_WAIT - 1)
    assert play.phases == ["queued"]
    play.look(unit("new0", "pending"), after=2)
    assert play.codes() == ["FT5110"]


def test_whether_only_a_gateway_is_missing_is_no_matter_of_words():
    play = Play(action())
    play.start()
    play.look(unit("new0", waits_for="engine", detail="no gateway is reached, says the log of the engine"))
    assert play.phases == ["booting"]
    play.look(unit("new0", waits_for="gateway", detail="warten auf ein Gateway"), after=60)
    assert play.phases == ["alone"]
    play.look(unit("new0", waits_for="gateway"), after=READY_MARGIN_S + 1)
    assert play.codes() == ["FT5106"]


def test_a_command_that_does_not_wait_leaves_jobs_in_their_queues():
    play = Play(action(), queue_wait_s=0.0)
    play.start()
    play.look(unit("new0", "pending", detail="Priority"))
    assert play.phases == ["left-in-queue"]


@pytest.mark.parametrize("kind", ["delete", "replace"])
def test_who_does_not_leave_is_killed_once_and_then_given_up(kind):
    play = Play(action(kind, stop_first=True))
    assert tells(play.look(unit("old0"), after=STOP_GRACE_S + 1)) == [("kill", ("old0",))]
    assert tells(play.look(unit("old0"), after=STOP_GRACE_S)) == []
    play.look(unit("old0"), after=1.0)
    assert play.codes() == ["FT5102"]


def test_nobody_is_killed_on_a_cluster_that_does_not_answer():
    play = Play(action("delete"))
    assert tells(play.look(known=False, after=STOP_GRACE_S + 1)) == []
    assert play.codes() == ["FT5102"]
    assert "no answer" in str(play.courses[0].error)


def test_of_many_that_die_alike_three_logs_are_read():
    play = Play(*(action(number=n) for n in range(5)))
    play.start()
    effects = play.look(*(unit(f"new{n}", "ended", reason="no memory") for n in range(5)))
    assert effects == [ReadTail("c", f"new{n}") for n in range(3)]
    for n in range(3):
        play.step(TailRead(f"new{n}", "out of memory"))
    assert play.codes() == ["FT5105"] * 5
    assert "out of memory" in play.courses[0].error.problems[0].hint
    assert "not asked for" in play.courses[4].error.problems[0].hint


def test_looks_are_frequent_at_first_and_seldom_later_however_long_it_takes():
    play = Play(action())
    play.start()
    gaps, last = [], 0.0
    for _ in range(2_000):
        if Look("c") in play.tick(0.5):
            gaps.append(play.now - last)
            play.look(after=60.0)  # however long the scheduler takes to answer, it is left alone for a while then
            last = play.now
    assert gaps[1:4] == [1.0, 2.0, 4.0]
    assert set(gaps[4:]) == {5.0}


def test_ctrl_c_once_starts_nothing_new_and_twice_stops_waiting():
    play = Play(action("replace", stop_first=True), action("replace", 1))
    play.start()
    play.look(unit("old0", "ended"), unit("old1"), unit("new1"))
    assert not any(isinstance(effect, Start) for effect in play.tick(presses=1))
    assert play.phases == ["left", "booting"]
    play.tick(presses=2)
    assert play.wave.over
    assert play.phases == ["left", "left"]


@pytest.mark.parametrize("seed", [*range(60), *(random.randrange(10**9) for _ in range(20))])
def test_whatever_happens_the_rules_hold_and_it_ends(seed):
    """A cluster that answers at random; `checked` holds every step against the table and the invariants."""
    rng = random.Random(seed)
    kinds = [action(rng.choice(["create", "replace", "delete"]), n, stop_first=rng.random() < 0.3) for n in range(4)]
    play = Play(*kinds, home=rng.choice("cd"))
    living = {a.former for a in kinds if a.former}
    pending = list(play.effects)
    for _ in range(5000):
        if play.wave.over:
            break
        effects, pending = pending, []
        for effect in effects:
            if isinstance(effect, Start):
                operations = tuple(a.operation for a in effect.actions)
                failed = {o: UnreachableError.of("FT5404", "no") for o in operations if rng.random() < 0.2}
                living |= {o for o in operations if o not in failed}
                pending += play.step(Started("c", operations, failed))
            elif isinstance(effect, Tell):
                if rng.random() < 0.1:
                    pending += play.step(TellFailed(effect.operations, UnreachableError.of("FT5409", "no")))
                elif effect.verb != "forget" and rng.random() < 0.7:
                    living -= set(effect.operations)
            elif isinstance(effect, ReadTail):
                pending += play.step(TailRead(effect.operation, "tail"))
            elif isinstance(effect, Look):
                units = [
                    unit(o, rng.choice(["running", "running", "running", "pending", "ended"]), ready=rng.random() < 0.5,
                         waits_for=rng.choice(["", "engine", "gateway"]))
                    for o in sorted(living) if rng.random() < 0.9
                ]  # fmt: skip
                pending += play.look(*units, known=rng.random() < 0.8, cluster=effect.cluster)
        pending += play.tick(rng.choice([0.1, 1.0, 30.0]), presses=int(rng.random() < 0.002))
    assert play.wave.over, f"seed {seed}: {play.phases}"
    for course in play.courses:
        assert (course.error is not None) == (course.phase == "failed"), f"seed {seed}"


def test_unknown_is_not_absent():
    for (phase, sign), then in TRANSITIONS.items():
        assert sign != "unknown" or then == phase


def given(operation="old0", in_force="former", state="running", **changes):
    return unit(operation, state, in_force=in_force, ready=state == "running", **changes)


def test_a_unit_is_updated_and_waited_for_until_it_says_so():
    play = Play(action("update", operation="old0", former=""))
    assert [(type(effect), effect.cluster) for effect in play.effects] == [(Update, "c")]
    assert play.step(Updated(("old0",))) == []
    assert play.tick() == [Look("c")]
    play.look(given(detail="not yet"))
    assert play.phases == ["updating"]
    play.look(known=False)
    assert play.phases == ["updating"]
    play.look(given(in_force="current"))
    assert play.phases == ["done"]
    assert play.tick() == [Ended(play.courses[0])]
    assert play.wave.over


@pytest.mark.parametrize(
    ("seen", "after"),
    [((given(detail="refused"),), READY_MARGIN_S + 1), ((given(state="ended"),), 0.0), ((), 0.0)],
)
def test_an_update_that_is_not_taken_over_fails(seen, after):
    play = Play(action("update", operation="old0", former=""))
    play.step(Updated(("old0",)))
    play.tick()
    play.look(*seen, after=after)
    assert (play.phases, play.codes()) == (["failed"], ["FT5113"])


def test_an_update_that_cannot_be_written_fails_and_after_ctrl_c_none_begins():
    play = Play(action("update", operation="old0", former=""))
    play.step(Updated(("old0",), {"old0": UnreachableError.of("FT5406", "no space")}))
    assert play.codes() == ["FT5406"]
    wave = Wave([Course.of(action("update", operation="old0", former=""), {})], {"c": 5.0}, checked=True)
    assert [type(effect) for effect in wave.step(0.0, Ticked(presses=1))] == [Ended]
    assert wave.courses[0].phase == "left"
