"""The objectives one after another, of any program: which of them users feel, how they compare, how they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.fairness import FAIRNESS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.planner.formulation import Formulation
    from fabrictool.planner.problem import Option, PlacementProblem, Solution
    from fabrictool.planner.program import ProgramSolution

TOLERANCE = 1e-6
"""Slack with which a solved stage is kept, relative to its value (and absolute near zero)."""
LATENCY_TOLERANCE = 0.005
"""Slack of the latency stage, above its bound; the forecast's own band is far wider
(`fabrictool.simulator.calibration`)."""
TOLERANCE_OF_WHAT_RUNS = {"latency": 0.05, "cost": 0.01, "energy": 0.01, "carbon": 0.01}
"""Where something runs: what a stage may be above the best that moves could reach, beyond what they cost, so that fewer
of them are made. Less than the forecast's error, and less than an operator would move a replica for. None of what is
unserved or misses its SLO: a share of all of it may be all of a small model's."""
LOADS = ("served", "survived", "slo", "excess", "quality")
"""Stages whose values are requests/s, mostly none: of these, dust is measured by the demand."""
TIE_BREAK = "tie-break"
TIDYING = ("moves", "replicas", TIE_BREAK)
"""Stages that choose among placements which are equally good to their users."""
NOUNS = {
    "fairness": "the largest share that a model or group lacks",
    "served": "unserved demand",
    "survived": "demand unserved after its losses, one by one,",
    "slo": "load that misses the SLO",
    "excess": "load times its distance from the SLO",
    "quality": "load behind the first variant",
    "preference": "replicas against the wishes of `place`",
    "latency": "requests in the system",
    "cost": "cost",
    "energy": "power",
    "carbon": "carbon",
    "moves": "started or stopped",
    "replicas": "in all",
}
"""What a stage keeps small."""


def stage_names(problem: PlacementProblem) -> list[str]:
    """The objectives in the order in which they are solved."""
    fairness = [FAIRNESS] if FAIRNESS in problem.objective else []
    objective = [name for name in problem.objective if name != FAIRNESS]
    if "slo" in objective:
        # Of what cannot meet its SLO, no more is lost than has to be.
        objective.insert(objective.index("slo") + 1, "excess")
    later = ["preference"]
    if "quality" not in objective and any(option.steps_down for option in problem.options):
        later.insert(0, "quality")
    at = objective.index("excess") + 1 if "slo" in objective else 0
    objective[at:at] = later
    survived = ["survived"] if any(need.survive for need in problem.needs) else []
    return list(dict.fromkeys([*fairness, "served", *survived, *objective, "moves", "replicas", TIE_BREAK]))


def user_stages(problem: PlacementProblem) -> list[str]:
    """Those that users feel, in this order."""
    return [name for name in stage_names(problem) if name not in TIDYING]


def clean(value: float) -> float:
    """Without the solver's last digits, which differ between machines."""
    return round(value, 6) + 0.0


def values_of(solution: Solution) -> dict[str, float]:
    return {stage.name: stage.objective for stage in solution.stages}


def proved(solution: Solution) -> bool:
    """Whether nothing that users feel can be better."""
    felt = [stage for stage in solution.stages if stage.name not in TIDYING]
    return all(stage.searched - stage.bound <= 2 * tolerance(stage.name, stage.searched) for stage in felt)


def tolerance(name: str, value: float) -> float:
    """Differences up to this are none: the slack with which the stage is kept while later ones are solved."""
    return max(rounding(value), LATENCY_TOLERANCE * value) if name == "latency" else rounding(value)


def kept(problem: PlacementProblem, name: str, value: float, bound: float) -> float:
    """The most that a solved stage may come to while later ones are solved.

    Of a tolerance, what the search has left of it: both together are at most so far above the bound.
    """
    return max(value + rounding(value), bound + slack(problem, name, bound))


def slack(problem: PlacementProblem, name: str, value: float) -> float:
    """By how much a solved stage may be above its value while later ones that users feel are solved.

    Where something runs, by nothing: what those would gain by it they would gain by moves.
    """
    return rounding(value) if problem.runs else tolerance(name, value)


def spared(problem: PlacementProblem, names: Iterable[str]) -> dict[str, float]:
    """Of stages that were solved: the share that each may be above its value so that less has to move."""
    shares = {name: TOLERANCE_OF_WHAT_RUNS.get(name, 0.0) for name in names} if problem.runs else {}
    return {name: share for name, share in shares.items() if share}


def residual(problem: PlacementProblem, name: str, value: float) -> float:
    """So far above its bound is a stage that is as good as can be: the solvers' rows hold within as much."""
    return 10 * TOLERANCE * max(1.0, abs(value), demand(problem, name))


def demand(problem: PlacementProblem, name: str) -> float:
    """All requests/s, of a stage that is counted in them; else 0."""
    return sum(need.rate * need.priority for need in problem.needs) if name in LOADS else 0.0


def rounding(value: float) -> float:
    """The difference up to which a solver may take two values for the same."""
    return TOLERANCE * max(1.0, abs(value))


def in_order(
    formulation: Formulation, names: Iterable[str], *, seconds: float, seed: int
) -> tuple[dict[str, float], ProgramSolution] | None:
    """One stage after another, each kept at its least: their values, and the last answer.

    None when the rows contradict each other. Raises FabrictoolError FT2902 when a stage found nothing in `seconds`.
    """
    values: dict[str, float] = {}
    answer: ProgramSolution | None = None
    for name in names:
        if not formulation.terms(name):
            continue
        answer = formulation.minimise(name, seconds=seconds, seed=seed)
        if answer is None:
            return None
        values[name] = formulation.value(name, answer)
        formulation.keep(name, values[name] + rounding(values[name]))
    return None if answer is None else (values, answer)


def first_change(
    before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str]
) -> tuple[str, float] | None:
    """The first of the stages that differs, and by how much it is larger after; None when all are the same."""
    for name in names:
        was = before.get(name, 0.0)
        change = after.get(name, 0.0) - was
        # Twice: both may have used their slack.
        if abs(change) > 2 * tolerance(name, was):
            return name, change
    return None


def amount(name: str, value: float, currency: str) -> str:
    """A stage's value with its unit, such as ``3.1 CHF/h``."""
    units = {
        "served": "req/s",
        "survived": "req/s",
        "slo": "req/s",
        "quality": "req/s",
        "preference": "replicas",
        "cost": f"{currency}/h" if currency else "",
        "energy": "W",
        "carbon": "g CO2e/h",
        "moves": "replicas",
        "replicas": "replicas",
    }
    if name == FAIRNESS:
        return f"{number(100 * value)}%"
    text, unit = number(value), units.get(name, "")
    return f"{text} {'replica' if (text, unit) == ('1', 'replicas') else unit}".rstrip()


def number(value: float) -> str:
    """Three digits, or all before the point; the solver's dust is 0."""
    return "0" if abs(value) < 2 * TOLERANCE else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def where(option: Option) -> str:
    """``CLUSTER/PARTITION (tp 2)``; of a mixed pipeline, all its stages."""
    if option.others:
        places = " + ".join(f"{'/'.join(pool.key)} (tp {tp})" for pool, tp in option.stages)
    else:
        cut = [f"{name} {of}" for name, of in (("pp", option.pp), ("dp", option.dp)) if of > 1]
        variant = [option.variant] if option.variant else []
        places = f"{'/'.join(option.pool.key)} ({', '.join([f'tp {option.tp}', *cut, *variant])})"
    return places if option.phase == "unified" else f"{places} for {option.phase}"
