"""Asking for consent, carrying a plan out with progress, and turning Ctrl-C into an orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from fabrictool.applier.wave import QUEUE_WAIT_S
from fabrictool.base.errors import (
    AppliedInPartError,
    PolicyDeniedError,
    UnreachableError,
    UsageError,
)
from fabrictool.cli.answers import StreamVersion
from fabrictool.cli.fabric_answers import EndLine, StepLine
from fabrictool.cli.output import data, json_line, paint, print_problems, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from fabrictool.applier.apply import Interrupt, Reporter
    from fabrictool.cli.fabric_answers import StepKind
    from fabrictool.cli.source import Source
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.state.fabric import Fabric

_MARKS = {"intent": "…", "started": "·", "waiting": "·", "done": "✓", "queued": "✓", "held": "✗", "failed": "✗"}


class TextReporter:
    """One line a step on stderr; why one failed is said once, in the errors that end the command."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, action: Action, kind: str, text: str) -> None:
        mark = _MARKS[kind]
        if kind in ("done", "queued", "held", "failed"):
            mark = paint(mark, "good" if kind in ("done", "queued") else "error")
        words = {"intent": action.kind, "done": "", "held": "held back; see below", "failed": "failed; see below"}
        say(f"  {mark} {time.monotonic() - self._began:6.1f} s  {action.address}  {words.get(kind, text)}".rstrip())


class JsonReporter:
    """One NDJSON event a step on stdout."""

    def step(self, action: Action, kind: str, text: str) -> None:
        json_line(StepLine(type=cast("StepKind", kind), action=action.kind, address=action.address, text=text))


def begin_stream(*, as_json: bool) -> None:
    """The first line of NDJSON has the version; it comes before whatever else the command has to tell."""
    if as_json:
        json_line(StreamVersion())


def reporter(*, as_json: bool) -> Reporter:
    """Lines for people, or events for programs."""
    return JsonReporter() if as_json else TextReporter()


def destroy_fabric(source: Source, *, yes: bool, as_json: bool) -> int:
    """Plan the end of everything, ask, carry it out; returns the exit code."""
    from fabrictool.cli.plan_text import action_lines
    from fabrictool.planner.plan import destruction

    begin_stream(as_json=as_json)
    with source.fabric() as fabric:
        plan, unreached = destruction(source.identity.digest, fabric.gather(now=time.time()))
        left = [problem for problem in unreached if problem.severity == "error"]
        print_problems(problem for problem in unreached if problem.severity == "warning")
        if not plan.changes:
            if left:
                raise UnreachableError(left)
            say(f"nothing of fabric {plan.fabric} is running")
            return 0
        if not as_json:
            data("\n".join(action_lines(plan, 0)))
        confirm(plan, yes=yes, max_delete=None, question="Destroy it?")
        code = carry_out(plan, source, fabric, as_json=as_json)
    if left:
        raise AppliedInPartError(left)
    return code


def confirm(plan: Plan, *, yes: bool, max_delete: int | None, question: str = "Apply?") -> None:
    """Ask a person, or require ``--yes``; raises FT4007 without consent and FT3001 above the allowed deletions."""
    deletions = sum(action.kind == "delete" for action in plan.changes)
    if max_delete is not None and deletions > max_delete:
        message = f"the plan deletes {deletions} unit{'s'[: deletions != 1]}, but --max-delete allows {max_delete}"
        raise PolicyDeniedError.of("FT3001", message, hint="review the plan; raise --max-delete if it is right")
    count = len(plan.changes)
    changes = f"{count} change{'s'[: count != 1]}"
    ask(f"{changes} to fabric {plan.fabric}. {question}", yes=yes, first="review the plan first")


def ask(question: str, *, yes: bool, first: str) -> None:
    """A person, or ``--yes``; raises FT4007 without consent. `first`: what to do before giving it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError.of("FT4007", "no terminal to confirm on; use --yes", hint=first)
    say(f"{question} Only 'yes' is accepted:")
    if input().strip() != "yes":
        raise UsageError.of("FT4007", "not confirmed; nothing was changed")


def carry_out(plan: Plan, source: Source, fabric: Fabric, *, as_json: bool, queue_wait_s: float = QUEUE_WAIT_S) -> int:
    """Apply `plan`; returns the exit code."""
    from fabrictool.applier.apply import Applier
    from fabrictool.base.clock import SystemClock
    from fabrictool.domain.specs import GatewaySpec
    from fabrictool.planner.readset import KEYS, read_set
    from fabrictool.state.tenantkeys import tenant_keys

    # A missing secret must be said before anything is started; what only stops needs none.
    needed = KEYS in plan.read_set or any(
        isinstance(action.spec, GatewaySpec) and action.spec.ingress for action in plan.changes
    )
    keys = tenant_keys(source.blueprint, os.environ) if needed else None
    digest, key_digest = source.identity.digest, keys.digest if keys is not None else ""
    applier = Applier(
        fabric,
        SystemClock(),
        reporter(as_json=as_json),
        keys,
        lambda _, observed: read_set(digest, observed, key_digest),
        queue_wait_s=queue_wait_s,
    )
    with finishing(applier.interrupt):
        changed = applier.apply(plan) and bool(plan.changes)
    print_problems(applier.complaints)
    if as_json:
        json_line(EndLine(plan=plan.id, changed=changed))
    elif changed:
        say(f"applied {len(plan.changes)} change{'s'[: len(plan.changes) != 1]} (plan {plan.id[:8]})")
    elif not plan.changes:
        say("nothing to do: everything in the plan already serves" if plan.actions else "nothing to do")
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
