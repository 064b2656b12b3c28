"""What a problem is built from, so that it can be built again with something changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fabrictool.planner.build import build_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.build import Tables
    from fabrictool.planner.problem import OptionKey, PlacementProblem


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

    def build(self) -> tuple[PlacementProblem, Tables]:
        """The solver's problem. Raises as `build_problem`."""
        return build_problem(
            self.blueprint,
            self.inventory,
            usable=self.usable,
            unseen=self.unseen,
            current=self.current,
            now=self.now,
        )

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
