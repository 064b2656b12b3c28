"""How a model's traffic is to be dealt out: the loads that the plan counts on, as weights for routing.

Of replicas that are alike, all have the same weight, and the largest of a model is 1. So one replica more changes no
gateway; and weights that the gateways have already are kept as long as they are about right: a plan that changes little
is soon read.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.plan import Placement
from fabrictool.domain.specs import weight_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.problem import OptionKey, PlacementProblem, Solution

LEAST = 0.02
"""Of the largest weight: what the plan leaves idle still takes what is too much for the others."""
ALIKE = 1.5
"""Weights whose ratio is within this factor of the wanted one stay as they are."""


def planned_rates(problem: PlacementProblem, solution: Solution) -> dict[OptionKey, float]:
    """Requests/s that the plan sends to each replica of an option."""
    return {problem.options[i].key: solution.loads.get(i, 0.0) / count for i, count in solution.counts.items() if count}


def weighted(
    problem: PlacementProblem, solution: Solution, placement: Placement, running: Mapping[str, float]
) -> Placement:
    """The placement with the weights that its gateway will have; `running` are those that it has, by `weight_key`."""
    wanted = _wanted(problem, solution)
    weights = running if _about(running, wanted) else wanted
    return Placement(
        replicas=tuple(
            msgspec.structs.replace(replica, weight=weights.get(_key(replica), 1.0)) for replica in placement.replicas
        )
    )


def gateway_weights(replicas: Iterable[ReplicaPlacement], running: Mapping[str, float]) -> Mapping[str, float]:
    """What a gateway has to know, by `weight_key`: what differs from 1, or `running` where that says the same."""
    weights = {_key(replica): replica.weight for replica in replicas}
    if all(running.get(key, 1.0) == weight for key, weight in weights.items()):
        return running
    return {key: weight for key, weight in weights.items() if weight != 1.0}


def _key(replica: ReplicaPlacement) -> str:
    variant = _told(replica.variant)
    return weight_key(replica.model, replica.cluster, replica.partition, replica.tp, replica.dp, variant)


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
        key = weight_key(option.model, *option.pool.key, option.tp, option.dp, _told(option.variant))
        busy = rates.get(option.key, 0.0)
        those = rivals[option.model, option.phase == "decode"]
        those[key] = max(those.get(key, 0.0), busy)
    weights: dict[str, float] = {}
    for those in rivals.values():
        most = max(those.values())
        weights |= {key: float(f"{max(LEAST, busy / most):.2g}") if most else 1.0 for key, busy in those.items()}
    return weights


def _about(running: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Whether the gateway's weights deal out about what is wanted: ratios count, and each model's by themselves."""
    off: dict[str, list[float]] = defaultdict(list)
    for key, weight in wanted.items():
        off[key.partition("@")[0]].append(running.get(key, 1.0) / weight)
    return all(max(ratios) <= ALIKE * min(ratios) for ratios in off.values())
