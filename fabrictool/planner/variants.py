"""The columns of a model that may be served in several ways: those of each variant, told apart by its name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.canonical import tidy
from fabrictool.domain.plan import VariantForecast
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.specs import Phase
    from fabrictool.planner.columns import Columns, Figures
    from fabrictool.planner.problem import Option, Pool
    from fabrictool.simulator.physics import PeakUse


@dataclass(frozen=True)
class VariantColumns:
    """Of all variants of one model, in its order."""

    by_name: Mapping[str, Columns]
    steps_down: Mapping[str, int]

    @property
    def first(self) -> Columns:
        """What does not depend on the variant is asked of one of them."""
        return next(iter(self.by_name.values()))

    def everywhere(self) -> Iterator[Option]:
        """All columns but mixed pipelines."""
        for name, columns in self.by_name.items():
            yield from (self._named(option, name) for option in columns.everywhere())

    def tables(self) -> dict[str, dict[object, Figures | None]]:
        """By variant; see `Columns`."""
        return {name: columns.tables() for name, columns in self.by_name.items()}

    def learn(self, tables: Mapping[str, Mapping[object, Figures | None]]) -> None:
        for name, its in tables.items():
            self.by_name[name].learn(its)

    def mixed(self, stages: Sequence[tuple[Pool, int]], phase: Phase) -> Option | None:
        """A pipeline of unlike stages, in the first variant that fits them."""
        for name, columns in self.by_name.items():
            option = columns.mixed(stages, phase)
            if option is not None:
                return self._named(option, name)
        return None

    def at_once(self, variant: str) -> int:
        """Requests that the engine takes into a batch at most."""
        return self.by_name[variant].at_once

    def peak_use(self, option: Option) -> PeakUse | None:
        """How near a replica that is one engine on one node comes to what its devices can do at most."""
        return self.by_name[option.variant].peak_use(option)

    def widths(self, pool: Pool, variant: str) -> list[int]:
        """Tensor-parallel degrees that its engine could have there, whether or not the model fits."""
        return list(self.by_name[variant].degrees(pool))

    def refusals(self) -> list[str]:
        """Why no replica can stand, for each partition and variant by itself."""
        of_variants = [(name, columns.refusals()) for name, columns in self.by_name.items()]
        if len(of_variants) == 1:
            return of_variants[0][1]
        told = [(name, *refusal.split(" ", 1)) for name, refusals in of_variants for refusal in refusals]
        reasons: dict[str, dict[str, list[str]]] = {}
        for name, place, reason in told:
            reasons.setdefault(place, {}).setdefault(reason, []).append(name)
        return [
            f"{place} " + "; ".join(f"{reason} (as {' or '.join(names)})" for reason, names in of_place.items())
            for place, of_place in reasons.items()
        ]

    def _named(self, option: Option, name: str) -> Option:
        return replace(option, variant=name, steps_down=self.steps_down[name]) if name else option


def alike(every: Mapping[str, VariantColumns]) -> list[dict[str, VariantColumns]]:
    """The models by what their replicas do, wherever these stand. Those of a group share their tables from now on."""
    groups: dict[object, dict[str, VariantColumns]] = {}
    for model, its in every.items():
        group = groups.setdefault(tuple(columns.traits for columns in its.by_name.values()), {})
        first = next(iter(group.values()), its)
        for mine, shared in zip(its.by_name.values(), first.by_name.values(), strict=True):
            mine.share(shared)
        group[model] = its
    return list(groups.values())


def tables_of(group: Mapping[str, VariantColumns]) -> dict[str, dict[object, Figures | None]]:
    """What all models of a group of `alike` need, for the first of them to learn."""
    tables: dict[str, dict[object, Figures | None]] = {}
    for its in group.values():  # some may stand where others must not, and all fill the same tables
        tables = its.tables()
    return tables


def running_variant(models: Mapping[str, Model], spec: AgentSpec) -> str:
    """Of a replica that runs, by what its engine was told; "" where its model has no variants."""
    model = models.get(spec.model)
    return "" if model is None else model.variant_of(spec.engine, spec.precision, spec.context)


def remembered_variant(blueprint: Blueprint, evidence: Evidence, address: str) -> str:
    """Of a replica that cannot be seen, by what the last approved plan wanted of it."""
    applied = evidence.state.applied_units.get(address)
    spec = None if applied is None else applied.spec
    return running_variant(blueprint.models, spec) if isinstance(spec, AgentSpec) else ""


def chosen_variants(model: Model, used: Sequence[tuple[Option, int, float]]) -> tuple[VariantForecast, ...]:
    """In the model's order; `used`: options with their replicas and requests/s, of this model alone."""
    total = math.fsum(load for _, _, load in used)
    parts = []
    for name in model.each_variant if model.variants else ():
        mine = [(count, load) for option, count, load in used if option.variant == name]
        load = math.fsum(load for _, load in mine)
        if mine:
            parts.append(VariantForecast(name, sum(count for count, _ in mine), tidy(load / total) if total else 0.0))
    return tuple(parts)
