"""A gateway alone, on a static list: without what a mesh takes."""

from __future__ import annotations

import logging
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.keeping import budgeting, spooling, storing
from fabrictool.gateway.loop import DRAIN_S, stop_event
from fabrictool.gateway.rules import routing_rules
from fabrictool.gateway.staticlist import StaticRegistry, declared_patience, static_targets
from fabrictool.routing.policies import routing_policy
from fabrictool.status.pages import serve_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.gateway.clienttls import ClientTls
    from fabrictool.gateway.keys import Keyring

_log = logging.getLogger("fabrictool.gateway")


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
        rules=replace(
            routing_rules(routing_policy(policy_name, random.Random(), {}, _log.warning), registry.groups, {}, retries),
            priorities=registry.priorities,
            aliases=registry.aliases,
            patience=declared_patience(registry),
        ),
        keyring=keyring,
        targets=static_targets(registry),
    )
    stop = stop_event()
    if records is None and keyring is not None and keyring.budgeted:
        message = "the key file has budgets, and there is no folder in which to keep what was spent"
        raise InvalidInputError.of("FT8002", message, hint="give --records FOLDER")
    async with AsyncExitStack() as stack:
        if records is not None:
            store = await stack.enter_async_context(storing(records, ""))
            spool = await stack.enter_async_context(spooling(records, store, "static", "static"))
            gateway.record_in(spool, opt_out=False)
            await stack.enter_async_context(budgeting(gateway.accounts, store))
        await gateway.listen(host, port, tls)
        pages = await serve_status(gateway.status, metrics=gateway.exposition)
        stack.push_async_callback(pages.cleanup)
        _log.info("status and metrics on http://127.0.0.1:%d", pages.addresses[0][1])
        ready(gateway.listen_address)
        reason = await stop()
        await gateway.drain(DRAIN_S)
    return reason
