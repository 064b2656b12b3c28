"""Limits of a month, over the hours of a schedule: what is used in all of them is no more than their share of it.

Of what is written by the month a horizon of h hours may use h/730, in whichever of its steps; what else was used in the
month, and what will be, is not looked at. Used is what replicas hold in their steps, and what they hold before to load,
as far as that is within the horizon. All other limits hold in each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.planner.limits import DUST, HOURS_A_MONTH, most_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.planner.problem import ResourceLimit
    from fabrictool.planner.steps import Step


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of a month, and a horizon's share of it."""

    limit: ResourceLimit
    most: float
    """Device hours, or money."""

    @property
    def unit(self) -> str:
        """Such as ``device hours`` or ``CHF``."""
        return self.limit.unit.rpartition("/")[0]

    def over(self, used: float) -> float:
        """By how much of itself it is exceeded."""
        beyond = used - self.most * (1 + DUST)
        return 0.0 if beyond <= 0.0 else beyond / (self.most or 1.0)


def is_of_a_month(limit: ResourceLimit) -> bool:
    return limit.scale == HOURS_A_MONTH


def quotas_of(steps: Sequence[Step]) -> tuple[Quota, ...]:
    """With what is left of them beside what no option stands for."""
    problem, hours = steps[0].problem, math.fsum(step.hours for step in steps)
    return tuple(Quota(limit, hours * most_of(problem, limit)) for limit in problem.limits if is_of_a_month(limit))


def without_quotas(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with those limits alone that hold in each of them."""
    return tuple(_limited(step, [its for its in step.problem.limits if not is_of_a_month(its)]) for step in steps)


def shared_out(steps: Sequence[Step], quotas: Sequence[Quota], used: Sequence[Sequence[float]]) -> tuple[Step, ...]:
    """The steps with a part of each quota as their limit, in proportion to what they would use of it.

    `used`: by step and quota.
    """
    totals = [math.fsum(its) for its in zip(*used, strict=True)]
    shared = []
    for step, parts in zip(steps, used, strict=True):
        limits = [its for its in step.problem.limits if not is_of_a_month(its)]
        for quota, part, total in zip(quotas, parts, totals, strict=True):
            share = part / total if total else 1.0 / len(steps)
            limits.append(replace(quota.limit, most=quota.most * share / step.hours, taken=0.0))
        shared.append(_limited(step, limits))
    return tuple(shared)


def _limited(step: Step, limits: Sequence[ResourceLimit]) -> Step:
    return replace(step, problem=replace(step.problem, limits=tuple(limits)))
