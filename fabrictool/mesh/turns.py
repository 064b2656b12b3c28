"""Who sends next on a tunnel, sans I/O: whole control frames first, then streams in turn, a slice each.

The order is that of fair queueing with a place for sparse flows (RFC 8290), cut down: a stream that has just got
something to say stands in the *fresh* queue, one that has had its slice and has more in the *waiting* queue, and the
two queues alternate. So a small request, or a token, goes after a slice or two however many bodies are under way, and
however many small requests come, bodies get half the link.

Nothing is copied until it is sent: what waits is the writer's own object and an offset into it.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

from fabrictool.mesh.framing import HEADER, SLICE_OCTETS, STREAM_CREDIT, FrameType

SMALL_SLICE_OCTETS = 4 * 1024
"""No slice is cut smaller for company: below this, headers and calls cost more than waiting does."""
ROUND_OCTETS = 128 * 1024
"""What a round of all streams may take: 64 ms at 2 MB/s. Larger: fewer frames a body; smaller: shorter waits."""

_pack = HEADER.pack
_DATA = int(FrameType.DATA)  # looking a member up, and packing it, costs more than all else of a frame


@dataclass(slots=True, eq=False)
class Outgoing:
    """What one stream has to send, and how much of it the peer has room for."""

    stream: int
    credit: int = STREAM_CREDIT
    piece: bytes = b""
    """What goes first; empty: nothing waits."""
    offset: int = 0
    """Octets of `piece` that have gone."""
    behind: deque[bytes] | None = None
    """What follows it; none while there is only one piece, as with most tokens: a deque weighs more than a stream."""
    turn: int = 0
    """What is left of a slice that did not fit into the last `take`."""
    queued: bool = False
    ending: bool = False
    """Nothing more will be written; END follows what waits."""
    ended: bool = False
    watched: bool = False
    """Somebody waits to hear that all has gone."""


class Turns:
    """The sending half of a multiplexer."""

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self.control_octets = 0
        """Of control frames that wait."""
        self._fresh: deque[Outgoing] = deque()
        self._waiting: deque[Outgoing] = deque()
        self._fresh_next = True
        self.drained: list[int] = []
        """Streams that were `watched`, or had to end, and have nothing left to send; whoever reads it empties it."""

    def control(self, frame: bytes) -> None:
        self._control.append(frame)
        self.control_octets += len(frame)

    def write(self, out: Outgoing, data: bytes) -> None:
        """Queue `data` behind what this stream has; it must not change afterwards."""
        if out.piece:
            if out.behind is None:
                out.behind = deque()
            out.behind.append(data)
            return
        out.piece = data
        if out.credit > 0 and not out.queued:
            out.queued = True
            self._fresh.append(out)

    def grant(self, out: Outgoing, octets: int) -> None:
        """The peer has room for that many more."""
        out.credit += octets
        if out.piece and out.credit > 0 and not out.queued:
            out.queued = True
            self._waiting.append(out)

    def take(self, limit: int | None) -> bytes:
        """The next octets for the wire; above `limit` only by what is left of a control frame, or by an END."""
        room = sys.maxsize if limit is None else limit
        frames: list[bytes | memoryview] = []
        control = self._control
        while control and room > 0:
            frame = control.popleft()
            frames.append(frame)
            room -= len(frame)
            self.control_octets -= len(frame)
        fresh, waiting = self._fresh, self._waiting
        while room > HEADER.size and (fresh or waiting):
            from_fresh = bool(fresh) and (self._fresh_next or not waiting)
            queue = fresh if from_fresh else waiting
            share = max(SMALL_SLICE_OCTETS, min(SLICE_OCTETS, ROUND_OCTETS // (len(fresh) + len(waiting))))
            out = queue.popleft()
            out.queued = False
            if not out.piece:
                continue  # reset meanwhile
            turn, most = out.turn or share, room - HEADER.size
            size = len(out.piece)
            if size <= most and size <= turn and size <= out.credit and out.behind is None and not out.offset:
                frames += (_pack(size, _DATA, out.stream), out.piece)  # most tokens: a piece that is a slice
                out.piece = b""
                out.credit -= size
            else:
                size = self._slice(out, min(turn, most), frames)
            if not out.piece and (out.watched or out.ending):
                room -= self._emptied(out, frames)
            room -= HEADER.size + size
            out.turn = 0
            if not out.piece or out.credit == 0:
                self._fresh_next = not from_fresh
                continue
            out.queued = True
            if size < turn:
                out.turn = turn - size
                queue.appendleft(out)
            else:
                waiting.append(out)
                self._fresh_next = not from_fresh
        return b"".join(frames)

    def _slice(self, out: Outgoing, most: int, frames: list[bytes | memoryview]) -> int:
        """Append one DATA frame of `most` octets or fewer; returns the octets of data."""
        room = min(most, out.credit)
        at, size = len(frames), 0
        frames.append(b"")
        while out.piece and size < room:
            end = min(len(out.piece), out.offset + room - size)
            size += end - out.offset
            if end < len(out.piece):
                frames.append(memoryview(out.piece)[out.offset : end])
                out.offset = end
                break
            frames.append(memoryview(out.piece)[out.offset :] if out.offset else out.piece)
            out.piece, out.offset = out.behind.popleft() if out.behind else b"", 0
        frames[at] = _pack(size, _DATA, out.stream)
        out.credit -= size
        if not out.piece:
            out.behind = None
        return size

    def _emptied(self, out: Outgoing, frames: list[bytes | memoryview]) -> int:
        """Tell who waits for it, and append END if that was all; returns the octets of that."""
        out.watched = False
        self.drained.append(out.stream)
        if not out.ending:
            return 0
        out.ended = True
        frames.append(_pack(0, FrameType.END, out.stream))
        return HEADER.size
