"""Carrying out a plan: every step announced on disk first, every step safe to repeat.

What a crash at any moment leaves: an intent in the journal, perhaps a prepared, queued or running unit that bears the
intent's operation id. Running apply again finds any of them and goes on; an operation is started at most once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from fabrictool.applier.checks import check_fresh, check_owned, check_sound, check_startable
from fabrictool.applier.course import Course
from fabrictool.applier.driver import Driver
from fabrictool.applier.journal import Journal
from fabrictool.applier.rollout import held_back, model_of, waves
from fabrictool.applier.wave import QUEUE_WAIT_S, Wave
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    Place,
    Problem,
    StaleError,
)
from fabrictool.clusters.joined import JoinedCluster
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.observed import LIVING, generation, lives
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import DEFAULT_LOADER, AgentSpec, GatewaySpec
from fabrictool.domain.state import Applied, Placed, load_key, operation_id, promises_of
from fabrictool.planner.healing import WINDOW_S
from fabrictool.planner.succession import KEPT, lead_s, preparable
from fabrictool.state.controllers import check_controller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.applier.events import Notify
    from fabrictool.applier.journal import EntryKind
    from fabrictool.base.clock import Clock
    from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.domain.state import State
    from fabrictool.state.fabric import Fabric
    from fabrictool.state.tenantkeys import TenantKeys
    from fabrictool.state.truststore import SessionRole

SESSION_SECONDS = 26 * 3600.0
"""Certificates outlive the longest usual walltime (24 h) by a margin (mesh.md §6)."""

NO_SPACE = "FT4301"

QUEUED_SECONDS = 3 * 86400.0
"""A job's session is made when it is submitted, and may wait that long; one that waits longer gets a successor."""


class Reporter(Protocol):
    """Hears what happens, for progress lines and ``--json`` events."""

    def step(self, action: Action, kind: str, text: str) -> None:
        """An action moved: ``intent``, ``started``, ``waiting``, ``done``, ``queued``, ``held``, ``failed``."""


@dataclass(slots=True)
class Interrupt:
    """Ctrl-C once: start nothing new, finish what runs. Twice: stop waiting too."""

    count: int = 0

    def press(self) -> None:
        self.count += 1


@dataclass(frozen=True, slots=True)
class Applier:
    """Carries plans of one fabric out."""

    fabric: Fabric
    clock: Clock
    reporter: Reporter
    keys: TenantKeys | None
    """The tenants', for the gateway."""
    read_set: Callable[[State, Observed], Mapping[str, str]]
    """The facts as they are now, asked for under the lease."""
    interrupt: Interrupt = field(default_factory=Interrupt)
    queue_wait_s: float = QUEUE_WAIT_S
    """How long jobs may wait in their queues; 0: the command ends when they are submitted."""
    checked: bool = False
    """Whether waves hold every step against their table and invariants."""
    complaints: list[Problem] = field(default_factory=list)
    """What did not stop a run and must be said after it."""

    def apply(self, plan: Plan, *, heals: bool = False) -> bool:
        """Carry `plan` out under the lease, until all that it lists serves.

        Returns False when it was the last to be carried out, and serves.

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
        fabric = self.fabric
        with fabric.folder.lease(f"apply {plan.id}", now=self.clock.wall()):
            check_sound(plan, fabric.name, fabric.clusters)
            check_startable(plan)
            state = fabric.folder.read_state()
            journal = Journal(fabric.folder.journal, plan.id, self.clock)
            observed, lineage = fabric.observe(patient=True), fabric.lineage_of(state)
            if state.applied_plan == plan.id:
                if not journal.finished:
                    journal.write("end")  # a crash came between the state and this line
                there = {unit.operation for facts in observed.clusters.values() for unit in facts.units}
                gone = [a for a in plan.changes if a.kind != "delete" and a.operation not in there]
                if not gone and not unready(plan, observed):
                    return False
            elif journal.finished:
                message = f"plan {plan.id[:8]} was applied before, and another plan since"
                raise StaleError.of("FT4004", message, thing="plan", hint="run `fabrictool plan` again")
            check_owned(plan, observed, state.lineage or plan.lineage or lineage)
            check_fresh(plan, observed, self.read_set(state, observed), journal.entries(), state, lineage)
            for action in plan.changes:
                if (provider := self._assigned_by(action)) is not None:
                    check_controller(fabric.trust, provider, now=self.clock.wall())
                elif action.spec is not None and action.renews is True:
                    fabric.trust.signer(action.spec.provider)
                elif action.spec is not None and action.kind != "update":
                    role = role_of(action.spec)  # what is missing or has expired is said before anything starts
                    model = action.spec.model if isinstance(action.spec, AgentSpec) else ""
                    fabric.trust.check_sessions(action.spec.provider, role, model, now=self.clock.wall())
            run = _Run(self, plan, journal, state, heals=heals)
            run.note("begin", text=f"{len(plan.changes)} change{'s'[: len(plan.changes) != 1]}")
            wanted = state.applied_units if heals else self._wanted(plan, state)
            if state.serial == 0 or wanted != state.applied_units or (state.applied_situation and not heals):
                # Until all is done nobody may take what runs for what was applied.
                applied = state.applied_situation if heals else ""
                begun = state.lineage or plan.lineage or lineage
                run.remember(lineage=begun, applied_units=wanted, applied_situation=applied)
            run.carry_out(observed)
            return True

    def identity(self, spec: UnitSpec, *, after: int = 0) -> dict[str, bytes]:
        """Relative name → bytes of a new session's keys and certificates; a node that joined has its own. `after` so
        many allocations before its own it is made.
        """
        if isinstance(spec, AgentSpec) and spec.assigned:
            return {}
        walltime = spec.walltime_s if isinstance(spec, AgentSpec) else None
        seconds = SESSION_SECONDS if walltime is None else walltime * (1 + after) + QUEUED_SECONDS
        return self.fabric.trust.session_files(spec.provider, role_of(spec), now=self.clock.wall(), seconds=seconds)

    def renewed(self, action: Action) -> dict[str, bytes]:
        """Of who runs: it keeps its session, and gets another certificate where the plan says so."""
        spec = action.spec
        if spec is None or action.renews is not True:
            return {}
        pem = self.fabric.clusters[action.cluster].certificate(action.operation)
        trust, now = self.fabric.trust, self.clock.wall()
        return trust.renewed_files(spec.provider, role_of(spec), pem, now=now, seconds=SESSION_SECONDS)

    def _assigned_by(self, action: Action) -> str | None:
        """Whose controller has to speak for an action, if one has to."""
        cluster = self.fabric.clusters.get(action.cluster)
        return cluster.provider if isinstance(cluster, JoinedCluster) and action.kind != "keep" else None

    def _wanted(self, plan: Plan, state: State) -> dict[str, Applied]:
        """What runs when the plan is carried out; what it says nothing of, on clusters out of sight, stays wanted."""
        gone = {action.address for action in plan.actions if action.kind == "delete"}
        wanted = {address: unit for address, unit in state.applied_units.items() if address not in gone}
        for action in plan.actions:
            spec = action.spec
            if spec is None and action.kind == "keep":
                spec = self.fabric.clusters[action.cluster].spec(action.former)
            if spec is not None:
                if isinstance(spec, GatewaySpec) and spec.ingress and self.keys is not None:
                    spec = msgspec.structs.replace(spec, keys=self.keys.digest)
                wanted[action.address] = Applied(cluster=action.cluster, spec=spec, summary=action.summary)
        return wanted


class _Run:
    """One plan under the lease."""

    def __init__(self, applier: Applier, plan: Plan, journal: Journal, state: State, *, heals: bool) -> None:
        self._applier = applier
        self._fabric = applier.fabric
        self._clock = applier.clock
        self._reporter = applier.reporter
        self._plan = plan
        self._journal = journal
        self._state = state
        self._heals = heals
        self._problems: list[Problem] = []
        self._facts: Mapping[str, ClusterFacts] = {}
        self._only_stops = all(action.kind == "delete" for action in plan.changes) and bool(plan.changes)
        self._driver = Driver(
            clusters=applier.fabric.clusters,
            clock=applier.clock,
            new_unit=self._new_unit,
            remember=self._save_starts,
            guard=self.remember,
            report=self._report,
            ended=self._end,
            presses=lambda: applier.interrupt.count,
        )

    def carry_out(self, observed: Observed) -> None:
        """Raises what `Applier.apply` raises."""
        self._facts = observed.clusters
        with self._telling_failures():
            self._run_waves(observed)
        if self._applier.interrupt.count:
            self.note("interrupted")
            raise self._interrupted("interrupted; nothing is half-done", "run the same command again to go on")
        if self._problems:
            raise AppliedInPartError(self._problems)
        if not self._heals:
            wanted = self._state.applied_units
            self._forget(lambda unit: unit.address not in wanted)  # a crash came between an end and that
            plan = self._plan
            self.remember(
                applied_plan=plan.id,
                applied_blueprint=plan.blueprint_digest,
                applied_situation="" if isinstance(plan.situation, msgspec.UnsetType) else plan.situation,
                forecast=promises_of(plan.forecast) or msgspec.UNSET,
            )
        self.note("end")
        if not self._heals:
            self._wait_for_the_rest(observed)

    def _wait_for_the_rest(self, observed: Observed) -> None:
        """All is done; what was started before and does not serve yet is waited for."""
        with self._telling_failures():
            self._run_wave([self._awaited(action) for action in unready(self._plan, observed)])
        if self._applier.interrupt.count:
            hint = "everything was started; run the same command again to go on waiting"
            raise self._interrupted("interrupted while waiting", hint)
        if self._problems:
            raise AppliedInPartError(self._problems)

    def _interrupted(self, message: str, hint: str) -> InterruptedByUserError:
        return InterruptedByUserError([*self._problems, Problem("FT4103", message, hint=hint)])

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """What failed before the run broke off is said with it: progress lines give no reasons."""
        try:
            yield
        except FabrictoolError as error:
            if not self._problems:
                raise
            raise type(error)([*self._problems, *error.problems]) from error

    def _run_waves(self, observed: Observed) -> None:
        failed: set[str] = set()
        done = {(entry.address, entry.operation) for entry in self._journal.entries() if entry.kind == "done"}
        over: list[Action] = []
        homes = {unit.operation: name for name, facts in observed.clusters.items() for unit in facts.units}
        for actions in waves(self._plan.changes):
            if self._applier.interrupt.count:
                break
            courses = []
            for action in actions:
                if (action.address, _operation(action)) in done:
                    continue
                if held_back(action, failed):
                    self._hold(action)
                    continue
                operation = _operation(action)
                self.note("intent", address=action.address, action=action.kind, operation=operation)
                self._reporter.step(action, "intent", action.summary)
                courses.append(Course.of(action, homes))
            self._run_wave(courses)
            over += [course.action for course in courses if course.phase in ("done", "left-in-queue")]
            failures = [course for course in courses if course.phase == "failed"]
            failed |= {model_of(course.action) for course in failures}
            if any(_stops_everything(course) for course in failures):
                break
        self._forget_dead(over)
        self._stop_followers({action.address: action.former for action in over if action.kind == "delete"})

    def _stop_followers(self, gone: Mapping[str, str]) -> None:
        """Jobs that units which were stopped had submitted in the moment before."""
        for cluster in self._fabric.clusters.values() if gone else ():
            late = [
                unit.operation
                for unit in cluster.observe(brief=True).units
                if unit.address in gone and lives(unit) and generation(unit.operation) > generation(gone[unit.address])
            ]
            if late:
                self.remember()
                cluster.stop(late)

    def _run_wave(self, courses: Sequence[Course]) -> None:
        polls = {name: cluster.poll_s for name, cluster in self._fabric.clusters.items()}
        self._driver.run(Wave(courses, polls, self._applier.queue_wait_s, checked=self._applier.checked))

    def _awaited(self, action: Action) -> Course:
        """Of a unit that was started before and does not serve yet: it is only waited for."""
        spec = self._fabric.clusters[action.cluster].spec(_operation(action))
        awaited = msgspec.structs.replace(action, kind="keep", operation=_operation(action), former="", spec=spec)
        return Course(awaited, "", "submitted", deadline=self._clock.monotonic() + self._applier.queue_wait_s)

    def _hold(self, action: Action) -> None:
        model = model_of(action)
        message = f"{action.kind} {action.address} was held back: a new replica of {model} failed before it"
        self.note("failed", address=action.address, action=action.kind, text=message)
        self._reporter.step(action, "held", message)
        hint = "what serves was not touched; fix the cause and run the command again"
        self._problems.append(Problem("FT4104", message, Place(thing=action.address), hint, transient=True))

    # -- what the driver asks for -----------------------------------------------------------------------------------

    def _new_unit(self, action: Action) -> NewUnit:
        spec, keys = action.spec, self._applier.keys
        if spec is None:  # the plan was found sound
            raise FabrictoolError.of("FT4006", f"{action.address} has no spec", thing=action.address)
        files = self._applier.renewed(action) if action.kind == "update" else self._applier.identity(spec)
        if isinstance(spec, GatewaySpec) and spec.ingress and keys is not None:
            files["keys.json"] = keys.file
            spec = msgspec.structs.replace(spec, keys=keys.digest)
        unit = NewUnit(action.operation, action.address, spec, files, self._state.lineage, self._state.serial)
        return self._with_followers(unit, action.cluster)

    def _with_followers(self, unit: NewUnit, cluster: str) -> NewUnit:
        """And what may follow it from inside its job: a session each, where its provider's key is here."""
        spec, facts = unit.spec, self._facts.get(cluster)
        if not isinstance(spec, AgentSpec) or not spec.may_follow or facts is None:
            return unit
        trust = self._fabric.trust
        provider_ends = trust.signs().get(spec.provider)
        if provider_ends is None:
            return unit
        try:
            trust.signer(spec.provider)
        except FabrictoolError:  # it was revoked, and that must keep nobody from being told so
            return unit
        followers = []
        latest = max(generation(unit.operation), self._state.generations.get(unit.address, 0))
        for number in range(1, preparable(spec, provider_ends - self._clock.wall()) + 1):
            operation = operation_id(unit.lineage, unit.address, latest + number)
            files = self._applier.identity(spec, after=number)
            followers.append(replace(unit, operation=operation, files=files))
        return replace(unit, followers=tuple(followers), lead_s=lead_s(spec, facts, self._state))

    def _report(self, report: Notify) -> None:
        action = report.action
        if report.kind == "started":
            self.note("started", address=action.address, action=action.kind, operation=action.operation)
            if self._heals:
                self._save_healed(action.address)
        self._reporter.step(action, report.kind, report.text)

    def _end(self, course: Course) -> None:
        action = course.action
        about: dict[str, Any] = {"address": action.address, "action": action.kind}
        if course.error is not None:
            self.note("failed", **about, text=str(course.error))
            self._reporter.step(action, "failed", str(course.error))
            self._problems += course.error.problems
            if course.death:
                self._save_failed_loader(action)
        elif course.phase == "done" or (course.phase == "left-in-queue" and action.kind in ("create", "keep")):
            if action.kind == "delete":
                self._save_end(action)
            if course.ready is not None:
                if action.cluster not in self._state.served_on:
                    self.remember(served_on=[*self._state.served_on, action.cluster])
                if action.kind in ("create", "replace"):
                    self._check_spec(action, course.ready)
                if action.kind != "keep":  # what was only waited for tells no time of a start
                    self._save_measured(action, course.ready, course.ready_at or self._clock.wall())
            self.note("done", **about, operation=_operation(action))
            kind, text = ("done", "") if course.phase == "done" else ("queued", course.text)
            self._reporter.step(action, kind, text)

    def _check_spec(self, action: Action, unit: ObservedUnit) -> None:
        """Whether it runs by what was planned: a job may have submitted it before, as it was prepared once."""
        if isinstance(action.spec, AgentSpec) and unit.spec_digest not in ("", spec_digest(action.spec)):
            message = f"{action.address} was submitted by the job before it, as it was prepared then"
            place = Place(thing=action.address)
            hint = "it serves by a former spec: plan and apply again"
            self._problems.append(Problem("FT5113", message, place, hint, transient=True))

    # -- state ------------------------------------------------------------------------------------------------------

    def _forget_dead(self, actions: Sequence[Action]) -> None:
        """Remove what former units of these addresses left behind; until now it was evidence."""
        keep = {action.address: action.operation for action in actions}
        if keep:
            self._forget(lambda unit: unit.address in keep and unit.operation != keep[unit.address])

    def _forget(self, over: Callable[[ObservedUnit], bool]) -> None:
        """Remove run folders of dead units of ours that are `over`."""
        for cluster in self._fabric.clusters.values():
            dead = [u for u in cluster.observe(brief=True).units if u.state not in LIVING and u.state != "damaged"]
            ours = [unit for unit in dead if unit.lineage in ("", self._state.lineage)]
            cluster.forget(unit.operation for unit in ours if over(unit))

    def _save_starts(self, actions: Sequence[Action]) -> None:
        """Remember units that are about to start: their generations and places."""
        generations, units = dict(self._state.generations), dict(self._state.units)
        for action in actions:
            if action.spec is not None:
                latest = max(generation(action.operation), generations.get(action.address, 0))
                generations[action.address] = latest
                units[action.address] = Placed.of(action.spec, action.cluster, action.operation)
        self.remember(generations=generations, units=units)

    def _save_healed(self, address: str) -> None:
        now = self._clock.wall()
        healed = {name: [at for at in times if at > now - WINDOW_S] for name, times in self._state.healed.items()}
        healed[address] = [*healed.get(address, ()), round(now, 3)]
        self.remember(healed={name: times for name, times in healed.items() if times})

    def _save_measured(self, action: Action, unit: ObservedUnit, served_at: float) -> None:
        """Remember how long its queue and its start took: the next successor is asked for by that."""
        spec, begun = action.spec, unit.begins_at
        if not isinstance(spec, AgentSpec) or begun is None:
            return
        waits, loads = dict(self._state.waits), dict(self._state.loads)
        key = load_key(spec.model, action.cluster, spec.loads_by)
        if unit.submitted_at is not None:
            place = f"{action.cluster}/{spec.partition}"
            waits[place] = [*waits.get(place, ()), round(max(0.0, begun - unit.submitted_at), 1)][-KEPT:]
        load = round(max(0.0, served_at - begun), 1)
        loads[key] = [*loads.get(key, ()), load][-KEPT:]
        self.remember(waits=waits, loads=loads, failed_loaders=[k for k in self._state.failed_loaders if k != key])

    def _save_failed_loader(self, action: Action) -> None:
        """Where loaders are compared, the one with which a replica ended before it served is tried no more."""
        spec = action.spec
        if isinstance(spec, AgentSpec) and not isinstance(spec.loaders, msgspec.UnsetType):
            key = load_key(spec.model, action.cluster, spec.loads_by)
            if spec.loads_by != DEFAULT_LOADER and key not in self._state.failed_loaders:
                self.remember(failed_loaders=[*self._state.failed_loaders, key])

    def _save_end(self, action: Action) -> None:
        """Forget the place of a unit that was stopped, unless a younger one of its address stands there."""
        placed = self._state.units.get(action.address)
        if placed is not None and generation(placed.operation) <= generation(action.former):
            self.remember(units={name: at for name, at in self._state.units.items() if name != action.address})

    def note(self, kind: EntryKind, **about: Any) -> None:
        """A line in the journal, on disk before what it announces is done."""
        with self._forgiving("the journal"):
            self._journal.write(kind, **about)

    def remember(self, **changes: Any) -> None:
        """Write the state with these changes; raises when another writer has the lease."""
        new = msgspec.structs.replace(self._state, **changes)
        with self._forgiving("the state (it still lists what was stopped)"):
            self._state = self._fabric.folder.write_state(new, read=self._state)

    @contextlib.contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """A full disk keeps nobody from stopping things: that frees devices, and space."""
        try:
            yield
        except FabrictoolError as error:
            if not self._only_stops or any(problem.code != NO_SPACE for problem in error.problems):
                raise
            message = f"the disk is full, so {what} was not written"
            problem = replace(error.problems[0], message=message, severity="warning")
            if problem not in self._applier.complaints:
                self._applier.complaints.append(problem)


def role_of(spec: UnitSpec) -> SessionRole:
    return "agent" if isinstance(spec, AgentSpec) else "gateway"


def unready(plan: Plan, observed: Observed) -> list[Action]:
    """Of what the plan leaves running, what was seen and did not serve."""
    seen = [unit for facts in observed.clusters.values() for unit in facts.units]
    waiting = {unit.operation for unit in seen if not (unit.ready or unit.dormant)}
    return [action for action in plan.actions if action.kind != "delete" and _operation(action) in waiting]


def _operation(action: Action) -> str:
    return action.operation or action.former


def _stops_everything(course: Course) -> bool:
    """Agents would wait in vain for a gateway; without space or rights all else fails alike."""
    problems = course.error.problems if course.error is not None else ()
    gateway = isinstance(course.action.spec, GatewaySpec) and course.action.kind != "update"
    return gateway or any(problem.code.startswith("FT43") for problem in problems)
