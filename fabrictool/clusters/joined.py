"""Nodes that joined the mesh without a model and named this cluster: units are signed assignments, and nothing else.

There is no login node, no folder and no job here. What is there is read in the mesh, as any of its members shows it;
a unit starts when a controller of the nodes' provider tells one of them what to serve, and ends when that is taken
back. The assignment bears the operation's id, so a start may be repeated after any crash.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.joined_facts import JoinedNodes
from fabrictool.domain.observed import LIVING, ClusterFacts
from fabrictool.domain.specs import AgentSpec, HostPort
from fabrictool.mesh.assignments import early_end
from fabrictool.mesh.records import AssignedUnit, AssignmentBody
from fabrictool.mesh.transport.controller import ControllerVisit
from fabrictool.status.fleet import OVER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.clusters.protocol import JobScript, NewUnit
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.plan import Outlook
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.mesh.transport.tls import IdentityFiles
    from fabrictool.status.documents import StatusDocument
    from fabrictool.status.fleet import FleetMember, FleetStatus

    Ask = Callable[[], FleetStatus]
    Identity = Callable[[], AbstractContextManager[IdentityFiles]]


class JoinedCluster:
    """See the module's docstring. `ask` shows the mesh, `identity` is that of a controller of `provider`."""

    poll_s = 5.0
    """What is looked at is a page of a member: of a large mesh megabytes, but nobody's login node."""

    # Wide: what it is, how the mesh is seen, and who speaks in it.
    def __init__(
        self, name: str, fabric: str, provider: str, described: ClusterSpec, ask: Ask, identity: Identity
    ) -> None:
        self.name = name
        self.provider = provider
        self._fabric = fabric
        self._nodes = JoinedNodes(name, fabric, provider, described)
        self._ask = ask
        self._identity = identity
        self._seen: FleetStatus | None = None

    # -- facts ------------------------------------------------------------------------------------------------

    def observe(self, *, brief: bool = False, patient: bool = False) -> ClusterFacts:
        try:
            fleet = self._look()
        except FabrictoolError as error:
            reason = "; ".join(problem.message for problem in error.problems)
            return ClusterFacts(cluster=self.name, known=False, reason=reason, hint=error.problems[0].hint or "")
        return ClusterFacts(
            cluster=self.name, known=True, units=self._nodes.units(fleet.members), idle=self._nodes.idle(fleet.members)
        )

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        """Whether there is somebody to sign for them, for as long as their sessions may last."""
        try:
            with self._identity() as files:
                warning = early_end(files.read()[0].chain, now=SystemClock().wall())
                return [], [warning] if warning else []
        except FabrictoolError as error:
            return [], [f"{problem.code} {problem.message}" for problem in error.problems]

    def scripts(self, units: Sequence[NewUnit]) -> list[JobScript]:
        return []

    def spec(self, operation: str) -> UnitSpec:
        """From the last look; raises FT5104 when that has none."""
        fleet = self._seen or self._look()
        member = next((m for m in self._nodes.bearing(fleet.members, [operation]) if _told(m)), None)
        if member is None:
            message = f"what {operation} was assigned cannot be read"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return self._nodes.spec(member)

    def certificate(self, operation: str) -> bytes:
        """None is renewed: the session is its node's own."""
        raise FabrictoolError.of("FT5408", "a node that joined has a session of its own", thing=operation)

    def document(self, operation: str) -> StatusDocument | None:
        """None: a node's own pages are on its loopback."""
        return None

    def page(self, operation: str) -> AbstractContextManager[str]:
        return contextlib.nullcontext("")

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """What the agent says of it in its records: its log is its owner's."""
        fleet = self._seen or self._look()
        return [text for m in self._nodes.bearing(fleet.members, [operation]) if (text := self._nodes.last_words(m))]

    def former_log(self, start: str, lines: int) -> list[str]:
        return []

    # -- commands ---------------------------------------------------------------------------------------------

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """Assign each to a node that is there for it, in the eyes of the mesh as it is when this is said."""
        failed: dict[str, FabrictoolError] = {}

        async def speak(visit: ControllerVisit) -> None:
            for unit in units:
                if not self._nodes.bearing(visit.every_agent(), [unit.operation]):
                    try:
                        await self._assign(visit, unit)
                    except FabrictoolError as error:
                        failed[unit.operation] = error

        if units:
            self._visit(self._look(), speak)
        return failed

    def update(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """None: of what an assignment says nothing changes while it is served, and its units do not say that it can."""
        message = "a node that joined cannot take over another assignment while it serves"
        return {unit.operation: FabrictoolError.of("FT5408", message, thing=unit.address) for unit in units}

    def stop(self, operations: Iterable[str]) -> None:
        """Assign nothing: the agent drains and stops its engine."""
        self._take_back(frozenset(operations), over=False)

    def kill(self, operations: Iterable[str]) -> None:
        """The same: how a node stops what it started is its own affair."""
        self.stop(operations)

    def forget(self, operations: Iterable[str]) -> None:
        """Take back what the mesh still remembers of units that do not run; raises FT5102 for one that does.

        Where the mesh cannot be reached any more, such as after the last gateway, that ends with the nodes' sessions.
        """
        named = frozenset(operations)
        if not named:
            return
        living = sorted(u.operation for u in self.observe().units if u.operation in named and u.state in LIVING)
        if living:
            raise FabrictoolError.of("FT5102", f"still serving: {', '.join(living)}", thing=f"cluster/{self.name}")
        with contextlib.suppress(UnreachableError):
            self._take_back(named, over=True)

    def close(self) -> None: ...

    # -- internals --------------------------------------------------------------------------------------------

    def _look(self) -> FleetStatus:
        fleet = self._ask()
        if fleet.fabric != self._fabric:
            message = f"the member of the mesh that was asked belongs to {fleet.fabric or 'no fabric'}"
            raise UnreachableError.of("FT5416", message, thing=f"cluster/{self.name}", hint="correct `status`")
        self._seen = fleet
        return fleet

    async def _assign(self, visit: ControllerVisit, unit: NewUnit) -> None:
        """Raises FT5417 when no node is there for it, and what `ControllerVisit.say` does."""
        spec = unit.spec
        if not isinstance(spec, AgentSpec):
            raise FabrictoolError.of("FT4006", f"{unit.address} is no replica", thing=unit.address)
        wanted = AssignmentBody(
            federation="",
            session=bytes(16),
            by=bytes(16),
            version=0,
            model=spec.model,
            source=spec.source,
            engine=spec.engine,
            precision=spec.precision,
            context=spec.context,
            tp=spec.tp,
            max_num_seqs=spec.max_num_seqs,
            unit=AssignedUnit(spec.replica, unit.operation, unit.lineage, spec.partition),
        )
        there = self._nodes.choices(visit.members(), spec.partition, spec.model)
        refusals = [visit.refusal(member, wanted) for member in there]
        for member, refusal in zip(there, refusals, strict=True):
            if refusal is None:
                await visit.say(member, wanted)
                return
        if refusals and refusals[0] is not None:
            raise refusals[0]
        message = f"no node of {self.name}/{spec.partition} is idle now: {unit.address} was assigned to none"
        hint = "`fabrictool mesh members --idle` lists those that are; plan again, or wait until one joins"
        raise UnreachableError.of("FT5417", message, thing=unit.address, hint=hint, transient=True)

    def _take_back(self, operations: frozenset[str], *, over: bool) -> None:
        """What is `over` leaves no trace; else the word that it ends bears its operation until it has."""
        fleet = self._look()
        if not self._nodes.bearing(fleet.members, operations):
            return

        async def speak(visit: ControllerVisit) -> None:
            for member in self._nodes.bearing(visit.every_agent(), operations):
                if (_told(member) and member.state not in OVER) or over:
                    await visit.say(member, _nothing(None if over else self._nodes.unit_told(member)))

        self._visit(fleet, speak)

    def _visit(self, fleet: FleetStatus, speak: Callable[[ControllerVisit], Awaitable[None]]) -> None:
        """By a gateway that `fleet` names. Raises FT6107 when none lets us in, FT6109 when nobody here may speak."""
        gateways = [
            HostPort(host.strip("[]"), int(port))
            for member in fleet.members
            if member.role == "gateway" and member.state not in (*OVER, "evicted", "down")
            for address in member.addresses
            for host, _, port in [address.rpartition(":")]
        ]

        async def visit(files: IdentityFiles) -> None:
            async with ControllerVisit(files, gateways, SystemClock()) as there:
                await speak(there)

        with self._identity() as files:
            asyncio.run(visit(files))


def _told(member: FleetMember) -> bool:
    return member.assignment is not None and bool(member.assignment.model)


def _nothing(unit: AssignedUnit | None) -> AssignmentBody:
    return AssignmentBody(federation="", session=bytes(16), by=bytes(16), version=0, unit=unit)
