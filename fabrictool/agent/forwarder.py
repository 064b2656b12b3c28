"""Splices a tunnel's stream to the engine: one stream, one request, bytes unparsed.

The request head arrives as data, not as bytes to be parsed, so nothing that a client sends can smuggle a second
request or reach another path: only what gateways offer passes, hop-by-hop headers do not.

A connection to the engine carries one request, and its end is the answer's. To keep it would save 45 µs of the agent's
CPU and 42 of uvicorn's (a Unix socket), and answers would have to be read for where they end, which is 0.2 µs a token.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from fabrictool.engines.paths import MODEL_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.agent.engine_address import EngineAddress
    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.transport.tunnel import TunnelStream

_log = logging.getLogger("fabrictool.agent")

_HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "authorization",
        "expect",
    ]
)


def allowed(head: StreamHead) -> bool:
    """Whether an engine may see this request."""
    path = head.path.split("?", 1)[0]
    return head.method == "POST" and path in MODEL_PATHS and all(32 < ord(c) < 127 for c in head.path)


def request_head(head: StreamHead) -> bytes:
    """The HTTP/1.1 head for the engine; header values with control characters are dropped."""
    lines = [f"{head.method} {head.path} HTTP/1.1", "host: localhost", "connection: close"]
    lines.append(f"content-length: {head.length}")
    lines += [
        f"{name}: {value}"
        for name, value in head.headers
        if name.lower() not in _HOP_BY_HOP
        and name.replace("-", "").replace("_", "").isalnum()
        and not any(ord(c) < 32 or ord(c) == 127 for c in value)
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


class EngineSide(asyncio.Protocol):
    """The connection to the engine; its bytes go to the stream as they come."""

    def __init__(self, stream: TunnelStream) -> None:
        self._stream = stream
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._stream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is done, or it died: told by the error, else by the gateway's parser from the body's length."""
        if exc is None:
            self._stream.write_eof()
        else:
            _log.warning("the engine broke off: %s", exc)
            self._stream.close()

    def pause_writing(self) -> None:
        """The engine reads slowly: grant the stream no credit."""
        self._stream.pause_reading()

    def resume_writing(self) -> None:
        self._stream.resume_reading()


class Forwarder(asyncio.Protocol):
    """The stream's handler on the agent: connects to the engine and splices."""

    def __init__(self, head: StreamHead, engine: EngineAddress, finished: Callable[[], None]) -> None:
        self._head = head
        self._address = engine
        self._finished = finished
        self._stream: TunnelStream
        self._engine: EngineSide
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hold the body back until the engine has accepted the connection."""
        self._stream = transport  # type: ignore[assignment]  # asyncio types this as BaseTransport
        self._stream.pause_reading()
        self._engine = EngineSide(self._stream)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._address.connect(lambda: self._engine)
        except OSError as error:
            _log.warning("the engine at %s does not answer: %s", self._address, error)
            self._stream.close()
            return
        if self._engine.transport is not None and not self._stream.is_closing():
            self._engine.transport.write(request_head(self._head))
            self._stream.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._engine.transport is not None:
            self._engine.transport.write(data)

    def eof_received(self) -> None:
        """The body is complete; content-length already says so, and engines may take a half-close for a cancel."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancelled by the client, or finished: free the engine's slot at once."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._engine.transport is not None:
            self._engine.transport.abort()
        self._finished()

    def pause_writing(self) -> None:
        """The gateway is slow: stop reading from the engine."""
        if self._engine.transport is not None and not self._engine.transport.is_closing():
            self._engine.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._engine.transport is not None and not self._engine.transport.is_closing():
            self._engine.transport.resume_reading()
