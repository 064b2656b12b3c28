r"""Max-min fairness: the rows that bound the largest share that anybody lacks, and how that stage's value is read.

For model m with the demand :math:`\lambda_m`, of which it could be served :math:`r_m` if it had the whole fabric, and
each of its groups: :math:`z \ge p_m (u / \lambda - (1 - r_m / \lambda_m))`. The column z is nobody's own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.planner.problem import ModelNeed
    from fabrictool.planner.program import Program, Terms

FAIRNESS = "fairness"
"""Its value is the largest of the models' values, not their sum."""

Lacks = list[tuple[int, float, float]]
"""(column of what is unserved, its share in 1 of that, the share that must lack) of all who ask for a model."""


def joined(name: str, values: Iterable[float]) -> float:
    """A stage's value, of those of its models."""
    return max(values, default=0.0) if name == FAIRNESS else sum(values)


def fair_rows(program: Program, need: ModelNeed, reach: float, fairest: int, unserved: int, groups: Terms) -> Lacks:
    """Adds the rows of a model with a demand; `reach`: requests/s of it that could be served; `unserved`: the column of
    the whole demand; `groups`: (column, requests/s that are asked for).
    """
    lacks = [(unserved, 1.0 / need.rate, 1.0 - reach / need.rate)]
    if reach >= need.rate:
        # Of a model that may not have enough replicas for all, some group has to lack what all do.
        lacks += [(column, 1.0 / rate, 0.0) for column, rate in groups]
    for column, share, inevitable in lacks:
        program.row(-need.priority * inevitable, math.inf, [(fairest, 1.0), (column, -need.priority * share)])
    return lacks
