"""A policy file and a plan: what is denied, what is warned of."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from fabrictool.base.errors import Place, PolicyDeniedError, Problem, StaleError
from fabrictool.cli.fabric_answers import PolicyLine, PolicyRow
from fabrictool.cli.output import json_line, print_problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from fabrictool.cli.source import Source
    from fabrictool.domain.plan import Plan


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """What one review rule says of a plan."""

    rule: str
    problem: Problem

    @property
    def denied(self) -> bool:
        return self.problem.severity == "error"


def verdicts_on(plan: Plan, file: Path | None, source: Source) -> list[RuleVerdict] | None:
    """FT3002 for each denial and FT3003 for each warning, with the limit's place in `file`; None without one.

    The blueprint is read only where a rule needs its protected models.
    """
    from fabrictool.blueprint.policy import load_policy
    from fabrictool.planner.policy import evaluate

    if file is None:
        return None
    loaded = load_policy(file)
    limits = [rule.deny or rule.warn for rule in loaded.policy.rules]
    asked = any(limit is not None and limit.keep_protected for limit in limits)
    protected = [name for name, model in source.blueprint.models.items() if model.protect] if asked else []
    return [
        RuleVerdict(
            finding.rule,
            Problem(
                "FT3002" if finding.effect == "deny" else "FT3003",
                f"{finding.rule}: {finding.text}",
                loaded.place(finding.index, finding.effect, finding.limit),
                "change the blueprint so that the limit is kept" if finding.effect == "deny" else None,
                severity="error" if finding.effect == "deny" else "warning",
            ),
        )
        for finding in evaluate(loaded.policy, plan, protected=protected, now=time.time())
    ]


def check_policy(plan: Plan, file: Path | None, source: Source, *, as_json: bool) -> None:
    """Say what is warned of; raise PolicyDeniedError (exit code 6) with all that is denied."""
    verdicts = verdicts_on(plan, file, source) or []
    if as_json:
        for row in as_rows(verdicts):
            json_line(PolicyLine(**structs.asdict(row)))
    print_problems(verdict.problem for verdict in verdicts if not verdict.denied)
    denials = [verdict.problem for verdict in verdicts if verdict.denied]
    if denials:
        raise PolicyDeniedError(denials)


def exit_code(verdicts: Iterable[RuleVerdict]) -> int:
    """6 when one of them is a denial."""
    return 6 if any(verdict.denied for verdict in verdicts) else 0


def check_reviewed(reviewed: Plan, fresh: Plan) -> None:
    """Raise FT4405 with every difference."""
    from fabrictool.planner.compare import differences

    hint = "make a new plan and have it reviewed; nothing was changed"
    problems = [Problem("FT4405", text, Place(thing="plan"), hint) for text in differences(reviewed, fresh)]
    if problems:
        raise StaleError(problems)


def as_rows(verdicts: Sequence[RuleVerdict]) -> list[PolicyRow]:
    return [
        PolicyRow(
            effect="deny" if verdict.denied else "warn",
            rule=verdict.rule,
            message=verdict.problem.message,
            place=str(verdict.problem.place),
        )
        for verdict in verdicts
    ]
