"""How a model's traffic is to be dealt out: the loads that the plan counts on, as weights for routing.

Of replicas that are alike, all have the same weight, and the largest of a model is 1. So one replica more changes no
gateway; and weights that the gateways have already are kept as long as they are about right: a plan that changes little
is soon read. Where a model's demand is divided among consumer groups, each group has weights of its own, by the flows
that the loads were planned for (`planner.group_flows`): 0 where none of it goes. A weight knows of no phase: of kinds
that are alike but for it, the larger one counts for prompts and for answers, so that neither loses what is its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.plan import Placement
from fabrictool.domain.specs import weight_key
from fabrictool.planner.consumers import may_use, providers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.group_flows import GroupFlow
    from fabrictool.planner.problem import Option, OptionKey, PlacementProblem, Solution

LEAST = 0.02
"""Of the largest weight: what the plan leaves idle still takes what is too much for the others."""
ALIKE = 1.5
"""Weights whose ratio is within this factor of the wanted one stay as they are."""
NOTHING = 0.001
"""Of a group's largest weight: less than that is none."""

GroupWeights = Mapping[str, Mapping[str, float]]
"""By `weight_key`, then consumer group."""
Divided = Mapping[str, Sequence["GroupFlow"]]
"""Model → flows of its groups, as `group_flows.divided_demands` has them."""
GroupRates = Mapping[str, Mapping[str, Mapping["OptionKey", float]]]
"""By model and consumer group: requests/s to each replica of an option."""


def planned_rates(problem: PlacementProblem, solution: Solution) -> dict[OptionKey, float]:
    """Requests/s that the plan sends to each replica of an option."""
    return {problem.options[i].key: solution.loads.get(i, 0.0) / count for i, count in solution.counts.items() if count}


def planned_flows(problem: PlacementProblem, solution: Solution, divided: Divided) -> GroupRates:
    """Requests/s of each consumer group that the plan sends to each replica of an option; `divided` as `weighted`."""
    return {
        model: {
            flow.group.group: {problem.options[i].key: rate / solution.counts[i] for i, rate in flow.into.items()}
            for flow in flows
        }
        for model, flows in divided.items()
    }


def weighted(
    problem: PlacementProblem,
    solution: Solution,
    placement: Placement,
    running: Mapping[str, float],
    running_groups: GroupWeights = MappingProxyType({}),
    divided: Divided = MappingProxyType({}),
) -> Placement:
    """The placement with the weights that its gateway will have; `running` and `running_groups` are those that it has,
    by `weight_key`. `divided`: the flows of the solution, of models whose demand is divided.
    """
    wanted = _wanted(problem, solution)
    weights = running if _about(running, wanted) else wanted
    fresh = {model: _wanted_by_group(problem, model, solution, flows) for model, flows in divided.items()}
    by_group = {model: running_groups if _about_the_same(running_groups, its) else its for model, its in fresh.items()}
    return Placement(
        replicas=tuple(
            msgspec.structs.replace(
                replica,
                weight=weights.get(_key(replica), 1.0),
                group_weights=dict(by_group.get(replica.model, {}).get(_key(replica), {})),
            )
            for replica in placement.replicas
        )
    )


def gateway_weights(replicas: Iterable[ReplicaPlacement], running: Mapping[str, float]) -> Mapping[str, float]:
    """What a gateway has to know, by `weight_key`: what differs from 1, or `running` where that says the same."""
    weights = {_key(replica): replica.weight for replica in replicas}
    if all(running.get(key, 1.0) == weight for key, weight in weights.items()):
        return running
    return {key: weight for key, weight in weights.items() if weight != 1.0}


def gateway_group_weights(replicas: Iterable[ReplicaPlacement], running: GroupWeights) -> GroupWeights:
    """What a gateway has to know of groups, by `weight_key`, or `running` where that says the same."""
    weights = {_key(replica): replica.group_weights for replica in replicas}
    if all(running.get(key, {}) == its for key, its in weights.items()):
        return running
    return {key: its for key, its in sorted(weights.items()) if its}


def _key(replica: ReplicaPlacement) -> str:
    variant = _told(replica.variant)
    return weight_key(replica.model, replica.cluster, replica.partition, replica.tp, replica.dp, variant)


def _option_key(option: Option) -> str:
    return weight_key(option.model, *option.pool.key, option.tp, option.dp, _told(option.variant))


def _told(variant: str) -> str:
    """Engine and precision, which agents advertise; of a variant's context gateways know nothing."""
    return " ".join(variant.split(" ")[:2])


def _wanted(problem: PlacementProblem, solution: Solution) -> dict[str, float]:
    """By `weight_key`, all that are in use."""
    rates = planned_rates(problem, solution)
    # Those who read prompts compete with each other and with those who do all; decode replicas among themselves.
    rivals: dict[tuple[str, bool], dict[str, float]] = defaultdict(dict)
    for i in solution.counts:
        option = problem.options[i]
        key = _option_key(option)
        busy = rates.get(option.key, 0.0)
        those = rivals[option.model, option.phase == "decode"]
        those[key] = max(those.get(key, 0.0), busy)
    weights: dict[str, float] = {}
    for those in rivals.values():
        most = max(those.values())
        for key, busy in those.items():
            weight = float(f"{max(LEAST, busy / most):.2g}") if most else 1.0
            weights[key] = max(weights.get(key, 0.0), weight)
    return weights


def _wanted_by_group(
    problem: PlacementProblem, model: str, solution: Solution, flows: Sequence[GroupFlow]
) -> GroupWeights:
    """Of all kinds in use that a group may use, whether any of it goes there or not.

    What the plan leaves idle, in both phases where it has two, takes as little of each group as it does of all.
    """
    options = {i: problem.options[i] for i in problem.of(model) if solution.counts.get(i)}
    busy = {_option_key(option) for i, option in options.items() if solution.loads.get(i, 0.0)}
    weights: dict[str, dict[str, float]] = {}
    for flow in flows:
        mine = {i: o for i, o in options.items() if may_use(flow.group, providers_of(o))}
        for late in (False, True):  # as in `_wanted`
            rates: dict[str, float] = {}
            for i, option in mine.items():
                if (option.phase == "decode") is late:
                    key = _option_key(option)
                    rates[key] = max(rates.get(key, 0.0), flow.into.get(i, 0.0) / solution.counts[i])
            most = max(rates.values(), default=0.0)
            for key, rate in rates.items() if most else ():
                share = (rate / most if rate >= NOTHING * most else 0.0) if key in busy else LEAST
                its = weights.setdefault(key, {})
                its[flow.group.group] = max(its.get(flow.group.group, 0.0), float(f"{share:.3g}"))
    return weights


def _about_the_same(running: GroupWeights, wanted: GroupWeights) -> bool:
    """Whether the gateway's weights deal each group out about as is wanted, and nothing of it to others."""
    off: dict[str, list[float]] = defaultdict(list)
    for key, its in wanted.items():
        if running.get(key, {}).keys() != its.keys():
            return False
        for group, weight in its.items():
            runs = running[key][group]
            if bool(runs) is not bool(weight):
                return False
            off[group] += [runs / weight] if weight else []
    return all(max(ratios) <= ALIKE * min(ratios) for ratios in off.values() if ratios)


def _about(running: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Whether the gateway's weights deal out about what is wanted: ratios count, and each model's by themselves."""
    off: dict[str, list[float]] = defaultdict(list)
    for key, weight in wanted.items():
        off[key.partition("@")[0]].append(running.get(key, 1.0) / weight)
    return all(max(ratios) <= ALIKE * min(ratios) for ratios in off.values())
