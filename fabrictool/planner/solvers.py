"""The solvers by name, as `fabrictool plan --solver` takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.exact import ExactSolver
from fabrictool.planner.memp import MempSolver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.problem import Solver

SOLVERS: Mapping[str, type[Solver]] = {"exact": ExactSolver, "memp": MempSolver}
"""The first one is the default."""
