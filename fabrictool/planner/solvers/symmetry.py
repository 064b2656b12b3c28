"""Partitions that differ in nothing that the program looks at are one in it: half the columns, and no mirrored plans.

Equal nodes of two such partitions are nodes of one that has them all; what fits into those can be dealt out to the two,
node by node, and is worth as much. So nothing is lost, and bounds hold for both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.moving import moves_in
from fabrictool.planner.problem import Option
from fabrictool.planner.program import Program

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.planner.problem import OptionKey, PlacementProblem, Pool, PoolKey, Solution

NODES = 2000
"""Of the search for the dealing-out that moves least."""
PATIENCE_S = 60.0
_hashable = attrgetter(
    *(part.name for part in fields(Option) if part.init and part.name not in ("pool", "elastic", "shared"))
)
"""What makes an option, beside its pool."""


@dataclass(frozen=True, slots=True)
class MergedProblem:
    """The smaller problem, and the way back."""

    problem: PlacementProblem
    whole: PlacementProblem
    members: Mapping[int, Sequence[int]]
    """Option of the smaller problem → those of the whole one that it stands for, in the order of their pools."""
    _known: dict[Hashable, dict[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Counts of a pool → how they were dealt out: from one solution to the next most pools stay as they are."""

    def dealt(self, solution: Solution, seed: int) -> Solution:
        """The same for the whole problem."""
        if self.problem is self.whole:
            return solution
        counts: dict[int, int] = {}
        by_pool: dict[PoolKey, dict[int, int]] = defaultdict(dict)
        for i, count in solution.counts.items():
            by_pool[self.problem.options[i].pool.key][i] = count
        runs = self.whole.running.keys()
        for i, members in self.members.items():
            if not runs.isdisjoint(members):
                by_pool[self.problem.options[i].pool.key].setdefault(i, 0)
        for wanted in by_pool.values():
            ordered = dict(sorted(wanted.items()))
            key = (seed, *ordered.items())
            if key not in self._known:
                self._known[key] = self._of_pool(ordered, runs, seed)
            counts |= self._known[key]
        loads = {}
        for i, load in solution.loads.items():
            for member in self.members[i]:
                if counts.get(member):
                    loads[member] = load * counts[member] / solution.counts[i]
        stages = tuple(
            replace(s, objective=s.objective + self._hidden(s.name, solution, counts)) for s in solution.stages
        )
        return replace(solution, counts={i: k for i, k in sorted(counts.items()) if k}, loads=loads, stages=stages)

    def _hidden(self, name: str, solution: Solution, counts: Mapping[int, int]) -> float:
        """Of a stage: between equal partitions more may have to move than the smaller problem sees."""
        return moves_in(self.whole, counts, name) - moves_in(self.problem, solution.counts, name)

    def counts_of(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Those of the whole problem, in the smaller one."""
        together = {i: sum(counts.get(member, 0) for member in members) for i, members in self.members.items()}
        return {i: count for i, count in together.items() if count}

    def _of_pool(self, wanted: Mapping[int, int], runs: AbstractSet[int], seed: int) -> dict[int, int]:
        if all(len(self.members[i]) == 1 for i in wanted):
            return {self.members[i][0]: count for i, count in wanted.items()}
        still = any(not runs.isdisjoint(self.members[i]) for i in wanted)
        packed = None if still else self._packed(wanted)
        return self._least_moves(wanted, seed) if packed is None else packed

    def _packed(self, wanted: Mapping[int, int]) -> dict[int, int] | None:
        """Largest first, into the nodes of one pool after another; None where that does not hold all of them."""
        options = self.whole.options
        pools = [options[member].pool for member in self.members[next(iter(wanted))]]
        free = [Counter({pool.devices_per_node: pool.nodes}) for pool in pools]
        counts: dict[int, int] = {}
        for i in sorted(wanted, key=lambda i: (-options[self.members[i][0]].devices, i)):
            left = wanted[i]
            for member, room in zip(self.members[i], free, strict=True):
                counts[member] = _taken(room, options[member].devices, left)
                left -= counts[member]
            if left:
                return None
        return counts

    def _least_moves(self, wanted: Mapping[int, int], seed: int) -> dict[int, int]:
        """By a program of its own: what runs stays where it can."""
        options, program = self.whole.options, Program(whole=True)
        columns, moves = dict[int, int](), list[tuple[int, float]]()
        for i, count in wanted.items():
            for member in self.members[i]:
                now = self.whole.running.get(member, 0)
                columns[member] = program.column(0, count, whole=True)
                moves.append((program.column(0, math.inf), 1.0))
                program.row(now, math.inf, [(columns[member], 1.0), moves[-1]])
                program.row(-math.inf, now, [(columns[member], 1.0), (moves[-1][0], -1.0)])
            program.row(count, count, [(columns[member], 1.0) for member in self.members[i]])
        for pool in {options[member].pool.key: options[member].pool for member in columns}.values():
            here = {member: options[member].devices for member in columns if options[member].pool.key == pool.key}
            for part in {1, *here.values()}:
                lost = [(columns[m], float(pool.parts_lost(size, part))) for m, size in here.items() if size >= part]
                program.row(-math.inf, pool.nodes * (pool.devices_per_node // part), lost)
        answer = program.minimise(moves, seconds=PATIENCE_S, seed=seed, nodes=NODES)
        if answer is None:
            raise FabrictoolError.of("FT2902", "replicas could not be dealt out to equal partitions")
        return {member: round(float(answer.values[column])) for member, column in columns.items()}


def _taken(room: Counter[int], size: int, most: int) -> int:
    """Blocks of `size` devices, at most so many, put into nodes with just enough room first; `room` is what is left."""
    placed = 0
    for free in sorted(room):
        blocks = free // size
        while blocks and room[free] and placed < most:
            here = min(blocks, most - placed)
            # Nodes that are filled alike are filled together.
            nodes = min(room[free], (most - placed) // here)
            room[free] -= nodes
            room[free - here * size] += nodes
            placed += nodes * here
    return placed


def merged(problem: PlacementProblem) -> MergedProblem:
    """With pools that are alike in one, wherever that is exact."""
    here: dict[PoolKey, list[int]] = {pool.key: [] for pool in problem.pools}
    single = set(here)
    # Losses tell places apart, and what is spread over nodes cannot be dealt out by size alone.
    survivors = {need.model for need in problem.needs if need.survive is not None or need.spread_nodes}
    for i, option in enumerate(problem.options):
        if option.pool.key in here:
            here[option.pool.key].append(i)
        whole = sum(option.blocks.values()) == 1 and option.phase == "unified" and option.key not in problem.fixed
        if not whole or option.model in survivors:
            single -= {pool.key for pool in option.pools}
    single -= {pool for _, *pair in problem.transfers for pool in pair} | {key for key, _ in problem.taken}
    groups: dict[Hashable, list[Pool]] = defaultdict(list)
    for pool in problem.pools:
        pinned = any(pool.within(*place) for need in problem.needs for place in need.pins)
        alike = here[pool.key] and pool.key in single and not pinned
        groups[shape(problem, pool, here[pool.key]) if alike else pool.key].append(pool)
    costly = problem.current and (problem.move_price or "moves" in problem.objective or problem.max_moves is not None)
    if len(groups) == len(problem.pools) or costly:
        return MergedProblem(problem, problem, {i: (i,) for i in range(len(problem.options))})
    return _joined(problem, groups.values(), here)


def shape(problem: PlacementProblem, pool: Pool, here: Iterable[int]) -> Hashable:
    """All of a pool that the program looks at."""
    spread = any(need.spread_sites for need in problem.needs)
    away = tuple(at for at, outage in enumerate(problem.outages) if pool.key in outage)
    divided = any(need.parts for need in problem.needs)  # whom a group allows is a provider
    provider, site = pool.provider if divided else "", pool.site if spread else ""
    same = replace(pool, cluster="", partition="", provider=provider, site=site, nodes=0)
    within = tuple(at for at, limit in enumerate(problem.limits) if pool.key in limit.pools)
    return (same, away, within, frozenset(_column(problem.options[i]) for i in here))


def _column(option: Option) -> Hashable:
    # Engines that merge or are shared are described with mappings, which have no hash.
    return (*_hashable(option), repr(option.elastic), repr(option.shared))


def _joined(
    problem: PlacementProblem, groups: Iterable[Sequence[Pool]], here: Mapping[PoolKey, Sequence[int]]
) -> MergedProblem:
    larger: dict[PoolKey, Pool] = {}
    others: dict[PoolKey, PoolKey] = {}
    for group in groups:
        first = group[0].key
        larger[first] = replace(group[0], nodes=sum(pool.nodes for pool in group))
        others |= {pool.key: first for pool in group}
    at: dict[Hashable, int] = {}
    members: dict[int, list[int]] = {}
    options: list[Option] = []
    current: Counter[tuple[str, str, str, int, int, str]] = Counter()
    moved = {i for group in others if others[group] != group for i in here[group]}
    for i, option in enumerate(problem.options):
        if i in moved:
            continue
        at[option.key] = len(options)
        members[len(options)] = [i]
        options.append(replace(option, pool=larger.get(option.pool.key, option.pool)))
    for pool in problem.pools:
        for i in here[pool.key] if others[pool.key] != pool.key else ():
            members[at[key_in(problem.options[i], others[pool.key])]].append(i)
    for key, count in problem.current.items():
        first = others.get(key[1:3], key[1:3])
        current[key[0], first[0], first[1], key[3], key[4], key[5]] += count
    smaller = replace(problem, pools=tuple(larger.values()), options=tuple(options), current=dict(current))
    return MergedProblem(smaller, problem, members)


def key_in(option: Option, place: PoolKey) -> OptionKey:
    """The key of the same option in another pool."""
    return (option.key[0], *place, *option.key[3:])
