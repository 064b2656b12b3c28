"""Paths of the clients' listener where something else than a model answers: the key API, and the login."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from fabrictool.gateway.openai import GatewayResponse, error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from fabrictool.gateway.http import ClientConnection, ClientRequest
    from fabrictool.gateway.keys import Keyring

_log = logging.getLogger("fabrictool.gateway")


class PathOwner(Protocol):
    """What answers at some paths of its own."""

    def attach(self, keyring: Keyring) -> None:
        """From now on these keys are in force."""

    def serves(self, path: str) -> bool: ...

    def admit(self, request: ClientRequest) -> GatewayResponse | None:
        """The refusal of a head, or None."""

    def call(self, request: ClientRequest, connection: ClientConnection) -> CoroutineAnswer:
        """Of an admitted request; it is not started yet."""


class CoroutineAnswer:
    """One request that a coroutine answers. A client that goes away does not stop what it asked for."""

    def __init__(self, answer: Awaitable[GatewayResponse], connection: ClientConnection) -> None:
        self._answer = answer
        self._connection: ClientConnection | None = connection
        self._task: asyncio.Future[GatewayResponse]

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._answer)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[GatewayResponse]) -> None:
        connection, self._connection = self._connection, None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a call failed", exc_info=error)
        if connection is None:
            return
        if task.cancelled() or error is not None:
            connection.answer(error_response(500, "FT8160", "the gateway failed; its log says more"))
        else:
            connection.answer(task.result())

    def cancel(self) -> None:
        self._connection = None

    def stop(self) -> None:
        """The gateway ends; whether the change was made is not known yet."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.answer(error_response(503, "FT8113", "the gateway is stopping: look whether this was done"))

    def pause(self) -> None:
        """Nothing is sent before the answer."""

    def resume(self) -> None:
        """Nothing was held back."""

    def expire(self, now: float) -> None:
        """The store has limits of its own."""
