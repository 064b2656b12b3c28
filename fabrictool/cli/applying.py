"""Asking for consent, carrying a plan out with progress, and turning Ctrl-C into an orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InvalidInputError,
    PolicyDeniedError,
    UnreachableError,
    UsageError,
)
from fabrictool.cli.output import data, json_line, paint, print_problems, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from fabrictool.applier.apply import Interrupt
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.planner.problem import Solution, Solver

QUEUE_WAIT_S = 900.0
"""How long `apply` waits for jobs in their queues."""
PATIENCE_S = 2.0
"""A search that takes longer tells how far it is."""
_MARKS = {"intent": "…", "started": "·", "waiting": "·", "done": "✓", "queued": "✓", "held": "✗", "failed": "✗"}


class TextReporter:
    """One line a step on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, action: Action, kind: str, text: str) -> None:
        """Say it."""
        mark = _MARKS[kind]
        if kind in ("done", "queued", "held", "failed"):
            mark = paint(mark, "good" if kind in ("done", "queued") else "error", sys.stderr)
        words = action.kind if kind == "intent" else "" if kind == "done" else f"{text}"
        say(f"  {mark} {time.monotonic() - self._began:6.1f} s  {action.address}  {words}".rstrip())


class JsonReporter:
    """One NDJSON event a step on stdout; the first line names the version."""

    def __init__(self) -> None:
        json_line({"type": "version", "format_version": "1"})

    def step(self, action: Action, kind: str, text: str) -> None:
        """Say it."""
        json_line({"type": kind, "action": action.kind, "address": action.address, "text": text})


def make_plan(
    blueprint: Path | None,
    inventory: Path | None,
    overlay: str | None,
    scenario: str | None,
    *,
    seed: int,
    time_limit: float = 60.0,
    solver: Solver | None = None,
    explain: bool = False,
    keep_best: bool = False,
) -> tuple[Plan, Observed]:
    """Load, observe, solve. With `keep_best`, Ctrl-C ends the search and not the command."""
    from fabrictool.applier.planning import plan_fabric
    from fabrictool.applier.tenantkeys import tenant_keys
    from fabrictool.cli.certificates import check_certificates
    from fabrictool.cli.fabrics import load, open_fabric

    loaded = load(blueprint, inventory, overlay=overlay, scenario=scenario)
    check_certificates(loaded.inventory)
    try:
        found = tenant_keys(loaded.blueprint, os.environ)
        keys: str | None = found.digest if found is not None else ""
    except FabrictoolError:
        keys = None  # a plan can be made and reviewed where the secrets are not; it says so
    fabric = open_fabric(loaded)
    return plan_fabric(
        fabric,
        loaded,
        seed=seed,
        now=time.time(),
        time_limit_s=time_limit,
        solver=solver,
        keys=keys,
        explain=explain,
        progress=_search_progress() if keep_best else None,
    )


def solver_named(name: str) -> Solver:
    """Raises UsageError FT9001 when there is none."""
    from fabrictool.planner.solvers.registry import SOLVERS

    if name not in SOLVERS:
        raise UsageError.of("FT9001", f"there is no solver {name!r}", hint=f"one of: {', '.join(SOLVERS)}")
    return SOLVERS[name]()


def _search_progress() -> Callable[[Solution], None]:
    """A line a better placement on a terminal's stderr, once a search takes long enough to wonder."""
    began = time.monotonic()

    def show(solution: Solution) -> None:
        passed = time.monotonic() - began
        if not sys.stderr.isatty() or passed < PATIENCE_S:
            return
        stage = solution.stages[-1]
        gap = f", at most {stage.objective - stage.bound:.3g} from the best" if stage.objective > stage.bound else ""
        say(f"{passed:4.0f} s  {stage.name} {stage.objective:.6g}{gap}; Ctrl-C takes the best so far")

    return show


def destroy_fabric(blueprint: Path | None, inventory: Path | None, *, yes: bool, as_json: bool) -> int:
    """Plan the end of everything, ask, carry it out; returns the exit code."""
    from fabrictool.applier.planning import destruction_plan
    from fabrictool.cli.fabrics import load, open_fabric
    from fabrictool.cli.plan_text import action_lines

    loaded = load(blueprint, inventory)
    made, unreached = destruction_plan(open_fabric(loaded), loaded)
    left = [problem for problem in unreached if problem.severity == "error"]
    print_problems(problem for problem in unreached if problem.severity == "warning")
    if not made.changes:
        if left:
            raise UnreachableError(left)
        say(f"nothing of fabric {made.fabric} runs")
        return 0
    if not as_json:
        data("\n".join(action_lines(made, 0)))
    confirm(made, yes=yes, max_delete=None)
    code = carry_out(made, blueprint, inventory, None, None, as_json=as_json)
    if left:
        raise AppliedInPartError(left)
    return code


def read_plan(path: Path) -> Plan:
    """A saved plan; raises FT4006 when the file is something else."""
    import msgspec

    from fabrictool.base.files import file_error
    from fabrictool.domain.plan import PLAN_API, decode_plan

    try:
        plan = decode_plan(path.read_bytes())
    except OSError as error:
        raise file_error(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "make one with `fabrictool plan -o FILE`"
        raise InvalidInputError.of("FT4006", f"not a saved plan: {error}", file=str(path), hint=hint) from error
    if plan.api != PLAN_API:
        raise InvalidInputError.of("FT4006", f"the plan has version {plan.api}, not {PLAN_API}", file=str(path))
    return plan


def confirm(plan: Plan, *, yes: bool, max_delete: int | None) -> None:
    """Ask a person, or require ``--yes``; raises FT4007 without consent and FT3001 above the allowed deletions."""
    deletions = sum(action.kind == "delete" for action in plan.changes)
    if max_delete is not None and deletions > max_delete:
        message = f"the plan deletes {deletions} units, --max-delete allows {max_delete}"
        raise PolicyDeniedError.of("FT3001", message, hint="review the plan; raise --max-delete if it is right")
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError.of("FT4007", "nobody is here to say yes", hint="--yes, after reviewing the plan")
    say(f"{len(plan.changes)} changes to fabric {plan.fabric}. Carry them out? Only 'yes' is accepted:")
    if input().strip() != "yes":
        raise UsageError.of("FT4007", "not confirmed; nothing was changed")


def carry_out(
    plan: Plan,
    blueprint: Path | None,
    inventory: Path | None,
    overlay: str | None,
    scenario: str | None,
    *,
    as_json: bool,
    queue_wait_s: float = QUEUE_WAIT_S,
) -> int:
    """Apply `plan`; returns the exit code."""
    from fabrictool.applier.apply import Applier
    from fabrictool.applier.readset import read_set
    from fabrictool.applier.tenantkeys import tenant_keys
    from fabrictool.base.clock import SystemClock
    from fabrictool.cli.fabrics import load, open_fabric

    loaded = load(blueprint, inventory, overlay=overlay, scenario=scenario)
    fabric = open_fabric(loaded)
    keys = tenant_keys(loaded.blueprint, os.environ)  # a missing secret must be said before anything is started
    applier = Applier(
        folder=fabric.folder,
        trust=fabric.trust,
        clusters=fabric.clusters,
        clock=SystemClock(),
        reporter=JsonReporter() if as_json else TextReporter(),
        keys=keys,
        lineage=fabric.lineage,
        observe=fabric.observe,
        read_set=lambda observed: read_set(loaded, observed, keys.digest if keys is not None else ""),
        queue_wait_s=queue_wait_s,
    )
    with finishing(applier.interrupt):
        changed = applier.apply(plan)
    if as_json:
        json_line({"type": "end", "plan": plan.id, "changed": changed})
    elif changed:
        say(f"applied {len(plan.changes)} changes (plan {plan.id[:8]})")
    else:
        say(f"plan {plan.id[:8]} was applied before; `fabrictool plan` tells whether it still holds")
    return 0


@contextlib.contextmanager
def finishing(interrupt: Interrupt) -> Iterator[None]:
    """Ctrl-C ends what runs inside in order."""
    former = signal.signal(signal.SIGINT, _handler(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _handler(interrupt: Interrupt) -> Any:
    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupt.press()
        if interrupt.count == 1:
            # Not print: the signal may have come in the middle of one, and buffered files are not re-entrant.
            os.write(2, b"\nfinishing the current step; nothing new is started (Ctrl-C again stops waiting)\n")

    return handle
