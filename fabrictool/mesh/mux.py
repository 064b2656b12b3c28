"""A tunnel's two halves, sans I/O: octets in, frames out, and the reverse.

The caller asks for octets when the socket takes some (`Mux.take`), so that nothing lies in a socket's buffer that a
beat or a small request would have to wait behind; who goes first is decided in `turns.py`, at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fabrictool.mesh.framing import (
    HEADER,
    MAX_FRAME_OCTETS,
    MAX_STREAMS,
    STREAM_CREDIT,
    Frame,
    FrameType,
    FramingError,
    StreamHead,
)
from fabrictool.mesh.turns import Outgoing, Turns

CONTROL_OCTETS = 16 * 2**20
"""Control frames that may wait for a peer that goes on sending; above it, it wants our memory and not our answers.
A whole registry of 10,000 sessions fits."""

_KINDS = tuple(FrameType)
_OPEN, _DATA = FrameType.OPEN, FrameType.DATA  # looked up once: an enumeration's members cost a call each time
_OF_STREAMS = frozenset({FrameType.OPEN, FrameType.DATA, FrameType.END, FrameType.RST, FrameType.CREDIT})


@dataclass(slots=True, eq=False)
class _Stream(Outgoing):
    receive_credit: int = STREAM_CREDIT
    ungranted: int = 0
    """Octets that the application took and the peer has not been told of."""
    remote_ended: bool = False


class Mux:
    """Both halves of the protocol for one connection; bytes in, frames out, and the reverse.

    The caller sends whatever `take` returns. `write` never blocks: what waits for its turn or for the peer's credit
    waits here, and `blocked` tells the caller to stop reading its own source.
    """

    def __init__(self, *, dialler: bool) -> None:
        self._next_stream = 1 if dialler else 2
        self._parity = self._next_stream % 2
        self._streams: dict[int, _Stream] = {}
        self._in = bytearray()
        self._turns = Turns()
        self._drained: list[int] = []

    # -- sending ----------------------------------------------------------------------------------------------

    def take(self, limit: int | None = None) -> bytes:
        """What goes out next: `limit` octets or fewer, but for the rest of a control frame; nothing: all has gone."""
        data = self._turns.take(limit)
        if self._turns.drained:
            gone, self._turns.drained = self._turns.drained, []
            for stream in gone:
                state = self._streams.get(stream)
                if state is not None:
                    self._drop_if_over(stream, state)
            self._drained += gone
        return data

    def drained(self) -> list[int]:
        """Streams that were found `blocked`, or had to end, and have sent all since the last call."""
        drained, self._drained = self._drained, []
        return drained

    def control(self, kind: FrameType, payload: bytes) -> None:
        self._emit(kind, 0, payload)

    def open(self, head: StreamHead) -> int:
        """A new stream; returns its id. Raises FT6202 and FT6205 before anything is sent."""
        if len(self._streams) >= MAX_STREAMS:
            raise FramingError.of("FT6202", "too many open streams on this tunnel", hint="try another node")
        payload = msgspec.msgpack.encode(head)
        try:
            msgspec.msgpack.decode(payload, type=StreamHead)  # encoding checks no limit, and the peer would refuse it
        except msgspec.ValidationError as error:
            raise FramingError.of("FT6205", f"the request's head does not fit into a tunnel: {error}") from error
        if len(payload) > MAX_FRAME_OCTETS:
            raise FramingError.of("FT6205", f"a request head of {len(payload)} octets does not fit into a tunnel")
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = _Stream(stream)
        self._emit(FrameType.OPEN, stream, payload)
        return stream

    def write(self, stream: int, data: bytes) -> None:
        """Queue the octets behind what this stream has, without a copy; they must not change afterwards."""
        state = self._streams.get(stream)
        if state is not None and data and not state.ending:
            self._turns.write(state, data)

    def end(self, stream: int) -> None:
        """No more data from us, once what waits has gone."""
        state = self._streams.get(stream)
        if state is None or state.ending:
            return
        state.ending = True
        if not state.piece:
            state.ended = True
            self._emit(FrameType.END, stream, b"")
            self._drop_if_over(stream, state)

    def reset(self, stream: int, reason: str) -> None:
        """Over at once: what waits is forgotten."""
        state = self._streams.pop(stream, None)
        if state is not None:
            state.piece, state.behind = b"", None
            self._emit(FrameType.RST, stream, reason.encode()[:200])

    def is_open(self, stream: int) -> bool:
        """False once both sides have ended, or either has reset."""
        return stream in self._streams

    def blocked(self, stream: int) -> bool:
        """Whether written data waits here; if so, `drained` will tell when it has gone."""
        state = self._streams.get(stream)
        if state is None or not state.piece:
            return False
        state.watched = True
        return True

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
        if self._turns.control_octets > CONTROL_OCTETS:
            waits = f"{self._turns.control_octets} octets wait for it"
            raise FramingError.of("FT6201", f"the peer keeps sending but does not read: {waits}")
        self._in += data
        frames: list[Frame] = []
        offset, total = 0, len(self._in)
        with memoryview(self._in) as view:
            while total - offset >= HEADER.size:
                length, kind, stream = HEADER.unpack_from(view, offset)
                if length > MAX_FRAME_OCTETS:
                    raise FramingError.of("FT6201", f"frame of {length} octets is over the limit")
                begin = offset + HEADER.size
                if total - begin < length:
                    break
                offset = begin + length
                frame = self._accept(kind, stream, bytes(view[begin:offset]))
                if frame is not None:
                    frames.append(frame)
        del self._in[:offset]
        return frames

    def _accept(self, kind: int, stream: int, payload: bytes) -> Frame | None:
        if kind >= len(_KINDS):
            return None  # a later version's frame: its length told us how to skip it
        frame_type = _KINDS[kind]
        if stream == 0:
            if frame_type in _OF_STREAMS:
                raise FramingError.of("FT6201", f"{frame_type.name} on stream 0")
            return Frame(frame_type, 0, payload)
        if frame_type is _OPEN:
            if stream % 2 == self._parity or stream in self._streams or len(self._streams) >= MAX_STREAMS:
                raise FramingError.of("FT6201", f"stream {stream} cannot be opened by the peer")
            self._streams[stream] = _Stream(stream)
            return Frame(frame_type, stream, payload)
        state = self._streams.get(stream)
        if state is None:
            return None  # it was reset while these frames were on their way
        return self._accept_on(state, frame_type, stream, payload)

    def _accept_on(self, state: _Stream, kind: FrameType, stream: int, payload: bytes) -> Frame | None:
        if kind is _DATA:
            state.receive_credit -= len(payload)
            if state.receive_credit < 0 or state.remote_ended:
                raise FramingError.of("FT6201", f"stream {stream} sent more than its credit")
        elif kind is FrameType.END:
            state.remote_ended = True
            self._drop_if_over(stream, state)
        elif kind is FrameType.RST:
            self._streams.pop(stream)
            state.piece, state.behind = b"", None
        elif kind is FrameType.CREDIT:
            if len(payload) != 4:
                raise FramingError.of("FT6201", "malformed CREDIT")
            self._turns.grant(state, int.from_bytes(payload, "big"))
        else:
            raise FramingError.of("FT6201", f"{kind.name} on stream {stream}")
        return Frame(kind, stream, payload)

    def _drop_if_over(self, stream: int, state: _Stream) -> None:
        if state.ended and state.remote_ended:
            self._streams.pop(stream, None)

    def _emit(self, kind: FrameType, stream: int, payload: bytes) -> None:
        self._turns.control(HEADER.pack(len(payload), kind, stream) + payload)
