"""Which replicas serve how much of one model's demand, when their numbers are given: the inner problem of the search.

Load levels are rungs: the first stretch of load costs what the first level says, the next one more, since
queues are convex. For replicas that do everything the cheapest rungs are filled first. Between prefill and decode it is
a transportation problem with costs on both sides and on the way, solved as a flow of least cost (ThunderServe's
two-stage transportation problem, paper 002, section 3.3, with the capacities that its formula leaves out).

What several flows share of a link between two sites is not looked at here; the solution is appraised with it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.node_spread import lacking_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, PoolKey

UNITS = 1_000_000
"""The demand in the flow's whole numbers."""
COST_UNITS = 1e4
"""Of the flow's whole costs in one second of latency."""
MISS = 1_000.0
"""Seconds that a request which misses its SLO counts for, so that the flow avoids it first."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What some replicas do for one model; less is better in all."""

    broken: float = 0.0
    """Replicas that the rules lack or have too many."""
    served: float = 0.0
    """Requests/s not served, by priority."""
    slo: float = 0.0
    """Requests/s on replicas that miss it."""
    latency: float = 0.0
    """Requests in the system."""
    cost: float = 0.0
    energy: float = 0.0
    carbon: float = 0.0
    preference: float = 0.0
    replicas: float = 0.0

    def __add__(self, other: Worth) -> Worth:
        return Worth(*(getattr(self, name) + getattr(other, name) for name in FIELDS))


FIELDS = tuple(Worth.__dataclass_fields__)


def worth(problem: PlacementProblem, need: ModelNeed, options: Sequence[Option], counts: Mapping[int, int]) -> Worth:
    """What `counts` replicas, by index into `options` and all of one model, do for it."""
    mine = [(options[i], count) for i, count in sorted(counts.items())]
    split = any(option.phase != "unified" for option, _ in mine)
    unserved, misses, latency = (_flow if split else _fill)(problem, need, mine)
    return Worth(
        broken=_broken(problem, need, mine),
        served=unserved * need.priority,
        slo=misses,
        latency=latency,
        cost=sum(option.cost * count for option, count in mine),
        energy=sum(option.power * count for option, count in mine),
        carbon=sum(option.carbon * count for option, count in mine),
        preference=sum(option.preference * count for option, count in mine),
        replicas=sum(count for _, count in mine),
    )


def _broken(problem: PlacementProblem, need: ModelNeed, mine: Sequence[tuple[Option, int]]) -> float:
    total = sum(count for _, count in mine)
    stable = [(option, count) for option, count in mine if option.stable and option.serves]
    least = min(
        sum(count for option, count in stable if away.isdisjoint(pool.key for pool in option.pools))
        for away in (frozenset[tuple[str, str]](), *problem.outages)
    )
    wrong = max(0, need.minimum - least) + max(0, total - need.maximum)
    for place, wanted in need.pins.items():
        wrong += abs(wanted - sum(count for option, count in mine if option.pool.within(*place)))
    phases = {option.phase for option, count in mine if count}
    if ("prefill" in phases) != ("decode" in phases):
        wrong += 1
    else:
        wrong += _stranded(problem, need.model, mine)
    if need.spread_sites:
        sites = Counter({option.pool.site: 0 for option in problem.options if option.model == need.model})
        for option, count in mine:
            sites[option.pool.site] += count
        even = math.ceil(total / max(1, need.sites, len(sites)))
        wrong += sum(max(0, count - even) for count in sites.values())
    wrong += lacking_nodes(problem, need, mine)
    return float(wrong)


def _stranded(problem: PlacementProblem, model: str, mine: Sequence[tuple[Option, int]]) -> int:
    """Places of one phase that reach none of the other's."""
    places = {
        phase: {option.pool.key for option, count in mine if count and option.phase == phase}
        for phase in ("prefill", "decode")
    }
    ways = [
        (sender, receiver)
        for sender in places["prefill"]
        for receiver in places["decode"]
        if (model, sender, receiver) in problem.transfers
    ]
    return sum(len(there - {way[side] for way in ways}) for side, there in enumerate(places.values()))


Rung = tuple[float, float, bool]
"""(requests/s, requests in system for each of them, within the SLO)."""


def _rungs(option: Option, count: int) -> list[Rung]:
    rungs = []
    rate = inside = 0.0
    for level in option.levels:
        if level.rate > rate:
            rungs.append(((level.rate - rate) * count, (level.in_system - inside) / (level.rate - rate), level.attains))
            rate, inside = level.rate, level.in_system
    return rungs


def _fill(
    _problem: PlacementProblem, need: ModelNeed, mine: Sequence[tuple[Option, int]]
) -> tuple[float, float, float]:
    """(unserved, missing the SLO, in system) with the cheapest rungs filled first."""
    left, misses, latency = need.rate, 0.0, 0.0
    for rate, price, attains in sorted(
        (rung for option, count in mine for rung in _rungs(option, count)), key=lambda rung: (not rung[2], rung[1])
    ):
        taken = min(rate, left)
        left -= taken
        latency += taken * price
        misses += 0.0 if attains else taken
    return left, misses, latency


def _flow(problem: PlacementProblem, need: ModelNeed, mine: Sequence[tuple[Option, int]]) -> tuple[float, float, float]:
    """The same with hand-overs, by a flow from source 0 to sink 1 over one node a pool and phase."""
    from ortools.graph.python import min_cost_flow  # noqa: PLC0415 - --help must not pay for it

    if need.rate <= 0:
        return 0.0, 0.0, 0.0
    scale = UNITS / need.rate
    nodes: dict[tuple[str, PoolKey], int] = {}
    arcs: list[tuple[int, int, float, float, float]] = []
    room: dict[str, float] = defaultdict(float)
    for option, count in mine:
        place = nodes.setdefault((option.phase, option.pool.key), 2 + len(nodes))
        ends = {"unified": (0, 1), "prefill": (0, place), "decode": (place, 1)}[option.phase]
        for rate, price, attains in _rungs(option, count):
            arcs.append((*ends, rate, price, 0.0 if attains else 1.0))
            room[option.phase] += rate
    most = min(need.rate, room["unified"] + min(room["prefill"], room["decode"]))
    for (phase, sender), tail in nodes.items():
        for (other, receiver), head in nodes.items():
            transfer = problem.transfers.get((need.model, sender, receiver))
            if phase == "prefill" and other == "decode" and transfer is not None:
                limit = most if transfer.link is None else problem.links[transfer.link] / max(transfer.octets, 1.0)
                arcs.append((tail, head, min(most, limit), transfer.seconds, 0.0))
    flow = min_cost_flow.SimpleMinCostFlow()
    for tail, head, rate, price, miss in arcs:
        flow.add_arc_with_capacity_and_unit_cost(
            tail, head, int(rate * scale), round((price + MISS * miss) * COST_UNITS)
        )
    flow.set_node_supply(0, UNITS)
    flow.set_node_supply(1, -UNITS)
    if flow.solve_max_flow_with_min_cost() != flow.OPTIMAL:
        return need.rate, 0.0, 0.0
    misses = latency = 0.0
    for arc, (_, _, _, price, miss) in enumerate(arcs):
        load = flow.flow(arc) / scale
        latency += load * price
        misses += load * miss
    return need.rate - flow.maximum_flow() / scale, misses, latency
