"""A policy file and a plan: what is denied, what is warned of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import Place, PolicyDeniedError, Problem, StaleError
from fabrictool.cli.output import json_line, print_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from fabrictool.domain.plan import Plan


def policy_problems(file: Path | None, plan: Plan, protected: Callable[[], Collection[str]]) -> list[Problem] | None:
    """FT3002 for each denial and FT3003 for each warning, with the limit's place in `file`; None without one.

    `protected` is asked only where a rule needs the blueprint's protected models.
    """
    from fabrictool.blueprint.policy import load_policy
    from fabrictool.planner.policy import evaluate

    if file is None:
        return None
    loaded = load_policy(file)
    limits = [rule.deny or rule.warn for rule in loaded.policy.rules]
    asked = any(each is not None and each.keep_protected for each in limits)
    findings = evaluate(loaded.policy, plan, protected=protected() if asked else (), now=time.time())
    return [
        Problem(
            "FT3002" if finding.effect == "deny" else "FT3003",
            f"{finding.rule}: {finding.text}",
            loaded.place(finding.index, finding.effect, finding.limit),
            "change the blueprint so that the limit is kept" if finding.effect == "deny" else None,
            severity="error" if finding.effect == "deny" else "warning",
        )
        for finding in findings
    ]


def protected_models(
    blueprint: Path | None, inventory: Path | None, overlay: str | None, scenario: str | None
) -> frozenset[str]:
    """Models with ``protect: true``."""
    from fabrictool.cli.fabrics import load

    models = load(blueprint, inventory, overlay=overlay, scenario=scenario, quiet=True).blueprint.models
    return frozenset(name for name, model in models.items() if model.protect)


def denied(problems: Sequence[Problem]) -> bool:
    """Whether one of them is a denial."""
    return any(problem.severity == "error" for problem in problems)


def check_policy(file: Path | None, plan: Plan, protected: Callable[[], Collection[str]], *, as_json: bool) -> None:
    """Say what is warned of; raise PolicyDeniedError (exit code 6) with all that is denied."""
    problems = policy_problems(file, plan, protected) or []
    if as_json:
        for row in as_rows(problems):
            json_line({"type": "policy", **row})
    print_problems(problem for problem in problems if problem.severity == "warning")
    if denied(problems):
        raise PolicyDeniedError(problem for problem in problems if problem.severity == "error")


def check_reviewed(reviewed: Plan, fresh: Plan) -> None:
    """Raise FT4405 with every difference."""
    from fabrictool.planner.compare import differences

    hint = "make a plan anew and have it reviewed; nothing was changed"
    found = [Problem("FT4405", text, Place(thing="plan"), hint) for text in differences(reviewed, fresh)]
    if found:
        raise StaleError(found)


def as_rows(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [
        {
            "effect": "deny" if problem.severity == "error" else "warn",
            "rule": problem.message.partition(":")[0],
            "message": problem.message,
            "place": str(problem.place),
        }
        for problem in problems
    ]
