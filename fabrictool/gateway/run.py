"""Starting a gateway: as a unit of a fabric (``python -m fabrictool.gateway``), or alone on a static list."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.files import write_atomic
from fabrictool.domain.specs import EXPECTED
from fabrictool.gateway.clienttls import ClientTls
from fabrictool.gateway.following import node_body
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.handover import Handover, take_over
from fabrictool.gateway.keeping import budgeting, forget_old, issuing, records_folder, spooling, storing
from fabrictool.gateway.loop import DRAIN_S, stop_event
from fabrictool.gateway.reloading import Reloading, keyring_of
from fabrictool.gateway.rules import RoutingRules, routing_rules
from fabrictool.gateway.settling import Settling
from fabrictool.gateway.sharing import sharing
from fabrictool.mesh.attestation import SignedBuilds, read_signer
from fabrictool.mesh.records import Lifecycle
from fabrictool.mesh.revocation import read_revocation
from fabrictool.mesh.transport.clocks import ClockWatch
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.mesh.transport.tracefile import TraceFile
from fabrictool.mesh.transport.views import views_of
from fabrictool.routing.policies import routing_policy, targets_of
from fabrictool.status.pages import serve_status
from fabrictool.status.signs import SignsOfLife

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.domain.specs import GatewaySpec
    from fabrictool.gateway.keys import Keyring
    from fabrictool.routing.protocol import RoutingPolicy
    from fabrictool.status.documents import Health

_log = logging.getLogger("fabrictool.gateway")

DRAIN_SUCCEEDED_S = 300.0
"""Where another process serves all new requests meanwhile; the applier waits so long, and a little more."""
IDLE_SUCCEEDED_S = 5.0
"""A client that keeps its connection is told with its next answer to take another one: closed under its hands, it would
not know whether its request was heard."""
TRACE = "mesh.trace"
SCRAPED = "prometheus.json"
BEAT_S = 3.0
"""A gateway is one process on a host of its own, and its document tells of the whole fabric."""


async def run_on_mesh(spec: GatewaySpec, folder: RunFolder, clock: Clock) -> str:
    """Serve a fabric until TERM; returns the reason for ending.

    Raises
    ------
    FabrictoolError
        FT8005 when the fabric has tenants and their keys are not here: a gateway never opens itself.
    """
    keyring = keyring_of(spec, folder)
    gateway = GatewayServer(clock, fabric=spec.fabric, rules=_rules_of(spec), keyring=keyring)
    trace = None if isinstance(spec.trace, msgspec.UnsetType) else TraceFile(folder.path / TRACE, spec.trace).write
    mesh = MeshNode(IdentityFiles(folder.identity), gateway.follower, clock, hub=True, trace=trace)
    gateway.join(mesh)
    _tell_plan(gateway, spec)
    stop = stop_event()
    async with AsyncExitStack() as stack:
        handover = Handover(gateway, mesh, folder)
        await _accept(spec, gateway, mesh, handover, stack, clock)
        pages = await serve_status(gateway.status, folder, metrics=gateway.exposition, views=views_of(mesh))
        stack.push_async_callback(pages.cleanup)
        folder.write_process(
            status=f"http://127.0.0.1:{pages.addresses[0][1]}/status",
            listen=gateway.listen_address,
            mesh=gateway.mesh_address,
            started_at=clock.wall(),
        )
        stack.callback(_show_prometheus(folder, spec, f"127.0.0.1:{pages.addresses[0][1]}"))
        _log.info("clients on %s, agents on %s", gateway.listen_address or "no address", gateway.mesh_address)
        settling = Settling(mesh, clock, others=bool(spec.hubs))

        def reload(new: GatewaySpec, keyring: Keyring | None) -> None:
            gateway.reload(_rules_of(new, reloading.former, gateway.routing_policy), keyring, new.limits)
            _learn(keyring, stack)
            _tell_plan(gateway, new)
            _tell_mesh(mesh, new)

        reloading = Reloading(spec, folder, reload, gateway.note, mesh.renew)

        def health() -> Health:
            gateway.spec_mark = reloading.mark
            seen = settling.health()
            text, ends = seen.text or reloading.refusal[:300], mesh.certificate_ends_at
            seen = msgspec.structs.replace(seen, spec=reloading.mark, text=text, certificate_ends_at=ends)
            return msgspec.structs.replace(seen, hands_over=handover.offered, wanted=gateway.waking.wanted())

        signs = SignsOfLife(folder, health, gateway.status, BEAT_S)
        _learn(keyring, stack)
        gateway.waking.wanted_changed = signs.touch
        clocks = ClockWatch(mesh, clock, gateway.note).run()
        expected = gateway.waking.hear_expected(folder.path / EXPECTED)
        for loop in (signs.run(), settling.run(signs.touch), reloading.run(signs.touch), clocks, expected):
            stack.callback(asyncio.create_task(loop).cancel)
        reason = await stop()
        handover.stop()
        await _drain(gateway, mesh, succeeded=handover.succeeded)
        if folder.comes_back:
            return f"{reason}; it starts again when its host comes back"
        mesh.publish(node_body(mesh, spec, Lifecycle.LEFT, version=2))
        await mesh.leave()
    return reason


# Wide: who accepts whom, and until when.
async def _accept(
    spec: GatewaySpec,
    gateway: GatewayServer,
    mesh: MeshNode,
    handover: Handover,
    stack: AsyncExitStack,
    clock: Clock,
) -> None:
    """Agents first, then clients; from the gateway that this one replaces, where that still runs."""
    former = await asyncio.to_thread(take_over, spec, handover.folder)
    port = await mesh.listen(spec.mesh.host, spec.mesh.port, former.mesh if former else ())
    stack.push_async_callback(mesh.close)
    gateway.mesh_address = f"{spec.mesh.host}:{port}"
    mesh.publish(node_body(mesh, spec, Lifecycle.SERVING, version=1))
    _tell_mesh(mesh, spec)
    mesh.dial([(hub.host, hub.port) for hub in spec.dials])
    if former:
        stack.callback(former.close)
        await former.reached(mesh, clock)
    await _listen(gateway, spec, handover.folder, stack, former.clients if former else (), clock)
    stack.callback(gateway.listening.close)
    await handover.offer()
    stack.callback(handover.close)
    if former:
        former.serving()


# Wide: who records what, and whose sockets they are.
async def _listen(
    gateway: GatewayServer,
    spec: GatewaySpec,
    folder: RunFolder,
    stack: AsyncExitStack,
    sockets: Iterable[socket.socket],
    clock: Clock,
) -> None:
    """For clients, whose requests are recorded; a hub has none."""
    if not isinstance(spec.listen, msgspec.UnsetType):
        here = records_folder(folder.path.parent, spec.fabric, spec.household)
        store = await stack.enter_async_context(storing(here, spec.recording.database))
        spool = await stack.enter_async_context(spooling(here, store, spec.fabric, spec.name))
        if spec.recording.keep_s:
            forgetting = asyncio.create_task(forget_old(store, clock, spec.fabric, spec.recording.keep_s))
            stack.callback(forgetting.cancel)
        gateway.record_in(spool, opt_out=spec.recording.opt_out)
        gateway.accounts.limit_models(spec.limits)
        if not isinstance(spec.key_api, msgspec.UnsetType):
            login = None if isinstance(spec.login, msgspec.UnsetType) else spec.login
            keys = issuing(gateway, store, here, clock, fabric=spec.fabric, group=spec.key_api, login=login)
            await stack.enter_async_context(keys)
        await stack.enter_async_context(budgeting(gateway.accounts, store))
        alone = isinstance(spec.shares, msgspec.UnsetType)
        if not alone:
            await stack.enter_async_context(sharing(here, spec.name, gateway.accounts, clock))
        if not isinstance(spec.telemetry, msgspec.UnsetType):
            from fabrictool.gateway.spanexport import exporting  # noqa: PLC0415 - loads Protocol Buffers

            await stack.enter_async_context(exporting(gateway, spec, spec.telemetry))
        tls = None if isinstance(spec.tls, msgspec.UnsetType) else ClientTls(*spec.tls)
        await gateway.listen(spec.listen.host, spec.listen.port, tls, sockets, shared=not alone)


def _show_prometheus(folder: RunFolder, spec: GatewaySpec, address: str) -> Callable[[], None]:
    """Tell a Prometheus on this host where the series are (its ``file_sd_configs``); returns what takes it back."""
    path, labels = folder.path / SCRAPED, {"fabric": spec.fabric, "gateway": spec.name}
    write_atomic(path, msgspec.json.encode([{"targets": [address], "labels": labels}]))
    return lambda: path.unlink(missing_ok=True)


async def _drain(gateway: GatewayServer, mesh: MeshNode, *, succeeded: bool) -> None:
    """Let clients' requests end, and those that it carries for other gateways."""
    mesh.retire()
    seconds, idle_s = (DRAIN_SUCCEEDED_S, IDLE_SUCCEEDED_S) if succeeded else (DRAIN_S, 0.0)
    await asyncio.gather(gateway.drain(seconds, idle_s=idle_s), mesh.relays.carried_out(seconds))


def _learn(keyring: Keyring | None, stack: AsyncExitStack) -> None:
    if keyring is not None:
        stack.callback(asyncio.create_task(_make_pseudonyms(keyring)).cancel)


async def _make_pseudonyms(keyring: Keyring) -> None:
    """Before the tenants ask: each takes longer than the loop may stand still."""
    for tenant in keyring.tenants:
        await asyncio.to_thread(keyring.pseudonym, tenant)


def _tell_plan(gateway: GatewayServer, spec: GatewaySpec) -> None:
    gateway.plan_for(spec.planned)
    gateway.stand_on(spec.adapter_bases)
    gateway.wake_for(spec.woken)
    gateway.count_caches(spec.octets_of_caches)
    gateway.label(spec.node_labels)


def _tell_mesh(mesh: MeshNode, spec: GatewaySpec) -> None:
    """Who was revoked, and whom to dial while nobody is linked."""
    for text in spec.revoked:
        mesh.take(read_revocation(text)[0])
    mesh.seek(spec.seeks)


def _rules_of(
    spec: GatewaySpec, former: GatewaySpec | None = None, policy: RoutingPolicy | None = None
) -> RoutingRules:
    """`policy` is that of `former`, and goes on with what it has learned, where the two agree."""
    if policy is None or former is None or (spec.policy, spec.slos) != (former.policy, former.slos):
        policy = routing_policy(spec.policy, random.Random(), targets_of(spec.latency_targets), _log.warning)
    rules = routing_rules(
        policy,
        spec.groups,
        spec.model_providers,
        spec.retries,
        spec.routing_weights,
        spec.visible,
        spec.weights_by_group,
    )
    rules = replace(
        rules,
        affinity=spec.affinity is not False,
        admission=spec.admission is not False,
        priorities=spec.tenant_priorities,
        aliases=spec.model_aliases,
        patience=spec.declared_patience,
    )
    if isinstance(spec.builds, msgspec.UnsetType):
        return rules
    return replace(rules, attestation=SignedBuilds(map(read_signer, spec.builds.signers), spec.builds.providers))
