"""From blueprint, inventory and facts to the solver's problem: columns with figures, rules as numbers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fabrictool.base.canonical import LateDigest, tidy
from fabrictool.base.errors import InvalidInputError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines
from fabrictool.planner.columns import Columns
from fabrictool.planner.limits import beside, limits_of
from fabrictool.planner.lost_together import keeps_apart, may_share_a_node
from fabrictool.planner.other_end import OtherEnd
from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, unit_key
from fabrictool.planner.variants import VariantColumns, alike, tables_of
from fabrictool.simulator.demanded import demand_of, parts_of
from fabrictool.simulator.network import hop

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.problem import OptionKey, PoolKey, Transfer
    from fabrictool.simulator.capacity import MeanWorkload


MANY = 150
"""Models that are not alike times partitions from which on another process makes a part of the tables."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What the problem was built from, for the forecast."""

    demands: dict[str, MeanWorkload]


# Long: a problem has many parts, and each is made here in a line.
def build_problem(
    blueprint: Blueprint,
    inventory: Inventory,
    *,
    usable: Iterable[str],
    unseen: Sequence[ReplicaPlacement],
    current: Mapping[OptionKey, int],
    now: float = -math.inf,
    loads: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ends_apart: bool = False,
) -> tuple[PlacementProblem, Tables]:
    """The problem over the clusters in `usable`; those are the ones that answered.

    `loads`: what starts took, as the state keeps it; `ends_apart`: no replica serves less for its walltime. Maintenance
    windows that end before `now` (seconds since 1970) are over. `unseen` replicas stand on clusters that did not
    answer: columns with a fixed count, which serve and count towards the bounds. One without a column, such as of a
    partition that is gone, counts towards the bounds.

    Raises
    ------
    InvalidInputError
        FT1411 a model whose architecture is nowhere, FT1412 a precision that its engine does not hold.
    """
    every, complaints = pools_of(inventory), list[Complaint]()
    pools = [pool for pool in every if pool.cluster in set(usable)]
    kinds = [unit_key(r.model, (r.cluster, r.partition), (r.tp, r.pp, r.dp), r.phase, r.variant) for r in unseen]
    there = Counter(kinds)
    unseen_pools = {key[1:3] for key in there} - {pool.key for pool in pools}
    unknown = {pool.cluster for pool in every} - {pool.cluster for pool in pools}
    considered = [*pools, *(pool for pool in every if pool.key in unseen_pools)]
    options: list[Option] = []
    needs: list[ModelNeed] = []
    demands: dict[str, MeanWorkload] = {}
    columns: dict[str, VariantColumns] = {}
    for name, wanted in sorted(blueprint.models.items()):
        architecture = _architecture(blueprint, name, complaints)
        unknown_companions = sorted(set(wanted.companions) - set(blueprint.companions(wanted)))
        for companion in unknown_companions:
            complaints.append(_unknown(f"models.{name}.companions.{companion}", wanted.companion(companion)))
        if architecture is None or unknown_companions:
            continue
        demands[name] = demand_of(next(iter(wanted.each_variant.values())), architecture)
        companions = blueprint.companions(wanted)
        columns[name] = VariantColumns(
            {
                variant: Columns(
                    name,
                    its,
                    architecture,
                    demand_of(its, architecture),
                    inventory,
                    considered,
                    loads,
                    companions,
                    ends_apart=ends_apart,
                )
                for variant, its in wanted.each_variant.items()
            },
            wanted.steps_down,
        )
    if complaints:
        raise InvalidInputError(complaints)
    groups = alike(columns)
    of_models: dict[str, list[Option]] = {}
    with OtherEnd(groups, tables_of, wanted=len(groups) * len(considered) >= MANY) as other_end:
        for at, group in enumerate(groups):
            next(iter(group.values())).learn(other_end.done(at) or {})
            of_models |= {name: list(its.everywhere()) for name, its in group.items()}
    for name in columns:
        wanted = blueprint.models[name]
        mine = [o for o in of_models[name] if o.pool.key not in unseen_pools or o.key in there]
        options += mine
        need = _need(name, wanted, demands[name], mine, there, unknown)
        asking, parts = _groups(blueprint, wanted), parts_of(blueprint, wanted)
        needs.append(replace(need, survive=wanted.survive, groups=asking, parts=parts))
    options.sort(key=lambda option: option.key)
    columns_of_all = tuple(options)
    known = {option.key for option in options}
    stray = [replica for replica, kind in zip(unseen, kinds, strict=True) if kind not in known]
    ways = {(a.key, b.key): way for a in pools for b in pools if (way := hop(inventory, a.key, b.key)) is not None}
    problem = PlacementProblem(
        needs=tuple(needs),
        options=columns_of_all,
        pools=tuple(pools),
        current=dict(current),
        fixed={option.key: there[option.key] for option in options if option.pool.key in unseen_pools},
        objective=tuple(dict.fromkeys([*blueprint.objective, "latency"])),
        tables=LateDigest(partial(_read_off, columns_of_all)),  # no first plan waits for it
        ways=ways,
        columns=columns,
        phases={name: generator.first.phases for name, generator in columns.items()},
        transfers=_transfers({name: generator.first for name, generator in columns.items()}, pools),
        links={(min(link.between), max(link.between)): float(link.bandwidth) for link in inventory.links},
        move_price=blueprint.move_price.amount if blueprint.move_price is not None else 0.0,
        outages=outages(inventory, pools, now),
        limits=beside(limits_of(blueprint, inventory, considered), stray, considered, inventory),
    )
    return problem, Tables(demands)


def _architecture(blueprint: Blueprint, name: str, complaints: list[Complaint]) -> ModelArchitecture | None:
    """The model's architecture; None after a complaint."""
    wanted = blueprint.models[name]
    architecture = blueprint.architecture(wanted)
    if architecture is None:
        complaints.append(_unknown(f"models.{name}", wanted))
        return None
    able = True
    for its in wanted.each_variant.values():
        known = engines()[its.engine].weight_bytes
        if its.variant.precision not in known:
            message = f"{name}: {its.engine} does not hold weights as {its.variant.precision}"
            place = Place(thing=f"models.{name}.{'variants' if wanted.variants else 'variant.precision'}")
            complaints.append(Complaint("FT1412", message, place, f"one of: {', '.join(sorted(known))}"))
            able = False
    return architecture if able else None


def _unknown(thing: str, wanted: Model) -> Complaint:
    hint = "write `architecture:` with an id that `fabrictool catalogue models` lists, or add it to `architectures`"
    name = thing.rpartition(".")[2]
    message = f"{name}: the architecture {wanted.architecture_id!r} is not in the catalogue"
    return Complaint("FT1411", message, Place(thing=thing), hint)


def _read_off(options: Sequence[Option]) -> list[list[Any]]:
    """All that the solver reads off these columns, for a digest."""
    # Equal partitions have the same levels, not only equal ones.
    known = {id(o.levels): o.levels for o in options}
    levels = {at: [[*map(tidy, (v.rate, v.in_system)), v.attains, v.excess] for v in its] for at, its in known.items()}
    # What takes the same places has the same share of their nodes.
    places = [(*(pool.key for pool in o.pools), *o.blocks.items()) for o in options]
    shares = {
        place: [o.cost, o.power, *((o.carbon,) if o.carbon else ())]
        for place, o in dict(zip(places, options, strict=True)).items()
    }
    return [
        [*o.key, *shares[place], levels[id(o.levels)], *((o.steps_down,) if o.variant else ())]
        for place, o in zip(places, options, strict=True)
    ]


def _transfers(columns: Mapping[str, Columns], pools: Sequence[Pool]) -> dict[tuple[str, PoolKey, PoolKey], Transfer]:
    """The hand-overs of all models that are served in two phases, between the pools where they may stand."""
    return {
        (name, sender.key, receiver.key): transfer
        for name, of_model in columns.items()
        if "decode" in of_model.phases
        for sender in pools
        for receiver in pools
        if of_model.degrees(sender) and of_model.degrees(receiver)
        if (transfer := of_model.transfer(sender, receiver)) is not None
    }


def pools_of(inventory: Inventory) -> list[Pool]:
    """The partitions of enabled clusters, by name."""
    return [
        _pool(inventory, cluster, partition, inventory.clusters[cluster].partitions[partition])
        for cluster in sorted(inventory.clusters)
        if inventory.clusters[cluster].enabled
        for partition in sorted(inventory.clusters[cluster].partitions)
    ]


def outages(inventory: Inventory, pools: Sequence[Pool], now: float) -> tuple[frozenset[PoolKey], ...]:
    """The sets of pools that maintenance will take away at the same time; a set inside another one says nothing new."""
    windows = [
        (float(window.begin), float(window.end), pool.key)
        for pool in pools
        for window in inventory.clusters[pool.cluster].partitions[pool.partition].maintenance
        if float(window.end) > now
    ]
    # What is away together with a window is away at some window's beginning.
    sets = {
        frozenset(pool for begin, end, pool in windows if begin <= start < end) for start in {w[0] for w in windows}
    }
    return tuple(sorted((away for away in sets if not any(away < other for other in sets)), key=sorted))


def _need(
    name: str,
    wanted: Model,
    demand: MeanWorkload,
    options: Sequence[Option],
    unseen: Mapping[OptionKey, int],
    unknown: Container[str],
) -> ModelNeed:
    """What of `unseen` has no column counts towards the bounds.

    Pins on `unknown` clusters wait for these: what is not there already is placed nowhere else meanwhile.
    """
    known, unseen = {option.key for option in options}, {key: n for key, n in unseen.items() if key[0] == name}
    lost = sum(count for key, count in unseen.items() if key not in known)
    pins = {(pin.cluster, pin.partition or ""): pin.replicas for pin in wanted.place.pin}
    lost += sum(waiting(pins, unseen, unknown).values())
    return ModelNeed(
        model=name,
        rate=demand.rate,
        minimum=max(0, max(wanted.replicas.min, int(wanted.protect)) - lost),
        maximum=max(0, wanted.replicas.max - lost),
        priority=float(wanted.slo.priority if wanted.slo is not None else 1),
        spread_sites=wanted.place.spread == "site",
        sites=len({option.pool.site for option in options}),
        spread_nodes=wanted.place.spread == "node",
        pins={place: count for place, count in pins.items() if place[0] not in unknown},
    )


def _groups(blueprint: Blueprint, wanted: Model) -> tuple[frozenset[str], ...]:
    """Of the groups that may ask for a model: providers that may serve them; alike ones once."""
    asking = {
        frozenset(group.allow)
        for name, group in blueprint.trust.groups.items()
        if wanted.groups is None or name in wanted.groups
    }
    return tuple(sorted(asking, key=sorted))


def waiting(
    pins: Mapping[PoolKey, int], unseen: Mapping[OptionKey, int], unknown: Container[str]
) -> dict[PoolKey, int]:
    """Pinned place on a cluster that does not answer → replicas that are pinned there and not remembered to be."""
    short = {}
    for (cluster, partition), count in pins.items():
        there = sum(n for key, n in unseen.items() if key[1] == cluster and partition in ("", key[2]))
        if cluster in unknown and count > there:
            short[cluster, partition] = count - there
    return short


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
        carbon_per_kwh=None if (carbon := inventory.sites[site].carbon) is None else float(carbon),
        whole_nodes=partition.whole_nodes,
        stable=partition.tier == "owned",
        joined=inventory.clusters[cluster].joined,
        shares_nodes=may_share_a_node(inventory.clusters[cluster], partition),
        keeps_apart=keeps_apart(inventory.clusters[cluster], partition),
    )
