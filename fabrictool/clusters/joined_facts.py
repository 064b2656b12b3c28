"""What the mesh says of a cluster's joined nodes, read as units and free places; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators
from fabrictool.domain.address import Address
from fabrictool.domain.observed import ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, IdleOffer
from fabrictool.mesh.records import AssignedUnit
from fabrictool.status.fleet import OVER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from fabrictool.domain.inventory import ClusterSpec, Partition
    from fabrictool.domain.observed import UnitState
    from fabrictool.status.fleet import FleetAssignment, FleetMember, FleetService

GONE = (*OVER, "evicted", "down")


@dataclass(frozen=True, slots=True)
class JoinedNodes:
    """The members of the mesh that are nodes of one cluster."""

    cluster: str
    fabric: str
    provider: str
    described: ClusterSpec

    def mine(self, members: Iterable[FleetMember]) -> list[FleetMember]:
        return [
            member
            for member in members
            if (member.role, member.provider, member.cluster) == ("agent", self.provider, self.cluster)
            and member.assignable
        ]

    def bearing(self, members: Iterable[FleetMember], operations: Collection[str]) -> list[FleetMember]:
        """Those whose assignment bears one of these operations, whatever became of them."""
        return [m for m in self.mine(members) if m.assignment is not None and m.assignment.operation in operations]

    def idle(self, members: Iterable[FleetMember]) -> dict[str, int]:
        """Partition → nodes that could be assigned something now."""
        free = [self.partition_of(member) for member in self.mine(members) if available(member)]
        return {name: free.count(name) for name in self.described.partitions}

    def choices(self, members: Iterable[FleetMember], partition: str, model: str) -> list[FleetMember]:
        """Those of them that are of `partition`, those first where `model` was not given up, then the roomiest."""
        there = [m for m in self.mine(members) if available(m) and self.partition_of(m) == partition]
        return sorted(there, key=lambda m: (_gave_up(m, model), not m.idle, -max(m.free, default=0), m.session))

    def partition_of(self, member: FleetMember) -> str:
        """The one with the most that it has all of; "": none."""
        fitting = [(name, p) for name, p in self.described.partitions.items() if _has(member, p)]
        return max(fitting, key=lambda pair: (pair[1].devices_per_node, _memory(pair[1])), default=("", None))[0]

    def units(self, members: Iterable[FleetMember]) -> tuple[ObservedUnit, ...]:
        """By operation; where two nodes bear one, the one that lives."""
        units: dict[str, ObservedUnit] = {}
        for member in self.mine(members):
            unit = self._unit(member)
            if unit is not None and (unit.operation not in units or unit.state == "running"):
                units[unit.operation] = unit
        return tuple(units.values())

    def spec(self, member: FleetMember) -> AgentSpec:
        """What it was told, as the planner would have said it."""
        told = _assignment(member)
        partition = self.described.partitions.get(told.partition)
        return AgentSpec(
            fabric=self.fabric,
            provider=self.provider,
            site=self.described.site,
            cluster=self.cluster,
            partition=told.partition,
            replica=told.replica,
            model=told.model,
            source=told.source,
            engine=told.engine,
            precision=told.precision,
            context=told.context,
            tp=told.tp,
            max_num_seqs=told.max_num_seqs,
            device=partition.device if partition is not None else member.device,
            devices=told.tp,
            idle=IdleOffer(),
        )

    def unit_told(self, member: FleetMember) -> AssignedUnit:
        told = _assignment(member)
        return AssignedUnit(told.replica, told.operation, told.lineage, told.partition)

    def last_words(self, member: FleetMember) -> str:
        """What its agent says of the engine that followed; "": nothing."""
        return next((service.note for service in _followers(member) if service.note), "")

    def _unit(self, member: FleetMember) -> ObservedUnit | None:
        """None: it is assigned nothing of a plan's, or that is over."""
        told = member.assignment
        if told is None or not told.operation:
            return None
        if not told.model and not _busy(member):
            return None
        state, ready, text = _life(member)
        leaving = state == "running" and not told.model
        return ObservedUnit(
            address=str(Address("replica", told.replica)),
            operation=told.operation,
            state=state,
            # A unit that ends was told something, but its assignment says no longer what.
            spec_digest=spec_digest(self.spec(member)) if told.model else "",
            reason="" if state == "running" else text,
            detail=text if state == "running" else "",
            ready=ready and not leaving,
            waits_for="leaving" if leaving else "engine" if state == "running" and not ready else "",
            ends_at=member.ends_at or member.certificate_ends_at,
            lineage=told.lineage,
            node=member.node,
        )


def available(member: FleetMember) -> bool:
    """Whether it could be assigned something: it is idle, or gave up what a plan had assigned to it."""
    told = member.assignment
    gave_up = told is not None and bool(told.operation) and any(s.given_up for s in _followers(member))
    return member.idle or (member.state == "serving" and gave_up and not _busy(member))


def _life(member: FleetMember) -> tuple[UnitState, bool, str]:
    """Of what it was assigned: its state, whether it serves, and what there is to say."""
    if member.state == "left":
        return "ended", False, f"its node {member.node} left"
    if member.state in GONE:
        return "killed", False, f"its node {member.node} is {member.state}"
    followers = _followers(member)
    given_up = next((service for service in followers if service.given_up), None)
    if given_up is not None:
        return "ended", False, given_up.note or "its node gave it up"
    serving = [s for s in followers if s.lifecycle == "SERVING" and s.accepting]
    where = f"on {member.node}, session {member.session[:8]}"
    if member.state != "serving":
        return "running", False, f"{where}: {member.state}"
    if serving:
        return "running", True, where
    note = next((service.note for service in followers if service.note), "")
    return "running", False, f"{where}: {note or ('its engine loads' if followers else 'it was told')}"


def _followers(member: FleetMember) -> list[FleetService]:
    """The engine starts of what it is assigned now."""
    version = member.assignment.version if member.assignment is not None else 0
    return [service for service in member.services if version and service.assigned == version]


def _busy(member: FleetMember) -> bool:
    """Whether an engine of it runs; of one that is gone none does."""
    return member.state not in GONE and any(service.lifecycle in ("JOIN", "SERVING") for service in member.services)


def _gave_up(member: FleetMember, model: str) -> bool:
    return any(service.given_up and service.model == model for service in member.services)


def _assignment(member: FleetMember) -> FleetAssignment:
    if member.assignment is None:
        raise ValueError(f"{member.session} is assigned nothing")
    return member.assignment


def _has(member: FleetMember, partition: Partition) -> bool:
    enough = member.devices >= partition.devices_per_node and member.memory >= _memory(partition)
    return member.device == partition.device and enough


def _memory(partition: Partition) -> float:
    """Octets that its nodes must have: where there are accelerators, they are what a node tells the memory of."""
    return as_float(partition.memory_per_node) if accelerators()[partition.device].kind == "cpu" else 0.0
