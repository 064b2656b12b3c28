"""A request waits while its key's purse is being filled: after a rest, or when a key is new, that takes a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.gateway.exchange import CLIENT_GONE
from fabrictool.gateway.openai import GatewayResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.gateway.answering import Answering
    from fabrictool.gateway.http import ClientConnection

WAIT_S = 8.0
"""A store's process starts in a second or two, on a busy machine in five."""


class PurseWait:
    """Asks again after each turn of the accounts; what comes of it answers in its place."""

    def __init__(
        self,
        refusal: GatewayResponse,
        connection: ClientConnection,
        after_turn: Callable[[Callable[[], None]], None],
        again: Callable[[], GatewayResponse | Answering],
        ended: Callable[[GatewayResponse], GatewayResponse],
    ) -> None:
        """`refusal` is for one that waited for too long; `ended` records what did not get as far as an exchange."""
        self._refusal = refusal
        self._connection: ClientConnection | None = connection
        self._after_turn = after_turn
        self._again = again
        self._ended = ended
        self._until = connection.now() + WAIT_S

    def start(self) -> None:
        self._after_turn(self._ask)

    def _ask(self) -> None:
        if self._connection is not None:
            self._connection.proceed(self._outcome)

    def _outcome(self) -> GatewayResponse | Answering:
        outcome = self._again()
        if isinstance(outcome, PurseWait):
            self._after_turn(self._ask)
            return self
        self._connection = None
        return outcome

    def expire(self, now: float) -> None:
        if now > self._until:
            self.stop()

    def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.answer(self._ended(self._refusal))

    def cancel(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._ended(GatewayResponse(CLIENT_GONE, b""))

    def pause(self) -> None:
        """Nothing is sent before the answer."""

    def resume(self) -> None:
        """Nothing was held back."""
