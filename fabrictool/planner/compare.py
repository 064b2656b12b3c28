"""Whether two plans do the same: what was reviewed, and what would be carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.canonical import digest
from fabrictool.domain.specs import without_hubs

if TYPE_CHECKING:
    from fabrictool.domain.plan import Action, Plan


def differences(reviewed: Plan, fresh: Plan) -> tuple[str, ...]:
    """How `fresh` is another change than `reviewed`, in words; empty when it is the same.

    What a person reviews counts: which units are started, replaced and stopped, where, and with what. Operation ids
    and the scheduler's outlook do not: a replica that died and came back meanwhile changes them.
    """
    lines = []
    if reviewed.fabric != fresh.fabric:
        lines.append(f"it is for fabric {reviewed.fabric}, not {fresh.fabric}")
    if reviewed.blueprint_digest != fresh.blueprint_digest:
        lines.append("it was made of another blueprint or inventory")
    before, after = _changes(reviewed), _changes(fresh)
    for address in sorted({*before, *after}):
        old, new = before.get(address, []), after.get(address, [])
        if old == new:
            continue
        if [kind for kind, *_ in old] == [kind for kind, *_ in new]:
            lines.append(
                f"{address}: {', '.join(kind for kind, *_ in new)}, but elsewhere or with another specification"
            )
        else:
            words = [", ".join(kind for kind, *_ in steps) or "nothing" for steps in (old, new)]
            lines.append(f"{address}: {words[0]} was reviewed, {words[1]} would be done")
    return tuple(lines)


def _changes(plan: Plan) -> dict[str, list[tuple[str, str, str, bool]]]:
    changes: dict[str, list[tuple[str, str, str, bool]]] = {}
    for action in plan.changes:
        changes.setdefault(action.address, []).append(_essence(action))
    return {address: sorted(steps) for address, steps in changes.items()}


def _essence(action: Action) -> tuple[str, str, str, bool]:
    spec = "" if action.spec is None else digest(msgspec.to_builtins(without_hubs(action.spec)))
    return (action.kind, action.cluster, spec, action.stop_first)
