"""How many tokens the prompt of a stream was that was given up before its figures came: an engine is asked.

Engines say at a stream's end what its prompt was, and a client that leaves does not wait for it. Some engines take the
same body at another path and answer how many tokens it is; any replica of the model may be asked, for all read it the
same way. Nothing waits for this but the books: the record, the limits and the budget of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from fabrictool.engines.adapter import engine_capabilities
from fabrictool.gateway.upstream import AnswerListener

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.gateway.directory import RoutingTarget
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.gateway.upstream import Upstream

MOST: Final = 64
"""Questions at a time; what goes beyond is estimated, so that whoever gives up very much costs the engines no more."""
PATIENCE_S: Final = 5.0
ANSWER_OCTETS: Final = 16 * 2**20
"""Engines send the tokens along."""
_MORE_THAN_TEXT: Final = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"audio_url"')
"""Parts of a prompt that are no text: what they become is not counted there."""
COUNT_PATHS: Final = {name: known.count_path for name, known in engine_capabilities().items() if known.count_path}
"""Engine → path."""


class _Counted(msgspec.Struct, frozen=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


_decoder: Final = msgspec.json.Decoder(_Counted)


class Recounts:
    """The questions of one gateway."""

    def __init__(self) -> None:
        self._open: set[_Question] = set()

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, target: RoutingTarget, asked: ModelRequest, then: Callable[[int | None], None]) -> bool:
        """Have `then` called with the tokens of a request's prompt, or with None; False where nobody can be asked."""
        path = COUNT_PATHS.get(target.engine)
        if path is None or len(self._open) >= MOST or any(part in asked.body for part in _MORE_THAN_TEXT):
            return False
        question = _Question(then, self._open.discard)
        self._open.add(question)
        question.begin(target, asked, path)
        return True

    def close(self) -> None:
        """Whoever still waits for an answer goes on without it."""
        for question in list(self._open):
            question.end(None)


class _Question(AnswerListener):
    """One of them, with one answer."""

    def __init__(self, then: Callable[[int | None], None], ended: Callable[[_Question], None]) -> None:
        self._then: Callable[[int | None], None] | None = then
        self._ended = ended
        self._status = 0
        self._parts: list[bytes] = []
        self._octets = 0
        self._upstream: Upstream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._again: Callable[[], Upstream] | None = None

    def begin(self, target: RoutingTarget, asked: ModelRequest, path: str) -> None:
        def send(*, anew: bool = False) -> Upstream:
            return target.connector.start("POST", path, asked.headers, asked.body, asked.caller, self, anew=anew)

        self._again = lambda: send(anew=True)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.end, None)
        self._upstream = send()

    def end(self, tokens: int | None) -> None:
        """Have the books closed, by whatever comes first."""
        then, self._then = self._then, None
        if then is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        self._ended(self)
        then(tokens)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._octets += len(data)
        if self._octets <= ANSWER_OCTETS:
            self._parts.append(data)
        else:
            self.end(None)

    def complete(self, *, sized: bool) -> None:
        self._upstream, tokens = None, None
        if self._status == 200:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                tokens = _decoder.decode(b"".join(self._parts)).count
        self.end(tokens)

    def failed(self, reason: str, *, refused: bool) -> None:
        self._upstream = None
        self.end(None)

    def exhausted(self, reason: str) -> None:
        self._upstream = None
        self.end(None)

    def stale(self) -> None:
        self._upstream = None
        if self._again is not None:
            self._upstream = self._again()
