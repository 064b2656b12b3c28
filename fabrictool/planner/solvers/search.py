"""Solutions of the tabu search: groups of devices, what they are worth, and walking from one to a better one.

What a group can do is `groups`, what groups do together `orchestration`; both are remembered. Nodes of a partition are
alike, so groups are counted and not numbered.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.limits import open_limits
from fabrictool.planner.solvers.appraisal import appraise
from fabrictool.planner.solvers.clustering import clusters
from fabrictool.planner.solvers.groups import MOST_BLOCKS, Deduction, DeviceGroup
from fabrictool.planner.solvers.orchestration import FIELDS, Worth, worth
from fabrictool.planner.solvers.rounding import FreeDevices
from fabrictool.planner.stages import stage_names

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.planner.problem import Option, PlacementProblem, Solution
    from fabrictool.planner.solvers.groups import Blocks

STEPS, NEIGHBOURS, MEMORY = 200, 16, 50
"""Of the search; the paper's are 100, 10 and 5."""
PATIENCE = 30
"""Steps without a better solution after which the search ends."""

WHOLE = 1e-6

Change = tuple[list[DeviceGroup], list[DeviceGroup]]
"""(groups that go, groups that come)."""


@dataclass(frozen=True, slots=True)
class TabuState:
    """One solution of the search: groups, the devices that they leave, and what they are worth."""

    groups: Counter[DeviceGroup]
    room: FreeDevices
    values: dict[str, Worth]
    rank: tuple[float, ...]
    """What they are worth together, in the order of the objectives; less is better."""

    @property
    def broken(self) -> bool:
        """Whether it lacks replicas that the rules ask for, or has some that they forbid."""
        return self.rank[0] > 0.0


class TabuSearch:
    """One problem's groups, and what they are worth."""

    def __init__(self, problem: PlacementProblem, rng: random.Random) -> None:
        """Raises FabrictoolError FT2030 where the problem asks for what groups of devices are not weighed by."""
        _require_known(problem)
        self.problem, self.rng = problem, rng
        self.deduction = Deduction(problem)
        self.needs = {need.model: need for need in problem.needs}
        self.columns = {
            need.model: [i for i in problem.of(need.model) if problem.options[i].key not in problem.fixed]
            for need in problem.needs
        }
        self._order = ["broken", *(name for name in stage_names(problem) if name in FIELDS)]
        self._worths: dict[tuple[str, frozenset[tuple[int, int]]], Worth] = {}
        self._fixed: dict[str, Counter[int]] = {need.model: Counter() for need in problem.needs}
        for i, option in enumerate(problem.options):
            if option.key in problem.fixed:
                self._fixed[option.model][i] = problem.fixed[option.key]

    def option(self, group: DeviceGroup) -> Option | None:
        i = self.deduction.column(group)
        return None if i is None else self.deduction.options[i]

    def changed(self, state: TabuState, change: Change) -> TabuState | None:
        """The solution after a change; None when devices or groups for it are missing, or one cannot hold its model."""
        gone, come = change
        if not Counter(gone) <= state.groups:
            return None
        options = [self.option(group) for group in come]
        room = state.room.copy()
        for group in gone:
            former = self.option(group)
            if former is not None:
                room.give(former)
        if any(option is None or not room.take(option) for option in options):
            return None
        groups = state.groups.copy()
        groups.subtract(gone)
        groups.update(come)
        groups += Counter()
        touched = {group.model for group in (*gone, *come)}
        values = state.values | {model: self._worth(model, groups) for model in touched}
        return TabuState(groups, room, values, self._rank(values))

    def run(
        self,
        start: TabuState,
        propose: Callable[[TabuSearch, TabuState], Iterator[Change]],
        *,
        evaluations: int,
    ) -> tuple[TabuState, int]:
        """The best that a tabu search from `start` finds among the changes of `propose`, and how many it weighed."""
        best = now = start
        visited = deque([frozenset(start.groups.items())], maxlen=MEMORY)
        used = stale = 0
        for _ in range(STEPS):
            around: list[TabuState] = []
            for change in islice(propose(self, now), 4 * NEIGHBOURS):
                near = self.changed(now, change)
                if near is not None and frozenset(near.groups.items()) not in visited:
                    around.append(near)
                if len(around) == NEIGHBOURS:
                    break
            used += len(around)
            stale += 1
            if stale > PATIENCE or used >= evaluations:
                break
            if not around:
                continue  # chance proposes other changes next time
            now = min(around, key=lambda state: state.rank)
            visited.append(frozenset(now.groups.items()))
            if now.rank < best.rank:
                best, stale = now, 0
        return best, used

    @property
    def extended(self) -> PlacementProblem:
        """The problem with all columns that were made."""
        return replace(self.problem, options=tuple(self.deduction.options))

    def start(self, usage: Mapping[int, float]) -> TabuState:
        """From a relaxation's replicas by column: the whole part, and more of the same as long as that helps."""
        state = self.of_counts({i: int(used + WHOLE) for i, used in usage.items()})
        return self._completed(state, sorted(usage))

    def used(self, state: TabuState) -> set[int]:
        columns = (self.deduction.column(group) for group in state.groups)
        return {i for i in columns if i is not None} | {i for fixed in self._fixed.values() for i in fixed}

    def clustered(self, model: str) -> TabuState:
        """From clusters of well-connected nodes, each in a random phase."""
        return self._completed(self._of_clusters(model), self.columns[model])

    def _empty(self) -> TabuState:
        room = FreeDevices(self.problem.pools, self.problem.options, open_limits(self.problem))
        values = {model: self._worth(model, Counter()) for model in self.needs}
        return TabuState(Counter(), room, values, self._rank(values))

    def of_counts(self, counts: Mapping[int, int]) -> TabuState:
        """Replicas by column, as far as they find devices."""
        state = self._empty()
        for i, count in sorted(counts.items()):
            group = self.deduction.group_of(i)
            fixed = self.deduction.options[i].key in self.problem.fixed
            for _ in range(count if group is not None and not fixed else 0):
                state = self.changed(state, ([], [group])) or state  # type: ignore[list-item]
        return state

    def _of_clusters(self, model: str) -> TabuState:
        phases = self.problem.phases.get(model, ("unified",))

        def holds(blocks: Blocks) -> bool:
            return any(self.deduction.column(DeviceGroup(model, blocks, phase)) is not None for phase in phases)

        state = self._empty()
        for blocks, count in sorted(clusters(self.problem, holds, MOST_BLOCKS).items()):
            for _ in range(count):
                group = DeviceGroup(model, blocks, self.rng.choice(phases))
                state = self.changed(state, ([], [group])) or state
        return state

    def _completed(self, state: TabuState, columns: Sequence[int]) -> TabuState:
        """With idle devices put to use by further replicas or pairs of these columns, as long as that helps most."""
        groups: dict[str, list[DeviceGroup]] = defaultdict(list)
        for i in columns:
            group = self.deduction.group_of(i)
            if group is not None and self.deduction.options[i].key not in self.problem.fixed:
                groups[group.model].append(group)
        while True:
            lacking = [m for m, value in state.values.items() if value.broken or value.served or value.slo]
            changes = [change for model in lacking for change in _additions(groups[model])]
            nearby = [near for change in changes if (near := self.changed(state, change)) is not None]
            better = [near for near in nearby if near.rank < state.rank]
            if not better:
                return state
            state = min(better, key=lambda near: near.rank)

    def _worth(self, model: str, groups: Counter[DeviceGroup]) -> Worth:
        counts = self._fixed[model].copy()
        for group, count in groups.items():
            column = self.deduction.column(group) if group.model == model else None
            if column is not None:
                counts[column] += count
        key = (model, frozenset(counts.items()))
        if key not in self._worths:
            self._worths[key] = worth(self.problem, self.needs[model], self.deduction.options, counts)
        return self._worths[key]

    def _rank(self, values: dict[str, Worth]) -> tuple[float, ...]:
        return tuple(
            round(sum(getattr(worth_of_model, name) for worth_of_model in values.values()), 6) for name in self._order
        )

    def solution(self, state: TabuState, solver: str, deadline_s: float, seed: int) -> Solution:
        """The state appraised, with the columns that the search made. Raises InfeasibleError when it breaks a rule."""
        counts = dict.fromkeys(range(len(self.deduction.options)), 0)
        for model in self.needs:
            counts |= self._fixed[model]
        for group, count in state.groups.items():
            column = self.deduction.column(group)
            if column is not None:
                counts[column] += count
        solution = appraise(self.extended, counts, f"{solver} (groups and phases; flow in OR-Tools)", deadline_s, seed)
        return replace(solution, added=self.deduction.added)


def _require_known(problem: PlacementProblem) -> None:
    divided = [need.model for need in problem.needs if need.parts]
    if divided:
        message = f"this search does not know consumer groups, by which the demand for {', '.join(divided)} is divided"
        raise FabrictoolError.of("FT2030", message, hint="`--solver exact`")
    if FAIRNESS in problem.objective:
        message = "this search looks at one model after another, and does not know fairness between them"
        raise FabrictoolError.of("FT2030", message, hint="`--solver exact`")


def _additions(groups: Sequence[DeviceGroup]) -> Iterator[Change]:
    for group in groups:
        yield [], [group]
        if group.phase == "prefill":
            yield from (([], [group, other]) for other in groups if other.phase == "decode")
