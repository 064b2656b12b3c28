"""From blueprint, inventory and facts to the solver's problem: columns with figures, rules as numbers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.canonical import digest, tidy
from fabrictool.base.errors import InvalidInputError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines, model
from fabrictool.engines.adapter import adapter
from fabrictool.planner.problem import Level, ModelNeed, Option, Pool, Problem
from fabrictool.simulator.capacity import Demand, Latency, replica, under_load
from fabrictool.simulator.stand import stand

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Model, Slo
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.capacity import Replica

DEGREES = (1, 2, 4, 8, 16)
"""Tensor-parallel degrees that are tried, inside one node."""
LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8)
"""Shares of a replica's capacity at which its latency is known to the planner; the last is the most that is planned:
the rest absorbs bursts."""
DEFAULT_CONTEXT = 4096
DEFAULT_INPUT, DEFAULT_OUTPUT = 512.0, 128.0
"""Lengths of a model without a declared demand: they only size its memory."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What the problem was built from, for the forecast."""

    demands: dict[str, Demand]


def build_problem(
    blueprint: Blueprint,
    inventory: Inventory,
    *,
    usable: Iterable[str],
    unseen: Sequence[ReplicaPlacement],
    current: Mapping[tuple[str, str, str, int], int],
) -> tuple[Problem, Tables]:
    """The problem over the clusters in `usable`; those are the ones that answered.

    `unseen` replicas stand on clusters that did not: columns with a fixed count, which serve and count towards the
    bounds. One for which there is no column any more, such as of a partition that is gone, counts towards the bounds.

    Raises
    ------
    InvalidInputError
        FT1411 a model whose architecture is not in the catalogue, FT1412 a precision that its engine does not hold.
    """
    complaints: list[Complaint] = []
    every = pools_of(inventory)
    pools = [pool for pool in every if pool.cluster in set(usable)]
    there = Counter((r.model, r.cluster, r.partition, r.tp) for r in unseen)
    unseen_pools = {key[1:3] for key in there} - {pool.key for pool in pools}
    considered = [*pools, *(pool for pool in every if pool.key in unseen_pools)]
    options: list[Option] = []
    needs: list[ModelNeed] = []
    demands: dict[str, Demand] = {}
    for name in sorted(blueprint.models):
        wanted = blueprint.models[name]
        architecture = model(wanted.architecture_id)
        if architecture is None:
            hint = "write `architecture:` with an id of the catalogue; docs/reference/catalogue.md lists them"
            message = f"{name}: the architecture {wanted.architecture_id!r} is not in the catalogue"
            complaints.append(Complaint("FT1411", message, Place(thing=f"models.{name}"), hint))
            continue
        demands[name] = demand_of(wanted, architecture)
        try:
            found = _options(name, wanted, architecture, demands[name], considered, inventory)
        except InvalidInputError as error:
            complaints += error.problems
            continue
        mine = [option for option in found if option.pool.key not in unseen_pools or option.key in there]
        options += mine
        seen = {option.key for option in mine}
        lost = sum(count for key, count in there.items() if key[0] == name and key not in seen)
        elsewhere = {key[1] for key in there if key[0] == name}
        needs.append(_need(name, wanted, demands[name], lost=lost, elsewhere=elsewhere))
    if complaints:
        raise InvalidInputError(complaints)
    options.sort(key=lambda option: option.key)
    tables = [
        [*o.key, o.cost, o.power, [[*map(tidy, (v.rate, v.in_system)), v.attains] for v in o.levels]] for o in options
    ]
    problem = Problem(
        needs=tuple(needs),
        options=tuple(options),
        pools=tuple(pools),
        current=dict(current),
        fixed={option.key: there[option.key] for option in options if option.pool.key in unseen_pools},
        objective=tuple(dict.fromkeys([*blueprint.objective, "latency"])),
        tables_sha256=digest(tables),
    )
    return problem, Tables(demands)


def pools_of(inventory: Inventory) -> list[Pool]:
    """The partitions of enabled clusters, by name."""
    return [
        _pool(inventory, cluster, partition, inventory.clusters[cluster].partitions[partition])
        for cluster in sorted(inventory.clusters)
        if inventory.clusters[cluster].enabled
        for partition in sorted(inventory.clusters[cluster].partitions)
    ]


def demand_of(wanted: Model, architecture: ModelArchitecture) -> Demand:
    """Mean lengths and rate, with the context that a replica must hold."""
    context = int(wanted.variant.context or min(DEFAULT_CONTEXT, architecture.max_context))
    declared = wanted.demand
    if declared is None or declared.rate is None or declared.input is None or declared.output is None:
        longest = float(context)
        return Demand(0.0, min(DEFAULT_INPUT, longest * 0.8), min(DEFAULT_OUTPUT, longest * 0.2), context)
    return Demand(float(declared.rate), float(declared.input.mean), float(declared.output.mean), context)


def slo_misses(slo: Slo | None, latency: Latency) -> list[str]:
    """The targets that a latency does not meet, in words."""
    if slo is None:
        return []
    misses = []
    for metric in ("ttft", "tpot", "e2e"):
        for percentile in (50, 95, 99):
            target = getattr(slo, f"{metric}_p{percentile}")
            value = _quantile(latency, metric, percentile / 100)
            if target is not None and value > float(target):
                misses.append(f"{metric.upper()} p{percentile} {value:.3g} s is over the target of {target}")
    return misses


def _quantile(latency: Latency, metric: str, share: float) -> float:
    """Read off mean and p95: a constant part and an exponential tail, so that only the tail grows with the quantile."""
    p95 = getattr(latency, f"{metric}_p95")
    if metric == "e2e":
        mean = latency.ttft_mean + (latency.e2e_p95 - latency.ttft_p95) * _ratio(latency.tpot_mean, latency.tpot_p95)
    else:
        mean = getattr(latency, f"{metric}_mean")
    tail = max(0.0, p95 - mean) / (math.log(20.0) - 1.0)
    return float(p95 + tail * (math.log(1.0 / (1.0 - share)) - math.log(20.0)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _need(name: str, wanted: Model, demand: Demand, *, lost: int, elsewhere: Container[str]) -> ModelNeed:
    """`lost` replicas have no column; pins on the clusters `elsewhere`, which do not answer, wait until they do."""
    return ModelNeed(
        model=name,
        rate=demand.rate,
        minimum=max(0, max(wanted.replicas.min, int(wanted.protect)) - lost),
        maximum=max(0, wanted.replicas.max - lost),
        priority=float(wanted.slo.priority if wanted.slo is not None else 1),
        spread_sites=wanted.place.spread == "site",
        pins={
            (pin.cluster, pin.partition or ""): pin.replicas for pin in wanted.place.pin if pin.cluster not in elsewhere
        },
    )


def _pool(inventory: Inventory, cluster: str, name: str, partition: Partition) -> Pool:
    site = inventory.clusters[cluster].site
    device = accelerators()[partition.device]
    power = as_float(partition.power, device.tdp_w * partition.devices_per_node)
    return Pool(
        cluster=cluster,
        partition=name,
        provider=inventory.sites[site].provider,
        site=site,
        device=partition.device,
        nodes=partition.nodes,
        devices_per_node=partition.devices_per_node,
        price_per_node_hour=partition.price.amount if partition.price is not None else 0.0,
        power_per_node_w=power,
        stable=partition.tier == "owned",
    )


def _options(
    name: str,
    wanted: Model,
    architecture: ModelArchitecture,
    demand: Demand,
    pools: list[Pool],
    inventory: Inventory,
) -> list[Option]:
    engine = engines()[wanted.engine]
    if wanted.variant.precision not in engine.weight_bytes:
        held = ", ".join(sorted(engine.weight_bytes))
        message = f"{name}: {wanted.engine} does not hold weights as {wanted.variant.precision}"
        raise InvalidInputError.of("FT1412", message, thing=f"models.{name}.variant.precision", hint=f"one of: {held}")
    tables: dict[object, tuple[Replica, tuple[Level, ...]] | None] = {}
    found = []
    for pool in pools:
        partition = inventory.clusters[pool.cluster].partitions[pool.partition]
        if not _permitted(wanted, pool, inventory):
            continue
        most = pool.devices_per_node if adapter(wanted.engine).capabilities.tensor_parallel else 1
        for tp in [degree for degree in DEGREES if degree <= most and architecture.heads % degree == 0]:
            if architecture.kv_heads % tp and tp % architecture.kv_heads:
                continue
            equal = (partition.device, partition.link, partition.memory_per_node, partition.devices_per_node, tp)
            if equal not in tables:
                tables[equal] = _table(wanted, architecture, demand, partition, tp)
            table = tables[equal]
            if table is not None:
                found.append(Option(name, pool, tp, *table, preference=_preference(wanted, pool)))
    return found


def _table(
    wanted: Model, architecture: ModelArchitecture, demand: Demand, partition: Partition, tp: int
) -> tuple[Replica, tuple[Level, ...]] | None:
    """A replica's figures, and what it does under each load; None where it does not fit."""
    there = stand(wanted, architecture, partition, tp)
    if there is None:
        return None
    figures = replica(there.step, there.room, demand, there.max_num_seqs, there.calibration)
    if not figures.fits:
        return None
    levels = []
    for rate in (load * figures.capacity for load in LOADS):
        latency = under_load(figures, demand, rate)
        levels.append(Level(rate, latency.in_system, attains=not slo_misses(wanted.slo, latency)))
    return figures, tuple(levels)


def _permitted(wanted: Model, pool: Pool, inventory: Inventory) -> bool:
    """Trust, tier and installed engines."""
    installed = inventory.clusters[pool.cluster].software.engines
    trusted = wanted.trust is None or pool.provider in wanted.trust
    stable_enough = pool.stable or wanted.tier == "scavenger"
    return trusted and stable_enough and (not installed or wanted.engine in installed)


def _preference(wanted: Model, pool: Pool) -> float:
    names = {pool.device, pool.provider, pool.site, pool.cluster}
    unwished = bool(wanted.place.prefer) and not names & set(wanted.place.prefer)
    return float(unwished) + 2.0 * bool(names & set(wanted.place.avoid))
