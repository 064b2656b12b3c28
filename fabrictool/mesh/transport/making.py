"""Waits for a connection in a way that may be cancelled at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_P = TypeVar("_P", bound=asyncio.BaseProtocol)


async def made(connecting: Coroutine[Any, Any, tuple[asyncio.BaseTransport, _P]]) -> _P:
    """The protocol of a connection that `connecting` makes over a socket of ours, such as ``loop.create_connection``.

    Cancelled in its first turn, asyncio's own would forget the transport and go on with it. And were we to close the
    socket, its number could be another one's by the time the transport registers it: that one would never be read.
    """
    task = asyncio.ensure_future(connecting)
    try:
        _, protocol = await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abandon)
        raise
    return protocol


def _abandon(task: asyncio.Future[tuple[asyncio.BaseTransport, Any]]) -> None:
    if not task.cancelled() and task.exception() is None:
        transport, _ = task.result()
        if isinstance(transport, asyncio.Transport):
            transport.abort()
