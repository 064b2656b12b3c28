"""Ways to a replica's engine, and the parser of what it answers; the same above TCP and above a tunnel."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import httptools

from fabrictool.base.compiling import mypyc_attr
from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.heads import HEADS_LEARNED, KnownHead, known_head
from fabrictool.gateway.outbox import Outbox
from fabrictool.mesh.framing import StreamHead

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.mesh.transport.tunnel import Tunnel

CONNECT_SECONDS: Final = 5.0
IDLE_S: Final = 4.0
"""A connection that has been idle for longer is not used again: uvicorn, below vLLM and SGLang, closes it after 5 s."""
IDLE_KEPT: Final = 256
"""Connections to one server that wait for a request."""
_SIZES: Final = frozenset({b"content-length", b"transfer-encoding"})
ANSWER_HEAD_OCTETS: Final = 64 * 1024
OK: Final = 200

_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Why this system makes no connection, to whomever."""

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is sent, as far as its replica's provider may know."""

    group: str = ""
    tenant: str = ""
    """Pseudonym; see `keys.pseudonym_of`."""


NOBODY: Final = Caller()


@mypyc_attr(allow_interpreted_subclasses=True)
class Connector:
    """One way to a server. No Protocol, whose methods compiled callers would look for by their names."""

    __slots__ = ()

    @property
    def ready(self) -> bool:
        """Whether it is worth trying."""
        raise NotImplementedError

    # Wide: a request, whose it is, and who hears of the answer.
    def start(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        caller: Caller,
        listener: AnswerListener,
        *,
        anew: bool = False,
    ) -> Upstream:
        """Send a request. Everything that follows, failure included, goes to `listener`, after this has returned.

        `anew`: by a connection that carried nothing before.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drop the connections that wait for a request."""


@mypyc_attr(allow_interpreted_subclasses=True)
class AnswerListener:
    """What an exchange hears of its upstream; after `failed`, `stale` or `complete` nothing more comes."""

    __slots__ = ()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Without what says how long the body is; nobody changes the list."""

    def body(self, data: bytes) -> None:
        """Body bytes, transfer coding removed."""

    def complete(self, *, sized: bool) -> None:
        """`sized`: the answer said where it ends; otherwise the connection's end is its end, and so is a crash."""

    def exhausted(self, reason: str) -> None:
        """The system lets this process open no connection more, to whomever."""

    def failed(self, reason: str, *, refused: bool) -> None:
        """The upstream broke off, before or after its head; `refused`: it was never reached."""

    def stale(self) -> None:
        """A kept connection was closed before anything came: the server closed it while the request was on its way."""


class Upstream:
    """A connection to a server, with one request after another, or a tunnel's stream, with one; an asyncio.Protocol by
    its methods.
    """

    __slots__ = (
        "_bodies", "_connecting", "_done", "_head_octets", "_head_seen", "_headers", "_heard", "_keep", "_known",
        "_known_headers", "_listener", "_parser", "_paused", "_sized", "_to_learn", "_transport", "idle_since", "used",
    )  # fmt: skip

    def __init__(self, listener: AnswerListener, keep: Callable[[Upstream], None] | None = None) -> None:
        """`keep` takes it back when it may carry another request."""
        self._listener: AnswerListener | None = listener
        self._keep = keep
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._bodies: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head_octets = 0
        self._known: KnownHead | None = None
        """Of an answer with 200 that came before."""
        self._known_headers: list[tuple[bytes, bytes]] = []
        self._to_learn = HEADS_LEARNED
        self._head_seen = self._sized = self._done = self._heard = self._paused = False
        self.used = False
        """Whether it carried a request before."""
        self.idle_since = 0.0

    def follow(self, connecting: asyncio.Task[None]) -> None:
        """The task that is still connecting, to be cancelled by `abort`."""
        self._connecting = connecting

    def again(self, listener: AnswerListener) -> None:
        """Another request goes by this connection."""
        self._listener, self.used = listener, True
        self._headers = []
        self._head_octets = 0
        self._head_seen = self._sized = self._done = self._heard = False

    def send(self, request: bytes, outbox: Outbox) -> None:
        if self._transport is not None:
            outbox.put(self._transport, request)

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Forget the answer; the engine sees a closed connection and frees its slot."""
        self._listener = None
        self.close()

    def exhaust(self, reason: str) -> None:
        """End, once, with what is not the server's fault."""
        listener, self._listener = self._listener, None
        self.close()
        if listener is not None:
            listener.exhausted(reason)

    def fail(self, reason: str, *, refused: bool = False) -> None:
        """End with a failure, once."""
        listener, self._listener = self._listener, None
        self.close()
        if listener is None:
            return
        if self.used and not self._heard:
            listener.stale()
        else:
            listener.failed(reason, refused=refused)

    def pause_reading(self) -> None:
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, unless the client has gone meanwhile."""
        self._transport = cast("asyncio.Transport", transport)
        if self._listener is None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse; what came of a body at once is passed on at once, however many chunks it came in."""
        self._heard = True
        begins = not self._head_octets and not self._done
        if begins and self._known is not None and self._listener is not None:
            body_at = self._known.body_at(data)
            if body_at:
                self._take_known(data[body_at:])
                return
        if not self._head_seen:
            self._head_octets += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the engine's answer is not HTTP: {error}")
            return
        if self._listener is None:
            self.close()  # it speaks without being asked
        elif not self._head_seen and self._head_octets > ANSWER_HEAD_OCTETS:
            self.fail(f"the head of the engine's answer is over {ANSWER_HEAD_OCTETS >> 10} KiB")
        elif self._bodies or self._done:
            if begins and self._done and self._to_learn:
                self._learn(data)
            self._pass_on()

    def eof_received(self) -> None:
        """A body without a length ends here; any other was cut off."""
        self._ended("the engine closed the connection early")

    def pause_writing(self) -> None:
        """A request is here as a whole: there is nobody to slow down."""

    def resume_writing(self) -> None:
        """It was never slowed down; see `pause_writing`."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Too early, or we would not be listening any more."""
        if exc is None:
            self._ended("the engine closed the connection early")
        else:
            self.fail(str(exc))

    # -- httptools callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._done:
            self._keep = None  # there is more than was asked for: it is dropped, and nothing goes here any more

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _SIZES:
            self._sized = True
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole; an interim 1xx head is skipped."""
        if self._done:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self._head_seen = True
        if self._listener is not None:
            self._listener.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self._done:
            self._bodies.append(data)

    def on_message_complete(self) -> None:
        if self._head_seen and not self._done:
            self._done = True
            if not self._parser.should_keep_alive():  # llhttp forgets it with the message
                self._keep = None

    # -- internals --------------------------------------------------------------------------------------------

    def _take_known(self, body: bytes) -> None:
        """A whole answer, with the head that is known."""
        self._to_learn = HEADS_LEARNED
        self._head_seen = self._sized = self._done = True
        if body:
            self._bodies.append(body)
        if self._listener is not None:
            self._listener.head(OK, self._known_headers)
        if self._listener is None:  # it asks elsewhere
            self.close()
        else:
            self._pass_on()

    def _learn(self, data: bytes) -> None:
        """Know the head of what was received, if that was one whole answer and would be read the same each time."""
        self._to_learn -= 1
        if self._keep is not None and self._parser.get_status_code() == OK and len(self._bodies) == 1:
            self._known, self._known_headers = known_head(data, len(self._bodies[0])), self._headers

    def _ended(self, reason: str) -> None:
        if self._head_seen and not self._sized and self._listener is not None:
            self._done = True
            self._pass_on()
        else:
            self.fail(reason)

    def _pass_on(self) -> None:
        listener, bodies = self._listener, self._bodies
        if listener is None:
            return
        if bodies:
            self._bodies = []
            listener.body(bodies[0] if len(bodies) == 1 else b"".join(bodies))
        if not self._done or self._listener is None:
            return
        self._listener = None
        if self._keep is not None and self._sized and self._transport is not None:  # `_kept` asks whether it still is
            if self._paused:  # a client took its last octets slowly
                self.resume_reading()
            self._keep(self)
        else:
            asyncio.get_running_loop().call_soon(self.close)
        listener.complete(sized=self._sized)


class TunnelConnector(Connector):
    """Through the tunnel that the agent dialled, or by a hub that it dialled."""

    def __init__(self, mesh: MeshNode, session: bytes, service: bytes) -> None:
        self._mesh = mesh
        self._session = session
        self._service = service

    @property
    def ready(self) -> bool:
        return self._mesh.reaches(self._session)

    # Wide: see `Connector`.
    def start(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        caller: Caller,
        listener: AnswerListener,
        *,
        anew: bool = False,
    ) -> Upstream:
        """Open a stream and send the body after its head."""
        upstream = Upstream(listener)
        head = StreamHead(self._service, method, path, headers, len(body), caller.group, caller.tenant)
        tunnel = self._mesh.tunnel(self._session) or self._mesh.relays.tunnel(self._session)
        if tunnel is not None:
            self._send(tunnel, head, body, upstream)
        elif self._mesh.relays.leads_to(self._session):
            upstream.follow(asyncio.get_running_loop().create_task(self._by_relay(head, body, upstream)))
        else:
            _refuse_soon(upstream, "the agent's tunnel is gone")
        return upstream

    def close(self) -> None:
        """Tunnels are the mesh's."""

    async def _by_relay(self, head: StreamHead, body: bytes, upstream: Upstream) -> None:
        try:
            tunnel = await self._mesh.relays.reach(self._session)
        except FabrictoolError as error:
            upstream.fail(error.problems[0].message, refused=True)
            return
        if tunnel.closed.done():  # in the turn of the loop between
            upstream.fail("the agent's tunnel is gone", refused=True)
            return
        self._send(tunnel, head, body, upstream)

    @staticmethod
    def _send(tunnel: Tunnel, head: StreamHead, body: bytes, upstream: Upstream) -> None:
        try:
            stream = tunnel.open_stream(head, cast("asyncio.Protocol", upstream))
        except FabrictoolError as error:
            _refuse_soon(upstream, str(error))
            return
        stream.write(body)
        stream.write_eof()


def _refuse_soon(upstream: Upstream, reason: str) -> None:
    """Not while the exchange is still starting."""
    asyncio.get_running_loop().call_soon(lambda: upstream.fail(reason, refused=True))


class TcpConnector(Connector):
    """Straight to a server's address, by connections that are kept for the next request."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._host = host
        self._port = port
        self._prefix = prefix
        self._host_line = f"HTTP/1.1\r\nhost: {host}:{port}\r\n"
        self._outbox = Outbox()
        self._idle: list[Upstream] = []
        """The one that was used last is used first, so that the others grow old and are dropped."""

    @property
    def ready(self) -> bool:
        """Static nodes are always worth a try: who refuses is out for a while (`routing.ejection`)."""
        return True

    # Wide: see `Connector`.
    def start(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        caller: Caller,
        listener: AnswerListener,
        *,
        anew: bool = False,
    ) -> Upstream:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        head = f"{method} {self._prefix}{path} {self._host_line}{lines}content-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        upstream = None if anew else self._kept()
        if upstream is not None:
            upstream.again(listener)
            upstream.send(request, self._outbox)
            return upstream
        upstream = Upstream(listener, self._keep)
        upstream.follow(asyncio.get_running_loop().create_task(self._connect(request, upstream)))
        return upstream

    def close(self) -> None:
        for upstream in self._idle:
            upstream.close()
        self._idle = []

    def _kept(self) -> Upstream | None:
        if not self._idle:
            return None
        oldest = monotonic() - IDLE_S
        while self._idle:
            upstream = self._idle.pop()
            if upstream.idle_since < oldest:
                upstream.close()
                self.close()  # all others are older
            elif upstream.usable:
                return upstream
        return None

    def _keep(self, upstream: Upstream) -> None:
        if len(self._idle) >= IDLE_KEPT:
            self._idle.pop(0).close()
        upstream.idle_since = monotonic()  # the loop's own clock costs a system call to find the loop
        self._idle.append(upstream)

    async def _connect(self, request: bytes, upstream: Upstream) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(
                    lambda: cast("asyncio.Protocol", upstream), self._host, self._port
                )
        except TimeoutError:
            text = f"{self._host}:{self._port} did not accept a connection within {CONNECT_SECONDS:.0f} s"
            upstream.fail(text, refused=True)
        except OSError as error:
            if error.errno in _OURS:
                upstream.exhaust(os.strerror(error.errno))
            else:
                upstream.fail(f"{self._host}:{self._port}: {error.strerror or error}", refused=True)
        else:
            transport.write(request)
