"""The gateways that should run, who of them dials whom, and which agents would reach none of them any more."""

from __future__ import annotations

from ipaddress import ip_address
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import Address
from fabrictool.domain.blueprint import ROUTING_POLICIES, Records, RequestLimits
from fabrictool.domain.specs import (
    AgentSpec,
    BuildRules,
    GatewaySpec,
    HostPort,
    LoginSpec,
    PatienceRule,
    RecordsSpec,
    TelemetrySpec,
    WakeRule,
    label_key,
    updatable,
)
from fabrictool.domain.terms import BudgetTerms, KeyLimits, Terms
from fabrictool.planner.succession import Succession
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.stepmodel import KV_OCTETS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from fabrictool.base.units import Duration
    from fabrictool.domain.blueprint import Blueprint, Budget, Gateway, Model, Tenant
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.planner.weights import GroupWeights

EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, never bound
UNAWARE = frozenset(ROUTING_POLICIES) - {"slo-headroom", "slo-packing"}
"""Routing policies that do not look at latencies."""
Link = tuple[str, str]
"""Two gateways by name: the first dials the second."""


def running_gateways(evidence: Evidence) -> dict[str, GatewaySpec]:
    """By name, those that live; of a cluster that does not answer those that were applied last."""
    applied = evidence.state.applied_units.items()
    unseen = {
        address: unit.spec
        for address, unit in applied
        if unit.cluster not in evidence.clusters or not evidence.clusters[unit.cluster].known
    }
    youngest = {
        address: evidence.specs.get(unit.operation) for address, (_, unit) in evidence.observed.running().items()
    }
    specs = dict(sorted((unseen | youngest).items())).values()
    return {spec.name: spec for spec in specs if isinstance(spec, GatewaySpec)}


# Wide: what they are told beside the files.
def wanted_gateways(
    blueprint: Blueprint,
    inventory: Inventory,
    evidence: Evidence,
    weights: Mapping[str, float],
    replicas: Iterable[str] = (),
    renewed: Container[str] = (),
    group_weights: GroupWeights = MappingProxyType({}),
) -> list[GatewaySpec]:
    """All gateways of the blueprint, by name; those at `renewed` addresses are replaced though they are as wanted.
    `replicas` are the planned ones, ``MODEL/NUMBER``.

    Tenants' keys that cannot be had are taken to be those of the gateway that runs.
    """
    keys, running = evidence.keys_of(blueprint), running_gateways(evidence)
    usual = next((spec.keys for spec in running.values() if spec.keys), "")
    wanted, planned = {}, _by_model(replicas)
    for name, gateway in blueprint.every_gateway.items():
        theirs = keys if keys is not None else running[name].keys if name in running else usual
        spec = _spec(blueprint, inventory, name, gateway, theirs, weights, group_weights, planned, evidence.revocations)
        wanted[name] = spec if gateway.listen is not None else _hub(spec)
    kept = {
        name: running[name]
        for name, spec in wanted.items()
        if name in running and str(Address.of(spec)) not in renewed and updatable(running[name], spec)
    }
    return _linked(wanted, kept, [spec.hub for spec in running.values()])


def _by_model(replicas: Iterable[str]) -> dict[str, tuple[int, ...]]:
    numbers: dict[str, list[int]] = {}
    for replica in replicas:
        model, _, number = replica.rpartition("/")
        numbers.setdefault(model, []).append(int(number))
    return {model: tuple(sorted(those)) for model, those in sorted(numbers.items())}


# Wide: what a gateway is made of.
def _spec(
    blueprint: Blueprint,
    inventory: Inventory,
    name: str,
    gateway: Gateway,
    keys: str,
    weights: Mapping[str, float],
    group_weights: GroupWeights,
    planned: dict[str, tuple[int, ...]],
    revocations: tuple[str, ...],
) -> GatewaySpec:
    site, builds = inventory.clusters[gateway.cluster].site, blueprint.trust.builds
    return GatewaySpec(
        fabric=blueprint.fabric,
        provider=inventory.sites[site].provider,
        site=site,
        cluster=gateway.cluster,
        node=gateway.cluster,
        name=name,
        listen=gateway.listen or msgspec.UNSET,
        tls=(gateway.tls.certificate, gateway.tls.key) if gateway.tls and gateway.listen else msgspec.UNSET,
        mesh=gateway.mesh,
        policy=blueprint.routing.policy,
        slos=_slos(blueprint) or msgspec.UNSET,
        admission=msgspec.UNSET if blueprint.routing.admission else False,
        priorities={
            name: tenant.priority for name, tenant in sorted(blueprint.tenants.items()) if tenant.priority != "standard"
        }
        or msgspec.UNSET,
        retries=blueprint.routing.retries,
        affinity=msgspec.UNSET if blueprint.routing.affinity else False,
        groups={group: tuple(sorted(its.allow)) for group, its in sorted(blueprint.trust.groups.items())},
        tenants={tenant: its.group for tenant, its in sorted(blueprint.tenants.items())},
        keys=keys,
        model_providers={
            name: tuple(sorted(its.trust)) for name, its in _with_adapters(blueprint) if its.trust is not None
        },
        weights=dict(sorted(weights.items())) or msgspec.UNSET,
        group_weights={kind: dict(its) for kind, its in sorted(group_weights.items())} or msgspec.UNSET,
        revocations=revocations or msgspec.UNSET,
        advertise=gateway.advertise or msgspec.UNSET,
        replicas=planned or msgspec.UNSET,
        after_reboot=inventory.clusters[gateway.cluster].after_reboot or msgspec.UNSET,
        bootstrap=gateway.bootstrap or msgspec.UNSET,
        builds=msgspec.UNSET if builds is None else BuildRules(builds.signers, builds.providers),
        records=RecordsSpec(
            str(gateway.records.database or ""), gateway.records.opt_out, float(gateway.records.keep or 0)
        )
        if gateway.records != Records()
        else msgspec.UNSET,
        terms={name: its for name, tenant in sorted(blueprint.tenants.items()) if (its := _terms(tenant)) != Terms()}
        or msgspec.UNSET,
        model_limits={
            name: _limits(model.limits)
            for name, model in sorted(blueprint.models.items())
            if model.limits != RequestLimits()
        }
        or msgspec.UNSET,
        patience=_patience(blueprint) or msgspec.UNSET,
        wakes=_wakes(blueprint) or msgspec.UNSET,
        cache_octets=_cache_octets(blueprint) or msgspec.UNSET,
        bases=blueprint.bases or msgspec.UNSET,
        labels=_labels(inventory),
        aliases={alias: model for model, its in sorted(blueprint.models.items()) for alias in its.aliases}
        or msgspec.UNSET,
        model_groups={
            name: tuple(sorted(its.groups)) for name, its in _with_adapters(blueprint) if its.groups is not None
        }
        or msgspec.UNSET,
        trace=msgspec.UNSET if gateway.trace is None else int(gateway.trace),
        key_api=msgspec.UNSET if gateway.key_api is None else gateway.key_api.group,
        shares=gateway.shares or msgspec.UNSET,
        login=_login(gateway),
        telemetry=_telemetry(gateway),
    )


def _labels(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    return {
        label_key(inventory.provider_of(name), name, partition): (its.tier, *inventory.sites[cluster.site].labels)
        for name, cluster in sorted(inventory.clusters.items())
        if cluster.enabled
        for partition, its in sorted(cluster.partitions.items())
    }


def _with_adapters(blueprint: Blueprint) -> list[tuple[str, Model]]:
    """What clients ask for, with the model whose rules it has."""
    bases = {name: name for name in blueprint.models} | blueprint.bases
    return [(name, blueprint.models[base]) for name, base in sorted(bases.items())]


def _cache_octets(blueprint: Blueprint) -> dict[str, float]:
    octets = {}
    for name, model in _with_adapters(blueprint):
        architecture = blueprint.architecture(model)
        if model.phases != "unified" and architecture is not None:
            octets[name] = kv_elements_per_token(architecture, Parallelism()) * KV_OCTETS[model.handover]
    return octets


def _wakes(blueprint: Blueprint) -> dict[str, WakeRule]:
    """Also of models of which some replicas stay: the others come back when these are not enough."""
    return {
        name: WakeRule(float(model.replicas.hold), model.replicas.min)
        for name, model in _with_adapters(blueprint)
        if model.replicas.idle_after is not None
    }


def _patience(blueprint: Blueprint) -> dict[str, PatienceRule]:
    """Of models that say something of it; what stands beside a model is held to be like it."""
    rules = {
        name: PatienceRule(
            _seconds(model.patience.first_byte),
            _seconds(model.patience.whole),
            _seconds(model.patience.idle),
            model.reasoning,
        )
        for name, model in _with_adapters(blueprint)
    }
    return {name: rule for name, rule in rules.items() if rule != PatienceRule()}


def _seconds(duration: Duration | None) -> float | None:
    return None if duration is None else float(duration)


def _slos(blueprint: Blueprint) -> dict[str, tuple[float | None, float | None]]:
    """What a policy that looks at latencies has to know; nothing for the others, which a new SLO does not concern."""
    return blueprint.latency_targets if looks_at_latency(blueprint) else {}


def looks_at_latency(blueprint: Blueprint) -> bool:
    """Whether its routing policy goes by how long requests take; plug-ins may."""
    return blueprint.routing.policy not in UNAWARE


def _login(gateway: Gateway) -> LoginSpec | msgspec.UnsetType:
    wanted = gateway.key_api.login if gateway.key_api is not None else None
    if wanted is None or gateway.listen is None:
        return msgspec.UNSET
    return LoginSpec(
        issuer=wanted.issuer.rstrip("/"),
        client=wanted.client,
        url=wanted.url.rstrip("/"),
        groups=tuple(wanted.groups.items()),
        group=wanted.group or "",
        claim=wanted.claim,
        scopes=wanted.scopes,
        secret=str(wanted.secret or ""),
        keep_s=float(wanted.keep),
        keys=wanted.keys,
        terms=Terms(limits=_limits(wanted.limits), budget=_budget(wanted.budget)),
    )


def _telemetry(gateway: Gateway) -> TelemetrySpec | msgspec.UnsetType:
    wanted = gateway.telemetry
    if wanted is None or gateway.listen is None:
        return msgspec.UNSET
    headers = {name.lower(): str(reference) for name, reference in sorted(wanted.headers.items())}
    return TelemetrySpec(wanted.endpoint, float(wanted.sample), headers)


def _terms(tenant: Tenant) -> Terms:
    """As gateways read them."""
    return Terms(
        models=tenant.models,
        expires_at=None if tenant.expires is None else float(tenant.expires),
        limits=_limits(tenant.limits),
        budget=_budget(tenant.budget),
    )


def _budget(budget: Budget | None) -> BudgetTerms | None:
    return None if budget is None else BudgetTerms(budget.tokens, budget.per)


def _limits(limits: RequestLimits) -> KeyLimits:
    return KeyLimits(limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrency or 0)


def _hub(spec: GatewaySpec) -> GatewaySpec:
    """It has no clients: it needs to know neither of tenants nor of what is served for them."""
    kept = ("fabric", "provider", "site", "cluster", "node", "name", "mesh")
    optional = ("revocations", "advertise", "after_reboot", "trace", "bootstrap")
    return GatewaySpec(**{field: getattr(spec, field) for field in (*kept, *optional)})


def _linked(
    wanted: Mapping[str, GatewaySpec], kept: Mapping[str, GatewaySpec], living: Sequence[HostPort]
) -> list[GatewaySpec]:
    """With the hubs of each; those that are about to leave are among them, for agents are heard of through them."""
    hubs = {name: spec.hub for name, spec in wanted.items()}
    leaving = {hub for hub in living if hub not in hubs.values()}
    links = {_link(pair, hubs, kept) for pair in combinations(sorted(hubs), 2)}
    specs = []
    for name, spec in wanted.items():
        others = {hub for other, hub in hubs.items() if other != name} | leaving
        dialled_by = {hubs[first] for first, second in links if second == name}
        specs.append(
            msgspec.structs.replace(
                spec,
                hubs=tuple(sorted(others, key=str)) or msgspec.UNSET,
                dialled_by=tuple(sorted(dialled_by, key=str)) or msgspec.UNSET,
            )
        )
    return specs


def _link(pair: Link, hubs: Mapping[str, HostPort], kept: Mapping[str, GatewaySpec]) -> Link:
    """Who of two dials: who runs already and does so; else who is new, for who runs is told nothing; else the first."""
    first, second = pair
    for dialler, dialled in (pair, (second, first)):
        if dialler in kept and hubs[dialled] in kept[dialler].dials:
            return dialler, dialled
    return (second, first) if first in kept and second not in kept else pair


def clash(former: GatewaySpec, wanted: GatewaySpec | Gateway) -> bool:
    """Whether the two cannot run side by side: both would listen at one address of, perhaps, one machine."""
    theirs, ours = [*former.listeners.values()], [*wanted.listeners.values()]
    if former.shares and (former.shares, former.cluster) == (wanted.shares, wanted.cluster):
        theirs, ours = [former.mesh], [wanted.mesh]  # workers of one gateway accept clients side by side
    pairs = [{a.host, b.host} for a in theirs for b in ours if a.port == b.port != 0]
    # Two names may mean one address; two addresses never do.
    near = former.cluster == wanted.cluster
    return any(len(hosts) == 1 or hosts & EVERYWHERE or (near and not all(map(_is_address, hosts))) for hosts in pairs)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def stranded(wanted: Mapping[str, Gateway], evidence: Evidence) -> dict[str, Succession]:
    """Agents to which none of the gateways that they can hear of will be left, by operation.

    An agent knows those that it was told of, and while it runs all those that are there. A gateway that moves, and
    runs beside its successor for a while, leads to it. Only who cannot be told, such as a job in a queue, needs a
    successor.
    """
    hubs, running = {gateway.hub for gateway in wanted.values()}, running_gateways(evidence)
    if not hubs:
        return {}
    known = {spec.hub for spec in running.values()}
    beside = any(not any(clash(spec, gateway) for gateway in wanted.values()) for spec in running.values())
    lost = {}
    for _, unit in evidence.observed.running().values():
        spec = evidence.specs.get(unit.operation)
        if not isinstance(spec, AgentSpec) or spec.assigned:  # a node that joined knows gateways by itself
            continue
        told = set(spec.hubs)
        hears = unit.state == "running" and bool(told)
        if not hubs & (told | known if hears else told) and not (hears and beside):
            reason = "no gateway that it knows will be there"
            if unit.in_force and unit.renewable:  # agents of an earlier release take over whom they serve, and no more
                lost[unit.operation] = Succession("gateways", f"{reason}: it is told of others", in_place=True)
            else:
                lost[unit.operation] = Succession("gateways", reason)
    return lost
