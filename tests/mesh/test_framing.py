"""The wire format: any cut of the bytes gives the same frames; no bytes raise anything but its own error."""

import contextlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabrictool.mesh.framing import (
    HEADER,
    MAX_FRAME_OCTETS,
    SLICE_OCTETS,
    STREAM_CREDIT,
    FrameType,
    FramingError,
    StreamHead,
)
from fabrictool.mesh.mux import Mux

HEAD = StreamHead(b"s" * 16, "POST", "/v1/x", (), 0)


def pair():
    return Mux(dialler=True), Mux(dialler=False)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.binary(max_size=40_000), max_size=6), st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_any_cut_of_the_bytes_gives_the_same_stream(pieces, cuts):
    a, b = pair()
    stream = a.open(HEAD)
    for piece in pieces:
        a.write(stream, piece)
    a.end(stream)
    received, ended, wire, turn = b"", False, a.take(), 0
    while wire:
        size = cuts[turn % len(cuts)]
        turn += 1
        for frame in b.receive(wire[:size]):
            if frame.type is FrameType.DATA:
                received += frame.payload
                b.consumed(frame.stream, len(frame.payload))
            ended |= frame.type is FrameType.END
        wire = wire[size:]
        a.receive(b.take())
        wire += a.take()
    assert received == b"".join(pieces)
    assert ended


class FormerHead(msgspec.Struct, frozen=True, array_like=True):
    """A stream's head as releases wrote it that did not say for whom they ask."""

    service: bytes
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    length: int


def test_a_head_is_read_by_who_does_not_know_its_last_fields_and_from_who_does_not_write_them():
    former = FormerHead(b"s" * 16, "POST", "/v1/x", (("a", "b"),), 3)
    told = StreamHead(b"s" * 16, "POST", "/v1/x", (("a", "b"),), 3, "all", "0f" * 16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=FormerHead) == former
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(former), type=StreamHead)
    assert heard == msgspec.structs.replace(told, group="", tenant="")


def test_a_sender_stops_at_the_credit_and_goes_on_when_it_is_granted():
    a, b = pair()
    stream = a.open(HEAD)
    a.write(stream, b"x" * (STREAM_CREDIT + 5))
    assert a.blocked(stream)
    frames = b.receive(a.take())
    assert sum(len(f.payload) for f in frames if f.type is FrameType.DATA) == STREAM_CREDIT
    b.consumed(stream, STREAM_CREDIT // 2 - 1)
    assert b.take() == b"", "a grant for each slice would cost a frame a token"
    b.consumed(stream, 1)
    (credit,) = a.receive(b.take())
    assert credit.type is FrameType.CREDIT
    assert [len(f.payload) for f in b.receive(a.take())] == [5]
    assert not a.blocked(stream)


def test_data_is_cut_so_that_a_beat_waits_for_one_slice_at_most():
    a, b = pair()
    stream = a.open(HEAD)
    a.write(stream, b"x" * (3 * SLICE_OCTETS))
    sizes = [len(f.payload) for f in b.receive(a.take()) if f.type is FrameType.DATA]
    assert sizes == [SLICE_OCTETS] * 3


def test_a_peer_that_ignores_credit_is_cut_off():
    _, b = pair()
    b.receive(HEADER.pack(0, FrameType.OPEN, 1))
    with pytest.raises(FramingError):
        for _ in range(STREAM_CREDIT // SLICE_OCTETS + 1):
            b.receive(HEADER.pack(SLICE_OCTETS, FrameType.DATA, 1) + b"x" * SLICE_OCTETS)


@pytest.mark.parametrize(
    "wire",
    [
        HEADER.pack(MAX_FRAME_OCTETS + 1, FrameType.GOSSIP, 0),
        HEADER.pack(0, FrameType.OPEN, 2),
        HEADER.pack(0, FrameType.DATA, 0),
        HEADER.pack(0, FrameType.OPEN, 1) * 2,
        HEADER.pack(0, FrameType.OPEN, 1) + HEADER.pack(1, FrameType.CREDIT, 1) + b"x",
        HEADER.pack(0, FrameType.OPEN, 1) + HEADER.pack(0, FrameType.BEAT, 1),
    ],
    ids=["length", "parity", "stream-0", "twice", "credit", "beat-on-a-stream"],
)
def test_what_the_protocol_forbids_closes_the_connection(wire):
    with pytest.raises(FramingError):
        Mux(dialler=False).receive(wire)


def test_frames_of_a_later_version_and_of_forgotten_streams_are_skipped():
    a, b = pair()
    stream = a.open(HEAD)
    b.receive(a.take())
    b.reset(stream, "enough")
    a.write(stream, b"late")
    assert b.receive(a.take() + HEADER.pack(3, 77, 0) + b"new") == []


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_garbage_never_raises_anything_else(data):
    with contextlib.suppress(FramingError):
        Mux(dialler=False).receive(data)
