"""What a placement does for each consumer group with a part of a model's demand: read off its counts and loads.

No flow of the solver is looked at, so it holds whichever solver placed the replicas.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.consumers import may_use, providers_of
from fabrictool.planner.program import Program
from fabrictool.planner.stages import TOLERANCE
from fabrictool.planner.survival import Reserve, losses, lost_with_a_node, stands_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.consumers import Providers
    from fabrictool.planner.problem import GroupDemand, ModelNeed, Option, PlacementProblem, Pool, PoolKey, Solution
    from fabrictool.planner.program import Terms
    from fabrictool.planner.survival import Loss

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GroupService:
    """One group's part of a model's service."""

    group: GroupDemand
    served: float
    """Share of what it asks for."""
    replicas: int
    """That may answer it."""
    left: int | None = None
    """Of these, after the worst loss of the kind that the model is to survive; None: it is to survive none."""


def services(problem: PlacementProblem, need: ModelNeed, solution: Solution) -> list[GroupService]:
    """Of each group with a part of the demand, and of all others together; none where it is not divided."""
    if not need.parts:
        return []
    options = {i: problem.options[i] for i in problem.of(need.model) if solution.counts.get(i)}
    told = []
    for group, served in zip(need.parts, _served(problem, need, options, solution), strict=True):
        mine = {i: o for i, o in options.items() if o.serves and may_use(group, providers_of(o))}
        left = None if need.survive is None else _left(problem, need, mine, solution.counts)
        told.append(GroupService(group, served, sum(solution.counts[i] for i in mine), left))
    return told


def _left(
    problem: PlacementProblem, need: ModelNeed, options: Mapping[int, Option], counts: Mapping[int, int]
) -> int | None:
    """Replicas after the worst loss."""
    if need.survive is None:
        return None
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for option in options.values() for pool in option.pools}
    every = sum(counts[i] for i in options)
    return every - max([0, *(_gone(loss, options, counts, pools) for loss in losses(need.survive, pools.values()))])


def _gone(loss: Loss, options: Mapping[int, Option], counts: Mapping[int, int], pools: Mapping[PoolKey, Pool]) -> int:
    here = sum(counts[i] for i, option in options.items() if stands_in(option, loss))
    if not loss.node:
        return here
    (key,) = loss.pools
    return min(here, round(lost_with_a_node(Reserve(dict.fromkeys(options, 1.0), 0.0, 1.0), options, pools[key])))


def _served(
    problem: PlacementProblem, need: ModelNeed, options: Mapping[int, Option], solution: Solution
) -> list[float]:
    """Of each part the share that the planned loads have room for: none gets less for another's sake than it must, and
    then as much as possible in all.
    """
    program = Program(whole=False)
    room = _room(problem, options, solution, program)
    rates = [group.share * need.rate for group in need.parts]
    least = program.column(0, 1)
    served = [program.column(0, rate) for rate in rates]
    into: dict[Providers, Terms] = defaultdict(list)
    for group, rate, column in zip(need.parts, rates, served, strict=True):
        flows = {place: program.column(0, rate) for place in sorted(room, key=sorted) if may_use(group, place)}
        program.row(0, 0, [(column, -1.0), *((flow, 1.0) for flow in flows.values())])
        program.row(0, rate, [(column, 1.0), (least, -rate)])
        for place, flow in flows.items():
            into[place].append((flow, 1.0))
    for place, (load, terms) in room.items():
        program.row(-1.0, load, [*into[place], *terms])
    fairest = program.minimise([(least, -1.0)], seconds=SECONDS, seed=0)
    if fairest is None:
        return [0.0] * len(rates)
    program.row(-fairest.objective * (1 - TOLERANCE), 1, [(least, 1.0)])
    answer = program.minimise([(column, -1.0) for column in served], seconds=SECONDS, seed=0) or fairest
    shares = [float(answer.values[column]) / rate for column, rate in zip(served, rates, strict=True)]
    return [1.0 if share >= 1 - 10 * TOLERANCE else max(0.0, share) for share in shares]


def _room(
    problem: PlacementProblem, options: Mapping[int, Option], solution: Solution, program: Program
) -> dict[Providers, tuple[float, Terms]]:
    """By the providers that see a request: requests/s of replicas that do all, and columns, negative, of what goes
    through pairs.
    """
    whole: dict[Providers, float] = defaultdict(float)
    handed: dict[Providers, Terms] = defaultdict(list)
    ends: dict[tuple[str, PoolKey], Terms] = defaultdict(list)
    load: dict[tuple[str, PoolKey], float] = defaultdict(float)
    for i, option in options.items():
        if option.phase == "unified":
            whole[providers_of(option)] += solution.loads.get(i, 0.0)
        else:
            load[option.phase, option.pool.key] += solution.loads.get(i, 0.0)
    provider = {option.pool.key: option.pool.provider for option in options.values()}
    name = next((option.model for option in options.values()), "")
    for model, sender, receiver in problem.transfers:
        if model == name and ("prefill", sender) in load and ("decode", receiver) in load:
            way = program.column(0, min(load["prefill", sender], load["decode", receiver]))
            handed[frozenset({provider[sender], provider[receiver]})].append((way, -1.0))
            ends["prefill", sender].append((way, 1.0))
            ends["decode", receiver].append((way, 1.0))
    for end, ways in ends.items():
        program.row(0, load[end], ways)
    return {place: (whole[place], handed[place]) for place in {*whole, *handed}}
