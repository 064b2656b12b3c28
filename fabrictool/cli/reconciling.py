"""``reconcile``: look, say, heal, and again."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fabrictool.base.errors import AppliedInPartError, FabrictoolError, InterruptedByUserError, StaleError
from fabrictool.cli.output import data, json_line, print_problems, say

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.applier.apply import Applier, Interrupt
    from fabrictool.applier.fabric import Fabric
    from fabrictool.applier.reconcile import Reconciliation
    from fabrictool.blueprint import Loaded


def reconcile_fabric(
    blueprint: Path | None,
    inventory: Path | None,
    *,
    watch: bool,
    interval: float,
    dry_run: bool,
    prune: bool,
    max_delete: int,
    as_json: bool,
    detailed: bool,
) -> int:
    """Returns the exit code of the last look."""
    from fabrictool.applier.apply import Interrupt
    from fabrictool.cli.applying import JsonReporter, TextReporter, finishing
    from fabrictool.cli.fabrics import load, open_fabric

    loaded = load(blueprint, inventory)
    fabric = open_fabric(loaded)
    interrupt = Interrupt()
    reporter = JsonReporter() if as_json else TextReporter()
    applier = _applier(fabric, loaded, interrupt, reporter)
    code = 0
    with finishing(interrupt):
        while True:
            code = _pass(fabric, applier, prune=prune, dry_run=dry_run, max_delete=max_delete, as_json=as_json,
                         detailed=detailed, lenient=watch)  # fmt: skip
            if not watch:
                return code
            until = time.monotonic() + interval
            while time.monotonic() < until and not interrupt.count:
                time.sleep(0.1)
            if interrupt.count:
                say("reconciling ended; what runs goes on")
                return 0


def _applier(fabric: Fabric, loaded: Loaded, interrupt: Interrupt, reporter: object) -> Applier:
    from fabrictool.applier.apply import Applier
    from fabrictool.applier.reconcile import healing_facts
    from fabrictool.applier.tenantkeys import tenant_keys
    from fabrictool.base.clock import SystemClock

    try:
        keys = tenant_keys(loaded.blueprint, os.environ)
    except FabrictoolError as error:
        print_problems(error.problems)
        say("without the tenants' keys a gateway cannot be started again; replicas can")
        keys = None
    return Applier(
        folder=fabric.folder,
        trust=fabric.trust,
        clusters=fabric.clusters,
        clock=SystemClock(),
        reporter=reporter,  # type: ignore[arg-type]
        keys=keys,
        lineage=fabric.lineage,
        observe=fabric.observe,
        read_set=lambda observed: healing_facts(fabric.folder.read_state(), observed),
        interrupt=interrupt,
        queue_wait_s=0.0,
    )


def _pass(
    fabric: Fabric,
    applier: Applier,
    *,
    prune: bool,
    dry_run: bool,
    max_delete: int,
    as_json: bool,
    detailed: bool,
    lenient: bool,
) -> int:
    """One look. `lenient`: a trouble is said, and the next look follows."""
    from msgspec.structs import replace

    from fabrictool.applier.journal import history
    from fabrictool.applier.reconcile import look

    try:
        found = look(fabric, history(fabric.folder.journal), now=time.time(), prune=prune)
        _show(found, as_json=as_json, dry_run=dry_run)
        deletions = [action for action in found.plan.changes if action.kind == "delete"]
        plan = found.plan
        if len(deletions) > max_delete and not dry_run:
            if not lenient:
                raise too_many(len(deletions), max_delete)
            print_problems(too_many(len(deletions), max_delete).problems)
            plan = replace(plan, actions=tuple(action for action in plan.actions if action.kind != "delete"))
        if plan.changes and not dry_run:
            applier.apply(plan, heals=True)
    except (AppliedInPartError, StaleError) as error:
        if not lenient:
            raise
        print_problems(error.problems)
    except InterruptedByUserError:
        if not lenient:
            raise
    except FabrictoolError as error:
        if not lenient or not any(problem.transient for problem in error.problems):
            raise
        print_problems(error.problems)
    else:
        return 2 if detailed and found.drift else 0
    return 0


def too_many(count: int, allowed: int) -> FabrictoolError:
    """FT3001: nothing is stopped then; a watch heals the rest."""
    from fabrictool.base.errors import PolicyDeniedError

    message = f"healing would stop {count} units, --max-delete allows {allowed}"
    return PolicyDeniedError.of("FT3001", message, hint="`fabrictool reconcile --dry-run` names them")


def _show(found: Reconciliation, *, as_json: bool, dry_run: bool) -> None:
    from fabrictool.cli.plan_text import action_lines

    if as_json:
        for each in found.drift:
            event = {"kind": each.kind, "address": each.address, "cluster": each.cluster, "text": each.text}
            json_line({"type": "drift", **event})
        for action in found.plan.changes:
            json_line({"type": "healing", "action": action.kind, "address": action.address, "text": action.reason})
        for text in found.held:
            json_line({"type": "held", "text": text})
        return
    for each in found.drift:
        data(f"  ~ {each.kind:<11} {each.text}")
    for text in found.held:
        data(f"  ! held        {text}")
    if found.plan.changes:
        data("\n".join(action_lines(found.plan, 0)))
    if any(each.kind == "unreachable" for each in found.drift):
        say("a cluster does not answer: nothing on it is touched; `fabrictool plan` can place its replicas elsewhere")
    if not found.drift:
        say("nothing has drifted")
    elif dry_run and found.plan.changes:
        say("next: fabrictool reconcile")
