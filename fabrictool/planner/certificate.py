"""How good the placement is proved to be: the solver's claims, of the problem as it was asked.

Lessons of the replay change tables, and with them only what levels count for: the same placements are possible, none of
them at a lower value than before. So what no placement of the problem as asked can be better than, none with the
lessons is either; the other way round it does not hold. A placement that lessons led to is therefore measured against
the bounds of the problem without them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.plan import Certificate, Stage
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.stages import TIDYING, clean, kept, residual, tolerance
from fabrictool.planner.work import units

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.planner.chosen import Chosen
    from fabrictool.planner.problem import PlacementProblem, Solution, StageResult


WORTH_SAYING = 1e-3
"""Share of a stage that was given up for fewer moves."""


def certificate(problem: PlacementProblem, solution: Solution, seed: int) -> Certificate:
    """The solver's claim, stage by stage, and of the stage where it is farthest from proved."""
    import ortools  # noqa: PLC0415 - --help must not pay for it

    stages = tuple(
        Stage(name=s.name, objective=s.objective, bound=s.bound, gap=_gap(problem, s), spared=_spared(s))
        for s in solution.stages
    )
    felt = [stage for stage in stages if stage.name not in TIDYING]
    # Among equals the first after ``served``, which is 0 of 0 in any fabric that is large enough.
    worst = max([*felt[1:], *felt[:1]], key=lambda stage: stage.gap)
    return Certificate(
        solver=solution.solver,
        seed=seed,
        optimal=solution.optimal,
        stages=stages,
        tables_sha256=problem.tables_sha256,
        stage=worst.name,
        objective=worst.objective,
        bound=worst.bound,
        gap=worst.gap,
        version=ortools.__version__,
        work=units(solution.work),
        ended=solution.ended,
    )


def certificate_of(chosen: Chosen, seed: int) -> Certificate:
    """The certificate of what was chosen, with or without lessons."""
    own = certificate(chosen.problem, chosen.solution, seed)
    if chosen.asked is None:
        return own
    problem, first = chosen.asked
    stages = tuple(_as_asked(problem, first, chosen.solution, seed))
    asked = certificate(chosen.problem, replace(chosen.solution, stages=stages), seed)
    return Certificate(
        **{name: getattr(asked, name) for name in asked.__struct_fields__ if name not in _OF_LESSONS},
        optimal=own.optimal and not asked.gap,
        lessons=len({lesson.kind for lesson in chosen.situation.learned}),
        gap_with_lessons=own.gap,
    )


_OF_LESSONS = ("optimal", "lessons", "gap_with_lessons")


def _as_asked(problem: PlacementProblem, first: Solution, taught: Solution, seed: int) -> Iterable[StageResult]:
    """The stages of a placement that lessons led to, with bounds of the problem without them.

    Bounds of the first search hold as long as each earlier stage is as good as there; from then on those of the
    relaxation that has the earlier stages where they are now.
    """
    known = {stage.name: stage for stage in first.stages}
    # Columns that a search made may be better than all that the first one looked at.
    holds = set(taught.added) <= set(first.added)
    whole = replace(problem, options=problem.options + tuple(o for o in taught.added if o not in problem.options))
    relaxed: Formulation | None = None
    for at, stage in enumerate(taught.stages):
        before = known.get(stage.name)
        if holds and before is not None:
            bound = before.bound
            holds = stage.objective <= before.objective + tolerance(stage.name, before.objective)
        elif stage.name in TIDYING:
            bound = 0.0  # nobody asks, and it takes long where the fabric is large
        else:
            if relaxed is None:
                relaxed = Formulation(whole, range(len(whole.options)), whole=False)
                for earlier in taught.stages[:at]:
                    relaxed.keep(earlier.name, kept(whole, earlier.name, earlier.objective, earlier.bound))
            bound = _below(relaxed, stage.name, seed)
            relaxed.keep(stage.name, kept(whole, stage.name, stage.objective, bound))
        yield replace(stage, bound=clean(min(bound, stage.objective)))


def _below(relaxed: Formulation, name: str, seed: int) -> float:
    """What no solution can be better than; no stage can be below zero."""
    try:
        answer = relaxed.minimise(name, seconds=60.0, seed=seed)
    except FabrictoolError:  # cut short: it bounds nothing
        return 0.0
    return 0.0 if answer is None else answer.objective


def _gap(problem: PlacementProblem, stage: StageResult) -> float:
    # Bounds are of stages before which others were kept within the solver's tolerance, which they may have used.
    above = stage.searched - stage.bound
    dust = above <= residual(problem, stage.name, stage.searched)
    return 0.0 if dust else tidy(above / max(abs(stage.searched), 1e-9))


def _spared(stage: StageResult) -> float | msgspec.UnsetType:
    more = stage.objective - stage.searched
    return tidy(more / stage.searched) if more > WORTH_SAYING * abs(stage.searched) > 0.0 else msgspec.UNSET
