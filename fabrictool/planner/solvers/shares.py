"""What each model may use of a stage that is kept, while later ones are solved for some of the models at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.fairness import FAIRNESS, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.planner.formulation import Formulation

SLACK = 1e-7
"""With which stages before are kept by each model, beyond their tolerance."""

Limits = dict[str, dict[str, float]]
"""Stage → model → what it may come to."""


def shared_out(name: str, values: Mapping[str, float], limit: float) -> dict[str, float]:
    """By model, what all together may use: by what they do, `values`."""
    if name == FAIRNESS:  # nobody has any of it: it holds for each
        return dict.fromkeys(values, limit)
    total = sum(values.values())
    left = limit - total
    return {model: value + left * (value / total if total else 1 / len(values)) for model, value in values.items()}


def keep_limits(formulation: Formulation, limits: Limits, models: Iterable[str]) -> None:
    """All stages, of some of the models."""
    for stage, limits_of in limits.items():
        keep_limit(formulation, stage, {model: limits_of[model] for model in models})


def keep_limit(formulation: Formulation, stage: str, limits: Mapping[str, float]) -> None:
    """Every model may have used its own slack."""
    formulation.keep(stage, joined(stage, [limit + SLACK * max(1.0, limit) for limit in limits.values()]))
