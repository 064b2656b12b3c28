"""Ways to a replica's engine, and the parser of what it answers; the same above TCP and above a tunnel."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.framing import StreamHead

if TYPE_CHECKING:
    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.mesh.transport.tunnel import Tunnel

CONNECT_SECONDS = 5.0

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is sent, as far as its replica's provider may know."""

    group: str = ""
    tenant: str = ""
    """Pseudonym; see `keys.pseudonym_of`."""


class Connector(Protocol):
    """One way to a server."""

    @property
    def ready(self) -> bool:
        """Whether it is worth trying."""

    def start(self, method: str, path: str, headers: Headers, body: bytes, caller: Caller, response: Response) -> None:
        """Send a request. Everything that follows, failure included, goes to `response`."""


class ResponseListener(Protocol):
    """What an exchange hears of its upstream; after `failed` or `complete` nothing more comes."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def body(self, data: bytes) -> None:
        """Body bytes, transfer coding removed."""

    def complete(self) -> None: ...

    def failed(self, reason: str) -> None:
        """The upstream broke off, before or after its head."""


class Response(asyncio.Protocol):
    """Parses one HTTP/1.1 response."""

    def __init__(self, listener: ResponseListener) -> None:
        self._listener: ResponseListener | None = listener
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head_seen = False
        self.sized = False
        """Whether the answer says where it ends; otherwise the connection's end is its end, and so is a crash."""

    def follow(self, connecting: asyncio.Task[None]) -> None:
        """The task that is still connecting, to be cancelled by `abort`."""
        self._connecting = connecting

    def abort(self) -> None:
        """Forget the upstream; the engine sees a closed connection and frees its slot."""
        self._listener = None
        self._close()

    def fail(self, reason: str) -> None:
        """End with a failure, once."""
        listener, self._listener = self._listener, None
        self._close()
        if listener is not None:
            listener.failed(reason)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, unless the client has gone meanwhile."""
        self._transport = cast("asyncio.Transport", transport)
        if self._listener is None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the engine's answer is not HTTP: {error}")

    def eof_received(self) -> None:
        """A body without a length ends here; any other was cut off."""
        if self._head_seen and not self.sized:
            self.on_message_complete()
        else:
            self.fail("the engine closed the connection early")

    def connection_lost(self, exc: Exception | None) -> None:
        """Too early, or we would not be listening any more."""
        if exc is None and self._head_seen and not self.sized:
            self.on_message_complete()
        else:
            self.fail(str(exc) if exc else "the engine closed the connection early")

    # -- httptools callbacks ----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.sized = True

    def on_headers_complete(self) -> None:
        """The head is whole; an interim 1xx head is skipped."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self._head_seen = True
        if self._listener is not None:
            self._listener.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._listener is not None:
            self._listener.body(data)

    def on_message_complete(self) -> None:
        if not self._head_seen:
            return
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().call_soon(self._close)
            listener.complete()

    def _close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()


class TunnelConnector:
    """Through the tunnel that the agent dialled, or by a hub that it dialled."""

    def __init__(self, mesh: MeshNode, session: bytes, service: bytes) -> None:
        self._mesh = mesh
        self._session = session
        self._service = service

    @property
    def ready(self) -> bool:
        return self._mesh.reaches(self._session)

    def start(self, method: str, path: str, headers: Headers, body: bytes, caller: Caller, response: Response) -> None:
        """Open a stream and send the body after its head."""
        head = StreamHead(self._service, method, path, headers, len(body), caller.group, caller.tenant)
        tunnel = self._mesh.tunnel(self._session) or self._mesh.relays.tunnel(self._session)
        if tunnel is not None:
            self._send(tunnel, head, body, response)
        elif self._mesh.relays.leads_to(self._session):
            response.follow(asyncio.get_running_loop().create_task(self._by_relay(head, body, response)))
        else:
            asyncio.get_running_loop().call_soon(response.fail, "the agent's tunnel is gone")

    async def _by_relay(self, head: StreamHead, body: bytes, response: Response) -> None:
        try:
            tunnel = await self._mesh.relays.reach(self._session)
        except FabrictoolError as error:
            response.fail(error.problems[0].message)
            return
        if tunnel.closed.done():  # in the turn of the loop between
            response.fail("the agent's tunnel is gone")
            return
        self._send(tunnel, head, body, response)

    @staticmethod
    def _send(tunnel: Tunnel, head: StreamHead, body: bytes, response: Response) -> None:
        try:
            stream = tunnel.open_stream(head, response)
        except FabrictoolError as error:
            asyncio.get_running_loop().call_soon(response.fail, str(error))
            return
        stream.write(body)
        stream.write_eof()


class TcpConnector:
    """Straight to a server's address."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._host = host
        self._port = port
        self._prefix = prefix
        self.ready = True
        """Static nodes are always worth a try; a refused connection costs one retry."""

    def start(self, method: str, path: str, headers: Headers, body: bytes, caller: Caller, response: Response) -> None:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"content-length: {len(body)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        response.follow(asyncio.get_running_loop().create_task(self._send(head + body, response)))

    async def _send(self, request: bytes, response: Response) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(lambda: response, self._host, self._port)
        except TimeoutError:
            response.fail(f"{self._host}:{self._port} did not accept a connection within {CONNECT_SECONDS:.0f} s")
        except OSError as error:
            response.fail(f"{self._host}:{self._port}: {error.strerror or error}")
        else:
            transport.write(request)
