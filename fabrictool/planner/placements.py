"""Placements without a plan: what a saved ``status --json`` shows, and what an empty fabric would get."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.address import Address
from fabrictool.domain.plan import ReplicaPlacement
from fabrictool.planner.apart_search import searched_apart
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.exact import ExactSolver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import ClusterSpec, Inventory
    from fabrictool.domain.plan import Placement
    from fabrictool.planner.problem import PlacementProblem, Solution


EMPTY_DEADLINE_S = 30.0


def empty_placement(blueprint: Blueprint, inventory: Inventory, *, seed: int) -> Placement:
    """What would be placed on the enabled clusters if nothing ran there."""
    usable = [name for name, cluster in inventory.clusters.items() if cluster.enabled]
    problem, _ = build_problem(blueprint, inventory, usable=usable, unseen=(), current={})

    def search(asked: PlacementProblem, work: float) -> tuple[Solution, bool]:
        *_, last = ExactSolver().solve(asked, deadline_s=max(0.01, EMPTY_DEADLINE_S - work), seed=seed)
        return last, False

    whole, solution, _ = searched_apart(problem, search)
    return assign(whole, solution, {})


def running_replicas(
    status: Mapping[str, Any], inventory: Inventory, models: Mapping[str, Model] = MappingProxyType({})
) -> list[ReplicaPlacement]:
    """The replicas that run; which of a model's variants each is, its gateway knows.

    Raises
    ------
    InvalidInputError
        FT2151 when it does not say what a replica stands on. KeyError, TypeError, AttributeError for what is no status.
    """
    devices, variants = _devices(status.get("gateway") or {}), _variants(status.get("gateway") or {}, models)
    replicas = []
    for unit in status["units"]:
        address = Address.parse(unit["address"])
        if address.kind != "replica" or unit["state"] != "running":
            continue
        cluster = inventory.clusters[unit["cluster"]]
        partition, tp, dp = _stands_on(str(address), unit["cluster"], cluster, devices)
        replicas.append(
            ReplicaPlacement(
                replica=address.name,
                model=address.model,
                provider=inventory.provider_of(unit["cluster"]),
                site=cluster.site,
                cluster=unit["cluster"],
                partition=partition,
                device=cluster.partitions[partition].device,
                tp=tp,
                dp=dp,
                variant=variants.get(str(address), ""),
            )
        )
    return replicas


def _variants(gateway: Mapping[str, Any], models: Mapping[str, Model]) -> dict[str, str]:
    """Replica → which of its model's variants it is, of models that have several."""
    return {
        service["replica"]: models[service["model"]].variant_of(
            str(service["engine"]), str(service["precision"]), int(service["context"])
        )
        for node in gateway.get("nodes", ())
        for service in node["services"]
        if service.get("model") in models and models[service["model"]].variants
    }


def _stands_on(
    address: str, name: str, cluster: ClusterSpec, devices: Mapping[str, tuple[str, int, int]]
) -> tuple[str, int, int]:
    """Partition, tp and dp of a running replica; raises FT2151 where they would have to be guessed."""
    if address in devices:
        device, tp, dp = devices[address]
        alike = [partition for partition, described in cluster.partitions.items() if described.device == device]
        if alike:
            return alike[0], tp, dp
        message = f"{address} runs on {device}, which no partition of {name} has"
        raise InvalidInputError.of("FT2151", message, hint="give the inventory of this fabric with -i")
    (partition, described), *more = cluster.partitions.items()
    if not more and described.devices_per_node == 1:
        return partition, 1, 1
    raise InvalidInputError.of(
        "FT2151",
        f"{address} runs, but the status does not say on how many devices: its gateway does not know the replica",
        hint="`fabrictool status --json` again while the gateway answers, or simulate the saved plan",
    )


def _devices(gateway: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Replica → (device, tp, dp), as the gateway knows them; without a gateway nothing is known."""
    return {
        service["replica"]: (str(node["device"]), int(service["tp"]), int(service.get("dp", 1)))
        for node in gateway.get("nodes", ())
        for service in node["services"]
    }
