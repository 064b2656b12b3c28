"""Carrying out a plan: every step announced on disk first, every step safe to repeat.

What a crash at any moment leaves: an intent in the journal, perhaps a prepared or running unit that bears the
intent's operation id. Running apply again finds either and goes on; an operation is started at most once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from fabrictool.applier.journal import Journal
from fabrictool.applier.state import Placed
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    Place,
    Problem,
    StaleError,
    UnreachableError,
)
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

POLL_S = 0.1
STOP_GRACE_S = 45.0
"""A unit drains for its `drain_s`, then leaves; after this long it is killed."""
READY_MARGIN_S = 30.0
"""For starting the process, and for reaching a gateway once the engine is ready."""
_NO_GATEWAY = "the engine is ready, but no gateway is reached yet"
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
            state = self.folder.read_state()
            journal = Journal(self.folder.journal, plan.id, self.clock)
            if journal.finished:
                if state.applied_plan == plan.id:
                    return False
                message = f"plan {plan.id[:8]} was applied before, and another one since"
                raise StaleError.of("FT4004", message, thing="plan", hint="run `fabrictool plan` again")
            begun = {entry.address for entry in journal.entries() if entry.kind == "intent"}
            self._check_fresh(plan, self.read_set(), begun, state)
            for action in plan.changes:
                if action.spec is not None:
                    self.trust.root()
                    self.trust.provider(action.spec.provider)  # says what is missing before anything starts
            if state.serial == 0:
                state = self.folder.write_state(state, read=state)
            self._state = state
            journal.write("begin", text=f"{len(plan.changes)} changes")
            problems = self._carry_out(plan, journal)
            if self.interrupt.count:
                journal.write("interrupted")
                raise InterruptedByUserError.of(
                    "FT4103", "interrupted; nothing is half-done", hint="run the same command again to go on"
                )
            if problems:
                raise AppliedInPartError(problems)
            journal.write("end")
            self._state = self.folder.write_state(
                msgspec.structs.replace(self._state, applied_plan=plan.id), read=self._state
            )
            return True

    def _check_fresh(self, plan: Plan, now: Mapping[str, str], begun: set[str], state: State) -> None:
        """Refuse when a fact of the read set changed, but for those that our own unfinished run changed."""
        first = plan.lineage == "" and (state.serial == 0 or begun)
        if plan.lineage != state.lineage and not first:
            message = f"the plan belongs to lineage {plan.lineage or 'none'}, this fabric is {state.lineage or 'new'}"
            raise StaleError.of("FT4005", message, hint="run `fabrictool plan` again")
        problems = [
            Problem(
                "FT4004",
                f"{fact} is no longer what the plan relies on",
                Place(thing=fact),
                "run `fabrictool plan` again and review the difference; nothing was changed",
            )
            for fact, seen in sorted(plan.read_set.items())
            if now.get(fact) != seen and fact.removeprefix("unit/") not in begun
        ]
        if problems:
            raise StaleError(problems)

    def _carry_out(self, plan: Plan, journal: Journal) -> list[Problem]:
        problems: list[Problem] = []
        done = {entry.address for entry in journal.entries() if entry.kind == "done"}
        for action in plan.changes:
            if self.interrupt.count:
                break
            if action.address in done:
                continue
            cluster = self.clusters[action.cluster]
            journal.write(
                "intent", address=action.address, action=action.kind, operation=action.operation or action.former
            )
            self.reporter.step(action, "intent", action.summary)
            try:
                self._perform(action, cluster, journal)
            except FabrictoolError as error:
                journal.write("failed", address=action.address, action=action.kind, text=str(error))
                self.reporter.step(action, "failed", str(error))
                problems += error.problems
                if any(problem.code.startswith("FT43") for problem in error.problems):
                    break  # no space or no rights: every further step would fail alike
                if isinstance(action.spec, GatewaySpec):
                    break  # agents would wait in vain for a gateway to reach
                continue
            if self.interrupt.count > 1:
                break
            journal.write("done", address=action.address, action=action.kind)
            self.reporter.step(action, "done", "")
        return problems

    def _perform(self, action: Action, cluster: Cluster, journal: Journal) -> None:
        match action.kind:
            case "create":
                self._start(action, cluster, journal)
                self._await_ready(action, cluster)
                self._forget_dead(action)
            case "replace":
                gateway = isinstance(action.spec, GatewaySpec)
                former = self._cluster_of(action.former) or cluster
                if gateway:
                    self._stop(action, former)
                self._start(action, cluster, journal)
                self._await_ready(action, cluster)
                if not gateway:
                    self._stop(action, former)
            case "delete":
                self._stop(action, cluster)
                self._forget_dead(action)
                self._save(action.address, 0, None)
            case "keep" | "unknown":
                pass

    def _start(self, action: Action, cluster: Cluster, journal: Journal) -> None:
        if action.spec is None:
            return
        spec, operation = action.spec, action.operation
        if cluster.state(operation) is None:
            role: Literal["agent", "gateway"] = "agent" if isinstance(spec, AgentSpec) else "gateway"
            files = self.trust.session_files(spec.provider, role, now=self.clock.wall(), seconds=_session_seconds(spec))
            if isinstance(spec, GatewaySpec) and self.keys is not None:
                files["keys.json"] = self.keys.file
                spec = msgspec.structs.replace(spec, keys=self.keys.digest)
            cluster.prepare(operation, spec, files)
        cluster.start(operation)
        journal.write("started", address=action.address, action=action.kind, operation=operation)
        generation = int(operation.rsplit("-g", 1)[1].split("-", 1)[0])
        tp = spec.tp if isinstance(spec, AgentSpec) else 1
        self._save(action.address, generation, Placed(cluster=action.cluster, node=spec.node, tp=tp))

    def _await_ready(self, action: Action, cluster: Cluster) -> None:
        """Until the unit serves; says every change of what it waits for."""
        spec = action.spec
        seconds = (spec.start_timeout_s if isinstance(spec, AgentSpec) else 0.0) + READY_MARGIN_S
        deadline = self.clock.monotonic() + seconds
        said = ""
        alone = False
        while self.interrupt.count < 2:
            state = cluster.state(action.operation)
            if state in ("ended", "killed"):
                raise self._died(action, cluster)
            ready, text = _readiness(cluster.status_url(action.operation))
            if ready:
                return
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

    def _stop(self, action: Action, cluster: Cluster) -> None:
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
        if cluster.state(operation) in ("ended", "killed", "prepared"):
            cluster.forget(operation)

    def _forget_dead(self, action: Action) -> None:
        """Remove what former units of this address left behind; until now it was evidence."""
        for cluster in self.clusters.values():
            for unit in cluster.observe().units:
                if unit.address == action.address and unit.state != "running" and unit.operation != action.operation:
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

    def _save(self, address: str, generation: int, placed: Placed | None) -> None:
        """Remember a start (generation and place) or an end (no place)."""
        if self._state is None:
            return
        generations, units = dict(self._state.generations), dict(self._state.units)
        generations[address] = max(generation, generations.get(address, 0))
        if placed is None:
            units.pop(address, None)
        else:
            units[address] = placed
        new = msgspec.structs.replace(self._state, generations=generations, units=units)
        self._state = self.folder.write_state(new, read=self._state)


def _session_seconds(spec: AgentSpec | GatewaySpec) -> float:
    walltime = spec.walltime_s if isinstance(spec, AgentSpec) else None
    return SESSION_SECONDS if walltime is None else walltime + 2 * 3600.0


def _readiness(url: str) -> tuple[bool, str]:
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
    if not document.links:
        why = "; ".join(f"{address}: {error}" for address, error in sorted(document.dial_errors.items()))
        return False, f"{_NO_GATEWAY}{': ' + why if why else ''}"
    return True, ""
