"""One look of ``reconcile``: what has drifted, and carrying out what heals it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.applier.journal import failures, history
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    PolicyDeniedError,
    StaleError,
)
from fabrictool.planner.healing import heal

if TYPE_CHECKING:
    from fabrictool.applier.apply import Applier
    from fabrictool.base.errors import Problem
    from fabrictool.planner.healing import Healing
    from fabrictool.state.fabric import Fabric


def look(fabric: Fabric, *, now: float, prune: bool) -> Healing:
    """Compare what runs with what was applied last; changes nothing. `now` in wall seconds."""
    evidence = fabric.gather(now=now)
    return heal(evidence, failures(history(fabric.folder.journal)), now=now, prune=prune)


def mend(applier: Applier, healing: Healing, *, max_delete: int, watches: bool) -> list[Problem]:
    """Carry the healing out; one that `watches` leaves out too many deletions and says so, others refuse.

    Raises
    ------
    PolicyDeniedError
        FT3001 more units would be stopped than `max_delete`, and nobody watches. Others as `Applier.apply`.
    """
    plan, left_out = healing.plan, []
    deletions = sum(action.kind == "delete" for action in plan.changes)
    if deletions > max_delete:
        message = f"healing would stop {deletions} units, --max-delete allows {max_delete}"
        error = PolicyDeniedError.of("FT3001", message, hint="`fabrictool reconcile --dry-run` names them")
        if not watches:
            raise error
        plan, left_out = healing.without_deletions(), list(error.problems)
    if plan.changes:
        applier.apply(plan, heals=True)
    return left_out


def passes(error: FabrictoolError) -> bool:
    """Whether the next look may find it gone."""
    if isinstance(error, AppliedInPartError | StaleError | InterruptedByUserError):
        return True
    return any(problem.transient for problem in error.problems)
