"""One look of ``reconcile``: what has drifted, and carrying out what heals it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.applier.journal import Journal, failures, history
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    Place,
    PolicyDeniedError,
    Problem,
    StaleError,
)
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.address import Address
from fabrictool.domain.specs import EXPECTED
from fabrictool.planner.healing import heal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.plan import Plan
    from fabrictool.planner.healing import Healing
    from fabrictool.state.fabric import Fabric


def look(fabric: Fabric, *, now: float, prune: bool, watches: bool = False) -> Healing:
    """Compare what runs with what was applied last; changes nothing. `now` in wall seconds.

    One that `watches` does not wait where only a second look can say who lives: that one comes.
    """
    evidence = fabric.gather(now=now, patient=not watches)
    return heal(evidence, failures(history(fabric.folder.journal)), now=now, prune=prune)


def capped(healing: Healing, fabric: Fabric, clock: Clock) -> list[Problem]:
    """Addresses that healing gave up for now; each becomes an event when it is given up, not at every look."""
    if not healing.capped:
        return []
    last = {entry.address: entry.kind for entry in history(fabric.folder.journal)}
    journal = Journal(fabric.folder.journal, healing.plan.id, clock)
    problems = []
    for address in healing.capped:
        text = "it was started so often in the last hour that healing waits"
        if last.get(address) != "capped":
            journal.write("capped", address=address, action="create", text=text)
        hint = "`fabrictool status` and `fabrictool logs` may tell why; `fabrictool apply` starts it again"
        problems.append(Problem("FT5112", f"{address}: {text}", Place(thing=address), hint, transient=True))
    return problems


def tell_expected(healing: Healing, fabric: Fabric, clock: Clock) -> None:
    """Tell gateways where requests wait for a replica when one is to serve: they tell their clients.

    Raises
    ------
    FabrictoolError
        FT4003 another writer, and others where a gateway's folder cannot be written.
    """
    if not healing.waiting:
        return
    files = {EXPECTED: msgspec.json.encode(healing.expected, order="deterministic")}
    with fabric.folder.lease("reconcile", now=clock.wall()):
        for cluster, operation in healing.waiting:
            there = fabric.clusters[cluster]
            spec = there.spec(operation)  # as it is now: another apply may have told it anew
            there.update([NewUnit(operation, str(Address.of(spec)), spec, files)])


def allowed(healing: Healing, *, max_delete: int, watches: bool) -> tuple[Plan, Sequence[Problem]]:
    """What of a healing may be carried out, and what is to be said of the rest.

    One that `watches` leaves out all deletions where there are more than `max_delete`; others refuse it as a whole.

    Raises
    ------
    PolicyDeniedError
        FT3001 more units would be stopped, and nobody watches.
    """
    deletions = sum(action.kind == "delete" for action in healing.plan.changes)
    if deletions <= max_delete:
        return healing.plan, ()
    message = f"healing would stop {deletions} unit{'s'[: deletions != 1]}, but --max-delete allows {max_delete}"
    error = PolicyDeniedError.of("FT3001", message, hint="`fabrictool reconcile --dry-run` names them")
    if not watches:
        raise error
    return healing.without_deletions(), error.problems


def passes(error: FabrictoolError) -> bool:
    """Whether the next look may find it gone."""
    if isinstance(error, AppliedInPartError | StaleError | InterruptedByUserError):
        return True
    return any(problem.transient for problem in error.problems)
