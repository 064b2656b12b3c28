"""Wanted units against observed units: the actions that lead from one to the other.

Unknown is not absent: a unit on a cluster that did not answer is neither started elsewhere nor stopped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fabrictool.domain.address import Address
from fabrictool.domain.observed import generation
from fabrictool.domain.plan import Action, spec_digest
from fabrictool.domain.specs import AgentSpec, GatewaySpec, updatable, without_hubs
from fabrictool.domain.state import operation_id
from fabrictool.planner.dormant import asked_for, dormant
from fabrictool.planner.gateways import clash

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.observed import ObservedUnit
    from fabrictool.domain.plan import ActionKind
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.planner.succession import Succession

Order = Literal["", "start-first", "resumed", "ports", "queue", "nodes", "devices"]
"""Of a replacement: the new unit first, or what the old one must give up before that."""

IN_WORDS: Mapping[Order, str] = {
    "": "",
    "resumed": "",
    "start-first": "start the new one, then stop the old one",
    "ports": "stop the old one, then start the new one: its ports are the same",
    "queue": "take the old one out of the queue, then submit the new one",
    "nodes": "stop the old one; the new one starts when its nodes are back",
    "devices": "stop the old one, then start the new one: no device is spare",
}
STOPS_FIRST = frozenset({"ports", "queue", "nodes", "devices"})
TURN = {"create": 0, "update": 1, "replace": 2, "delete": 3, "keep": 4, "unknown": 5}
TURN_OF_AGENTS = -1
"""Of those that are told whom they serve: before any gateway sends them what they would refuse until then."""
IN_PLACE_REASON = "while it serves: its process and its clients stay"
ASKED_REASON = "requests wait for its model"
EXTRA_REASON = "it starts while requests wait and nodes are idle"
Place = tuple[str, str]
"""(cluster, partition)."""
Units = list[tuple[str, "ObservedUnit"]]
"""(cluster, unit) of those that live at one address, youngest first."""


@dataclass(frozen=True, slots=True)
class WantedUnit:
    """One unit that should run."""

    address: str
    cluster: str
    spec: UnitSpec
    summary: str

    def action(self, kind: ActionKind, **more: Any) -> Action:
        return Action(kind=kind, address=self.address, cluster=self.cluster, summary=self.summary, **more)


@dataclass(frozen=True, slots=True)
class _Step:
    """An action whose order is not in words yet."""

    action: Action
    order: Order = ""

    def worded(self) -> Action:
        reason = "; ".join(filter(None, (self.action.reason, IN_WORDS[self.order])))
        return msgspec.structs.replace(self.action, reason=reason, stop_first=self.order in STOPS_FIRST)


def actions(
    wanted: Mapping[str, WantedUnit], evidence: Evidence, expiring: Mapping[str, Succession] = MappingProxyType({})
) -> tuple[Action, ...]:
    """The actions, gateways first where something starts and last where something ends.

    `expiring` names operations that cannot stay as they are although nothing changed, and why.
    """
    living = evidence.observed.living()
    asked = asked_for({want.address: (want.cluster, want.spec) for want in wanted.values()}, evidence)
    steps = [_step(want, evidence, living, expiring, asked) for want in wanted.values()]
    steps, early = _make_room(steps, living, evidence)
    planned = [step.worded() for step in steps]
    used = {name for action in planned for name in (action.operation, action.former)} | _awaiting(living)
    untouched = {action.address for action in planned if action.kind == "unknown"}
    for address, units in living.items():
        left = "a replacement that was cut off left it" if address in wanted else "the blueprint no longer asks for it"
        needed = f"another one needs its {'ports' if Address.parse(address).kind == 'gateway' else 'devices'}"
        planned += [
            delete(cluster, unit, (needed if unit.operation in early else left) + _and_its_node(unit, evidence))
            for cluster, unit in units
            if unit.operation not in used and address not in untouched
        ]
    for name, facts in evidence.clusters.items():
        damaged = [unit for unit in facts.units if unit.state == "damaged"]
        early |= {unit.operation for unit in damaged}  # they may hold a port or devices that a new one needs
        planned += [delete(name, unit, f"what it is cannot be read any more: {unit.reason}") for unit in damaged]
    return tuple(sorted(planned, key=lambda action: (action.former not in early, *_turn(action))))


def next_operation(evidence: Evidence, address: str) -> str:
    """The id of an address's next unit: past every generation that the state or a cluster knows of."""
    start = Address.parse(address).operations  # a damaged folder still bears its id
    units = [unit for facts in evidence.clusters.values() for unit in facts.units]
    known = [generation(unit.operation) for unit in units if unit.operation.startswith(start)]
    return operation_id(evidence.lineage, address, max([evidence.state.generations.get(address, 0), *known]) + 1)


def delete(cluster: str, unit: ObservedUnit, reason: str) -> Action:
    return Action(
        kind="delete",
        address=unit.address,
        cluster=cluster,
        summary=f"{cluster}   {unit.operation}",
        reason=reason,
        former=unit.operation,
    )


def _and_its_node(unit: ObservedUnit, evidence: Evidence) -> str:
    spec = evidence.specs.get(unit.operation)
    return "; its node is idle again then" if isinstance(spec, AgentSpec) and spec.assigned else ""


def _awaiting(living: Mapping[str, Units]) -> set[str]:
    """Units that serve while their successor waits in a queue: a slot given up may not come back for days."""
    return {unit.operation for units in living.values() if units[0][1].state == "pending" for _, unit in units[1:]}


def _make_room(steps: Sequence[_Step], living: Mapping[str, Units], evidence: Evidence) -> tuple[list[_Step], set[str]]:
    """Where a new replica gets devices on which another runs, or a new gateway ports of another, that one ends first.

    Returns the steps and the operations of units that must be deleted before anything else starts.
    """
    holders: dict[tuple[str, int], set[str]] = {}
    for units in living.values():
        for cluster, unit in units:
            for index in _devices(evidence.specs.get(unit.operation)):
                holders.setdefault((cluster, index), set()).add(unit.operation)
    early = _in_the_way_of_others(steps, living, evidence)
    scarce = _scarce_places(steps, evidence)
    early |= _in_scarce_places(steps, living, evidence, scarce)
    moved = []
    for step in steps:
        action = step.action
        indices = _devices(action.spec) if action.kind in ("create", "replace") else ()
        there = {name for index in indices for name in holders.get((action.cluster, index), ())} - {action.operation}
        early |= there - {action.former}
        in_place = action.former in there and step.order in ("start-first", "resumed")
        in_place |= step.order == "start-first" and _assigned_place(action) in scarce
        moved.append(replace(step, order="devices") if in_place else step)
    return [_without_former(step) if step.action.former in early else step for step in moved], early


def _scarce_places(steps: Sequence[_Step], evidence: Evidence) -> set[Place]:
    """Where more is to be assigned than nodes are idle: something must end before something else can start."""
    starting = Counter(_assigned_place(step.action) for step in steps if step.action.kind in ("create", "replace"))
    idle = {(name, label): n for name, f in evidence.clusters.items() for label, n in (f.idle or {}).items()}
    return {place for place, count in starting.items() if place is not None and count > idle.get(place, 0)}


def _in_scarce_places(
    steps: Sequence[_Step], living: Mapping[str, Units], evidence: Evidence, scarce: Container[Place]
) -> set[str]:
    """Operations in such places that end whatever happens."""
    wanted = {step.action.address for step in steps}
    return {
        unit.operation
        for address, units in living.items()
        if address not in wanted
        for cluster, unit in units
        if isinstance(spec := evidence.specs.get(unit.operation), AgentSpec) and (cluster, spec.partition) in scarce
    }


def _assigned_place(action: Action) -> Place | None:
    """Of a replica on a node that joined by itself."""
    spec = action.spec
    return (spec.cluster, spec.partition) if isinstance(spec, AgentSpec) and spec.assigned else None


def _in_the_way_of_others(steps: Sequence[_Step], living: Mapping[str, Units], evidence: Evidence) -> set[str]:
    """Operations of gateways that leave or change, and have a port that a new one of another name needs."""
    starting = [step.action for step in steps if step.action.kind in ("create", "replace")]
    leaving = {unit.operation for units in living.values() for _, unit in units}
    leaving -= {step.action.former or step.action.operation for step in steps if step.action.kind == "keep"}
    leaving -= {action.operation for action in starting}
    return {
        operation
        for operation in leaving
        for action in starting
        if action.former != operation
        and isinstance(action.spec, GatewaySpec)
        and isinstance(former := evidence.specs.get(operation), GatewaySpec)
        and clash(former, action.spec)
    }


def _devices(spec: UnitSpec | None) -> tuple[int, ...]:
    return spec.device_indices if isinstance(spec, AgentSpec) else ()


def _without_former(step: _Step) -> _Step:
    """A replacement whose former unit ends before everything else, because another one needs its devices."""
    if step.action.kind != "replace":
        return step
    return _Step(msgspec.structs.replace(step.action, kind="create", former="", reason="its place goes to another"))


def _step(
    want: WantedUnit,
    evidence: Evidence,
    living: Mapping[str, Units],
    expiring: Mapping[str, Succession],
    asked: Container[str],
) -> _Step:
    facts = evidence.clusters[want.cluster]
    if not facts.known:
        return _Step(want.action("unknown", reason=f"{want.cluster} is unknown: {facts.reason}"))
    units = living.get(want.address)
    if units is None:
        dead = dormant(evidence, want.address, want.cluster)
        extra = want.spec.is_extra
        if (extra or dead is not None) and want.address not in asked:
            reason = EXTRA_REASON if extra or dead is None else f"it starts when somebody asks: {dead.reason}"
            return _Step(want.action("keep", reason=reason, spec=want.spec))
        reason = ASKED_REASON if extra or dead is not None else _obituary(facts.unit(want.address))
        operation = next_operation(evidence, want.address)
        return _Step(want.action("create", reason=reason, operation=operation, spec=want.spec))
    cluster, unit = units[0]
    same = cluster == want.cluster and unit.spec_digest == spec_digest(_comparable(want.spec, unit, evidence))
    again = expiring.get(unit.operation)
    stays = cluster == want.cluster and len(units) == 1 and (again is None or again.in_place)
    if stays and unit.in_force and updatable(evidence.specs.get(unit.operation), want.spec):
        return _updated(want, unit, evidence, again)
    if same and again is None:
        return _resumed(want, units, evidence)
    succession = again if same else None
    former = evidence.specs.get(unit.operation)
    return _Step(
        want.action(
            "replace",
            reason="" if succession is None else succession.reason,
            changes=() if former is None else changed_fields(former, want.spec),
            operation=next_operation(evidence, want.address),
            former=unit.operation,
            spec=want.spec,
        ),
        _order(want, unit, again, former),
    )


def _updated(want: WantedUnit, unit: ObservedUnit, evidence: Evidence, lack: Succession | None) -> _Step:
    """It takes over while it serves: a gateway keys and rules, an agent whom it serves and where the gateways are, both
    another certificate.
    """
    changes = changed_fields(evidence.specs[unit.operation], want.spec)
    if not changes and lack is None and unit.in_force == "current":
        return _Step(want.action("keep", former=unit.operation))
    if lack is not None:
        reason = lack.reason
    else:
        reason = IN_PLACE_REASON if changes else f"what was written before is not in force: {unit.detail or 'not yet'}"
    action = want.action("update", reason=reason, changes=changes, operation=unit.operation, spec=want.spec)
    if lack is not None and lack.cause == "certificate":
        action = msgspec.structs.replace(action, renews=True)
    return _Step(action)


def _comparable(wanted: UnitSpec, unit: ObservedUnit, evidence: Evidence) -> UnitSpec:
    """Without what the release that started a unit did not write down: an upgrade replaces nothing."""
    former = evidence.specs.get(unit.operation)
    if isinstance(wanted, AgentSpec) and isinstance(former, AgentSpec) and former.job is msgspec.UNSET:
        return msgspec.structs.replace(wanted, job=msgspec.UNSET)
    told = isinstance(former, GatewaySpec) and former.replicas is not msgspec.UNSET
    if isinstance(wanted, GatewaySpec) and not told and not unit.in_force:
        return msgspec.structs.replace(wanted, replicas=msgspec.UNSET)
    return wanted


def _obituary(dead: ObservedUnit | None) -> str:
    if dead is None:
        return ""
    end = f"the former one {'was killed' if dead.state == 'killed' else 'ended'}"
    return f"{end}: {dead.reason}" if dead.reason else end


def _resumed(want: WantedUnit, units: Units, evidence: Evidence) -> _Step:
    """What is wanted lives already, or is on its way."""
    _, unit = units[0]
    if unit.state == "pending" and unit.job:
        return _Step(want.action("keep", reason=f"it waits in the queue: {unit.detail}", former=unit.operation))
    if len(units) > 1:  # the new one was started, the old one not yet stopped
        action = want.action(
            "replace",
            reason="goes on with a replacement that was cut off",
            operation=unit.operation,
            former=units[1][1].operation,
            spec=want.spec,
        )
        in_the_way = _in_the_way(want.spec, evidence.specs.get(action.former), units[1][1])
        return _Step(action, "ports" if in_the_way else "resumed")
    if unit.state == "pending":
        reason = "goes on with a submission that was cut off"
        return _Step(want.action("create", reason=reason, operation=unit.operation, spec=want.spec))
    return _Step(want.action("keep", former=unit.operation))


def _order(want: WantedUnit, unit: ObservedUnit, succession: Succession | None, former: UnitSpec | None) -> Order:
    if _in_the_way(want.spec, former, unit):
        return "ports"
    if unit.state == "pending":
        return "queue"
    return "nodes" if succession is not None and succession.stop_first else "start-first"


def _in_the_way(wanted: UnitSpec, former: UnitSpec | None, unit: ObservedUnit) -> bool:
    """Of a gateway whether its successor needs its ports, and cannot have them while it runs. One that moves starts
    first: agents hear of it from the one that they have.
    """
    if not isinstance(wanted, GatewaySpec):
        return False
    if isinstance(former, GatewaySpec) and unit.hands_over and unit.ready and former.mesh == wanted.mesh:
        return False
    return not isinstance(former, GatewaySpec) or clash(former, wanted)


def changed_fields(before: UnitSpec, after: UnitSpec) -> tuple[str, ...]:
    """``field: old → new`` of every field that differs, and counts."""
    old, new = msgspec.to_builtins(without_hubs(before)), msgspec.to_builtins(without_hubs(after))
    keys = sorted({*old, *new})
    return tuple(
        f"{key}: {_short(old.get(key))} → {_short(new.get(key))}" for key in keys if old.get(key) != new.get(key)
    )


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _turn(action: Action) -> tuple[int, int, str]:
    starts = action.kind in ("create", "replace")
    if action.kind == "update" and not is_gateway(action):
        return (TURN_OF_AGENTS, 0, action.address)
    return (TURN[action.kind], 0 if is_gateway(action) == starts else 1, action.address)


def is_gateway(action: Action) -> bool:
    return Address.parse(action.address).kind == "gateway"
