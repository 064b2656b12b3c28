"""Starting a gateway: as a unit of a fabric (``python -m fabrictool.gateway``), or alone on a static list."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.clienttls import ClientTls
from fabrictool.gateway.directory import StaticRegistry, static_targets
from fabrictool.gateway.exchange import RoutingRules
from fabrictool.gateway.gateway import GatewayServer, node_body
from fabrictool.gateway.keeping import budgeting, opener, records_folder, spooling
from fabrictool.gateway.reloading import Reloading, keyring_of
from fabrictool.gateway.settling import Settling
from fabrictool.mesh.attestation import SignedBuilds, read_signer
from fabrictool.mesh.records import Lifecycle
from fabrictool.mesh.revocation import read_revocation
from fabrictool.mesh.transport.clocks import ClockWatch
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.mesh.transport.tracefile import TraceFile
from fabrictool.mesh.transport.views import views_of
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.policies import routing_policy
from fabrictool.status.pages import serve_status
from fabrictool.status.signs import SignsOfLife

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.domain.specs import GatewaySpec
    from fabrictool.gateway.keys import Keyring
    from fabrictool.status.documents import Health

_log = logging.getLogger("fabrictool.gateway")

DRAIN_S = 20.0
TRACE = "mesh.trace"
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
    mesh = MeshNode(IdentityFiles(folder.identity), gateway, clock, hub=True, trace=trace)
    gateway.join(mesh)
    gateway.plan_for(spec.planned)
    stop = _stop_event()
    async with AsyncExitStack() as stack:
        port = await mesh.listen(spec.mesh.host, spec.mesh.port)
        stack.push_async_callback(mesh.close)
        gateway.mesh_address = f"{spec.mesh.host}:{port}"
        await _listen(gateway, spec, folder, stack)
        pages = await serve_status(gateway.status, folder, metrics=gateway.exposition, views=views_of(mesh))
        stack.push_async_callback(pages.cleanup)
        folder.write_process(
            status=f"http://127.0.0.1:{pages.addresses[0][1]}/status",
            listen=gateway.listen_address,
            mesh=gateway.mesh_address,
            started_at=clock.wall(),
        )
        gateway.publish_node(node_body(mesh, spec, Lifecycle.SERVING, version=1))
        _log.info("clients on %s, agents on %s", gateway.listen_address or "no address", gateway.mesh_address)
        _tell_mesh(mesh, spec)
        mesh.dial([(hub.host, hub.port) for hub in spec.dials])
        settling = Settling(mesh, clock, others=bool(spec.hubs))

        def take_over(new: GatewaySpec, keyring: Keyring | None) -> None:
            gateway.reload(_rules_of(new), keyring, new.limits)
            _learn(keyring, stack)
            gateway.plan_for(new.planned)
            _tell_mesh(mesh, new)

        reloading = Reloading(spec, folder, take_over, gateway.note, mesh.renew)

        def health() -> Health:
            gateway.spec_mark = reloading.mark
            seen = settling.health()
            text, ends = seen.text or reloading.refusal[:300], mesh.certificate_ends_at
            return msgspec.structs.replace(seen, spec=reloading.mark, text=text, certificate_ends_at=ends)

        signs = SignsOfLife(folder, health, gateway.status, BEAT_S)
        _learn(keyring, stack)
        clocks = ClockWatch(mesh, clock, gateway.note).run()
        for loop in (signs.run(), settling.run(signs.touch), reloading.run(signs.touch), clocks):
            stack.callback(asyncio.create_task(loop).cancel)
        reason = await stop()
        await _drain(gateway, mesh)
        if folder.comes_back:
            return f"{reason}; it starts again when its host comes back"
        gateway.publish_node(node_body(mesh, spec, Lifecycle.LEFT, version=2))
        await mesh.leave()
    return reason


async def _listen(gateway: GatewayServer, spec: GatewaySpec, folder: RunFolder, stack: AsyncExitStack) -> None:
    """For clients, whose requests are recorded; a hub has none."""
    if not isinstance(spec.listen, msgspec.UnsetType):
        here = records_folder(folder.path.parent, spec.fabric, spec.name)
        opened = opener(here, spec.recording.database)
        spool = await stack.enter_async_context(spooling(here, opened, spec.fabric, spec.name))
        gateway.record_with(spool.append, opt_out=spec.recording.opt_out)
        gateway.accounts.limit_models(spec.limits)
        await stack.enter_async_context(budgeting(gateway.accounts, opened))
        tls = None if isinstance(spec.tls, msgspec.UnsetType) else ClientTls(*spec.tls)
        await gateway.listen(spec.listen.host, spec.listen.port, tls)


async def _drain(gateway: GatewayServer, mesh: MeshNode) -> None:
    """Let clients' requests end, and those that it carries for other gateways."""
    mesh.retire()
    await asyncio.gather(gateway.drain(DRAIN_S), mesh.relays.carried_out(DRAIN_S))


# Wide: the options of ``gateway run``, as its command passes them.
async def run_on_list(
    registry: StaticRegistry,
    clock: Clock,
    *,
    host: str,
    port: int,
    keyring: Keyring | None,
    policy_name: str,
    retries: int,
    tls: ClientTls | None,
    records: Path | None,
    ready: Callable[[str], None],
) -> str:
    """Serve a static list until TERM or Ctrl-C; `ready` is told the address once it accepts clients.

    `records`: the folder of the request records and of budgets; None: nothing is kept. Raises FT8002 for keys with
    budgets and no folder.
    """
    gateway = GatewayServer(
        clock,
        fabric="static",
        rules=_rules(policy_name, registry.groups, {}, retries),
        keyring=keyring,
        targets=static_targets(registry),
    )
    stop = _stop_event()
    if records is None and keyring is not None and keyring.budgeted:
        message = "the key file has budgets, and there is no folder in which to keep what was spent"
        raise InvalidInputError.of("FT8002", message, hint="give --records FOLDER")
    async with AsyncExitStack() as stack:
        if records is not None:
            spool = await stack.enter_async_context(spooling(records, opener(records, ""), "static", "static"))
            gateway.record_with(spool.append, opt_out=False)
            await stack.enter_async_context(budgeting(gateway.accounts, opener(records, "")))
        await gateway.listen(host, port, tls)
        pages = await serve_status(gateway.status, metrics=gateway.exposition)
        stack.push_async_callback(pages.cleanup)
        _log.info("status and metrics on http://127.0.0.1:%d", pages.addresses[0][1])
        ready(gateway.listen_address)
        reason = await stop()
        await gateway.drain(DRAIN_S)
    return reason


def _learn(keyring: Keyring | None, stack: AsyncExitStack) -> None:
    if keyring is not None:
        stack.callback(asyncio.create_task(_make_pseudonyms(keyring)).cancel)


async def _make_pseudonyms(keyring: Keyring) -> None:
    """Before the tenants ask: each takes longer than the loop may stand still."""
    for tenant in keyring.tenants:
        await asyncio.to_thread(keyring.pseudonym, tenant)


def _tell_mesh(mesh: MeshNode, spec: GatewaySpec) -> None:
    """Who was revoked, and whom to dial while nobody is linked."""
    for text in spec.revoked:
        mesh.take(read_revocation(text)[0])
    mesh.seek(spec.seeks)


def _rules_of(spec: GatewaySpec) -> RoutingRules:
    rules = _rules(spec.policy, spec.groups, spec.model_providers, spec.retries, spec.routing_weights)
    rules = replace(rules, affinity=spec.affinity is not False)
    if isinstance(spec.builds, msgspec.UnsetType):
        return rules
    return replace(rules, attestation=SignedBuilds(map(read_signer, spec.builds.signers), spec.builds.providers))


def _rules(
    policy_name: str,
    groups: Mapping[str, Iterable[str]],
    model_providers: Mapping[str, Iterable[str]],
    retries: int,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> RoutingRules:
    trust = TrustPolicy(
        {group: frozenset(names) for group, names in groups.items()},
        {model: frozenset(names) for model, names in model_providers.items()},
    )
    return RoutingRules(routing_policy(policy_name, random.Random()), trust, retries, weights)


def _stop_event() -> Callable[[], asyncio.Future[str]]:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(name: str) -> None:
        if not stopped.done():
            stopped.set_result(f"signal {name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    return lambda: stopped
