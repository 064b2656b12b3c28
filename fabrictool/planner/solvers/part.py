"""The problem of some models, with what the others leave: of devices, links, limits and moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.planner.limits import limits_left
from fabrictool.planner.moving import changed
from fabrictool.planner.node_spread import apart_of_others

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.planner.problem import PlacementProblem, PoolKey


def part_of(
    problem: PlacementProblem, counts: Mapping[int, int], among: Sequence[int], models: Sequence[str]
) -> tuple[PlacementProblem, list[int]]:
    """The part, and the indices of its options in the whole: those of `among` that are the models'."""
    members = set(models)
    indices = [i for i in among if problem.options[i].model in members]
    part = replace(
        problem,
        needs=tuple(need for need in problem.needs if need.model in members),
        options=tuple(problem.options[i] for i in indices),
        current={key: count for key, count in problem.current.items() if key[0] in members},
        runs_elsewhere=problem.runs,
        links=_links_left(problem, members),
        taken=_taken(problem, counts, members),
        apart=apart_of_others(problem, counts, members),
        limits=limits_left(problem, counts, members),
        max_moves=_moves_left(problem, counts, members),
    )
    return part, indices


def _taken(
    problem: PlacementProblem, counts: Mapping[int, int], members: AbstractSet[str]
) -> Counter[tuple[PoolKey, int]]:
    taken: Counter[tuple[PoolKey, int]] = Counter()
    pools = {pool.key: pool for pool in problem.pools}
    for i, count in counts.items():
        if problem.options[i].model not in members:
            for (key, size), blocks in problem.options[i].blocks.items():
                for smaller in range(1, size + 1):
                    taken[key, smaller] += count * blocks * pools[key].parts_lost(size, smaller)
    return taken


def _moves_left(problem: PlacementProblem, counts: Mapping[int, int], members: AbstractSet[str]) -> int | None:
    if problem.max_moves is None:
        return None
    return problem.max_moves - sum(abs(n) for option, n in changed(problem, counts) if option.model not in members)


def _links_left(problem: PlacementProblem, members: AbstractSet[str]) -> dict[tuple[str, str], float]:
    """What the hand-overs of other models leave of the links: an even part, as who uses which is not looked at."""
    split = {option.model for option in problem.options if option.phase != "unified"}
    share = len(split & members) / max(1, len(split))
    return {link: octets * share for link, octets in problem.links.items()}
