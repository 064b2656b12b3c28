"""What facts say about clusters. An observation is present, absent or unknown; unknown is not absent (rule 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from fabrictool.domain.specs import mark_of

if TYPE_CHECKING:
    from collections.abc import Mapping

UnitState = Literal["running", "pending", "ended", "killed", "prepared", "damaged"]
"""running: its process lives; pending: its job waits in a scheduler's queue; ended: it said goodbye; killed: it died
without; prepared: it was never started; damaged: its spec cannot be read, so what it is can only be guessed from its
operation."""
Awaited = Literal["", "engine", "gateway", "replicas", "leaving"]
"""What keeps a running unit from serving: its engine loads, no gateway is reached, a gateway is not reached by all
replicas yet, it ends; "": nothing, or unknown."""
Blocked = Literal["", "held", "invalid", "limit", "nodes"]
"""Why a job in a queue does not start however long it waits: somebody holds it, it asks for what is never granted, a
limit of its account or QoS is reached, its nodes are away; "": it just waits."""
InForce = Literal["", "current", "former"]
"""Whether a unit runs by its spec as it is written now; "": it takes over no other one as it runs, or does not say."""
LIVING: frozenset[UnitState] = frozenset({"running", "pending"})


class ObservedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One unit that a cluster knows of."""

    address: str
    """``replica/smollm2-135m/0`` or ``gateway/main``."""
    operation: str
    """The id under which it was started; at most one unit ever bears it."""
    state: UnitState
    spec_digest: str
    in_force: InForce = ""
    pid: int | None = None
    reason: str = ""
    """How it ended."""
    dormant: bool = False
    """It ended because nobody asked for it, and starts again when somebody does."""
    wanted: dict[str, int] = {}
    """Of a gateway: model → replicas that requests wait for, with those that serve."""
    status_url: str = ""
    certificate_begins_at: float = 0.0
    certificate_ends_at: float | None = None
    """Wall seconds until which every certificate of its chain is valid."""
    renewable: bool = False
    """It takes another certificate for its key, and other gateways, while it runs."""
    hands_over: bool = False
    """A gateway: its successor can start beside it, and takes over its ports."""
    followers: tuple[str, ...] = ()
    """Operations that are prepared to follow it, submitted from inside its job."""
    ends_at: float | None = None
    """Wall seconds at which its walltime ends; None when it has none or was not started."""
    holds: bool = False
    """Of a damaged one: its process or its job lives."""
    ready: bool = False
    """It serves, and a gateway reaches it."""
    waits_for: Awaited = ""
    """Of a running unit that does not serve."""
    blocked: Blocked = ""
    """Of a pending unit."""
    requeued: bool = False
    """Of a pending unit: its job has run before, and the scheduler put it back into its queue."""
    detail: str = ""
    """What it says of itself, or why it waits, in words."""
    job: str = ""
    """The scheduler's own id of it."""
    lineage: str = ""
    """Whose it is; "" on clusters that hold nobody else's."""
    silent_s: float = 0.0
    """Seconds since the last sign of life of a running unit of which it is sure that it gives none."""
    node: str = ""
    """Where the scheduler put it; several are separated by commas."""
    submitted_at: float | None = None
    begins_at: float | None = None
    """Of a pending job: when the scheduler expects to start it; of a running one: when it did."""


def awaited(word: object) -> Awaited:
    """Of a unit's own account; what another release says otherwise is not known."""
    return next((known for known in get_args(Awaited) if known == word), "")


def standing(health: Mapping[str, object], written: bytes, certificate_ends_at: float | None) -> InForce:
    """From what a unit tells of the spec and the certificate that are in force, and those that are written."""
    told, ends = health.get("spec"), health.get("certificate_ends_at")
    if not isinstance(told, str) or not told:
        return ""
    if isinstance(ends, int | float) and certificate_ends_at is not None and ends < certificate_ends_at - 1.0:
        return "former"
    return "current" if told == mark_of(written) else "former"


def wanted_models(health: Mapping[str, object]) -> dict[str, int]:
    """From what a gateway tells; of another release's words those that are understood."""
    told = health.get("wanted")
    if not isinstance(told, dict):
        return {}
    return {name: count for name, count in told.items() if isinstance(name, str) and isinstance(count, int)}


def renewable(health: Mapping[str, object]) -> bool:
    """Earlier releases do not tell until when their certificate is good, and take no other one."""
    return isinstance(health.get("certificate_ends_at"), int | float)


def lives(unit: ObservedUnit) -> bool:
    """Whether something of it still has to end before its files can go."""
    return unit.state in LIVING or unit.holds


def generation(operation: str) -> int:
    """Which start of its address an operation is; 0 for an id that says none."""
    middle = operation.rpartition("-g")[2].partition("-")[0]
    return int(middle) if middle.isdecimal() else 0


class NodeKind(msgspec.Struct, frozen=True, kw_only=True):
    """Equal nodes of one partition, by name."""

    nodes: str
    """As the scheduler writes many of them, such as ``n[01-03,7]`` (`domain.hostlist`)."""
    devices: int = 0
    """Accelerators of each."""
    device: str = ""
    """Their type in the scheduler's words."""
    away: bool = False
    """They are down or drained."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a scheduler, as it says itself."""

    up: bool = True
    nodes: int = 0
    idle: int = 0
    """Nodes on which nothing runs."""
    away: int = 0
    """Nodes that are down or drained."""
    pending: int = 0
    """Jobs that wait, everybody's."""
    longest_s: float | None = None
    """Longest walltime that it grants; None: no limit."""
    devices: int = 0
    """Accelerators of a node."""
    device: str = ""
    """Their type in the scheduler's words."""
    cpus: int = 0
    """Of a node."""
    memory: int = 0
    """Of a node, in octets."""
    kinds: tuple[NodeKind, ...] = ()
    """Its nodes, where the scheduler names them."""


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation that takes nodes away from us, such as for maintenance."""

    name: str
    begin: float
    """Wall seconds."""
    end: float
    partitions: tuple[str, ...] = ()
    """Those whose nodes it takes; empty: all."""
    nodes: tuple[str, ...] = ()
    """When it takes just these; empty: all of its partitions."""
    enforced: bool = True
    """The scheduler knows of it, and starts nothing that would run into it; not so for the inventory's windows."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster, as far as it could be seen."""

    cluster: str
    known: bool
    """False: it did not answer, so nothing on it is created or deleted."""
    reason: str = ""
    """Why it is unknown."""
    hint: str = ""
    units: tuple[ObservedUnit, ...] = ()
    scheduler: str = ""
    """Its name and version."""
    queues: dict[str, Queue] = {}
    """By partition."""
    stated_waits: dict[str, float] = {}
    """Partition → seconds that a job waits in its queue, as the inventory states it; where it does."""
    away: tuple[Away, ...] = ()
    now: float | None = None
    """The scheduler's own clock, wall seconds: times that it says are compared with this one."""
    skew_s: float = 0.0
    """How far its clock is ahead of ours, in seconds; 0 where that may be the way there. It decides nothing."""
    here: bool = True
    """The folder of the units was there; without it nothing can be said about units that were started."""
    owner: str = ""
    """Who started something there first under the fabric's name: lineage, user and machine; "": nobody, or not told."""
    idle: dict[str, int] | None = None
    """Of a cluster whose nodes join by themselves: how many could be assigned a model now, by partition."""
    foreign: tuple[str, ...] = ()
    """Operations of other lineages under the same fabric's name: never touched."""

    def unit(self, address: str) -> ObservedUnit | None:
        """The youngest living unit of that address, else the youngest dead one, else None."""
        same = [unit for unit in self.units if unit.address == address]
        return max(same, key=lambda unit: (unit.state in LIVING, generation(unit.operation)), default=None)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All clusters of the inventory."""

    clusters: dict[str, ClusterFacts]

    def living(self) -> dict[str, list[tuple[str, ObservedUnit]]]:
        """Address → (cluster, unit) of all that runs or waits, youngest first: a replacement that was cut off leaves
        two.
        """
        living: dict[str, list[tuple[str, ObservedUnit]]] = {}
        for name, facts in sorted(self.clusters.items()):
            for unit in facts.units:
                if unit.state in LIVING:
                    living.setdefault(unit.address, []).append((name, unit))
        for units in living.values():
            units.sort(key=lambda pair: generation(pair[1].operation), reverse=True)
        return living

    def running(self) -> dict[str, tuple[str, ObservedUnit]]:
        """Address → (cluster, unit) of the youngest that lives."""
        return {address: units[0] for address, units in self.living().items()}
