"""The tunnel's wire format: one TLS connection, many streams, sans I/O.

A frame is a 9-octet header, ``u32 length | u8 type | u32 stream`` (big endian), and that many octets of payload.

=========  ======================================================================================
HELLO      stream 0, once each way, first: msgpack `Hello`; nothing else counts before it
OPEN       a new stream: msgpack `StreamHead`; odd ids belong to the dialling side, even to the other
DATA       at most 16 KiB of a stream's body, under the receiver's credit
END        no more data from this side
RST        the stream is over, both ways, at once; payload: a reason
CREDIT     u32: the receiver has consumed that many octets more
GOSSIP     stream 0: msgpack message of the registry (`gossip.py`)
BEAT       stream 0: msgpack `Beat`; any frame counts as life, beats fill the silence
=========  ======================================================================================

Every length is checked before anything is allocated. Data is cut into 16 KiB slices so that a beat never waits
behind a large body. Why not HTTP/2: see ``docs/adr/0002-transport.md``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from fabrictool.base.errors import FabrictoolError

HEADER = struct.Struct(">IBI")
SLICE_OCTETS = 16 * 1024
MAX_FRAME_OCTETS = 256 * 1024
STREAM_CREDIT = 256 * 1024
"""Octets that a sender may have in flight on one stream: formula bandwidth × RTT; 256 KiB is 200 Mbit/s at 10 ms."""
MAX_STREAMS = 4096
PROTOCOL = 1


class FrameType(enum.IntEnum):
    """What a frame is; its type octet."""

    HELLO = 0
    OPEN = 1
    DATA = 2
    END = 3
    RST = 4
    CREDIT = 5
    GOSSIP = 6
    BEAT = 7


class FramingError(FabrictoolError):
    """The peer broke the protocol; the connection is closed (FT6201)."""


TEXT_CHARACTERS = 8192
"""Limit of a path and of a header's value inside a tunnel."""
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, and which versions it understands."""

    protocol: int
    chain: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=2)]
    release: Text = ""


class StreamHead(msgspec.Struct, frozen=True, array_like=True):
    """A request to a service: never a host and port, so that a tunnel is no open proxy."""

    service: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    method: Text
    path: Text
    headers: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=64)]
    length: Annotated[int, msgspec.Meta(ge=0)]
    """Octets of body that follow."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """Proof of life, the registry's root digest, and the load that is too volatile for the registry."""

    root: bytes
    load: Annotated[tuple[tuple[bytes, int, int, float, int], ...], msgspec.Meta(max_length=256)] = ()
    """Per service: id, running and waiting requests, KV use from 0 to 1, open requests of others than the receiver."""


@dataclass(slots=True)
class _Stream:
    send_credit: int = STREAM_CREDIT
    receive_credit: int = STREAM_CREDIT
    ungranted: int = 0
    """Octets that the application took and the peer has not been told of."""
    local_ended: bool = False
    remote_ended: bool = False
    unsent: list[bytes] = field(default_factory=list)
    end_when_sent: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One event from the peer."""

    type: FrameType
    stream: int
    payload: bytes = b""


class Mux:
    """Both halves of the protocol for one connection; bytes in, frames out, and the reverse.

    The caller sends whatever `take` returns. `write` never blocks: what exceeds the peer's credit waits here, and
    `blocked` tells the caller to stop reading its own source.
    """

    def __init__(self, *, dialler: bool) -> None:
        self._next_stream = 1 if dialler else 2
        self._parity = self._next_stream % 2
        self._streams: dict[int, _Stream] = {}
        self._in = bytearray()
        self._out: list[bytes] = []

    # -- sending ----------------------------------------------------------------------------------------------

    def take(self) -> bytes:
        """Everything to be sent since the last call."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def control(self, kind: FrameType, payload: bytes) -> None:
        self._emit(kind, 0, payload)

    def open(self, head: StreamHead) -> int:
        """A new stream; returns its id. Raises FT6202 and FT6205 before anything is sent."""
        if len(self._streams) >= MAX_STREAMS:
            raise FramingError.of("FT6202", "too many open streams on this tunnel", hint="try another node")
        payload = _encode(head)
        try:
            msgspec.msgpack.decode(payload, type=StreamHead)  # encoding checks no limit, and the peer would refuse it
        except msgspec.ValidationError as error:
            raise FramingError.of("FT6205", f"the request's head does not fit into a tunnel: {error}") from error
        if len(payload) > MAX_FRAME_OCTETS:
            raise FramingError.of("FT6205", f"a request head of {len(payload)} octets does not fit into a tunnel")
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = _Stream()
        self._emit(FrameType.OPEN, stream, payload)
        return stream

    def write(self, stream: int, data: bytes) -> None:
        """Send `data`, or keep what the peer has no room for."""
        state = self._streams.get(stream)
        if state is None or state.local_ended:
            return
        view = memoryview(data)
        if not state.unsent:
            while view and state.send_credit > 0:
                size = min(len(view), SLICE_OCTETS, state.send_credit)
                self._emit(FrameType.DATA, stream, bytes(view[:size]))
                state.send_credit -= size
                view = view[size:]
        if len(view):
            state.unsent.append(bytes(view))

    def end(self, stream: int) -> None:
        """No more data from us, once what waits has gone."""
        state = self._streams.get(stream)
        if state is None or state.local_ended:
            return
        if state.unsent:
            state.end_when_sent = True
            return
        state.local_ended = True
        self._emit(FrameType.END, stream, b"")
        self._drop_if_over(stream, state)

    def reset(self, stream: int, reason: str) -> None:
        if self._streams.pop(stream, None) is not None:
            self._emit(FrameType.RST, stream, reason.encode()[:200])

    def is_open(self, stream: int) -> bool:
        """False once both sides have ended, or either has reset."""
        return stream in self._streams

    def blocked(self, stream: int) -> bool:
        """Whether written data waits for credit."""
        state = self._streams.get(stream)
        return state is not None and bool(state.unsent)

    def consumed(self, stream: int, octets: int) -> None:
        """The application took that many octets: let the peer send as many more, told in half windows.

        A grant for each slice would cost a frame, and a TLS record, for every streamed token. Waiting cannot stall
        the peer: when all is taken, what is not granted yet is less than half the window, so the rest is open.
        """
        state = self._streams.get(stream)
        if state is None or state.remote_ended:
            return
        state.ungranted += octets
        if state.ungranted >= STREAM_CREDIT // 2:
            state.receive_credit += state.ungranted
            self._emit(FrameType.CREDIT, stream, state.ungranted.to_bytes(4, "big"))
            state.ungranted = 0

    # -- receiving --------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Frame]:
        """The complete frames in `data` and what came before it.

        Raises
        ------
        FramingError
            FT6201 on a frame that the protocol does not allow; the connection must be closed.
        """
        self._in += data
        frames: list[Frame] = []
        offset = 0
        while len(self._in) - offset >= HEADER.size:
            length, kind, stream = HEADER.unpack_from(self._in, offset)
            if length > MAX_FRAME_OCTETS:
                raise FramingError.of("FT6201", f"frame of {length} octets is over the limit")
            if len(self._in) - offset - HEADER.size < length:
                break
            begin = offset + HEADER.size
            offset = begin + length
            frame = self._accept(kind, stream, bytes(self._in[begin:offset]))
            if frame is not None:
                frames.append(frame)
        del self._in[:offset]
        return frames

    def _accept(self, kind: int, stream: int, payload: bytes) -> Frame | None:
        try:
            frame_type = FrameType(kind)
        except ValueError:
            return None  # a later version's frame: its length told us how to skip it
        if stream == 0:
            if frame_type in (FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.RST, FrameType.CREDIT):
                raise FramingError.of("FT6201", f"{frame_type.name} on stream 0")
            return Frame(frame_type, 0, payload)
        if frame_type is FrameType.OPEN:
            if stream % 2 == self._parity or stream in self._streams or len(self._streams) >= MAX_STREAMS:
                raise FramingError.of("FT6201", f"stream {stream} cannot be opened by the peer")
            self._streams[stream] = _Stream()
            return Frame(frame_type, stream, payload)
        state = self._streams.get(stream)
        if state is None:
            return None  # it was reset while these frames were on their way
        return self._accept_on(state, frame_type, stream, payload)

    def _accept_on(self, state: _Stream, kind: FrameType, stream: int, payload: bytes) -> Frame | None:
        if kind is FrameType.DATA:
            state.receive_credit -= len(payload)
            if state.receive_credit < 0 or state.remote_ended:
                raise FramingError.of("FT6201", f"stream {stream} sent more than its credit")
        elif kind is FrameType.END:
            state.remote_ended = True
            self._drop_if_over(stream, state)
        elif kind is FrameType.RST:
            del self._streams[stream]
        elif kind is FrameType.CREDIT:
            if len(payload) != 4:
                raise FramingError.of("FT6201", "malformed CREDIT")
            state.send_credit += int.from_bytes(payload, "big")
            self._flush(stream, state)
        else:
            raise FramingError.of("FT6201", f"{kind.name} on stream {stream}")
        return Frame(kind, stream, payload)

    def _flush(self, stream: int, state: _Stream) -> None:
        waiting, state.unsent = b"".join(state.unsent), []
        self.write(stream, waiting)
        if state.end_when_sent and not state.unsent:
            state.end_when_sent = False
            self.end(stream)

    def _drop_if_over(self, stream: int, state: _Stream) -> None:
        if state.local_ended and state.remote_ended:
            self._streams.pop(stream, None)

    def _emit(self, kind: FrameType, stream: int, payload: bytes) -> None:
        self._out.append(HEADER.pack(len(payload), kind, stream))
        if payload:
            self._out.append(payload)


_encode = msgspec.msgpack.encode
