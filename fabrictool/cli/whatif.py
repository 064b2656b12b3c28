"""``plan --what-if``: a table of what would be, beside what is."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InfeasibleError
from fabrictool.cli.executors import executor_named, lost_workers_named
from fabrictool.cli.forecast_answers import WhatIf, WhatIfModel, WhatIfOutcome
from fabrictool.cli.output import data, json_data, say, table
from fabrictool.planner.explaining.whatif import Sweep, WhatIfResult, started, stopped, sweep
from fabrictool.planner.stages import amount, number, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.cli.source import Source
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.plan import ModelForecast
    from fabrictool.planner.problem import Solver

MOST_NAMED = 5
"""Models that one line names."""
PATIENCE_S = 2.0
"""A sweep that takes longer tells how far it is."""
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How the what-ifs are tried."""

    solver: Solver
    work_s: float
    seed: int
    executor: str
    workers: int | None


# Wide: what the command was given.
def show_sweep(
    expressions: Sequence[str],
    source: Source,
    evidence_of: Callable[[], Evidence],
    options: SweepOptions,
    *,
    as_json: bool,
) -> int:
    """Try each expression and print what it would change; returns the exit code."""
    from fabrictool.planner.at_once import planned_at_once
    from fabrictool.planner.plan import currency_of
    from fabrictool.planner.situation import situation_of

    evidence = evidence_of().within(source.inventory)
    situation = planned_at_once(situation_of(source.blueprint, source.inventory, evidence, time.time()))
    with (
        lost_workers_named("what-ifs"),
        executor_named(options.executor, len(expressions), options.workers) as doer,
    ):
        outcome = sweep(
            doer, situation, evidence, expressions, options.solver,
            deadline_s=options.work_s, seed=options.seed, done=_progress(len(expressions)),
        )  # fmt: skip
    if as_json:
        json_data(document(outcome))
    else:
        data(text(outcome, currency_of(source.inventory)))
    return 0 if outcome.base.feasible else InfeasibleError.exit_code


def _progress(every: int) -> Callable[[int], None]:
    began = time.monotonic()

    def show(count: int) -> None:
        passed = time.monotonic() - began
        if sys.stderr.isatty() and passed > PATIENCE_S and count < every:
            say(f"{passed:4.0f} s  {count} of {every} tried")

    return show


def document(sweep: Sweep) -> WhatIf:
    """All figures as one JSON document."""

    def row(outcome: WhatIfResult, expression: str | msgspec.UnsetType) -> WhatIfOutcome:
        both = outcome.feasible and sweep.base.feasible
        return WhatIfOutcome(
            expression=expression,
            feasible=outcome.feasible,
            problem=outcome.problem or None,
            optimal=outcome.optimal,
            repeatable=outcome.repeatable,
            models={model.model: _verdict(model) for model in outcome.models},
            stages=dict(outcome.values),
            differences={name: outcome.values[name] - sweep.base.values[name] for name in sweep.stages if both},
            started=started(sweep.base, outcome) if both else None,
            stopped=stopped(sweep.base, outcome) if both else None,
        )

    return WhatIf(
        base=row(sweep.base, msgspec.UNSET), outcomes=[row(outcome, outcome.expression) for outcome in sweep.outcomes]
    )


def _verdict(model: ModelForecast) -> WhatIfModel:
    """As ``plan --json`` has it."""
    return WhatIfModel(
        slo=model.slo,
        judge=model.judge,
        served=model.served,
        misses=model.misses,
        undecided=model.undecided,
        why=model.why,
        attainment=None if model.replay is None else model.replay.attainment,
    )


def text(sweep: Sweep, currency: str) -> str:
    """A line an expression; below it, why one has no placement, and who is not shown to meet its SLO."""
    every = [sweep.base, *sweep.outcomes]
    shown = [name for name in sweep.stages if any(outcome.values.get(name) for outcome in every)] or ["served"]
    judged = any(model.slo for outcome in every for model in outcome.models)
    rows = []
    for outcome in every:
        title = outcome.expression or AS_IT_IS
        if not outcome.feasible:
            rows.append([title, *["–"] * (len(shown) + judged), "–", "infeasible"])
            continue
        moved = f"+{started(sweep.base, outcome)} −{stopped(sweep.base, outcome)}" if sweep.base.feasible else "–"
        remarks = [*([] if outcome.optimal else ["not proved"]), *([] if outcome.repeatable else ["not repeatable"])]
        cells = [_cell(name, outcome, sweep.base, currency) for name in shown]
        rows.append([title, *cells, *([_verdicts(outcome.models)] if judged else []), moved, ", ".join(remarks)])
    headings = ["what if", *[HEADINGS.get(name, name) for name in shown], *(["SLO"] if judged else []), "replicas", ""]
    lines = [table(headings, rows)]
    for outcome in every:
        complaint = _complaint(outcome.models) if outcome.feasible else outcome.problem
        lines += [f"  ▲ {outcome.expression or AS_IT_IS}: {complaint}"] if complaint else []
    return "\n".join(lines)


def _verdicts(models: Sequence[ModelForecast]) -> str:
    """Such as ``4 meet, 1 misses``; of those that have an SLO."""
    counts: Counter[str] = Counter(model.slo for model in models if model.slo)
    words = (("meets", "meet"), ("misses", "miss"), ("undecided", "undecided"))
    several = [f"{counts[word]} {word if counts[word] == 1 else plural}" for word, plural in words if counts[word]]
    return next(iter(counts)) if counts.total() == 1 else ", ".join(several) or "–"


def _complaint(models: Sequence[ModelForecast]) -> str:
    """Who misses, and of whom it is undecided, by name."""
    parts = []
    for verdict in ("misses", "undecided"):
        names = [model.model for model in models if model.slo == verdict]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        parts += [f"{verdict}: {', '.join(names[:MOST_NAMED])}{more}"] if names else []
    return "; ".join(parts)


HEADINGS = {
    "fairness": "lacks most",
    "served": "unserved",
    "survived": "by losses",
    "slo": "misses SLO",
    "excess": "over SLO",
    "quality": "behind first",
    "latency": "open requests",
    "preference": "unwished",
}
"""Where a stage's name does not say what its value is."""


def _cell(name: str, outcome: WhatIfResult, base: WhatIfResult, currency: str) -> str:
    value = outcome.values[name]
    shown = amount(name, value, currency)
    if outcome is base or not base.feasible:
        return shown
    change = value - base.values[name]
    same = abs(change) <= 2 * tolerance(name, base.values[name])
    return shown + (" (=)" if same else f" ({'+' if change > 0 else '−'}{number(abs(change))})")
