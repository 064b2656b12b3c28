"""From a placement to the units that should run: one agent a replica, and the gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines
from fabrictool.domain.address import Address, number_of
from fabrictool.domain.blueprint import staged_name
from fabrictool.domain.plan import node_blocks
from fabrictool.domain.specs import (
    DEFAULT_LOADER,
    AdapterSpec,
    AgentSpec,
    AgentTrust,
    CompanionSpec,
    EngineInstall,
    MemoryShare,
    as_assigned,
)
from fabrictool.planner.device_choice import WantedNodes
from fabrictool.planner.devices import visibility_variable, with_devices
from fabrictool.planner.diff import WantedUnit
from fabrictool.planner.egress import egress_of
from fabrictool.planner.extra import extra_replicas
from fabrictool.planner.gateways import looks_at_latency, running_gateways, wanted_gateways
from fabrictool.planner.loads import MEASURED, with_loader
from fabrictool.planner.node_parts import with_node_parts
from fabrictool.planner.weights import gateway_group_weights, gateway_weights
from fabrictool.simulator.demanded import context_of
from fabrictool.simulator.stand import stand

if TYPE_CHECKING:
    from collections.abc import Container

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory, NodeEnvironment, Partition, Software
    from fabrictool.domain.plan import Placement, ReplicaPlacement
    from fabrictool.domain.specs import GatewaySpec
    from fabrictool.planner.weights import GroupWeights

MEASURE_S = 20.0
"""That a replica may take to measure its steps before it serves: some of what a large model takes to load."""
_DEVICES_SHOWN = {"nvidia": ("--nv",), "amd": ("--rocm",)}
"""Vendor → what makes Apptainer or Singularity show a container its devices (Apptainer user guide, "GPU Support")."""


def wanted_units(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, evidence: Evidence, expiring: Container[str]
) -> dict[str, WantedUnit]:
    """Address → what should run there; `expiring` are operations that get a successor even if nothing changed."""
    # What is remembered on a cluster that does not answer may be of a model that nothing asks for any more.
    asked = [replica for replica in placement.replicas if replica.model in blueprint.models]
    agents = [_agent(blueprint, inventory, replica) for replica in asked]
    agents = [with_loader(spec, evidence.state) for spec in agents]
    placed = {replica.replica: replica for replica in placement.replicas}
    running = evidence.running_specs().values()
    youngest = evidence.observed.running()
    renewed = {Address.parse(name).name for name, (_, unit) in youngest.items() if unit.operation in expiring}
    living = [spec for spec in running if isinstance(spec, AgentSpec)]
    nodes = WantedNodes.by(blueprint.models)
    specs = with_devices(agents, inventory, evidence.running_agents(), living, renewed, nodes)
    specs = with_node_parts(specs, blueprint, inventory, evidence)
    units = [_wanted(spec, placed[spec.replica]) for spec in specs]
    for replica in extra_replicas(blueprint, inventory, placement, evidence):
        spec = with_loader(_agent(blueprint, inventory, replica), evidence.state)
        after = blueprint.models[replica.model].replicas.idle_after
        spec = msgspec.structs.replace(spec, extra=True, idle_after_s=float(after or 0))
        units.append(_wanted(spec, replica))
    weights = gateway_weights(placement.replicas, running_weights(evidence))
    again = {name for name, (_, unit) in youngest.items() if unit.operation in expiring}
    by_group = gateway_group_weights(placement.replicas, running_group_weights(evidence))
    gateways = wanted_gateways(blueprint, inventory, evidence, weights, placed, again, by_group)
    return {unit.address: unit for unit in [*units, *(gateway_unit(spec) for spec in gateways)]}


def running_weights(evidence: Evidence) -> dict[str, float]:
    """What the gateways deal out by; all have the same, but for the time of a change."""
    return next((spec.routing_weights for spec in running_gateways(evidence).values()), {})


def running_group_weights(evidence: Evidence) -> GroupWeights:
    """The same by consumer group."""
    return next((spec.weights_by_group for spec in running_gateways(evidence).values()), {})


def _agent(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> AgentSpec:
    model = blueprint.models[replica.model].in_variant(replica.variant)
    partition = inventory.clusters[replica.cluster].partitions[replica.partition]
    memory = as_float(partition.memory_per_node, accelerators()[replica.device].memory * partition.devices_per_node)
    staged, source = staged_in(blueprint, inventory, replica, model.source)
    nodes, _ = node_blocks(replica.tp * replica.dp, replica.pp, partition.devices_per_node)
    spec = AgentSpec(
        fabric=blueprint.fabric,
        provider=replica.provider,
        site=replica.site,
        cluster=replica.cluster,
        partition=replica.partition,
        replica=replica.replica,
        model=replica.model,
        source=source,
        engine=model.engine,
        precision=model.variant.precision,
        context=_context(blueprint, model),
        tp=replica.tp,
        pp=replica.pp,
        merging=replica.dp if replica.dp > 1 else msgspec.UNSET,
        phase=replica.phase,
        max_num_seqs=model.max_num_seqs or engines()[model.engine].default_max_num_seqs,
        device=replica.device,
        devices=replica.devices,
        nodes=nodes if nodes > 1 else msgspec.UNSET,
        visibility_variable=visibility_variable(replica.device),
        memory=int(memory),
        options={name: _flag(value) for name, value in model.options.items()},
        hubs=tuple(gateway.hub for gateway in blueprint.every_gateway.values()),
        walltime_s=None if partition.walltime is None else float(partition.walltime),
        job=_job(partition) | _prepared(inventory.clusters[replica.cluster].environment),
        egress=egress_of(inventory.clusters[replica.cluster].egress),
        trust=_trust(blueprint, inventory, replica),
        install=install_of(inventory.clusters[replica.cluster].software, model.engine, replica.device),
        weights=staged or msgspec.UNSET,
        adapters=_adapters(blueprint, inventory, replica) or msgspec.UNSET,
        shared=_shared(blueprint, inventory, replica),
        kv_precision=_kv_precision(model, replica),
        idle_after_s=_idle_after(model, inventory, replica),
        site_links=msgspec.UNSET if inventory.clusters[replica.cluster].site_links else False,
        successors=partition.job.successors or msgspec.UNSET,
        loader=msgspec.UNSET if model.loader in (DEFAULT_LOADER, MEASURED) else model.loader,
        loaders=_compared(model) or msgspec.UNSET,
        measure_s=MEASURE_S if _is_timed(blueprint, replica) else msgspec.UNSET,
        priorities=_is_timed(blueprint, replica) or msgspec.UNSET,
    )
    return as_assigned(spec) if inventory.clusters[replica.cluster].joined else spec


def _context(blueprint: Blueprint, model: Model) -> int:
    """Tokens of a request that its engine is started for; 0: nothing is known of the model."""
    architecture = blueprint.architecture(model)
    if architecture is None:
        return 0
    most = [companion.max_context for companion in blueprint.companions(model).values()]
    return min([context_of(model, architecture), *most])


def _is_timed(blueprint: Blueprint, replica: ReplicaPlacement) -> bool:
    """Whether routing goes by how long its steps take. Of two that share a request neither has it all, and several
    models in one engine have turns.
    """
    alone = replica.phase == "unified" and not blueprint.models[replica.model].companions
    return alone and looks_at_latency(blueprint)


def staged_in(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement, source: str) -> tuple[str, str]:
    """The folder of the set that holds it, or "", and where a source is on that cluster."""
    name = staged_name(source)
    folder = inventory.clusters[replica.cluster].weights
    if name is None or folder is None:  # of a cluster that does not answer: what stands there stays as it is
        return "", source
    staged = f"{folder}/sha256-{blueprint.weights[name[0]].sha256}"
    return staged, f"file://{staged}" + (f"/{name[1]}" if name[1] else "")


def _adapters(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> dict[str, AdapterSpec]:
    specs = {}
    for name, adapter in sorted(blueprint.models[replica.model].adapters.items()):
        staged, source = staged_in(blueprint, inventory, replica, adapter.source)
        specs[name] = AdapterSpec(source=source, rank=adapter.rank, weights=staged)
    return specs


def _shared(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> MemoryShare | msgspec.UnsetType:
    model = blueprint.models[replica.model]
    architecture = blueprint.architecture(model)
    if not model.companions or architecture is None:
        return msgspec.UNSET
    specs = {}
    for name, companion in sorted(model.companions.items()):
        staged, source = staged_in(blueprint, inventory, replica, companion.source)
        specs[name] = CompanionSpec(source=source, weights=staged)
    there = stand(model, architecture, inventory.clusters[replica.cluster].partitions[replica.partition], 1)
    ttft, tpot = (None, None) if model.slo is None else model.slo.held_to
    return MemoryShare(models=specs, memory=0 if there is None else int(there.room.usable), ttft_s=ttft, tpot_s=tpot)


def _compared(model: Model) -> tuple[str, ...]:
    """Loaders among which measurements choose; none where the engine has only its own."""
    known = engines()[model.engine].loaders
    return (DEFAULT_LOADER, *known) if model.loader == MEASURED and known else ()


def _kv_precision(model: Model, replica: ReplicaPlacement) -> str | msgspec.UnsetType:
    """Engines hand caches over as they hold them."""
    return msgspec.UNSET if replica.phase == "unified" or model.handover == "bf16" else model.handover


def _idle_after(model: Model, inventory: Inventory, replica: ReplicaPlacement) -> float | msgspec.UnsetType:
    """The first replicas, as many as there are to be at least, stay; so do those that nobody could see end so."""
    after = model.replicas.idle_after if inventory.clusters[replica.cluster].tells_anew else None
    return msgspec.UNSET if after is None or number_of(replica.replica) < model.replicas.min else float(after)


def _trust(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> AgentTrust | msgspec.UnsetType:
    """Whom it serves. One that could not be told of a change is told nothing: it would have to be replaced for it."""
    if not inventory.clusters[replica.cluster].tells_anew:
        return msgspec.UNSET
    return trust_of(blueprint, inventory, replica.provider, blueprint.models[replica.model])


def trust_of(blueprint: Blueprint, inventory: Inventory, provider: str, model: Model | None) -> AgentTrust:
    """Whom an agent of that provider serves; None: a model that the blueprint does not know."""
    allowing = tuple(sorted(name for name, group in blueprint.trust.groups.items() if provider in group.allow))
    if model is not None and model.groups is not None:
        allowing = tuple(group for group in allowing if group in model.groups)
    groups = allowing if blueprint.tenants or blueprint.key_api else None
    if model is not None and model.trust is not None and provider not in model.trust:
        groups = ()
    ingresses = (gateway for gateway in blueprint.every_gateway.values() if gateway.listen is not None)
    asking = {inventory.provider_of(gateway.cluster) for gateway in ingresses}
    return AgentTrust(groups=groups, gateways=tuple(sorted(asking)))


def install_of(software: Software, engine: str, device: str) -> EngineInstall | msgspec.UnsetType:
    """Where its engine is; unset where the agents' own Python has it."""
    install = software.engines.get(engine)
    if install is None or not install.ways:
        return msgspec.UNSET
    ways = {way: getattr(install, way) for way in install.ways}
    shown = _DEVICES_SHOWN.get(accelerators()[device].vendor, ())
    return EngineInstall(**ways, runtime=(software.runtime, "exec", *shown) if install.container else ())


def _job(partition: Partition) -> dict[str, str]:
    request = partition.job
    sizes = {
        "cpus per device": request.cpus_per_device,
        "memory per device": None if request.memory_per_device is None else int(request.memory_per_device),
        "devices as": None if request.devices_as == "gres" else request.devices_as,
        "queue": partition.queue,
        "whole nodes": partition.whole_nodes or None,
    }
    steps = {f"step {name}": value for name, value in request.step_options.items()}
    return dict(request.options) | steps | {name: str(value) for name, value in sizes.items() if value is not None}


def _prepared(environment: NodeEnvironment) -> dict[str, str]:
    """What its job does before it starts: a job that began otherwise is another one."""
    words = {f"set {name}": value for name, value in environment.set.items()}
    words |= {f"unset {name}": "" for name in environment.unset}
    if environment.purge or environment.modules:
        words["modules"] = " ".join([*(["purge"] if environment.purge else []), *environment.modules])
    return words


def _wanted(spec: AgentSpec, replica: ReplicaPlacement) -> WantedUnit:
    which = f" {','.join(map(str, spec.device_indices))}" if spec.device_indices else ""
    stages = f"{spec.pp}×" if spec.pp > 1 else f"{spec.dp} merging engines of " if spec.dp > 1 else ""
    nodes = f" on {spec.on_nodes} nodes" if spec.on_nodes > 1 else ""
    apart = "" if isinstance(spec.node_part, msgspec.UnsetType) else f", {spec.node_part} of the nodes"
    where = f"{spec.cluster}/{spec.partition}  {stages}{spec.tp}×{spec.device}{which}{nodes}{apart}"
    if replica.stages:
        where = " → ".join(f"{stage.cluster}/{stage.partition} {stage.tp}×{stage.device}" for stage in replica.stages)
    part = f", {spec.phase}" if spec.phase != "unified" else ""
    how = "; assigned to a node that joined idle" if spec.assigned else ""
    beside = f", with {', '.join(spec.companions)} in the same memory" if spec.companions else ""
    summary = f"{where}  {spec.engine}, {spec.precision}{part}{beside}{how}"
    return WantedUnit(str(Address.of(spec)), spec.cluster, spec, summary)


def gateway_unit(spec: GatewaySpec) -> WantedUnit:
    """A gateway, with what a table says of it."""
    agents = f"{spec.mesh}" if spec.hub == spec.mesh else f"{spec.mesh} (as {spec.hub})"
    clients = spec.listeners.get("clients")
    faces = f"clients {clients}, agents {agents}" if clients is not None else f"a hub, agents {agents}"
    return WantedUnit(str(Address.of(spec)), spec.cluster, spec, f"{spec.cluster}  {faces}")


def _flag(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
