"""Carrying out the actions of one wave side by side: one start a cluster, then one look a cluster and interval."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.domain.observed import lives
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.clusters.protocol import Cluster, NewUnit
    from fabrictool.domain.observed import ClusterFacts, ObservedUnit
    from fabrictool.domain.plan import Action

TICK_S = 0.1
STOP_GRACE_S = 60.0
"""A unit drains for its `drain_s`, then leaves; after this long it is killed."""
READY_MARGIN_S = 30.0
"""For starting the process, and for reaching a gateway once the engine is ready."""
QUEUE_WAIT_S = 900.0
"""How long a job may wait in its queue before the command goes on without it."""
STARTERS = 8
MOST_TAILS = 3
"""Of a wave: two hundred replicas that fail alike are told about by three logs."""
FIRST_PAUSE_S = 1.0
"""Between the first two looks at a cluster after something was done there; each further pause is twice as long, up to
the cluster's `poll`: most of what happens, happens at once, and login nodes belong to everybody."""

Step = Literal["stop-first", "start", "wait", "ready", "stop", "done", "queued", "failed", "left"]


@dataclass(slots=True)
class Course:
    """One action under way."""

    action: Action
    former: str
    """Name of the cluster of the unit to be stopped; "": there is none."""
    step: Step
    deadline: float = 0.0
    said: str = ""
    killed: bool = False
    late: bool = False
    """Its former unit is to be killed."""
    gone: bool = False
    """Its former unit has ended, and its files are still there."""
    alone: bool = False
    error: FabrictoolError | None = None
    ready: ObservedUnit | None = None
    """The new unit, as it was seen when it first served."""
    ready_at: float | None = None
    """When that was, by the cluster's own clock; None: by ours."""

    @property
    def over(self) -> bool:
        """Nothing more happens to it."""
        return self.step in ("done", "queued", "failed", "left")


@dataclass(slots=True)
class Wave:
    """Runs courses until all are over; see the module's docstring."""

    clusters: Mapping[str, Cluster]
    clock: Clock
    new_unit: Callable[[Action], NewUnit]
    """Identity included; asked for just before the start."""
    remember: Callable[[Sequence[Action]], None]
    """Called before anything is started: whatever runs is in the state."""
    tell: Callable[[Action, str, str], None]
    """``started``, ``waiting``."""
    presses: Callable[[], int]
    """How often Ctrl-C was pressed."""
    ended: Callable[[Course], None]
    """Called once for each course that is over."""
    guard: Callable[[], None]
    """Raises when another writer has the lease: nothing that runs is touched then."""
    queue_wait_s: float = QUEUE_WAIT_S
    _facts: dict[str, ClusterFacts] = field(default_factory=dict)
    _next_look: dict[str, float] = field(default_factory=dict)
    _tails: int = 0
    _looks: dict[str, int] = field(default_factory=dict)
    """How often each cluster was looked at since something was last done on it."""

    def run(self, courses: Sequence[Course]) -> None:
        """Until every course is over, or the user stopped waiting."""
        told: set[int] = set()
        self._ask_to_stop([course for course in courses if course.step in ("stop", "stop-first")])
        while True:
            self._start([course for course in courses if course.step == "start"])
            self._tell_ends(courses, told)
            open_ones = [course for course in courses if not course.over]
            if not open_ones or self.presses() >= 2:
                break
            for name in self._look(open_ones):
                watching = [course for course in open_ones if name == self._watched(course)]
                for course in watching:
                    self._advance(course, self._facts[name])
                self._kill(name, [course for course in watching if course.late])
                self._clear(name, [course for course in watching if course.gone])
            self._ask_to_stop([course for course in open_ones if course.step == "ready"])
            if not any(course.step == "start" for course in courses):
                time.sleep(TICK_S)
        for course in courses:
            if not course.over:
                course.step = "left"

    def _tell_ends(self, courses: Sequence[Course], told: set[int]) -> None:
        for index, course in enumerate(courses):
            if course.over and index not in told:
                told.add(index)
                self.ended(course)

    def _watched(self, course: Course) -> str:
        return course.former if course.step in ("stop-first", "stop") else course.action.cluster

    def _look(self, courses: Iterable[Course]) -> list[str]:
        """Names of the clusters that were looked at now."""
        now = self.clock.monotonic()
        names = sorted({self._watched(course) for course in courses})
        due = [name for name in names if now >= self._next_look.get(name, 0.0)]
        with ThreadPoolExecutor(STARTERS) as pool:
            found = list(pool.map(lambda name: self.clusters[name].observe(brief=True), due))
        for name, facts in zip(due, found, strict=True):
            self._facts[name] = facts
            pause = min(self.clusters[name].poll_s, FIRST_PAUSE_S * 2 ** self._looks.get(name, 0))
            self._looks[name] = self._looks.get(name, 0) + 1
            self._next_look[name] = self.clock.monotonic() + pause
        return due

    def _start(self, courses: Sequence[Course]) -> None:
        """All of a cluster at once."""
        groups: dict[str, list[Course]] = {}
        for course in courses:
            if self.presses():
                course.step = "left"
            else:
                groups.setdefault(course.action.cluster, []).append(course)
        if not groups:
            return
        self.remember([course.action for group in groups.values() for course in group])
        with ThreadPoolExecutor(STARTERS) as pool:
            list(pool.map(lambda name: self._start_on(name, groups[name]), sorted(groups)))

    def _start_on(self, name: str, courses: Sequence[Course]) -> None:
        try:
            failed = self.clusters[name].start([self.new_unit(course.action) for course in courses])
        except FabrictoolError as error:
            failed = {course.action.operation: error for course in courses}
        for course in courses:
            error_here = failed.get(course.action.operation)
            if error_here is not None:
                self._fail(course, error_here)
                continue
            course.step = "wait"
            course.deadline = self.clock.monotonic() + self.queue_wait_s
            self.tell(course.action, "started", "")
        self._next_look[name], self._looks[name] = 0.0, 0

    def _advance(self, course: Course, facts: ClusterFacts) -> None:
        action = course.action
        if not facts.known:
            self._say(course, f"{facts.cluster} does not answer: {facts.reason}")
            self._check_deadline(course)
        elif course.step == "wait":
            self._advance_start(course, _unit(facts, action.operation), facts.now)
        elif course.step in ("stop", "stop-first"):
            self._advance_stop(course, _unit(facts, action.former))

    def _advance_start(self, course: Course, unit: ObservedUnit | None, facts_now: float | None) -> None:
        action = course.action
        if unit is not None and unit.state in ("ended", "killed"):
            self._fail(course, self._died(action, unit))
        elif unit is not None and unit.state == "running" and unit.ready:
            course.ready, course.ready_at = unit, facts_now
            if course.former and action.kind == "replace" and not action.stop_first:
                course.step = "ready"
            else:
                course.step = "done"
        else:
            text = "starting" if unit is None else unit.detail or "starting"
            if unit is not None and unit.state == "pending":
                text = f"in the queue: {unit.detail}"
                if self.queue_wait_s <= 0.0:
                    course.step = "queued"
                    return
            else:
                self._running(course, text)
            self._say(course, text)
            self._check_deadline(course)

    def _running(self, course: Course, text: str) -> None:
        """Its time counts from its start, not from its submission; and less once only a gateway is missing."""
        spec, now = course.action.spec, self.clock.monotonic()
        seconds = (spec.start_timeout_s if isinstance(spec, AgentSpec) else 0.0) + READY_MARGIN_S
        if not course.said or course.said.startswith("in the queue"):
            course.deadline = now + seconds
        if "no gateway is reached" in text and not course.alone:
            course.alone = True
            course.deadline = min(course.deadline, now + READY_MARGIN_S)

    def _advance_stop(self, course: Course, unit: ObservedUnit | None) -> None:
        if unit is not None and lives(unit):
            if self.clock.monotonic() > course.deadline:
                if course.killed:
                    why = f"{course.action.former} does not end, although it was killed"
                    self._fail(course, UnreachableError.of("FT5102", why, thing=course.action.address, transient=True))
                    return
                self._say(course, "it did not leave in time and is killed")
                course.killed, course.late = True, True
                course.deadline = self.clock.monotonic() + STOP_GRACE_S
            return
        course.gone = unit is not None
        course.step = "start" if course.step == "stop-first" else "done"

    def _kill(self, cluster: str, courses: Sequence[Course]) -> None:
        for course in courses:
            course.late = False
        self._told(courses, lambda: self.clusters[cluster].kill(course.action.former for course in courses))

    def _told(self, courses: Sequence[Course], tell: Callable[[], None]) -> None:
        """Say it to a cluster, while we are still the one writer."""
        if not courses:
            return
        try:
            self.guard()
            tell()
        except FabrictoolError as error:
            for course in courses:
                self._fail(course, error)

    def _clear(self, cluster: str, courses: Sequence[Course]) -> None:
        """Remove the run folders of what has ended, all of a cluster at once."""
        for course in courses:
            course.gone = False
        self._told(courses, lambda: self.clusters[cluster].forget(course.action.former for course in courses))

    def _ask_to_stop(self, courses: Sequence[Course]) -> None:
        """All of a cluster at once."""
        groups: dict[str, list[Course]] = {}
        for course in courses:
            course.step = "stop" if course.step == "ready" else course.step
            course.deadline = self.clock.monotonic() + STOP_GRACE_S
            groups.setdefault(course.former, []).append(course)
        for name, group in groups.items():
            self._next_look[name], self._looks[name] = 0.0, 0
            self._stop_all(name, group)

    def _stop_all(self, cluster: str, courses: Sequence[Course]) -> None:
        self._told(courses, lambda: self.clusters[cluster].stop(course.action.former for course in courses))

    def _check_deadline(self, course: Course) -> None:
        if self.clock.monotonic() <= course.deadline:
            return
        action, waiting = course.action, course.said
        code, what = ("FT5110", "still waits") if waiting.startswith("in the queue") else ("FT5106", "is not ready")
        hint = f"fabrictool logs {action.address}"
        if code == "FT5110":
            hint = "it stays in the queue, and `fabrictool reconcile` or the next apply goes on"
        message = f"{action.address} {what} in time: {waiting}"
        self._fail(course, UnreachableError.of(code, message, thing=action.address, hint=hint, transient=True))

    def _died(self, action: Action, unit: ObservedUnit) -> FabrictoolError:
        self._tails += 1
        try:
            few = self._tails <= MOST_TAILS
            tail = " | ".join(self.clusters[action.cluster].log_tail(action.operation, 3)) if few else "not asked for"
        except FabrictoolError as error:
            tail = str(error)
        return UnreachableError.of(
            "FT5105",
            f"{action.address} ended before it was ready: {unit.reason or 'it was killed'}",
            thing=action.address,
            hint=f"fabrictool logs {action.address}; its last lines: {tail}",
        )

    def _fail(self, course: Course, error: FabrictoolError) -> None:
        course.error, course.step = error, "failed"

    def _say(self, course: Course, text: str) -> None:
        if text != course.said:
            course.said = text
            self.tell(course.action, "waiting", text)


def _unit(facts: ClusterFacts, operation: str) -> ObservedUnit | None:
    return next((unit for unit in facts.units if unit.operation == operation), None)
