"""One TLS connection between two nodes: HELLO, beats, gossip, and streams that look like asyncio transports.

A stream's handler is an ordinary `asyncio.Protocol`, so the gateway drives a tunnel and a plain TCP connection
with the same code, and the agent splices a stream to a local socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import msgspec

from fabrictool import __version__
from fabrictool.mesh.framing import PROTOCOL, Beat, Frame, FramingError, Hello, StreamHead
from fabrictool.mesh.framing import FrameType as F
from fabrictool.mesh.identity import IdentityError, VerifiedSession
from fabrictool.mesh.member import BEAT_SECONDS
from fabrictool.mesh.mux import Mux

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from fabrictool.base.errors import FabrictoolError

_T = TypeVar("_T")
_log = logging.getLogger("fabrictool.mesh")

Expected = bytes | Literal["gateway", "agent or gateway", "own agent or gateway"]
"""At the other end: a session, or what its certificate must say; an own agent is one of our provider."""

MISSED_BEATS = 3
WRITE_OCTETS = 16 * 1024
"""Handed to the socket at a time. Larger: fewer TLS records and calls a body; all of it is ahead of the next beat."""
UNSENT_OCTETS = 32 * 1024
"""What the kernel may hold and has not sent yet. Larger: fewer wake-ups on a fast link; longer waits on a slow one."""
PARTING_S = 5.0
"""A peer closes a tunnel that we leave within a moment, if its release knows how."""
HELLO_SECONDS = 10.0
"""A connection that has not proved itself by then is closed: nobody may hold a slot without an identity."""


class Host(Protocol):
    """What a tunnel asks of the node that owns it."""

    @property
    def chain(self) -> tuple[bytes, ...]:
        """Our certificates, leaf first."""

    def verify(self, chain: tuple[bytes, ...], expected: Expected) -> VerifiedSession:
        """Check the peer's chain, and that it is somebody whom we expect there; raises IdentityError."""

    def expired(self, session: VerifiedSession) -> bool:
        """Whether the peer's certificate has ended meanwhile."""

    def beat(self, session: VerifiedSession) -> Beat:
        """What to tell this peer every second."""

    def tunnel_up(self, tunnel: Tunnel) -> None:
        """The peer has proved who it is."""

    def tunnel_down(self, tunnel: Tunnel, reason: str) -> None:
        """The connection is gone; called once, only after `tunnel_up`."""

    def gossip_received(self, tunnel: Tunnel, payload: bytes) -> None: ...

    def beat_received(self, tunnel: Tunnel, beat: Beat) -> None: ...

    def stream_opened(self, stream: TunnelStream, head: StreamHead) -> asyncio.Protocol | None:
        """The peer wants a service: the handler of the stream, or None to refuse."""


class TunnelStream(asyncio.Transport):
    """One stream. `close` and `abort` both reset it unless both sides have ended."""

    def __init__(self, tunnel: Tunnel, stream: int) -> None:
        super().__init__()
        self.tunnel = tunnel
        self.id = stream
        self.protocol: asyncio.Protocol | None = None
        self._closed = False
        self._paused = False
        self._held: list[bytes] = []
        self._held_end = False
        self._writing_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or queue under the peer's credit."""
        if self._closed:
            return
        self.tunnel.mux.write(self.id, bytes(data))  # which copies nothing if these are bytes
        self.tunnel.flush()
        self.regulate()

    def write_eof(self) -> None:
        self.tunnel.mux.end(self.id)
        self.tunnel.flush()
        self.tunnel.reap(self)

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        """Whether `close` was called or the peer reset the stream."""
        return self._closed

    def close(self) -> None:
        """End the stream at once, telling the peer."""
        if not self._closed:
            self._closed = True
            self.tunnel.forget(self.id, "closed")
            if self.protocol is not None:
                asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        """Stop granting credit; the peer stalls after 256 KiB."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver what was held and grant its credit."""
        self._paused = False
        held, self._held = self._held, []
        for data in held:
            self.deliver(data)
        if self._held_end and not self._paused:
            self._held_end = False
            self.peer_ended()
        self.tunnel.reap(self)

    def is_reading(self) -> bool:
        return not self._paused

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``session``: the peer's verified session."""
        return self.tunnel.peer if name == "session" else default

    # called by the tunnel

    def deliver(self, data: bytes) -> None:
        if self._paused:
            self._held.append(data)
            return
        if self.protocol is not None and not self._closed:
            self.protocol.data_received(data)
            self.tunnel.mux.consumed(self.id, len(data))
            self.tunnel.flush()  # whatever the protocol wrote meanwhile, and now and then a grant

    def peer_ended(self) -> None:
        if self._held:
            self._held_end = True
        elif self.protocol is not None and not self._closed:
            self.protocol.eof_received()

    def peer_gone(self, error: Exception | None) -> None:
        """RST from the peer, or the tunnel broke."""
        if not self._closed:
            self._closed = True
            if self.protocol is not None:
                self.protocol.connection_lost(error)

    @property
    def held_octets(self) -> int:
        """What came while reading was paused."""
        return sum(map(len, self._held))

    @property
    def delivered(self) -> bool:
        """Whether everything that came has been handed to the protocol."""
        return not self._held and not self._held_end

    def regulate(self) -> None:
        """Let the protocol write only while nothing of its stream waits, for its turn or for the peer's credit."""
        full = self.tunnel.mux.blocked(self.id)
        if self.protocol is None or self._closed or full == self._writing_paused:
            return
        self._writing_paused = full
        if full:
            self.protocol.pause_writing()
        else:
            self.protocol.resume_writing()


class Tunnel(asyncio.Protocol):
    """One connection, either side."""

    def __init__(self, host: Host, clock: Callable[[], float], *, dialler: bool, expected: Expected) -> None:
        self._host = host
        self._clock = clock
        self._expected: Expected = expected
        self.mux = Mux(dialler=dialler)
        self.peer: VerifiedSession | None = None
        self.refusal: FabrictoolError | None = None
        """Why the connection was given up, if it was ours to decide."""
        self.sent_octets = 0
        self.fell_silent = False
        """Whether it was closed because the peer was not heard any more."""
        self._closed_because = "the peer closed the tunnel"
        """Said when it is over: whoever reads of a broken link wants to know which side gave it up, and why."""
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, TunnelStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_heard = self._beat_due = clock()
        self._socket_full = False
        self._parting = self._closes_when_idle = False
        """It carries no gossip any more; and it is ours to close."""
        self._told_wall = 0, 0.0
        """What the peer's clock showed in its last beat, and when that came."""

    # -- for the owner ----------------------------------------------------------------------------------------

    def open_stream(self, head: StreamHead, protocol: asyncio.Protocol) -> TunnelStream:
        """Ask the peer for a service; `protocol.connection_made` has been called on return."""
        stream = TunnelStream(self, self.mux.open(head))
        self._streams[stream.id] = stream
        stream.protocol = protocol
        self.flush()
        protocol.connection_made(stream)
        if self.closed.done():  # nobody else would end it; not at once, as who opens it is not told before it has it
            del self._streams[stream.id]
            asyncio.get_running_loop().call_soon(stream.peer_gone, ConnectionResetError(self._closed_because))
        return stream

    def gossip(self, payload: bytes) -> None:
        self.mux.control(F.GOSSIP, payload)
        self.flush()

    def send_beat(self) -> None:
        """Send a heartbeat now; it also acknowledges what was merged."""
        if self.peer is not None:
            self.mux.control(F.BEAT, msgspec.msgpack.encode(self._host.beat(self.peer)))
            self.flush()

    def leave(self, reason: str) -> None:
        """Have the peer open nothing more, and close when all has ended. Were we to close, what it just opened would be
        lost on the way.
        """
        if self.peer is None:
            self.close(reason)
            return
        beat = msgspec.structs.replace(self._host.beat(self.peer), leaving=True)
        self.mux.control(F.BEAT, msgspec.msgpack.encode(beat))
        self.flush()
        self._parting = True
        self._host.tunnel_down(self, reason)
        asyncio.get_running_loop().call_later(PARTING_S, self._close_parted, reason)

    @property
    def silent_s(self) -> float:
        """Seconds since the peer was heard last."""
        return max(0.0, self._clock() - self._last_heard)

    def peer_wall(self) -> float | None:
        """Wall seconds that the peer's clock should show now; None where it never said."""
        told, heard = self._told_wall
        return told + self._clock() - heard if told else None

    @property
    def open_streams(self) -> int:
        """How many streams have not ended on both sides."""
        return len(self._streams)

    def close(self, reason: str) -> None:
        """Close the connection and break its streams."""
        if self._transport is not None and not self._transport.is_closing():
            self._closed_because = reason
            self._transport.abort()

    # -- for streams ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand the socket what it takes, a little at a time; the rest waits where its order can still change."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while not self._socket_full and (data := self.mux.take(WRITE_OCTETS)):
            self.sent_octets += len(data)
            transport.write(data)
        for stream in [self._streams.get(drained) for drained in self.mux.drained()]:
            if stream is not None:
                stream.regulate()
                self.reap(stream)

    def forget(self, stream: int, reason: str) -> None:
        """The local side is done with a stream."""
        self._streams.pop(stream, None)
        self.mux.reset(stream, reason)
        self.flush()
        self._close_if_idle()

    def reap(self, stream: TunnelStream) -> None:
        """When both sides have ended and all was delivered, the stream's protocol has lost its connection."""
        if stream.delivered and not self.mux.is_open(stream.id) and self._streams.pop(stream.id, None) is not None:
            asyncio.get_running_loop().call_soon(stream.peer_gone, None)
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closes_when_idle and not self._streams:
            asyncio.get_running_loop().call_soon(self.close, "the peer has other hubs")

    def _close_parted(self, reason: str) -> None:
        """The peer is of a release that does not close."""
        if self._streams and not self.closed.done():
            asyncio.get_running_loop().call_later(PARTING_S, self._close_parted, reason)
        else:
            self.close(reason)

    # -- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce ourselves and start the clock on the peer's HELLO."""
        self._transport = cast("asyncio.Transport", transport)
        self._keep_buffers_short()
        hello = Hello(PROTOCOL, self._host.chain, __version__)
        self.mux.control(F.HELLO, msgspec.msgpack.encode(hello))
        self.flush()
        self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.close, "no HELLO in time")

    def data_received(self, data: bytes) -> None:
        """Frames from the peer; any of them counts as life."""
        self._last_heard = self._clock()
        try:
            for frame in self.mux.receive(data):
                self._frame(frame)
        except (FramingError, IdentityError) as error:
            self.refusal = error
            _log.warning("tunnel closed: %s", error)
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Break every stream, then tell the owner."""
        if self._timer is not None:
            self._timer.cancel()
        error = exc or ConnectionResetError(self._closed_because)
        # First: what the end of a stream sets free may be sent here, as its owner has not been told yet.
        if not self.closed.done():
            self.closed.set_result(None)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.peer_gone(error)
        if self.peer is not None:
            self._host.tunnel_down(self, str(error))

    def pause_writing(self) -> None:
        """The socket is full: what is written now waits in the multiplexer, and its writers are told."""
        self._socket_full = True

    def resume_writing(self) -> None:
        self._socket_full = False
        self.flush()

    def _keep_buffers_short(self) -> None:
        """Pause as soon as anything waits behind the kernel, and let the kernel hold little that it has not sent."""
        transport = cast("asyncio.Transport", self._transport)
        transport.set_write_buffer_limits(high=1)
        raw = transport.get_extra_info("socket")
        if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
            return
        option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        if option is not None:
            raw.setsockopt(socket.IPPROTO_TCP, option, UNSENT_OCTETS)

    # -- frames -----------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame) -> None:
        if self.peer is None:
            if frame.type is not F.HELLO:
                raise FramingError.of("FT6201", f"{frame.type.name} before HELLO")
            self._hello(frame.payload)
        elif frame.type is F.OPEN:
            self._opened(frame)
        elif frame.stream:
            self._on_stream(frame)
        elif self._parting:
            return  # what is said here has been said elsewhere
        elif frame.type is F.GOSSIP:
            self._host.gossip_received(self, frame.payload)
        elif frame.type is F.BEAT:
            beat = _decoded(frame.payload, Beat)
            self._told_wall = beat.at, self._clock()
            if beat.leaving:
                self._parting = self._closes_when_idle = True
                self._host.tunnel_down(self, "it has other hubs")
                self._close_if_idle()
            else:
                self._host.beat_received(self, beat)

    def _hello(self, payload: bytes) -> None:
        hello = _decoded(payload, Hello)
        if hello.protocol != PROTOCOL:
            raise FramingError.of("FT6203", f"the peer speaks protocol {hello.protocol}, this node {PROTOCOL}")
        session = self._host.verify(hello.chain, self._expected)
        ssl_object: ssl.SSLObject | None = None
        if self._transport is not None:
            ssl_object = self._transport.get_extra_info("ssl_object")
        if ssl_object is None or ssl_object.getpeercert(binary_form=True) != hello.chain[0]:
            raise IdentityError.of("FT6004", "the HELLO's certificate is not the connection's")
        self.peer = session
        self._schedule_beat()
        self._host.tunnel_up(self)

    def _opened(self, frame: Frame) -> None:
        stream = TunnelStream(self, frame.stream)
        try:
            head = _decoded(frame.payload, StreamHead)
        except FramingError as error:  # one bad request is no reason to break everybody else's
            _log.warning("stream refused: %s", error)
            self.mux.reset(frame.stream, "malformed head")
            self.flush()
            return
        handler = self._host.stream_opened(stream, head)
        if handler is None:
            self.mux.reset(frame.stream, "no such service")
            self.flush()
            return
        self._streams[frame.stream] = stream
        stream.protocol = handler
        handler.connection_made(stream)

    def _on_stream(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return
        if frame.type is F.DATA:
            stream.deliver(frame.payload)
        elif frame.type is F.END:
            stream.peer_ended()
            self.reap(stream)
        elif frame.type is F.RST:
            del self._streams[frame.stream]
            stream.peer_gone(ConnectionResetError(frame.payload.decode(errors="replace")))
            self._close_if_idle()
        elif frame.type is F.CREDIT:
            self.flush()

    def _schedule_beat(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)
        self._beat_due = self._clock() + BEAT_SECONDS

    def _beat(self) -> None:
        if self._clock() - self._beat_due > BEAT_SECONDS:
            self._last_heard = self._clock()  # it was us who stood still: what the peer said waits in the socket
        if self._clock() - self._last_heard > BEAT_SECONDS * MISSED_BEATS:
            self.fell_silent = True
            self.close(f"nothing heard for {MISSED_BEATS} beats")
            return
        if self.peer is not None and self._host.expired(self.peer):
            self.close("the peer's certificate has expired")
            return
        self.send_beat()
        self._schedule_beat()


def _decoded(payload: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise FramingError.of("FT6201", f"malformed {kind.__name__}: {error}") from error
