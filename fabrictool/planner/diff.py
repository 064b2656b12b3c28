"""Wanted units against observed units: the actions that lead from one to the other.

Unknown is not absent: a unit on a cluster that did not answer is neither started elsewhere nor stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import Address
from fabrictool.domain.plan import Action, spec_digest
from fabrictool.domain.specs import AgentSpec, GatewaySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.domain.specs import UnitSpec

START_FIRST = "start the new one, then stop the old one"
ORDER = {"create": 0, "replace": 1, "delete": 2, "keep": 3, "unknown": 4}


@dataclass(frozen=True, slots=True)
class Succession:
    """Why a unit needs a successor although nothing about it changed."""

    reason: str
    stop_first: bool = False
    """It must be gone by then, and its successor can only start later: its nodes are taken away."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One unit that should run."""

    address: str
    cluster: str
    spec: UnitSpec
    summary: str


def actions(
    wanted: Mapping[str, Wanted],
    observed: Observed,
    operation: Callable[[str], str],
    *,
    running_specs: Mapping[str, UnitSpec],
    expiring: Mapping[str, Succession] = MappingProxyType({}),
) -> tuple[Action, ...]:
    """The actions, gateways first where something starts and last where something ends.

    `operation` gives the id of an address's next unit; `running_specs` the specs of running units, for naming what
    changed; `expiring` the operations that need a successor although nothing changed, and why.
    """
    living = observed.living()
    found = [_wanted_action(want, observed, living, operation, running_specs, expiring) for want in wanted.values()]
    found, early = _make_room(found, living, running_specs)
    used = {name for action in found for name in (action.operation, action.former)} | _awaiting(living)
    untouched = {action.address for action in found if action.kind == "unknown"}
    for address, units in living.items():
        reason = (
            "a replacement that was cut off left it" if address in wanted else "the blueprint no longer asks for it"
        )
        found += [
            delete(cluster, unit, "another one needs its devices" if unit.operation in early else reason)
            for cluster, unit in units
            if unit.operation not in used and address not in untouched
        ]
    for name, facts in observed.clusters.items():
        damaged = [unit for unit in facts.units if unit.state == "damaged"]
        early |= {unit.operation for unit in damaged}  # they may hold a port or devices that a new one needs
        found += [delete(name, unit, f"what it is cannot be read any more: {unit.reason}") for unit in damaged]
    return tuple(sorted(found, key=lambda action: (action.former not in early, *_order(action))))


def _awaiting(living: Mapping[str, list[tuple[str, ObservedUnit]]]) -> set[str]:
    """Units that serve while their successor waits in a queue: a slot given up may not come back for days."""
    return {unit.operation for units in living.values() if units[0][1].state == "pending" for _, unit in units[1:]}


def _make_room(
    found: list[Action], living: Mapping[str, list[tuple[str, ObservedUnit]]], specs: Mapping[str, UnitSpec]
) -> tuple[list[Action], set[str]]:
    """Where a new replica gets devices on which another runs, that one ends first.

    Returns the actions and the operations of units that must be deleted before anything else starts.
    """
    holders: dict[tuple[str, int], set[str]] = {}
    for units in living.values():
        for cluster, unit in units:
            spec = specs.get(unit.operation)
            for index in spec.device_indices if isinstance(spec, AgentSpec) else ():
                holders.setdefault((cluster, index), set()).add(unit.operation)
    early: set[str] = set()
    changed = []
    for action in found:
        spec = action.spec if action.kind in ("create", "replace") else None
        indices = spec.device_indices if isinstance(spec, AgentSpec) else ()
        there = {name for index in indices for name in holders.get((action.cluster, index), ())} - {action.operation}
        early |= there - {action.former}
        if action.former in there and not action.stop_first:
            reason = (
                action.reason.removesuffix(START_FIRST) + "stop the old one, then start the new one: no device is spare"
            )
            changed.append(msgspec.structs.replace(action, stop_first=True, reason=reason))
        else:
            changed.append(action)
    return [_without_former(action) if action.former in early else action for action in changed], early


def _without_former(action: Action) -> Action:
    """A replacement whose former unit ends before everything else, because another one needs its devices."""
    if action.kind != "replace":
        return action
    reason = "its devices go to another"
    return msgspec.structs.replace(action, kind="create", former="", stop_first=False, reason=reason)


def delete(cluster: str, unit: ObservedUnit, reason: str) -> Action:
    """The end of one unit."""
    return Action(
        kind="delete",
        address=unit.address,
        cluster=cluster,
        summary=f"{cluster}   {unit.operation}",
        reason=reason,
        former=unit.operation,
    )


def _wanted_action(
    want: Wanted,
    observed: Observed,
    living: Mapping[str, list[tuple[str, ObservedUnit]]],
    operation: Callable[[str], str],
    running_specs: Mapping[str, UnitSpec],
    expiring: Mapping[str, Succession],
) -> Action:
    here = living.get(want.address)
    facts = observed.clusters[want.cluster]
    if not facts.known:
        return Action(
            kind="unknown",
            address=want.address,
            cluster=want.cluster,
            summary=want.summary,
            reason=f"{want.cluster} is unknown: {facts.reason}",
        )
    if here is None:
        dead = facts.unit(want.address)
        reason = "" if dead is None else f"the former one {'was killed' if dead.state == 'killed' else 'ended'}"
        if dead is not None and dead.reason:
            reason += f": {dead.reason}"
        return Action(
            kind="create",
            address=want.address,
            cluster=want.cluster,
            summary=want.summary,
            reason=reason,
            operation=operation(want.address),
            spec=want.spec,
        )
    cluster, unit = here[0]
    same = cluster == want.cluster and unit.spec_digest == spec_digest(want.spec)
    if same and unit.operation not in expiring:
        if unit.state == "pending" and unit.job:
            reason = f"it waits in the queue: {unit.detail}"
            return Action(
                kind="keep",
                address=want.address,
                cluster=cluster,
                summary=want.summary,
                reason=reason,
                former=unit.operation,
            )
        if len(here) > 1:  # the new one was started, the old one not yet stopped
            return Action(
                kind="replace",
                address=want.address,
                cluster=want.cluster,
                summary=want.summary,
                reason="goes on with a replacement that was cut off",
                operation=unit.operation,
                former=here[1][1].operation,
                stop_first=isinstance(want.spec, GatewaySpec),
                spec=want.spec,
            )
        if unit.state == "pending":
            return Action(
                kind="create",
                address=want.address,
                cluster=cluster,
                summary=want.summary,
                reason="goes on with a submission that was cut off",
                operation=unit.operation,
                spec=want.spec,
            )
        return Action(kind="keep", address=want.address, cluster=cluster, summary=want.summary, former=unit.operation)
    before = running_specs.get(unit.operation)
    succession = expiring.get(unit.operation, Succession(""))
    order = START_FIRST
    if isinstance(want.spec, GatewaySpec):
        order = "stop the old one, then start the new one: its ports are the same"
    elif unit.state == "pending":
        order = "take the old one out of the queue, then submit the new one"
    elif succession.stop_first:
        order = "stop the old one; the new one starts when its nodes are back"
    return Action(
        kind="replace",
        address=want.address,
        cluster=want.cluster,
        summary=want.summary,
        reason="; ".join(filter(None, (succession.reason if same else "", order))),
        changes=() if before is None else changed_fields(before, want.spec),
        operation=operation(want.address),
        former=unit.operation,
        stop_first=isinstance(want.spec, GatewaySpec) or succession.stop_first or unit.state == "pending",
        spec=want.spec,
    )


def changed_fields(before: UnitSpec, after: UnitSpec) -> tuple[str, ...]:
    """``field: old → new`` of every field that differs."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    keys = sorted({*old, *new})
    return tuple(
        f"{key}: {_short(old.get(key))} → {_short(new.get(key))}" for key in keys if old.get(key) != new.get(key)
    )


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _order(action: Action) -> tuple[int, int, str]:
    gateway = isinstance(action.spec, GatewaySpec) or Address.parse(action.address).kind == "gateway"
    starts = action.kind in ("create", "replace")
    return (ORDER[action.kind], 0 if gateway == starts else 1, action.address)
