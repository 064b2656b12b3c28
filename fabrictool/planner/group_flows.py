r"""Where the requests of each consumer group go: flows of a divided demand that fit the planned loads.

No flow of the solver is looked at, so it holds whichever solver placed the replicas. First no group is served less for
another one's sake than it must be, and then as much as possible is served. Many flows do that. Of these the fairest is
taken: were nobody in another one's way, each group would be dealt out as the loads of those that it may use are, and so
that nobody depends on a single one, the least part that a group has of this where it may go is made as large as it can
be, then the next (lexicographic max-min). That is a single flow: with the same loads it is always the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.consumers import may_use, providers_of
from fabrictool.planner.program import Program
from fabrictool.planner.stages import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.consumers import Providers
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, PoolKey, Solution
    from fabrictool.planner.program import Terms
    from fabrictool.simulator.demanded import GroupDemand

    End = tuple[str, PoolKey]
    """Phase and pool of the halves of pairs."""

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GroupFlow:
    """Where what the plan serves of a consumer group goes."""

    group: GroupDemand
    served: float
    """Share of what it asks for."""
    places: Mapping[Providers, float]
    """Requests/s by the providers that see them."""
    into: Mapping[int, float]
    """Requests/s by option, on all of its replicas; what a pair serves counts for both of its halves."""

    @property
    def sent(self) -> Mapping[Providers, float]:
        """Of what is served of it, the share by the providers that see it."""
        every = math.fsum(self.places.values())
        return {place: flow / every for place, flow in self.places.items()}


@dataclass(frozen=True, slots=True)
class _Room:
    """What replicas that just the same providers see were planned to serve."""

    whole: Mapping[int, float]
    """Requests/s by option, of replicas that do all."""
    ways: Mapping[tuple[End, End], int]
    """Columns of what goes through pairs."""

    def terms(self) -> Terms:
        return [(way, -1.0) for way in self.ways.values()]


def divided_demands(problem: PlacementProblem, solution: Solution) -> dict[str, list[GroupFlow]]:
    """`group_flows` by model, of those whose demand is divided."""
    flows = {need.model: group_flows(problem, need, solution) for need in problem.needs}
    return {model: its for model, its in flows.items() if its}


def group_flows(problem: PlacementProblem, need: ModelNeed, solution: Solution) -> list[GroupFlow]:
    """Of each group with a part of the demand, and of all others together; none where it is not divided."""
    if not need.parts or not need.rate:
        return []
    options = {i: problem.options[i] for i in problem.of(need.model) if solution.counts.get(i)}
    rates = [part.share * need.rate for part in need.parts]
    program = Program(whole=False)
    rooms = _rooms(problem, need.model, options, solution, program)
    served, values = _served(need.parts, rates, rooms, program)
    shared = {
        place: {i: load for i, load in room.whole.items() if load > 0.0}
        | _halves(room, values, options, solution.loads)
        for place, room in rooms.items()
    }
    taken = {
        place: math.fsum(room.whole.values()) + math.fsum(max(0.0, values[way]) for way in room.ways.values())
        for place, room in rooms.items()
    }
    flows = []
    for part, rate, amount, to in zip(
        need.parts, rates, served, _fairest(need.parts, served, taken, need.rate), strict=True
    ):
        into: dict[int, float] = defaultdict(float)
        for place, flow in to.items():
            for i, load in shared[place].items():
                into[i] += flow * load / taken[place]
        share = 1.0 if amount >= rate * (1 - 10 * TOLERANCE) else amount / rate
        flows.append(GroupFlow(part, share, to, dict(into)))
    return flows


def _rooms(
    problem: PlacementProblem, model: str, options: Mapping[int, Option], solution: Solution, program: Program
) -> dict[Providers, _Room]:
    """By the providers that see a request; adds columns and rows for what goes through pairs."""
    whole: dict[Providers, dict[int, float]] = defaultdict(dict)
    handed: dict[Providers, dict[tuple[End, End], int]] = defaultdict(dict)
    ends: dict[End, Terms] = defaultdict(list)
    load: dict[End, float] = defaultdict(float)
    for i, option in options.items():
        if option.phase == "unified":
            whole[providers_of(option)][i] = solution.loads.get(i, 0.0)
        else:
            load[option.phase, option.pool.key] += solution.loads.get(i, 0.0)
    provider = {option.pool.key: option.pool.provider for option in options.values()}
    for name, sender, receiver in problem.transfers:
        first, then = ("prefill", sender), ("decode", receiver)
        if name == model and first in load and then in load:
            way = program.column(0, min(load[first], load[then]))
            handed[frozenset({provider[sender], provider[receiver]})][first, then] = way
            ends[first].append((way, 1.0))
            ends[then].append((way, 1.0))
    for end, ways in ends.items():
        program.row(0, load[end], ways)
    return {place: _Room(whole[place], handed[place]) for place in sorted({*whole, *handed}, key=sorted)}


def _served(
    parts: Sequence[GroupDemand], rates: Sequence[float], rooms: Mapping[Providers, _Room], program: Program
) -> tuple[list[float], Sequence[float]]:
    """Requests/s of each part for which there is room, and the values of all columns."""
    least = program.column(0, 1)
    served = [program.column(0, rate) for rate in rates]
    into: dict[Providers, Terms] = defaultdict(list)
    for part, rate, column in zip(parts, rates, served, strict=True):
        flows = {place: program.column(0, rate) for place in rooms if may_use(part, place)}
        program.row(0, 0, [(column, -1.0), *((flow, 1.0) for flow in flows.values())])
        program.row(0, rate, [(column, 1.0), (least, -rate)])
        for place, flow in flows.items():
            into[place].append((flow, 1.0))
    for place, room in rooms.items():
        program.row(0.0, math.fsum(room.whole.values()), [*into[place], *room.terms()])
    fairest = program.minimise([(least, -1.0)], seconds=SECONDS, seed=0)
    if fairest is None:
        return [0.0] * len(rates), [0.0] * program.columns
    program.row(-fairest.objective * (1 - TOLERANCE), 1, [(least, 1.0)])
    answer = program.minimise([(column, -1.0) for column in served], seconds=SECONDS, seed=0) or fairest
    values = [float(value) for value in answer.values]
    return [max(0.0, values[column]) for column in served], values


def _halves(
    room: _Room, values: Sequence[float], options: Mapping[int, Option], loads: Mapping[int, float]
) -> dict[int, float]:
    """Requests/s by option of what goes through its pairs; in a pool the halves of a kind share it by their loads."""
    through: dict[End, float] = defaultdict(float)
    for way, column in room.ways.items():
        for end in way:
            through[end] += max(0.0, values[column])
    halves: dict[int, float] = {}
    for (phase, key), flow in through.items():
        mine = {i: loads.get(i, 0.0) for i, o in options.items() if o.phase == phase and o.pool.key == key}
        every = math.fsum(mine.values())
        halves |= {i: flow * load / every for i, load in mine.items() if load > 0.0}
    return halves


def _fairest(
    parts: Sequence[GroupDemand], served: Sequence[float], taken: Mapping[Providers, float], rate: float
) -> list[dict[Providers, float]]:
    """Requests/s of each part by place, of `served` in all, where `taken` is served of all parts together; `rate` is
    about how large they are.
    """
    fair: dict[tuple[int, Providers], float] = {}
    for g, (part, amount) in enumerate(zip(parts, served, strict=True)):
        mine = {place: load for place, load in taken.items() if load > TOLERANCE * rate and may_use(part, place)}
        every = math.fsum(mine.values())
        fair |= {(g, place): amount * load / every for place, load in mine.items() if amount > TOLERANCE * rate}
    flows = fair if _fits(fair, taken, rate) else _levelled(fair, served, taken, rate)
    return [
        {place: flow for (whose, place), flow in flows.items() if whose == g and flow > TOLERANCE * rate}
        for g in range(len(parts))
    ]


def _fits(fair: Mapping[tuple[int, Providers], float], taken: Mapping[Providers, float], rate: float) -> bool:
    """Whether nobody is in another one's way."""
    return all(
        math.fsum(flow for (_, place), flow in fair.items() if place == here) <= load + 10 * TOLERANCE * rate
        for here, load in taken.items()
    )


def _levelled(
    fair: Mapping[tuple[int, Providers], float],
    served: Sequence[float],
    taken: Mapping[Providers, float],
    rate: float,
) -> Mapping[tuple[int, Providers], float]:
    """Each flow with as large a part of what would be fair as the smallest can have, then the next, and so on."""
    settled: dict[tuple[int, Providers], float] = {}
    flows = fair
    while len(settled) < len(fair):
        program = Program(whole=False)
        level = program.column(0, math.inf)
        columns = {pair: program.column(0, math.inf) for pair in fair}
        for g, amount in enumerate(served):
            mine = [(column, 1.0) for (whose, _), column in columns.items() if whose == g]
            if mine:
                program.row(amount / rate * (1 - TOLERANCE), amount / rate, mine)
        for here, load in taken.items():
            mine = [(column, 1.0) for (_, place), column in columns.items() if place == here]
            program.row(0, load / rate + TOLERANCE, mine)
        rows = {}
        for pair, column in columns.items():
            if pair in settled:
                program.row(settled[pair], math.inf, [(column, 1.0)])
            else:
                rows[pair] = program.row(0, math.inf, [(column, 1.0), (level, -fair[pair] / rate)])
        answer = program.minimise([(level, -1.0)], seconds=SECONDS, seed=0)
        if answer is None:
            break
        flows = {pair: float(answer.values[column]) * rate for pair, column in columns.items()}
        reached = -answer.objective
        bound = {pair for pair, row in rows.items() if abs(answer.prices[row]) > TOLERANCE}
        for pair in bound or rows:
            settled[pair] = max(0.0, reached * fair[pair] / rate - TOLERANCE)
    return flows
