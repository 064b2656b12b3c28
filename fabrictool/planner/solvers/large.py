"""Problems too large for one integer program: the relaxation rounded, then improved a few models at a time.

The linear relaxation over all options gives the bounds, and the options that matter: those that it uses or nearly uses.
Its whole part, filled up, is the first placement. Then some models after others are placed anew, as an integer program
of their own with the devices that all others leave; as every objective is a sum over models, what these gain all gain.
Sweeps over all models go on until they gain little. Limits are on the work, not on the time: same seed, same answer.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import PlacementProblem, Solution, StageResult
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import TIDYING, TIE_BREAK, TOLERANCE, clean, stage_names, tolerance
from fabrictool.planner.work import SearchWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fabrictool.planner.problem import PoolKey
    from fabrictool.planner.program import ProgramSolution

NEAREST = 12
"""Options a model beyond those that the relaxation uses: the ones that it would cost least."""
CLOSE = 0.001
"""Relative gap to the relaxation at which a stage ends."""
TOGETHER = 120
"""Options of the models that are placed anew together."""
MEDIATORS, MEDIATING = 6, 2
"""Each party has so many of so many models with the largest demand."""
NODES, GAP = 100, 5e-4
"""Limits of one such program."""
SLACK = 1e-6
"""With which stages before are kept by each model, beyond their tolerance."""
FIRST_NODES = 2000
"""Of the search for any placement, where the rounded relaxation breaks a rule."""
GAIN = 5e-4
"""A sweep that gains less, of the value, is the last one of its stage."""
SWEEPS_PER_SECOND = 0.2
"""By which a time limit becomes one of sweeps."""


class LargeSearch:
    """One run over all objectives in turn, and what it has placed so far."""

    def __init__(self, problem: PlacementProblem, solver: str, deadline_s: float, seed: int) -> None:
        self._problem, self._solver, self._seconds, self._seed = problem, solver, deadline_s, seed
        self._work = SearchWork(deadline_s)
        self._rng = random.Random(f"large {seed}")
        self._core = _core(problem, stage_names(problem), deadline_s, seed)
        self._relaxed = Formulation(problem, range(len(problem.options)), whole=False)
        self.whole = Formulation(problem, self._core.options, whole=True)
        self._mine: dict[str, list[int]] = defaultdict(list)
        for i in self._core.options:
            self._mine[problem.options[i].model].append(i)
        self._repeatable = True
        self._counts: dict[int, int] = {}
        self._loads: dict[int, float] = {}
        self._values: dict[str, dict[str, float]] = {}
        """Stage → model → value."""
        self._limits: dict[str, dict[str, float]] = {}
        """Of the stages before."""
        self._bounds: dict[str, float] = {}

    def stage(self, name: str) -> Iterator[Solution]:
        """Minimises one objective, and keeps it from then on."""
        self._bounds[name] = bound = self._bound(name)
        if not self._values:
            self._begin(name)
        self._judge(name)
        yield self._solution()
        for _ in range(max(1, int(SWEEPS_PER_SECOND * self._work.share(name)))):
            before = self._total(name)
            if before - bound <= max(TOLERANCE, CLOSE * abs(before)):
                break
            self._work.spent += 1 / SWEEPS_PER_SECOND
            yield from self._sweep(name)
            if before - self._total(name) <= GAIN * abs(before):
                break
        self._limits[name] = {
            model: value + (tolerance(name, value) if value else 0.0) for model, value in self._values[name].items()
        }
        self._keep_limit(self._relaxed, name, self._limits[name])

    def _bound(self, name: str) -> float:
        """What no solution can be better than, with the earlier stages where they are."""
        lowest = self._core.lowest
        if name in lowest and all(self._total(n) <= low + tolerance(n, low) for n, low in self._bounds.items()):
            return lowest[name]  # each stage before is at its own least
        below = self._relaxed.minimise(name, seconds=self._seconds, seed=self._seed)
        if below is None and not self._values:
            raise explain_infeasible(self._problem)
        # There is a placement: that the relaxation denies it is a matter of digits, and leaves no bound but zero.
        return below.objective if below is not None else 0.0

    def _begin(self, name: str) -> None:
        """The relaxation rounded; where that breaks a rule, whatever the integer solver finds first."""
        self._counts = {i: count for i, count in self._core.rounded.items() if count}
        if self._loaded(name) is None:
            answer = self.whole.minimise(name, seconds=self._seconds, seed=self._seed, gap=CLOSE, nodes=FIRST_NODES)
            if answer is None:
                raise explain_infeasible(self._problem)
            self._repeatable = answer.in_time
            self._counts = self.whole.counts(answer)

    def _loaded(self, name: str) -> tuple[Formulation, ProgramSolution] | None:
        """The counts as they are, with the loads that are best for this stage."""
        loads = Formulation.of_counts(self._problem, self._counts, self._core.options)
        self._keep_limits(loads, [need.model for need in self._problem.needs])
        answer = loads.minimise(name, seconds=self._seconds, seed=self._seed)
        return None if answer is None else (loads, answer)

    def _judge(self, name: str) -> None:
        if not self._judged(name):
            raise explain_infeasible(self._problem)

    def _judged(self, name: str) -> bool:
        """Sets loads and values; False when the counts cannot keep what was kept before."""
        loaded = self._loaded(name)
        if loaded is None:
            return False
        loads, answer = loaded
        self._loads = loads.loads(answer)
        self._values = {stage: loads.shares(stage, answer) for stage in (*self._limits, name)}
        return True

    def _total(self, name: str) -> float:
        return sum(self._values[name].values())

    # -- a few models at a time ---------------------------------------------------------------------------------

    def _sweep(self, name: str) -> Iterator[Solution]:
        """Every model once, in groups that chance puts together."""
        former = dict(self._counts), {stage: dict(limits) for stage, limits in self._limits.items()}
        for models in self._parties():
            self._place_anew(name, models)
        if not self._judged(name):
            # Parties share links by even parts, whatever others use of them: together they may ask for too much.
            self._counts, self._limits = former
            self._judge(name)
        yield self._solution()

    def _parties(self) -> list[list[str]]:
        order = [need.model for need in self._problem.needs if self._mine[need.model]]
        self._rng.shuffle(order)
        parties: list[list[str]] = [[]]
        size = 0
        for model in order:
            if size and size + len(self._mine[model]) > TOGETHER:
                parties.append([])
                size = 0
            parties[-1].append(model)
            size += len(self._mine[model])
        return [party + self._mediators(party) for party in parties]

    def _mediators(self, party: Sequence[str]) -> list[str]:
        """Some of the models with the largest demand: they stand on many pools and can give way in each."""
        largest = sorted(self._problem.needs, key=lambda need: (-need.rate, need.model))[:MEDIATORS]
        names = [need.model for need in largest if self._mine[need.model]]
        chosen = self._rng.sample(names, min(len(names), MEDIATING))
        return [name for name in chosen if name not in party]

    def _place_anew(self, name: str, models: Sequence[str]) -> None:
        part, indices = self._part(models)
        try:
            better = self._best(name, part, models)
        except FabrictoolError:  # nothing was found within the limits, or no numbers that can be trusted
            better = None
        if better is None:
            return
        counts, loads, answer = better
        for at, i in enumerate(indices):
            self._counts.pop(i, None)
            if counts.get(at):
                self._counts[i] = counts[at]
        self._values[name] |= loads.shares(name, answer)
        for stage, limits in self._limits.items():
            # What one of them uses of another's limit, the other has no more.
            used = loads.shares(stage, answer)
            left = (sum(limits[model] for model in models) - sum(used.values())) / len(models)
            limits |= {model: value + left for model, value in used.items()}

    def _best(
        self, name: str, part: PlacementProblem, models: Sequence[str]
    ) -> tuple[dict[int, int], Formulation, ProgramSolution] | None:
        """Better counts for a part, and the loads that show it; None when there are none."""
        program = Formulation(part, range(len(part.options)), whole=True)
        self._keep_limits(program, models)
        rough = program.minimise(name, seconds=self._seconds, seed=self._seed, gap=GAP, nodes=NODES)
        if rough is None:
            return None
        self._repeatable = self._repeatable and rough.in_time
        # The integer solver's rows hold to a share of their size; loads are judged by the linear program.
        counts = program.counts(rough)
        loads = Formulation.of_counts(part, counts)
        self._keep_limits(loads, models)
        answer = loads.minimise(name, seconds=self._seconds, seed=self._seed)
        former = sum(self._values[name][model] for model in models)
        if answer is None or loads.value(name, answer) >= former - TOLERANCE * max(1.0, abs(former)):
            return None
        return counts, loads, answer

    def _keep_limits(self, formulation: Formulation, models: Iterable[str]) -> None:
        for stage, limits in self._limits.items():
            self._keep_limit(formulation, stage, {model: limits[model] for model in models})

    def _keep_limit(self, formulation: Formulation, stage: str, limits: Mapping[str, float]) -> None:
        """Every model may have used its own slack."""
        formulation.keep(stage, sum(limit + SLACK * max(1.0, limit) for limit in limits.values()))

    def _part(self, models: Sequence[str]) -> tuple[PlacementProblem, list[int]]:
        """The problem of these models with what the others leave, and its options' indices in the whole."""
        problem, members = self._problem, set(models)
        indices = [i for i in self._core.options if problem.options[i].model in members]
        taken: Counter[tuple[PoolKey, int]] = Counter()
        pools = {pool.key: pool for pool in problem.pools}
        for i, count in self._counts.items():
            if problem.options[i].model not in members:
                for (key, size), blocks in problem.options[i].blocks.items():
                    for smaller in range(1, size + 1):
                        taken[key, smaller] += count * blocks * pools[key].parts_lost(size, smaller)
        part = replace(
            problem,
            needs=tuple(need for need in problem.needs if need.model in members),
            options=tuple(problem.options[i] for i in indices),
            current={key: count for key, count in problem.current.items() if key[0] in members},
            links=self._links_left(members),
            taken=taken,
        )
        return part, indices

    def _links_left(self, members: set[str]) -> dict[tuple[str, str], float]:
        """What the hand-overs of other models leave of the links: an even part, as who uses which is not looked at."""
        split = {o.model for o in self._problem.options if o.phase != "unified"}
        share = len(split & members) / max(1, len(split))
        return {link: octets * share for link, octets in self._problem.links.items()}

    def _solution(self) -> Solution:
        return Solution(
            {i: count for i, count in sorted(self._counts.items()) if count},
            self._loads,
            tuple(
                StageResult(n, clean(self._total(n)), clean(min(self._total(n), self._bounds[n]))) for n in self._values
            ),
            self._solver,
            optimal=False,
            repeatable=self._repeatable,
            work=self._work.spent,
        )


@dataclass(frozen=True, slots=True)
class _Core:
    """What the relaxation says of a large problem."""

    options: Sequence[int]
    """Those that it uses in any stage, those that it nearly uses, and those that rules or habit name."""
    lowest: dict[str, float]
    """By stage: what it reaches at best when each stage before is at its own least."""
    rounded: dict[int, int]
    """By option: whole counts near those of the last stage that users feel."""


def _core(problem: PlacementProblem, names: list[str], deadline_s: float, seed: int) -> _Core:
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    core = {i for i, o in enumerate(problem.options) if o.key in problem.fixed or o.key in problem.current}
    for need in problem.needs:
        core |= {i for i in problem.of(need.model) if any(problem.options[i].pool.within(*pin) for pin in need.pins)}
    lowest: dict[str, float] = {}
    distance: dict[int, float] = {}
    usage: dict[int, float] = {}
    for name in names:
        if name == TIE_BREAK or not relaxed.terms(name):
            continue
        answer = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None:
            raise explain_infeasible(problem)
        lowest[name] = answer.objective
        used = relaxed.usage(answer)
        core |= {i for i, replicas in used.items() if replicas > TOLERANCE}
        if name not in TIDYING:
            # What tidying up costs within the tolerances is not lost before it begins.
            usage, distance = used, {i: relaxed.distance(answer, i) for i in relaxed.chosen}
            nearest: dict[str, list[tuple[float, int]]] = defaultdict(list)
            for i, option in enumerate(problem.options):
                nearest[option.model].append((distance[i], i))
            for options in nearest.values():
                core |= {i for _, i in sorted(options)[:NEAREST]}
        relaxed.keep(name, answer.objective + tolerance(name, answer.objective))
    chosen = sorted(core)
    near = rounded(problem, {i: usage.get(i, 0.0) for i in chosen}, distance)
    return _Core(chosen, lowest, near)
