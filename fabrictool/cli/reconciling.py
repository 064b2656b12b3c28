"""``reconcile``: look, say, heal, and again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InfeasibleError,
    InterruptedByUserError,
    UnreachableError,
)
from fabrictool.cli.fabric_answers import DriftLine, HealingLine, NotHealedLine
from fabrictool.cli.output import data, json_line, print_problems, say

if TYPE_CHECKING:
    from fabrictool.applier.apply import Applier, Interrupt
    from fabrictool.cli.source import Source
    from fabrictool.planner.healing import Healing
    from fabrictool.state.fabric import Fabric


INTERVAL_S = 60.0
DORMANT_INTERVAL_S = 10.0
"""While requests may come for which a replica has to be started."""


@dataclass(frozen=True, slots=True)
class ReconcileOptions:
    """What the command line asks for."""

    watch: bool
    interval: float | None
    """Seconds; None: as often as is needed."""
    dry_run: bool
    prune: bool
    max_delete: int
    as_json: bool
    detailed: bool


def reconcile_fabric(source: Source, options: ReconcileOptions) -> int:
    """Returns the exit code of the last look."""
    from fabrictool.applier.apply import Interrupt
    from fabrictool.cli.applying import begin_stream, finishing

    begin_stream(as_json=options.as_json)
    interrupt = Interrupt()
    with source.fabric() as fabric, finishing(interrupt):
        applier = _applier(fabric, source, interrupt, as_json=options.as_json)
        while True:
            code, dormant = _look(applier, options)
            if not options.watch:
                return code
            usual = DORMANT_INTERVAL_S if dormant else INTERVAL_S
            until = time.monotonic() + (usual if options.interval is None else options.interval)
            while time.monotonic() < until and not interrupt.count:
                time.sleep(0.1)
            if interrupt.count:
                say("reconciling stopped; everything that runs keeps running")
                return 0


def _applier(fabric: Fabric, source: Source, interrupt: Interrupt, *, as_json: bool) -> Applier:
    from fabrictool.applier.apply import Applier
    from fabrictool.base.clock import SystemClock
    from fabrictool.cli.applying import reporter
    from fabrictool.planner.readset import healing_facts
    from fabrictool.state.tenantkeys import tenant_keys

    try:
        keys = tenant_keys(source.blueprint, os.environ)
    except FabrictoolError as error:
        print_problems(error.problems)
        say("tenant keys unavailable; replicas can be restarted, a gateway cannot")
        keys = None
    return Applier(fabric, SystemClock(), reporter(as_json=as_json), keys, healing_facts, interrupt, queue_wait_s=0.0)


def _look(applier: Applier, options: ReconcileOptions) -> tuple[int, bool]:
    """The exit code, and whether replicas are dormant. Of a watch a passing trouble is said, the next look follows."""
    from fabrictool.applier.reconcile import allowed, capped, look, passes, tell_expected

    dormant = False
    try:
        healing = look(applier.fabric, now=time.time(), prune=options.prune, watches=options.watch)
        dormant = healing.dormant + healing.extra > 0
        _show(healing, options)
        if not options.dry_run:
            try:
                tell_expected(healing, applier.fabric, applier.clock)
            except FabrictoolError as error:  # clients are told something vague instead
                print_problems(error.problems)
            plan, left_out = allowed(healing, max_delete=options.max_delete, watches=options.watch)
            print_problems(left_out)
            given_up = capped(healing, applier.fabric, applier.clock)
            if plan.changes:
                applier.apply(plan, heals=True)
            if given_up:
                raise AppliedInPartError(given_up)
    except FabrictoolError as error:
        if not options.watch or not passes(error):
            raise
        if not isinstance(error, InterruptedByUserError):
            print_problems(error.problems)
        return 0, dormant
    if not options.watch and (code := _unhealed(healing)):
        return code, dormant
    return (2 if options.detailed and healing.drift else 0), dormant


def _unhealed(healing: Healing) -> int:
    """The exit code of what no healing mends: a cluster that does not answer, a job that cannot start, the cap."""
    kinds = {drift.kind for drift in healing.drift}
    if "unreachable" in kinds:
        return UnreachableError.exit_code
    if "stuck" in kinds:
        return InfeasibleError.exit_code
    return AppliedInPartError.exit_code if healing.capped else 0


def _show(healing: Healing, options: ReconcileOptions) -> None:
    from fabrictool.cli.plan_text import action_lines

    if options.as_json:
        for drift in healing.drift:
            json_line(DriftLine(kind=drift.kind, address=drift.address, cluster=drift.cluster, text=drift.text))
        for action in healing.plan.changes:
            json_line(HealingLine(action=action.kind, address=action.address, text=action.reason))
        for text in healing.held:
            json_line(NotHealedLine(text=text))
        return
    for drift in healing.drift:
        data(f"  ~ {drift.kind:<11} {drift.text}")
    for text in healing.held:
        data(f"  ! held        {text}")
    if healing.plan.changes:
        data("\n".join(action_lines(healing.plan, 0)))
    if any(drift.kind == "unreachable" for drift in healing.drift):
        say(
            "a cluster does not answer: nothing on it is touched; with `enabled: false` in the inventory, "
            "`fabrictool plan` places its replicas elsewhere"
        )
    if healing.dormant:
        many = healing.dormant != 1
        say(f"{healing.dormant} replica{'s'[:many]} ended for want of requests, and start{'s'[many:]} for the next one")
    if not healing.drift:
        say("nothing has drifted")
    elif options.dry_run and healing.plan.changes:
        say("next: fabrictool reconcile")
