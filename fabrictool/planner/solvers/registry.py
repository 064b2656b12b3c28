"""The solvers by name, as `fabrictool plan --solver` takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.solvers.cp import CpSolver, CpUniformSolver
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.memp import MempSolver
from fabrictool.planner.solvers.reschedule import RescheduleSolver
from fabrictool.planner.solvers.tabu import TabuSolver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.problem import Solver

SOLVERS: Mapping[str, type[Solver]] = {
    "exact": ExactSolver,
    "cp": CpSolver,
    "cp-uniform": CpUniformSolver,
    "memp": MempSolver,
    "reschedule": RescheduleSolver,
    "tabu": TabuSolver,
}
"""The first one is the default."""
