"""Carrying out a plan: every step announced on disk first, every step safe to repeat.

What a crash at any moment leaves: an intent in the journal, perhaps a prepared or running unit that bears the
intent's operation id. Running apply again finds either and goes on; an operation is started at most once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from fabrictool.applier.journal import Journal
from fabrictool.applier.planning import ABSENT
from fabrictool.applier.state import Placed, operation_id
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    InvalidInputError,
    Place,
    Problem,
    StaleError,
    UnreachableError,
)
from fabrictool.base.ids import is_name
from fabrictool.domain.observed import generation
from fabrictool.domain.specs import AgentSpec, GatewaySpec
from fabrictool.status.client import StatusUnavailableError, fetch
from fabrictool.status.documents import AgentStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.applier.state import FabricFolder, State
    from fabrictool.applier.tenantkeys import TenantKeys
    from fabrictool.applier.truststore import TrustStore
    from fabrictool.base.clock import Clock
    from fabrictool.clusters.protocol import Cluster
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.domain.specs import UnitSpec

POLL_S = 0.1
STOP_GRACE_S = 45.0
"""A unit drains for its `drain_s`, then leaves; after this long it is killed."""
READY_MARGIN_S = 30.0
"""For starting the process, and for reaching a gateway once the engine is ready."""
_NO_GATEWAY = "the engine is ready, but no gateway is reached yet"
_DEAD = ("ended", "killed", "prepared")
SESSION_SECONDS = 26 * 3600.0
"""Certificates outlive the longest usual walltime (24 h) by a margin (mesh.md §6)."""


class Reporter(Protocol):
    """Hears what happens, for progress lines and ``--json`` events."""

    def step(self, action: Action, kind: str, text: str) -> None:
        """An action moved: ``intent``, ``started``, ``waiting``, ``done``, ``failed``."""
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
    read_set: Callable[[], Mapping[str, str]]
    """The facts as they are now, asked for under the lease."""
    interrupt: Interrupt = field(default_factory=Interrupt)
    _state: State | None = None

    def apply(self, plan: Plan) -> bool:
        """Carry `plan` out under the lease; returns False when it was the last to be carried out.

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
            self._check_sound(plan)
            self._check_startable(plan)
            state = self.folder.read_state()
            journal = Journal(self.folder.journal, plan.id, self.clock)
            if state.applied_plan == plan.id:
                if not journal.finished:
                    journal.write("end")  # a crash came between the state and this line
                return False
            if journal.finished:
                message = f"plan {plan.id[:8]} was applied before, and another one since"
                raise StaleError.of("FT4004", message, thing="plan", hint="run `fabrictool plan` again")
            self._check_fresh(plan, self.read_set(), journal, state)
            for action in plan.changes:
                if action.spec is not None:
                    self._identity(action.spec)  # says what is missing or has expired before anything starts
            journal.write("begin", text=f"{len(plan.changes)} changes")
            if state.serial == 0:
                state = self.folder.write_state(state, read=state)
            self._state = state
            problems = self._carry_out(plan, journal)
            if self.interrupt.count:
                journal.write("interrupted")
                raise InterruptedByUserError.of(
                    "FT4103", "interrupted; nothing is half-done", hint="run the same command again to go on"
                )
            if problems:
                raise AppliedInPartError(problems)
            self._state = self.folder.write_state(
                msgspec.structs.replace(self._state, applied_plan=plan.id, applied_blueprint=plan.blueprint_digest),
                read=self._state,
            )
            journal.write("end")
            return True

    def _check_sound(self, plan: Plan) -> None:
        """Refuse a plan that no planner makes: names from it become paths."""
        for action in plan.changes:
            good = action.cluster in self.clusters
            if action.kind in ("create", "replace"):
                wanted = operation_id(plan.lineage, action.address, generation(action.operation))
                good = good and action.spec is not None and is_name(action.spec.provider)
                good = good and action.operation == wanted
            if not good:
                message = f"no plan of this fabric says {action.kind} {action.address} on {action.cluster} like this"
                hint = "a plan is not edited; change the blueprint and run `fabrictool plan` again"
                raise InvalidInputError.of("FT4006", message, thing=action.address, hint=hint)

    def _check_startable(self, plan: Plan) -> None:
        """Refuse what this release plans and cannot start."""
        for replica in plan.placement.replicas:
            if replica.phase != "unified" or replica.stages:
                what = f"a {replica.phase} replica" if replica.phase != "unified" else "a pipeline over partitions"
                raise InvalidInputError.of(
                    "FT4008",
                    f"{replica.replica} is {what}: that is planned and forecast, and not started by this release",
                    thing=f"replica/{replica.replica}",
                    hint="leave `phases` of the model at `unified`, and plan with another solver than tabu",
                )

    def _check_fresh(self, plan: Plan, now: Mapping[str, str], journal: Journal, state: State) -> None:
        """Refuse when a fact of the read set changed, but for what our own unfinished run can have changed."""
        entries = journal.entries()
        first = plan.lineage == "" and (state.serial == 0 or entries)
        if plan.lineage != state.lineage and not first:
            message = f"the plan belongs to lineage {plan.lineage or 'none'}, this fabric is {state.lineage or 'new'}"
            raise StaleError.of("FT4005", message, hint="run `fabrictool plan` again")
        begun = {entry.address for entry in entries if entry.kind == "intent"}
        ours: dict[str, set[str]] = {}
        for action in plan.changes:
            if action.address in begun:
                ours.setdefault(f"unit/{action.address}", set()).add(f"{action.operation} on {action.cluster}")
        changed = []
        for fact in sorted({*plan.read_set, *(name for name in now if name.startswith("unit/"))}):
            planned, seen = plan.read_set.get(fact, ABSENT), now.get(fact, ABSENT)
            mine = fact in ours and _units(seen) <= _units(planned) | ours[fact]
            if planned != seen and not mine:
                changed.append((fact, f"{fact} is no longer what the plan relies on"))
        for action in plan.changes:
            started = 0 < generation(action.operation) <= state.generations.get(action.address, 0)
            if started and self.clusters[action.cluster].state(action.operation) is None:
                changed.append((action.address, f"{action.operation} was started before and has ended since"))
        if changed:
            hint = "run `fabrictool plan` again and review the difference; nothing was changed"
            raise StaleError([Problem("FT4004", message, Place(thing=thing), hint) for thing, message in changed])

    def _carry_out(self, plan: Plan, journal: Journal) -> list[Problem]:
        problems: list[Problem] = []
        done = {(entry.address, entry.operation) for entry in journal.entries() if entry.kind == "done"}
        for action in plan.changes:
            if self.interrupt.count:
                break
            operation = action.operation or action.former
            if (action.address, operation) in done:
                continue
            journal.write("intent", address=action.address, action=action.kind, operation=operation)
            self.reporter.step(action, "intent", action.summary)
            try:
                finished = self._perform(action, journal)
            except FabrictoolError as error:
                journal.write("failed", address=action.address, action=action.kind, text=str(error))
                self.reporter.step(action, "failed", str(error))
                problems += error.problems
                if any(problem.code.startswith("FT43") for problem in error.problems):
                    break  # no space or no rights: every further step would fail alike
                if isinstance(action.spec, GatewaySpec):
                    break  # agents would wait in vain for a gateway to reach
                continue
            if not finished:
                break
            journal.write("done", address=action.address, action=action.kind, operation=operation)
            self.reporter.step(action, "done", "")
        return problems

    def _perform(self, action: Action, journal: Journal) -> bool:
        """Carry one action out; False when the user stopped waiting, and then nothing that still serves was stopped."""
        cluster = self.clusters[action.cluster]
        if action.kind == "delete":
            if not self._stop(action, cluster):
                return False
            self._forget_dead(action)
            self._save_end(action)
            return True
        if action.spec is None:
            return True
        former = self._cluster_of(action.former) if action.former else None
        if action.stop_first and former is not None and not self._stop(action, former):
            return False
        self._start(action, action.spec, cluster, journal)
        if not self._await_ready(action, action.spec, cluster):
            return False
        if not action.stop_first and former is not None and not self._stop(action, former):
            return False
        self._forget_dead(action)
        return True

    def _start(self, action: Action, spec: UnitSpec, cluster: Cluster, journal: Journal) -> None:
        operation = action.operation
        if cluster.state(operation) is None:
            files = self._identity(spec)
            if isinstance(spec, GatewaySpec) and self.keys is not None:
                files["keys.json"] = self.keys.file
                spec = msgspec.structs.replace(spec, keys=self.keys.digest)
            cluster.prepare(operation, spec, files)
        placed = Placed(cluster=action.cluster, node=spec.node, operation=operation)
        if isinstance(spec, AgentSpec):
            placed = msgspec.structs.replace(placed, tp=spec.tp, pp=spec.pp, phase=spec.phase)
        self._save_start(action.address, placed)  # first: whatever runs is remembered
        cluster.start(operation)
        journal.write("started", address=action.address, action=action.kind, operation=operation)

    def _identity(self, spec: UnitSpec) -> dict[str, bytes]:
        role: Literal["agent", "gateway"] = "agent" if isinstance(spec, AgentSpec) else "gateway"
        return self.trust.session_files(spec.provider, role, now=self.clock.wall(), seconds=_session_seconds(spec))

    def _await_ready(self, action: Action, spec: UnitSpec, cluster: Cluster) -> bool:
        """Until the unit serves; says every change of what it waits for. False when the user stopped waiting."""
        seconds = (spec.start_timeout_s if isinstance(spec, AgentSpec) else 0.0) + READY_MARGIN_S
        deadline = self.clock.monotonic() + seconds
        said = ""
        alone = False
        while self.interrupt.count < 2:
            state = cluster.state(action.operation)
            if state in ("ended", "killed"):
                raise self._died(action, cluster)
            ready, text = _readiness(cluster.status_url(action.operation), spec)
            if ready:
                return True
            if text.startswith(_NO_GATEWAY) and not alone:
                alone = True
                deadline = min(deadline, self.clock.monotonic() + READY_MARGIN_S)
            if text != said:
                said = text
                self.reporter.step(action, "waiting", text)
            if self.clock.monotonic() > deadline:
                raise UnreachableError.of(
                    "FT5106",
                    f"{action.address} is not ready in time: {text}",
                    thing=action.address,
                    hint=f"fabrictool logs {action.address}",
                    transient=True,
                )
            time.sleep(POLL_S)
        return False

    def _stop(self, action: Action, cluster: Cluster) -> bool:
        """Until the former unit is gone; False when the user stopped waiting before."""
        operation = action.former
        if cluster.state(operation) == "running":
            cluster.stop(operation)
            deadline = self.clock.monotonic() + STOP_GRACE_S
            while cluster.state(operation) == "running" and self.interrupt.count < 2:
                if self.clock.monotonic() > deadline:
                    self.reporter.step(action, "waiting", "it did not leave in time and is killed")
                    cluster.kill(operation)
                    deadline = self.clock.monotonic() + STOP_GRACE_S
                time.sleep(POLL_S)
        state = cluster.state(operation)
        if state in _DEAD:
            cluster.forget(operation)
        return state != "running"

    def _forget_dead(self, action: Action) -> None:
        """Remove what former units of this address left behind; until now it was evidence."""
        for cluster in self.clusters.values():
            for unit in cluster.observe().units:
                if unit.address == action.address and unit.state in _DEAD and unit.operation != action.operation:
                    cluster.forget(unit.operation)

    def _cluster_of(self, operation: str) -> Cluster | None:
        return next((c for c in self.clusters.values() if c.state(operation) is not None), None)

    def _died(self, action: Action, cluster: Cluster) -> FabrictoolError:
        reason = cluster.exit_reason(action.operation) or "it was killed"
        tail = " | ".join(cluster.log_tail(action.operation, 3))
        return UnreachableError.of(
            "FT5105",
            f"{action.address} ended before it was ready: {reason}",
            thing=action.address,
            hint=f"fabrictool logs {action.address}; its last lines: {tail}",
        )

    def _save_start(self, address: str, placed: Placed) -> None:
        """Remember that a unit is started, its generation and its place."""
        if self._state is not None:
            known = self._state.generations.get(address, 0)
            generations = self._state.generations | {address: max(generation(placed.operation), known)}
            self._write(generations=generations, units=self._state.units | {address: placed})

    def _save_end(self, action: Action) -> None:
        """Forget the place of a unit that was stopped, unless a younger one of its address stands there."""
        placed = None if self._state is None else self._state.units.get(action.address)
        if self._state is not None and placed is not None and placed.operation in ("", action.former):
            self._write(units={name: at for name, at in self._state.units.items() if name != action.address})

    def _write(self, **changes: Any) -> None:
        if self._state is not None:
            new = msgspec.structs.replace(self._state, **changes)
            self._state = self.folder.write_state(new, read=self._state)


def _session_seconds(spec: AgentSpec | GatewaySpec) -> float:
    walltime = spec.walltime_s if isinstance(spec, AgentSpec) else None
    return SESSION_SECONDS if walltime is None else walltime + 2 * 3600.0


def _units(fact: str) -> set[str]:
    """The units that a fact of the read set names."""
    return set() if fact == ABSENT else set(fact.split(", "))


def _readiness(url: str, spec: UnitSpec) -> tuple[bool, str]:
    """Whether a unit serves, and if not, what it is doing."""
    if not url:
        return False, "starting"
    try:
        document = fetch(url, timeout_s=2.0)
    except StatusUnavailableError:
        return False, "starting"
    if not isinstance(document, AgentStatus):
        return True, ""
    if document.engine.state != "ready":
        return False, f"engine {document.engine.state}: {document.engine.progress}".rstrip(": ")
    if not document.links and isinstance(spec, AgentSpec) and spec.hubs:
        why = "; ".join(f"{address}: {error}" for address, error in sorted(document.dial_errors.items()))
        return False, f"{_NO_GATEWAY}{': ' + why if why else ''}"
    return True, ""
