"""What a problem is built from, so that it can be built again with something changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fabrictool.domain.address import Address, model_of
from fabrictool.domain.plan import ReplicaPlacement
from fabrictool.planner.build import build_problem
from fabrictool.planner.joined import as_there
from fabrictool.planner.judged import taught
from fabrictool.planner.problem import unit_key
from fabrictool.planner.units import running_group_weights, running_weights
from fabrictool.planner.variants import remembered_variant, running_variant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.specs import AgentSpec
    from fabrictool.domain.state import Placed
    from fabrictool.planner.build import Tables
    from fabrictool.planner.judged import Lesson
    from fabrictool.planner.problem import OptionKey, PlacementProblem
    from fabrictool.planner.weights import GroupWeights


@dataclass(frozen=True, slots=True)
class Situation:
    """Desired state, what exists, and what the clusters answered; can be pickled."""

    blueprint: Blueprint
    inventory: Inventory
    usable: tuple[str, ...]
    """Clusters that answered."""
    unseen: tuple[ReplicaPlacement, ...]
    """Replicas on the others."""
    current: Mapping[OptionKey, int]
    """What runs."""
    now: float
    """Seconds since 1970: maintenance that is over does not matter."""
    learned: tuple[Lesson, ...] = ()
    """From replays of what was planned before."""
    names: Mapping[str, OptionKey] = field(default_factory=dict)
    """Replicas (``MODEL/NUMBER``) whose names are taken, and what they are."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By which the running gateways deal requests out, by `weight_key`."""
    group_weights: GroupWeights = field(default_factory=dict)
    """The same by consumer group."""
    blind: frozenset[str] = frozenset()
    """Clusters of which nothing is known."""
    loads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds that starts took, as the state keeps them."""
    max_moves: int | None = None
    """Of what runs: replicas that may start or stop."""
    ends_apart: bool = False
    """Whether what the end of a walltime costs is counted when it comes, and not as a share of all the time."""

    def build(self) -> tuple[PlacementProblem, Tables]:
        """The solver's problem. Raises as `build_problem`."""
        problem, tables = build_problem(
            self.blueprint,
            self.inventory,
            usable=self.usable,
            unseen=self.unseen,
            current=self.current,
            now=self.now,
            loads=self.loads,
            ends_apart=self.ends_apart,
        )
        return taught(replace(problem, max_moves=self.max_moves), self.learned), tables

    def with_models(self, changes: Mapping[str, Mapping[str, Any]]) -> Situation:
        """With other fields of some models; what pydantic would check is the caller's care."""
        models = {
            name: model.model_copy(update=dict(changes[name])) if name in changes else model
            for name, model in self.blueprint.models.items()
        }
        return replace(self, blueprint=self.blueprint.model_copy(update={"models": models}))


def with_model(situation: Situation, problem: PlacementProblem, name: str, changed: Model) -> PlacementProblem:
    """`problem`, which `situation` led to, with one model described otherwise; only its own tables are made anew."""
    alone, _ = replace(situation, blueprint=situation.blueprint.model_copy(update={"models": {name: changed}})).build()
    kept = [option for option in problem.options if option.model != name]
    others = {option.key for option in kept}
    return replace(
        problem,
        needs=tuple(alone.needs[0] if need.model == name else need for need in problem.needs),
        options=tuple(sorted([*kept, *alone.options], key=lambda option: option.key)),
        fixed={key: count for key, count in problem.fixed.items() if key in others} | alone.fixed,
        columns={**problem.columns, **alone.columns},
        phases={**problem.phases, **alone.phases},
        transfers={key: way for key, way in problem.transfers.items() if key[0] != name} | alone.transfers,
    )


def situation_of(blueprint: Blueprint, inventory: Inventory, evidence: Evidence, now: float) -> Situation:
    """With the files, and with what the clusters answered."""
    inventory = as_there(inventory, evidence)
    return Situation(
        blueprint,
        inventory,
        usable=tuple(name for name, facts in evidence.clusters.items() if facts.known),
        unseen=_unseen_replicas(blueprint, inventory, evidence),
        current=Counter(running_options(blueprint, evidence).values()),
        now=now,
        names=_names_out_of_sight(blueprint, evidence) | running_options(blueprint, evidence),
        weights=dict(running_weights(evidence)),
        group_weights=dict(running_group_weights(evidence)),
        loads=evidence.state.loads,
        blind=frozenset(name for name, facts in evidence.clusters.items() if not facts.known),
    )


def running_options(blueprint: Blueprint, evidence: Evidence) -> dict[str, OptionKey]:
    """Replica (``MODEL/NUMBER``) → the option as which it runs; of those that a plan has room for."""
    planned = ((name, spec) for name, spec in evidence.running_agents().items() if not spec.is_extra)
    return {replica: placed_option(replica, spec, running_variant(blueprint.models, spec)) for replica, spec in planned}


def placed_option(replica: str, placed: AgentSpec | Placed | ReplicaPlacement, variant: str = "") -> OptionKey:
    cut = (placed.tp, placed.pp, placed.dp)
    return unit_key(model_of(replica), (placed.cluster, placed.partition), cut, placed.phase, variant)


def _names_out_of_sight(blueprint: Blueprint, evidence: Evidence) -> dict[str, OptionKey]:
    """Nothing can be said of replicas on a cluster that is not enabled, but their names are taken."""
    remembered = [(Address.parse(address), placed) for address, placed in evidence.state.units.items()]
    return {
        address.name: placed_option(address.name, placed, remembered_variant(blueprint, evidence, str(address)))
        for address, placed in remembered
        if address.kind == "replica" and placed.cluster not in evidence.clusters
    }


def _unseen_replicas(blueprint: Blueprint, inventory: Inventory, evidence: Evidence) -> tuple[ReplicaPlacement, ...]:
    """Replicas that we started on clusters that do not answer now: unknown is not absent, so they count as there."""
    unseen = []
    for text, placed in sorted(evidence.state.units.items()):
        address, facts = Address.parse(text), evidence.clusters.get(placed.cluster)
        cluster = inventory.clusters.get(placed.cluster)
        if facts is None or facts.known or cluster is None or address.kind != "replica":
            continue
        partition = cluster.partitions.get(placed.partition)
        unseen.append(
            ReplicaPlacement(
                replica=address.name,
                model=address.model,
                provider=inventory.provider_of(placed.cluster),
                site=cluster.site,
                cluster=placed.cluster,
                partition=placed.partition,
                device=partition.device if partition is not None else "cpu",
                tp=placed.tp,
                pp=placed.pp,
                dp=placed.dp,
                phase=placed.phase,
                variant=remembered_variant(blueprint, evidence, text),
            )
        )
    return tuple(unseen)
