"""One wave of actions side by side, without I/O: events in, effects out.

`Wave.step` takes the time and what happened, and returns what is to be done about it; `driver` does it and says how it
went. What a look makes of an action's phase stands in `TRANSITIONS`; `checked` waves refuse anything else.

=========== =================================================================
making-room its former unit was told to leave, for the new one needs its place
to-start    its new unit is to be started
submitted   its new unit was started, and nothing was seen of it yet
queued      … waits for the scheduler
booting     … runs and does not serve
alone       … is ready but for a gateway
retiring    the new unit serves, and its former one was told to leave
stopping    its unit was told to leave
to-update   its unit is to be given another spec
updating    … was given one, and does not run by it yet
=========== =================================================================

The module is longer than most: the table is read together with the machine that it is for. Its events and effects are
in `events`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fabrictool.applier.course import LEAVING, OVER, STARTING, Course
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
from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.domain.observed import lives
from fabrictool.domain.specs import AgentSpec, GatewaySpec
from fabrictool.planner.drift import cannot_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.applier.course import Phase
    from fabrictool.applier.events import Effect, Event
    from fabrictool.domain.observed import ClusterFacts, ObservedUnit
    from fabrictool.domain.plan import Action

STOP_GRACE_S = 60.0
"""A unit drains for its `drain_s`, then leaves; after this long it is killed."""
HANDED_OVER_GRACE_S = 330.0
"""Of a gateway whose successor serves: it lets streams end for 300 s."""
READY_MARGIN_S = 30.0
"""For starting the process, and for reaching a gateway once the engine is ready."""
QUEUE_WAIT_S = 900.0
"""How long a job may wait in its queue before the command goes on without it."""
MOST_TAILS = 3
"""Of a wave: two hundred replicas that fail alike are told about by three logs."""
FIRST_PAUSE_S = 1.0
"""Between the first two looks at a cluster after something was done there; each further pause is twice as long, up to
the cluster's `poll`: most of what happens, happens at once, and login nodes belong to everybody."""
MOST_DOUBLINGS = 16

Sign = Literal["unknown", "absent", "ended", "queued", "stuck", "booting", "alone", "serving", "there"]
"""What a look shows of the unit that an action waits for; of one that is to leave only whether it is there."""

NEVER = ("held", "invalid")
"""Jobs that are so blocked are not waited for; a limit may be free, and nodes may be back, while one waits."""
TRANSITIONS: Mapping[tuple[Phase, Sign], Phase] = {
    **{(phase, "unknown"): phase for phase in STARTING | LEAVING},  # unknown is not absent: nothing moves
    ("updating", "unknown"): "updating",
    **{(phase, "there"): phase for phase in LEAVING},
    **{("making-room", sign): "to-start" for sign in ("absent", "ended")},
    **{(phase, sign): "done" for phase in ("retiring", "stopping") for sign in ("absent", "ended")},
    **{(phase, sign): "failed" for phase in STARTING for sign in ("ended", "stuck")},
    **{(phase, "serving"): "done" for phase in STARTING},  # or "retiring", where a former one is left to stop
    **{(phase, "queued"): "queued" for phase in STARTING},  # or "left-in-queue", where nobody waits for queues
    **{(phase, "booting"): "booting" for phase in STARTING},
    **{(phase, "alone"): "alone" for phase in STARTING},
    ("updating", "serving"): "done",
    ("updating", "there"): "updating",
    **{("updating", sign): "failed" for sign in ("absent", "ended")},
    ("submitted", "absent"): "booting",
    ("queued", "absent"): "booting",
    ("booting", "absent"): "booting",
    ("alone", "absent"): "booting",
}
INSTEAD: Mapping[Phase, Phase] = {"done": "retiring", "queued": "left-in-queue"}


# -- the machine ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Wave:
    """See the module's docstring; `polls` are the clusters' longest pauses between two looks, in seconds."""

    courses: Sequence[Course]
    polls: Mapping[str, float]
    queue_wait_s: float = QUEUE_WAIT_S
    checked: bool = False
    """Whether every step is held against `TRANSITIONS` and the invariants."""
    _next_look: dict[str, float] = field(default_factory=dict)
    _looks: dict[str, int] = field(default_factory=dict)
    """How often each cluster was looked at since something was last done on it."""
    _tails: int = 0
    _stopping: bool = False
    """Nothing new is started."""
    _told: set[int] = field(default_factory=set)
    """Courses whose end was said."""
    _begun: set[str] = field(default_factory=set)
    """Operations that were to be started."""

    @property
    def over(self) -> bool:
        return len(self._told) == len(self.courses)

    def step(self, now: float, event: Event) -> list[Effect]:
        """What is to be done, in this order; `now` in monotonic seconds.

        Units are told to leave or started, and ends are said, when time passes: it is known then how all else went.
        """
        before = [course.phase for course in self.courses]
        effects = self._react(now, event)
        if self.checked:
            self._check(before, effects)
        return effects

    def _react(self, now: float, event: Event) -> list[Effect]:
        match event:
            case Ticked(presses):
                return self._tick(now, presses)
            case Looked(facts):
                return self._looked(now, facts)
            case Started():
                return self._started(now, event)
            case Updated():
                return self._updated(now, event)
            case TellFailed(operations, error):
                for index, course in enumerate(self.courses):
                    if index not in self._told and course.action.former in operations:
                        self._fail(course, error)
                return []
            case TailRead(operation, tail):
                for course in self._open():
                    if course.action.operation == operation and course.death:
                        self._fail(course, _death(course, tail))
                return []

    def _open(self) -> list[Course]:
        return [course for course in self.courses if not course.over]

    # -- time -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float, presses: int) -> list[Effect]:
        self._stopping = self._stopping or presses > 0
        if presses >= 2:
            for course in self._open():
                course.phase = "left"
        starts = self._start(now)
        effects: list[Effect] = [*self._ask_to_leave(now), *starts, *self._update(), *self._ends()]
        watched = sorted({course.watched for course in self._open() if not course.death})
        due = [name for name in watched if now >= self._next_look.get(name, 0.0)]
        self._next_look |= dict.fromkeys(due, math.inf)  # until it is known what they show
        return effects + [Look(name) for name in due]

    def _ends(self) -> list[Effect]:
        fresh = [index for index, course in enumerate(self.courses) if course.over and index not in self._told]
        self._told |= set(fresh)
        return [Ended(self.courses[index]) for index in fresh]

    def _look_soon(self, cluster: str) -> None:
        self._next_look[cluster], self._looks[cluster] = 0.0, 0

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> list[Start]:
        """One effect for all new units of a cluster."""
        groups: dict[str, list[Course]] = {}
        for course in self.courses:
            if course.phase == "to-start" and self._stopping:
                course.phase = "left"
            elif course.phase == "to-start":
                course.phase = "submitted"
                course.deadline = now + self.queue_wait_s
                groups.setdefault(course.action.cluster, []).append(course)
        self._next_look |= dict.fromkeys(groups, math.inf)  # until it is known how it went
        return [Start(name, tuple(course.action for course in groups[name])) for name in sorted(groups)]

    def _started(self, now: float, event: Started) -> list[Effect]:
        effects: list[Effect] = []
        for course in self._open():
            operation = course.action.operation
            if course.phase != "submitted" or operation not in event.operations:
                continue
            error = event.failed.get(operation)
            if error is not None:
                self._fail(course, error)
                continue
            course.deadline = now + self.queue_wait_s
            effects.append(Notify(course.action, "started"))
        self._look_soon(event.cluster)
        return effects

    # -- updating ---------------------------------------------------------------------------------------------------

    def _update(self) -> list[Update]:
        """One effect for all units of a cluster; after Ctrl-C none."""
        groups: dict[str, list[Course]] = {}
        for course in self.courses:
            if course.phase == "to-update":
                course.phase = "left" if self._stopping else "updating"
            if course.phase == "updating" and not course.asked:
                course.asked, course.deadline = True, math.inf
                groups.setdefault(course.action.cluster, []).append(course)
        self._next_look |= dict.fromkeys(groups, math.inf)  # until it is known how it went
        return [Update(name, tuple(course.action for course in groups[name])) for name in sorted(groups)]

    def _updated(self, now: float, event: Updated) -> list[Effect]:
        for course in self._open():
            if course.phase == "updating" and course.action.operation in event.operations:
                course.deadline = now + READY_MARGIN_S
                self._look_soon(course.action.cluster)
                error = event.failed.get(course.action.operation)
                if error is not None:
                    self._fail(course, error)
        return []

    # -- looking ----------------------------------------------------------------------------------------------------

    def _looked(self, now: float, facts: ClusterFacts) -> list[Effect]:
        effects: list[Effect] = []
        gone: list[str] = []
        late: list[str] = []
        units = {unit.operation: unit for unit in facts.units}
        looks = self._looks.get(facts.cluster, 0)
        pause = min(self.polls[facts.cluster], FIRST_PAUSE_S * 2 ** min(looks, MOST_DOUBLINGS))
        self._looks[facts.cluster], self._next_look[facts.cluster] = looks + 1, now + pause
        for course in self._open():
            if course.watched != facts.cluster or course.death or not course.underway():
                continue
            unit = units.get(course.awaited)
            was, deadline = course.phase, course.deadline
            sign = _sign(was, facts, unit)
            died = self._move(now, course, sign, unit, facts)
            if self.checked:
                then = TRANSITIONS[was, sign]
                stays = was if died else then
                _hold(course.phase in (stays, INSTEAD.get(then)), f"{was} and {sign} gave {course.phase}")
            if was in LEAVING and course.phase != was and unit is not None:
                gone.append(course.action.former)
            if died:
                effects += self._tail(course)
            elif not course.over:
                effects += self._describe(course, sign, unit, facts)
                if deadline == course.deadline < now and course.underway() and self._overdue(now, course, sign):
                    effects += self._say(course, "it did not leave in time and is killed")
                    late.append(course.action.former)
        effects += [Tell("kill", facts.cluster, tuple(late))] if late else []
        effects += [Tell("forget", facts.cluster, tuple(gone))] if gone else []
        return effects

    def _move(self, now: float, course: Course, sign: Sign, unit: ObservedUnit | None, facts: ClusterFacts) -> bool:
        """Into its next phase; True when its new unit died, of which only the tail of the log is missing."""
        was, then = course.phase, TRANSITIONS[course.phase, sign]
        if sign == "stuck" and unit is not None:
            self._fail(course, FabrictoolError([cannot_start(unit, facts.cluster)]))
            return False
        if then == "failed" and was == "updating":
            message = f"{course.action.address} ended while it was given another spec"
            self._fail(course, UnreachableError.of("FT5113", message, thing=course.action.address, hint="apply again"))
            return False
        if then == "failed":
            course.death = (unit.reason if unit is not None else "") or "it was killed"
            return True
        if then == "done" and was in STARTING:
            course.ready, course.ready_at = unit, facts.now
            if course.former and course.action.kind == "replace" and not course.action.stop_first:
                then = INSTEAD[then]
        if then == "queued" and self.queue_wait_s <= 0.0:
            then = INSTEAD[then]
        course.phase = then
        if then == "queued" and was in ("booting", "alone"):  # preempted, and in the queue again
            course.deadline = now + self.queue_wait_s
        if then in ("booting", "alone") and was in ("submitted", "queued"):  # its time counts from its start
            spec = course.action.spec
            course.deadline = now + (spec.start_timeout_s if isinstance(spec, AgentSpec) else 0.0) + READY_MARGIN_S
        if then == "alone" and was != "alone":
            course.deadline = min(course.deadline, now + READY_MARGIN_S)
        return False

    def _describe(self, course: Course, sign: Sign, unit: ObservedUnit | None, facts: ClusterFacts) -> list[Effect]:
        detail = unit.detail if unit is not None else ""
        if sign == "unknown":
            text = f"{facts.cluster} does not answer: {facts.reason}"
        elif course.phase == "queued":
            text = f"in the queue: {detail}"
        elif course.phase in STARTING:
            text = detail or "starting"
        elif course.phase == "updating":
            text = detail or "takes it over"
        else:
            return []
        return self._say(course, text)

    def _say(self, course: Course, text: str) -> list[Effect]:
        if text == course.text:
            return []
        course.text = text
        return [Notify(course.action, "waiting", text)]

    def _overdue(self, now: float, course: Course, sign: Sign) -> bool:
        """Whether its former unit is to be killed; else it has failed."""
        if course.phase in LEAVING and sign != "unknown" and not course.killed:
            course.killed = True
            course.deadline = now + STOP_GRACE_S
            return True
        self._fail(course, _late(course, sign))
        return False

    # -- ending -----------------------------------------------------------------------------------------------------

    def _ask_to_leave(self, now: float) -> list[Effect]:
        """One effect for all former units of a cluster."""
        groups: dict[str, list[str]] = {}
        for course in self._open():
            if course.phase in LEAVING and not course.asked:
                course.asked, course.deadline = True, now + _grace(course.action)
                groups.setdefault(course.former, []).append(course.action.former)
        for name in groups:
            self._look_soon(name)
        return [Tell("stop", name, tuple(operations)) for name, operations in groups.items()]

    def _tail(self, course: Course) -> list[Effect]:
        self._tails += 1
        if self._tails <= MOST_TAILS:
            return [ReadTail(course.action.cluster, course.action.operation)]
        self._fail(course, _death(course, "not asked for"))
        return []

    def _fail(self, course: Course, error: FabrictoolError) -> None:
        course.error, course.phase = error, "failed"

    # -- checking ---------------------------------------------------------------------------------------------------

    def _check(self, before: Sequence[Phase], effects: Sequence[Effect]) -> None:
        """What must hold after every step; raises AssertionError, for a wave that breaks it is a bug."""
        for was, course in zip(before, self.courses, strict=True):
            change = f"{course.action.address} went from {was} to {course.phase}"
            _hold(was not in OVER or course.phase in (was, "failed"), change)
        asked = {course.action.former for course in self.courses if course.asked}
        leaving = {course.action.former for course in self.courses if course.phase in LEAVING or course.over}
        for effect in effects:
            if isinstance(effect, Start):
                operations = {action.operation for action in effect.actions}
                _hold(not operations & self._begun, f"{operations & self._begun} would be started twice")
                _hold(not self._stopping, "something is started after Ctrl-C")
                self._begun |= operations
            if isinstance(effect, Tell) and effect.verb != "forget":
                _hold(set(effect.operations) <= leaving, "a unit is told to leave whose successor does not serve yet")
                _hold(effect.verb != "kill" or set(effect.operations) <= asked, "a unit is killed that was not asked")


def _grace(action: Action) -> float:
    """How long its former unit may take to end."""
    beside = isinstance(action.spec, GatewaySpec) and action.kind == "replace" and not action.stop_first
    return HANDED_OVER_GRACE_S if beside else STOP_GRACE_S


def _sign(phase: Phase, facts: ClusterFacts, unit: ObservedUnit | None) -> Sign:
    if phase == "updating":
        return "serving" if unit is not None and unit.in_force == "current" else former_sign(facts, unit)
    return former_sign(facts, unit) if phase in LEAVING else new_sign(facts, unit)


def former_sign(facts: ClusterFacts, unit: ObservedUnit | None) -> Sign:
    """What a look says of a unit that is to leave."""
    if not facts.known:
        return "unknown"
    if unit is None:
        return "absent"
    return "there" if lives(unit) else "ended"


def new_sign(facts: ClusterFacts, unit: ObservedUnit | None) -> Sign:
    """What a look says of a unit that was started."""
    if not facts.known:
        return "unknown"
    if unit is None:
        return "absent"
    if unit.state in ("ended", "killed"):
        return "ended"
    if unit.state == "pending":
        return "stuck" if unit.blocked in NEVER else "queued"
    if unit.ready and unit.state == "running":
        return "serving"
    return "alone" if unit.waits_for == "gateway" else "booting"


def _late(course: Course, sign: Sign) -> FabrictoolError:
    action = course.action
    if course.phase in LEAVING:
        why = "although it was killed" if sign != "unknown" else f"as far as can be seen: {course.text}"
        message = f"{action.former} does not end, {why}"
        return UnreachableError.of("FT5102", message, thing=action.address, transient=True)
    if course.phase == "updating":
        message = f"{action.address} was given another spec, but still runs by its former one: {course.text}"
        return FabrictoolError.of("FT5113", message, thing=action.address, hint=f"fabrictool logs {action.address}")
    code, what, hint = "FT5106", "was not ready in time", f"fabrictool logs {action.address}"
    if course.phase == "queued":
        code, what = "FT5110", "did not leave its queue in time"
        hint = "it stays in the queue; `fabrictool reconcile` or the next apply goes on"
    message = f"{action.address} {what}: {course.text or 'nothing was seen of it since its start'}"
    return UnreachableError.of(code, message, thing=action.address, hint=hint, transient=True)


def _death(course: Course, tail: str) -> FabrictoolError:
    address = course.action.address
    return UnreachableError.of(
        "FT5105",
        f"{address} ended before it was ready: {course.death}",
        thing=address,
        hint=f"fabrictool logs {address}; its last lines: {tail}",
    )


def _hold(good: bool, what: str) -> None:
    if not good:
        raise AssertionError(what)
