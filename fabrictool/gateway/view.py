"""What a gateway sees, as the rows of its status document."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from fabrictool.gateway.metrics import GatewayMetrics, ModelFigures, percentile
from fabrictool.mesh.fleet import is_idle
from fabrictool.mesh.records import NodeBody, ServiceBody
from fabrictool.status.documents import GatewayStatus, ModelRow, NodeRow, ServiceRow, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.gateway.directory import Directory
    from fabrictool.gateway.tails import Tails
    from fabrictool.gateway.waking import Waking
    from fabrictool.mesh.transport.node import MeshNode

GONE_SHOWN_S = 60.0
"""How long a node that left or was lost is still shown."""


def model_row(
    name: str, nodes: list[NodeRow], directory: Directory, metrics: GatewayMetrics, waking: Waking
) -> ModelRow:
    """One model over all its replicas."""
    targets = directory.of_model(name)
    figures = metrics.models.get(name, ModelFigures())
    services = [s for node in nodes for s in node.services if s.lifecycle in ("JOIN", "SERVING")]
    known = [service for service in services if service.model == name or name in service.adapters]
    planned = directory.planned.get(name)
    there = {service.replica for service in known}
    stay = waking.rules[name].stay if name in waking.rules else sys.maxsize
    away = [number for number in planned or () if f"{name}/{number}" not in there]
    return ModelRow(
        model=name,
        ready=sum(target.ready for target in targets),
        replicas=len(known),
        providers=sorted({target.provider for target in targets}),
        in_flight=sum(target.in_flight for target in targets),
        requests=figures.requests,
        failures=figures.failures,
        tokens=figures.tokens,
        ttft_p50_s=percentile(figures.ttft, 0.5),
        ttft_p95_s=percentile(figures.ttft, 0.95),
        tpot_p50_s=percentile(figures.tpot, 0.5),
        tpot_p95_s=percentile(figures.tpot, 0.95),
        samples=len(figures.ttft),
        planned=None if planned is None else len(planned),
        missing=[f"{name}/{number}" for number in away if number < stay],
        dormant=sum(number >= stay for number in away),
        held=waking.waiting(name),
        reasons=metrics.patience.reasons(name),
    )


def as_tenant(status: GatewayStatus, may_use: Callable[[str, str], bool]) -> GatewayStatus:
    """What a tenant may know of it: the models that it may use, and who serves them. `may_use` of (provider, model).

    A model's figures are of all who may use it; nothing is said of the mesh, nor of what moves between sites.
    """
    nodes = []
    for node in status.nodes:
        services = [msgspec.structs.replace(s, note="") for s in node.services if may_use(node.provider, s.model)]
        if services:
            nodes.append(msgspec.structs.replace(node, services=services, free=[], certificate_ends_at=None))
    models = []
    for row in status.models:
        providers = [provider for provider in row.providers if may_use(provider, row.model)]
        if providers:
            models.append(msgspec.structs.replace(row, providers=providers, planned=None, missing=[]))
    totals = Totals(
        requests=sum(row.requests for row in models),
        failures=sum(row.failures for row in models),
        in_flight=sum(row.in_flight for row in models),
        tokens=sum(row.tokens for row in models),
    )
    return msgspec.structs.replace(
        status,
        nodes=nodes,
        models=models,
        totals=totals,
        mesh="",
        registry_records=0,
        registry_root="",
        handed=[],
        events=[],
    )


def mesh_rows(
    mesh: MeshNode, directory: Directory, lost_at: Mapping[bytes, float], tails: Tails, now: float
) -> list[NodeRow]:
    """The registry's nodes: those that are reached, and for a while those that were (`lost_at`, wall seconds)."""
    services: dict[bytes, list[ServiceBody]] = {}
    nodes: list[NodeBody] = []
    for record in mesh.registry:
        if isinstance(record.body, ServiceBody):
            services.setdefault(record.body.session, []).append(record.body)
        elif isinstance(record.body, NodeBody):
            nodes.append(record.body)
    rows = []
    for node in sorted(nodes, key=lambda n: (n.role, n.cluster, n.node, n.session)):
        straight = node.session == mesh.session or mesh.tunnel(node.session) is not None
        hub = None if straight else mesh.relays.by(node.session)
        connected = straight or hub is not None
        gone_at = lost_at.get(node.session)
        if not connected and (gone_at is None or now - gone_at > GONE_SHOWN_S):
            continue
        identity = mesh.registry.session(node.session)
        rows.append(
            NodeRow(
                session=node.session.hex(),
                role=node.role,
                provider=node.provider,
                site=node.site,
                cluster=node.cluster,
                node=node.node,
                lifecycle="EVICTED" if mesh.registry.evicted(node.session) else node.lifecycle.name,
                connected=connected,
                by="" if hub is None else hub.hex(),
                disconnected_at=None if connected else gone_at,
                device=node.hardware.device if node.hardware else "",
                devices=node.hardware.devices if node.hardware else 0,
                memory=node.hardware.memory if node.hardware else 0,
                free=list(node.hardware.free) if node.hardware else [],
                idle=is_idle(mesh.registry, node),
                ends_at=node.ends_at,
                certificate_ends_at=identity.not_after if identity is not None else None,
                release=node.release,
                services=[
                    _service_row(service, directory, tails.of(service.session, service.service))
                    for service in services.get(node.session, [])
                ],
            )
        )
    return rows


def _service_row(service: ServiceBody, directory: Directory, tail: str) -> ServiceRow:
    target = directory.get(service.session + service.service)
    targets = [target, *target.shares] if target else []
    return ServiceRow(
        service=service.service.hex(),
        replica=service.replica,
        model=service.model,
        engine=service.engine,
        precision=service.precision,
        context=service.context,
        tp=service.tp,
        dp=service.dp,
        lifecycle=service.lifecycle.name,
        accepting=service.accepting,
        running=target.running if target else 0,
        waiting=target.waiting if target else 0,
        kv_use=target.kv_use if target else 0.0,
        in_flight=sum(its.in_flight for its in targets),
        requests=sum(its.requests for its in targets),
        failures=sum(its.failures for its in targets),
        phase=service.phase,
        adapters=list(service.adapters),
        ttft_s=target.ttft_s if target else None,
        tpot_s=target.tpot_s if target else None,
        note="\n".join(filter(None, (service.note, tail))),
    )


def static_rows(directory: Directory) -> list[NodeRow]:
    """A static list's servers in the form of nodes."""
    rows = []
    for target in directory:
        service = ServiceRow(
            service=target.key.hex(),
            replica=target.replica,
            model=target.model,
            engine="",
            precision=target.precision,
            context=target.context,
            lifecycle="SERVING",
            accepting=True,
            in_flight=target.in_flight,
            requests=target.requests,
            failures=target.failures,
        )
        rows.append(
            NodeRow(
                session=target.key.hex(),
                role="static",
                provider=target.provider,
                site="",
                cluster="",
                node=target.replica,
                lifecycle="SERVING",
                connected=target.ready,
                device=target.device,
                services=[service],
            )
        )
    return rows
