"""Carrying out a plan: every step announced on disk first, every step safe to repeat.

What a crash at any moment leaves: an intent in the journal, perhaps a prepared, queued or running unit that bears the
intent's operation id. Running apply again finds any of them and goes on; an operation is started at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from fabrictool.applier.checks import check_fresh, check_sound, check_startable
from fabrictool.applier.journal import Journal
from fabrictool.applier.rollout import held_back, model_of, waves
from fabrictool.applier.state import Applied, Placed
from fabrictool.applier.succession import KEPT
from fabrictool.applier.wave import QUEUE_WAIT_S, Course, Wave
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    Place,
    Problem,
    StaleError,
)
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.observed import LIVING, generation
from fabrictool.domain.specs import AgentSpec, GatewaySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.applier.state import FabricFolder, State
    from fabrictool.applier.tenantkeys import TenantKeys
    from fabrictool.applier.truststore import TrustStore
    from fabrictool.base.clock import Clock
    from fabrictool.clusters.protocol import Cluster
    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.domain.specs import UnitSpec

SESSION_SECONDS = 26 * 3600.0
"""Certificates outlive the longest usual walltime (24 h) by a margin (mesh.md §6)."""

QUEUED_SECONDS = 3 * 86400.0
"""A job's session is made when it is submitted, and may wait that long; one that waits longer gets a successor."""


class Reporter(Protocol):
    """Hears what happens, for progress lines and ``--json`` events."""

    def step(self, action: Action, kind: str, text: str) -> None:
        """An action moved: ``intent``, ``started``, ``waiting``, ``done``, ``queued``, ``held``, ``failed``."""
        ...


@dataclass(slots=True)
class Interrupt:
    """Ctrl-C once: start nothing new, finish what runs. Twice: stop waiting too."""

    count: int = 0

    def press(self) -> None:
        """Count one Ctrl-C."""
        self.count += 1


@dataclass(slots=True)
class Applier:
    """Everything that applying needs; `keys` are those of the tenants, for the gateway."""

    folder: FabricFolder
    trust: TrustStore
    clusters: Mapping[str, Cluster]
    clock: Clock
    reporter: Reporter
    keys: TenantKeys | None
    lineage: str
    """Of the fabric, when its state has none yet."""
    observe: Callable[[], Observed]
    read_set: Callable[[Observed], Mapping[str, str]]
    """The facts as they are now, asked for under the lease."""
    interrupt: Interrupt = field(default_factory=Interrupt)
    queue_wait_s: float = QUEUE_WAIT_S
    """How long jobs may wait in their queues; 0: the command ends when they are submitted."""
    _state: State | None = None

    def apply(self, plan: Plan, *, heals: bool = False) -> bool:
        """Carry `plan` out under the lease; returns False when it was the last to be carried out.

        A plan that `heals` leads back to what was applied last, so what `reconcile` aims at stays as it is.

        Raises
        ------
        StaleError
            FT4003 another writer; FT4004 a fact that the plan relies on has changed (nothing was done).
        AppliedInPartError
            Some actions failed, with the problems of each; the others were carried out.
        InterruptedByUserError
            FT4103 after Ctrl-C; running apply again goes on.
        """
        with self.folder.lease(f"apply {plan.id}", now=self.clock.wall()):
            check_sound(plan, self.clusters)
            check_startable(plan)
            state = self.folder.read_state()
            journal = Journal(self.folder.journal, plan.id, self.clock)
            if state.applied_plan == plan.id:
                if not journal.finished:
                    journal.write("end")  # a crash came between the state and this line
                return False
            if journal.finished:
                message = f"plan {plan.id[:8]} was applied before, and another one since"
                raise StaleError.of("FT4004", message, thing="plan", hint="run `fabrictool plan` again")
            observed = self.observe()
            check_fresh(plan, observed, self.read_set(observed), journal.entries(), state, self.lineage)
            for action in plan.changes:
                if action.spec is not None:
                    self._identity(action.spec)  # says what is missing or has expired before anything starts
            journal.write("begin", text=f"{len(plan.changes)} changes")
            wanted = state.applied_units if heals else self._wanted(plan, state)
            if state.serial == 0 or wanted != state.applied_units:
                lineage = state.lineage or plan.lineage or self.lineage
                new = msgspec.structs.replace(state, lineage=lineage, applied_units=wanted)
                state = self.folder.write_state(new, read=state)
            self._state = state
            problems = self._carry_out(plan, observed, journal)
            if self.interrupt.count:
                journal.write("interrupted")
                raise InterruptedByUserError.of(
                    "FT4103", "interrupted; nothing is half-done", hint="run the same command again to go on"
                )
            if problems:
                raise AppliedInPartError(problems)
            if not heals:
                self._forget(lambda unit: unit.address not in wanted)  # a crash came between an end and that
                self._write(applied_plan=plan.id, applied_blueprint=plan.blueprint_digest)
            journal.write("end")
            return True

    def _wanted(self, plan: Plan, state: State) -> dict[str, Applied]:
        """What runs when the plan is carried out; what it says nothing of, on clusters out of sight, stays wanted."""
        gone = {action.address for action in plan.actions if action.kind == "delete"}
        found = {address: unit for address, unit in state.applied_units.items() if address not in gone}
        for action in plan.actions:
            spec = action.spec
            if spec is None and action.kind == "keep":
                spec = self.clusters[action.cluster].spec(action.former)
            if spec is not None:
                if isinstance(spec, GatewaySpec) and self.keys is not None:
                    spec = msgspec.structs.replace(spec, keys=self.keys.digest)
                found[action.address] = Applied(cluster=action.cluster, spec=spec, summary=action.summary)
        return found

    def _carry_out(self, plan: Plan, observed: Observed, journal: Journal) -> list[Problem]:
        problems: list[Problem] = []
        failed: set[str] = set()
        done = {(entry.address, entry.operation) for entry in journal.entries() if entry.kind == "done"}
        over: list[Action] = []
        homes = {unit.operation: name for name, facts in observed.clusters.items() for unit in facts.units}
        for wave in waves(plan.changes):
            if self.interrupt.count:
                break
            courses = []
            for action in wave:
                if (action.address, _operation(action)) in done:
                    continue
                if held_back(action, failed):
                    problems.append(self._hold(action, journal))
                    continue
                journal.write("intent", address=action.address, action=action.kind, operation=_operation(action))
                self.reporter.step(action, "intent", action.summary)
                courses.append(self._course(action, homes))
            found = self._run(courses, journal)
            problems += found
            over += [course.action for course in courses if course.step in ("done", "queued")]
            failed |= {model_of(course.action.address) for course in courses if course.step == "failed"}
            gateway_failed = any(c.step == "failed" and isinstance(c.action.spec, GatewaySpec) for c in courses)
            if gateway_failed or any(problem.code.startswith("FT43") for problem in found):
                break  # agents would wait in vain for a gateway; without space or rights all else fails alike
        self._forget_dead(over)
        return problems

    def _course(self, action: Action, homes: Mapping[str, str]) -> Course:
        if action.kind == "delete":
            return Course(action, action.cluster, "stop")
        former = homes.get(action.former, "") if action.former else ""
        return Course(action, former, "stop-first" if action.stop_first and former else "start")

    def _hold(self, action: Action, journal: Journal) -> Problem:
        model = model_of(action.address)
        message = f"{action.kind} {action.address} was held back: a new replica of {model} failed before it"
        journal.write("failed", address=action.address, action=action.kind, text=message)
        self.reporter.step(action, "held", message)
        hint = "what serves was not touched; mend the cause and run the command again"
        return Problem("FT4104", message, Place(thing=action.address), hint, transient=True)

    def _run(self, courses: Sequence[Course], journal: Journal) -> list[Problem]:
        """One wave; returns what went wrong in it."""
        if not courses:
            return []
        problems: list[Problem] = []
        wave = Wave(
            clusters=self.clusters,
            clock=self.clock,
            new_unit=self._new_unit,
            remember=self._save_starts,
            tell=lambda action, kind, text: self._tell(action, kind, text, journal),
            presses=lambda: self.interrupt.count,
            ended=lambda course: problems.extend(self._end(course, journal)),
            guard=self._write,
            queue_wait_s=self.queue_wait_s,
        )
        wave.run(courses)
        return problems

    def _end(self, course: Course, journal: Journal) -> Sequence[Problem]:
        """Write down how an action ended."""
        action = course.action
        about = {"address": action.address, "action": action.kind}
        if course.error is not None:
            journal.write("failed", **about, text=str(course.error))
            self.reporter.step(action, "failed", str(course.error))
            return course.error.problems
        if course.step == "done" or (course.step == "queued" and action.kind == "create"):
            if action.kind == "delete":
                self._save_end(action)
            if course.ready is not None:
                if self._state is not None and action.cluster not in self._state.served_on:
                    self._write(served_on=[*self._state.served_on, action.cluster])
                self._save_measured(action, course.ready, course.ready_at or self.clock.wall())
            journal.write("done", **about, operation=_operation(action))
            self.reporter.step(action, course.step, course.said if course.step == "queued" else "")
        return ()

    def _tell(self, action: Action, kind: str, text: str, journal: Journal) -> None:
        if kind == "started":
            journal.write("started", address=action.address, action=action.kind, operation=action.operation)
        self.reporter.step(action, kind, text)

    def _new_unit(self, action: Action) -> NewUnit:
        spec = action.spec
        if spec is None:  # the plan was found sound
            raise FabrictoolError.of("FT4006", f"{action.address} has no spec", thing=action.address)
        files = self._identity(spec)
        if isinstance(spec, GatewaySpec) and self.keys is not None:
            files["keys.json"] = self.keys.file
            spec = msgspec.structs.replace(spec, keys=self.keys.digest)
        state = self._state
        lineage, serial = (state.lineage, state.serial) if state is not None else ("", 0)
        return NewUnit(action.operation, action.address, spec, files, lineage, serial)

    def _identity(self, spec: UnitSpec) -> dict[str, bytes]:
        role: Literal["agent", "gateway"] = "agent" if isinstance(spec, AgentSpec) else "gateway"
        return self.trust.session_files(spec.provider, role, now=self.clock.wall(), seconds=_session_seconds(spec))

    def _forget_dead(self, actions: Sequence[Action]) -> None:
        """Remove what former units of these addresses left behind; until now it was evidence."""
        keep = {action.address: action.operation for action in actions}
        if keep:
            self._forget(lambda unit: unit.address in keep and unit.operation != keep[unit.address])

    def _forget(self, over: Callable[[ObservedUnit], bool]) -> None:
        """Remove run folders of dead units of ours that are `over`."""
        lineage = self._state.lineage if self._state is not None else ""
        for cluster in self.clusters.values():
            dead = [u for u in cluster.observe(brief=True).units if u.state not in LIVING and u.state != "damaged"]
            cluster.forget(unit.operation for unit in dead if unit.lineage in ("", lineage) and over(unit))

    def _save_starts(self, actions: Sequence[Action]) -> None:
        """Remember units that are about to start: their generations and places."""
        if self._state is None:
            return
        generations, units = dict(self._state.generations), dict(self._state.units)
        for action in actions:
            spec = action.spec
            if spec is None:
                continue
            generations[action.address] = max(generation(action.operation), generations.get(action.address, 0))
            units[action.address] = Placed.of(spec, action.cluster, action.operation)
        self._write(generations=generations, units=units)

    def _save_measured(self, action: Action, unit: ObservedUnit, served_at: float) -> None:
        """Remember how long its queue and its start took: the next successor is asked for by that."""
        spec, begun = action.spec, unit.begins_at
        if self._state is None or not isinstance(spec, AgentSpec) or begun is None:
            return
        waits, loads = dict(self._state.waits), dict(self._state.loads)
        if unit.submitted_at is not None:
            place = f"{action.cluster}/{spec.partition}"
            waits[place] = [*waits.get(place, ()), round(max(0.0, begun - unit.submitted_at), 1)][-KEPT:]
        load = round(max(0.0, served_at - begun), 1)
        loads[spec.model] = [*loads.get(spec.model, ()), load][-KEPT:]
        self._write(waits=waits, loads=loads)

    def _save_end(self, action: Action) -> None:
        """Forget the place of a unit that was stopped, unless a younger one of its address stands there."""
        placed = None if self._state is None else self._state.units.get(action.address)
        if self._state is not None and placed is not None and placed.operation in ("", action.former):
            self._write(units={name: at for name, at in self._state.units.items() if name != action.address})

    def _write(self, **changes: Any) -> None:
        if self._state is not None:
            new = msgspec.structs.replace(self._state, **changes)
            self._state = self.folder.write_state(new, read=self._state)


def _operation(action: Action) -> str:
    return action.operation or action.former


def _session_seconds(spec: AgentSpec | GatewaySpec) -> float:
    walltime = spec.walltime_s if isinstance(spec, AgentSpec) else None
    return SESSION_SECONDS if walltime is None else walltime + QUEUED_SECONDS
