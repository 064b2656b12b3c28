"""Ask a host for its keys without trusting it: the key exchange alone, no login, nothing is sent to it."""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncssh

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections import errors, pins
from fabrictool.clusters.connections.asyncssh_connection import log_in
from fabrictool.clusters.connections.settings import ConnectionLimits

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Endpoint


def shown_keys(endpoint: Endpoint, *, limits: ConnectionLimits | None = None) -> list[pins.HostKeyPin]:
    """The public keys that a host shows, one of each kind; `endpoint.host_keys` are not looked at.

    The jump hosts on the way are logged in to, so their keys must be pinned.

    Raises
    ------
    FabrictoolError
        FT5301, FT5302 or FT5310 for the host; all that a login may raise for a jump host.
    """
    return asyncio.run(_shown(endpoint, limits or ConnectionLimits()))


async def _shown(endpoint: Endpoint, limits: ConnectionLimits) -> list[pins.HostKeyPin]:
    hosts: list[Any] = []
    shown: list[pins.HostKeyPin] = []
    failure: FabrictoolError | None = None
    try:
        for hop in endpoint.jumps:
            hosts.append(await log_in(hop, hosts[-1] if hosts else None, limits))
        for kind, names in pins.SIGNATURES.items():
            try:
                blob = await _key(endpoint, list(names), hosts[-1] if hosts else None, limits)
            except FabrictoolError as error:
                failure = error
                if error.problems[0].transient and not shown:
                    break  # nobody is there; a server that lacks one kind of key may also just hang up
            else:
                shown.append(pins.HostKeyPin(authority=False, kind=kind, blob=blob))
    finally:
        for host in reversed(hosts):
            host.close()
            with suppress(OSError, asyncssh.Error):
                await host.wait_closed()
    if not shown and failure is not None:
        raise failure
    return shown


async def _key(endpoint: Endpoint, algorithms: list[str], tunnel: Any, limits: ConnectionLimits) -> bytes:
    try:
        async with asyncio.timeout(limits.connect_s):
            key = await asyncssh.get_server_host_key(
                endpoint.host,
                endpoint.port,
                tunnel=tunnel,
                config=None,
                server_host_key_algs=algorithms,
            )
    except TimeoutError as error:
        raise errors.no_answer(endpoint, "no host key", limits.connect_s) from error
    except (OSError, asyncssh.Error) as error:
        raise errors.of_connecting(endpoint, error) from error
    if key is None:
        raise errors.no_protocol(endpoint, "no host key was shown")
    return base64.b64decode(key.export_public_key("openssh").split()[1])
