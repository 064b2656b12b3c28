"""How many tokens the prompt of a stream was that was given up before its figures came: an engine is asked.

Engines say at a stream's end what its prompt was, and a client that leaves does not wait for it. Some engines take the
same body at another path and answer how many tokens it is: who read it is asked, or, where that one was lost, another
replica of the same provider, for all read it the same way. Nothing waits for this but the record; limits and budget go
by an estimate until then.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

from fabrictool.engines.adapter import engine_capabilities
from fabrictool.gateway.accounts import may_have_media
from fabrictool.gateway.upstream import AnswerListener, Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.gateway.directory import RoutingTarget
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.gateway.upstream import Upstream

_log = logging.getLogger("fabrictool.gateway")

MOST: Final = 64
"""Questions at a time; what goes beyond is estimated, so that whoever gives up very much costs the engines no more."""
MOST_OF_A_TENANT: Final = 16
MOST_OCTETS: Final = 32 * 2**20
"""Of the bodies of all of them."""
PATIENCE_S: Final = 5.0
HEAD_OCTETS: Final = 4096
"""Of an answer, that are looked at: the count stands first, and the tokens, which engines send along, behind it."""
COUNT_PATHS: Final = {name: known.count_path for name, known in engine_capabilities().items() if known.count_path}
"""Engine → path."""
_COUNT: Final = re.compile(rb'\{\s*"count"\s*:\s*([1-9]\d{0,11})\s*[,}]')


class Recounts:
    """The questions of one gateway."""

    def __init__(self) -> None:
        self._open: set[_Question] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, target: RoutingTarget, asked: ModelRequest, then: Callable[[int | None], None]) -> bool:
        """Have `then` called with the tokens of a request's prompt, or with None; False where nobody can be asked."""
        path = COUNT_PATHS.get(target.engine)
        if path is None or not self._has_room(asked) or may_have_media(asked.body):
            return False
        question = _Question(target, path, asked, then, self._open.discard)
        self._open.add(question)
        question.send()
        return True

    def _has_room(self, asked: ModelRequest) -> bool:
        if self._closed or len(self._open) >= MOST:
            return False
        if sum(question.asked.tenant == asked.tenant for question in self._open) >= MOST_OF_A_TENANT:
            return False
        return sum(len(question.asked.body) for question in self._open) + len(asked.body) <= MOST_OCTETS

    def close(self) -> None:
        """Nobody is asked any more, and whoever still waits for an answer goes on without it."""
        self._closed = True
        for question in list(self._open):
            try:
                question.end(None)
            except Exception:  # noqa: BLE001 - the books of the others are closed all the same
                _log.exception("the books of a request stay open")


class _Question(AnswerListener):
    """One of them, with one answer."""

    # Wide: who is asked what, and who hears of the end.
    def __init__(
        self,
        target: RoutingTarget,
        path: str,
        asked: ModelRequest,
        then: Callable[[int | None], None],
        ended: Callable[[_Question], None],
    ) -> None:
        self.asked = asked
        self._target, self._path = target, path
        self._then: Callable[[int | None], None] | None = then
        self._ended = ended
        self._status = 0
        self._head = b""
        self._upstream: Upstream | None = None
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.end, None)

    def send(self, *, anew: bool = False) -> None:
        asked, way = self.asked, self._target.connector
        caller = Caller(asked.caller.group)  # of no tenant: an agent would count it as another request of that one
        self._upstream = way.start("POST", self._path, asked.headers, asked.body, caller, self, anew=anew)

    def end(self, tokens: int | None) -> None:
        """Have the books closed, by whatever comes first."""
        then, self._then = self._then, None
        if then is None:
            return
        self._timer.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        self._ended(self)
        then(tokens)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if len(self._head) < HEAD_OCTETS:
            self._head += data[:HEAD_OCTETS]

    def complete(self, *, sized: bool) -> None:
        self._upstream = None
        told = _COUNT.match(self._head) if self._status == 200 else None
        tokens = int(told[1]) if told is not None else None
        # More than its context nobody can have read.
        self.end(None if tokens is None or 0 < self._target.context < tokens else tokens)

    def failed(self, reason: str, *, refused: bool) -> None:
        self._upstream = None
        self.end(None)

    def exhausted(self, reason: str) -> None:
        self._upstream = None
        self.end(None)

    def stale(self) -> None:
        self.send(anew=True)
