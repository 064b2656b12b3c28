"""The tunnel's wire format: one TLS connection, many streams; `mux.py` speaks it.

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

Every length is checked before anything is allocated. Data is cut into slices of 16 KiB or less, so that whatever is
small waits for a slice and not for a body; `turns.py` says who goes next. Why not HTTP/2: see
``docs/adr/0002-transport.md``.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated

import msgspec

from fabrictool.base.errors import FabrictoolError

HEADER = struct.Struct(">IBI")
SLICE_OCTETS = 16 * 1024
MAX_FRAME_OCTETS = 256 * 1024
STREAM_CREDIT = 256 * 1024
"""Octets that a sender may have in flight on one stream: formula bandwidth × RTT; 256 KiB is 200 Mbit/s at 10 ms."""
MAX_STREAMS = 4096
PROTOCOL = 2


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
LEFT_HEADER = b"x-fabric-left"
"""Of an answer by an agent that takes no request any more: nothing of it came to an engine."""
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
    group: Text = ""
    """Consumer group for which a gateway asks. Empty: it asks nobody for a key, or its release says nothing."""
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """A name of the tenant's that only the fabric's gateways can tell whose it is; empty: like `group`."""


MAX_WALL_S = 2**40
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """Proof of life, the registry's root digest, and the load that is too volatile for the registry."""

    root: bytes
    load: Annotated[tuple[tuple[bytes, Count, Count, Share, Count], ...], msgspec.Meta(max_length=256)] = ()
    """Per service: id, running and waiting requests, KV use from 0 to 1, open requests of others than the receiver."""
    alone: bool = False
    """Of an agent: it has no gateway."""
    at: Annotated[int, msgspec.Meta(ge=0, le=MAX_WALL_S)] = 0
    """Wall seconds of the sender, by which wrong clocks are told; 0: its release does not say."""
    aside: bool = False
    """Of a hub: another process accepts connections at its address now, and is to be dialled beside it."""
    leaving: bool = False
    """The sender has other hubs: open nothing more on this tunnel, and close it when what is open has ended."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One event from the peer; not a dataclass, which would take longer to make than the frame to parse."""

    type: FrameType
    stream: int
    payload: bytes = b""
