"""Who sends next, on a virtual link that takes so many octets a tick: control first, streams in turn, nothing twice."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given, settings
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
from fabrictool.mesh.mux import CONTROL_OCTETS, Mux

HEAD = StreamHead(b"s" * 16, "POST", "/v1/x", (), 0)
KIB = 1024
SLOW_LINK = 2_000_000
"""Octets a second."""


class Link:
    """Takes `octets` a tick from one side and gives them to the other; grants come back at once."""

    def __init__(self, octets, a=None, b=None):
        self.a, self.b = a or Mux(dialler=True), b or Mux(dialler=False)
        self.octets = octets
        self.carried = 0
        self.frames = []
        self.received = {}

    def tick(self):
        wire = self.a.take(self.octets)
        self.carried += len(wire)
        frames = self.b.receive(wire)
        for frame in frames:
            if frame.type is FrameType.DATA:
                self.received[frame.stream] = self.received.get(frame.stream, 0) + len(frame.payload)
                self.b.consumed(frame.stream, len(frame.payload))
        self.a.receive(self.b.take())
        self.frames += frames
        return frames

    def bulk(self, count, octets=4 * 1024 * KIB):
        """That many streams with more to send than the test carries."""
        ids = [self.a.open(HEAD) for _ in range(count)]
        for stream in ids:
            self.a.write(stream, bytes(octets))
        return ids


def until_ended(link, stream):
    """Octets that the link carried until the stream's END."""
    before = link.carried
    while not any(f.type is FrameType.END and f.stream == stream for f in link.tick()):
        assert link.carried - before < 16 * 1024 * KIB, "it never came"
    return link.carried - before


@pytest.mark.parametrize("streams", [1, 8, 32, 256])
def test_a_small_request_beside_bulk_streams_waits_for_a_few_slices(streams):
    link = Link(4 * KIB)
    link.bulk(streams)
    while link.carried < 2048 * KIB:  # each has had its first slice
        link.tick()
    small = link.a.open(HEAD)
    link.a.write(small, bytes(2000))
    link.a.end(small)
    waited = until_ended(link, small)
    assert waited <= 3 * SLICE_OCTETS
    assert waited / SLOW_LINK <= 0.03


def test_a_request_of_several_slices_waits_one_round_for_each():
    link = Link(4 * KIB)
    link.bulk(32)
    while link.carried < 512 * KIB:
        link.tick()
    medium = link.a.open(HEAD)
    link.a.write(medium, bytes(8 * KIB))
    link.a.end(medium)
    assert until_ended(link, medium) / SLOW_LINK <= 0.2


def test_control_goes_before_data_and_keeps_its_order():
    a, b = Mux(dialler=True), Mux(dialler=False)
    bulk, doomed = a.open(HEAD), a.open(HEAD)
    b.receive(a.take())
    a.write(bulk, bytes(100 * KIB))
    a.write(doomed, bytes(100 * KIB))
    a.control(FrameType.GOSSIP, b"news")
    a.control(FrameType.BEAT, b"beat")
    a.reset(doomed, "enough")
    a.open(HEAD)
    kinds = [f.type for f in b.receive(a.take(20 * KIB))]
    assert kinds[:4] == [FrameType.GOSSIP, FrameType.BEAT, FrameType.RST, FrameType.OPEN]
    assert set(kinds[4:]) == {FrameType.DATA}
    rest = b.receive(a.take())
    assert {f.stream for f in rest} == {bulk}, "a stream that was reset sends nothing more"


def test_streams_share_a_link_evenly():
    link = Link(16 * KIB)
    ids = link.bulk(32)
    while link.carried < 1024 * KIB:  # each has had its first slice
        link.tick()
    before = dict(link.received)
    while link.carried < 9 * 1024 * KIB:
        link.tick()
    shares = [link.received[stream] - before[stream] for stream in ids]
    assert max(shares) - min(shares) <= SLICE_OCTETS


def test_slices_are_large_alone_and_small_in_company():
    def largest(streams):
        link = Link(64 * KIB)
        link.bulk(streams)
        while link.carried < 1024 * KIB:
            link.tick()
        return max(len(f.payload) for f in link.frames if f.type is FrameType.DATA)

    assert largest(1) == SLICE_OCTETS
    assert largest(32) * 32 <= 128 * KIB, "a round of all streams must stay short"


def test_small_requests_without_end_do_not_starve_a_bulk_stream():
    link = Link(8 * KIB)
    (bulk,) = link.bulk(1)
    for _ in range(200):
        for _ in range(4):
            small = link.a.open(HEAD)
            link.a.write(small, bytes(4 * KIB))
            link.a.end(small)
        link.tick()
    assert link.received[bulk] >= link.carried / 3


def test_a_stream_without_credit_holds_up_nobody():
    a, b = Mux(dialler=True), Mux(dialler=False)
    stalled, other = a.open(HEAD), a.open(HEAD)
    a.write(stalled, bytes(STREAM_CREDIT + 1))
    b.receive(a.take())
    assert a.blocked(stalled)
    assert a.take() == b""
    a.write(other, b"x" * 10)
    assert [(f.stream, f.payload) for f in b.receive(a.take())] == [(other, b"x" * 10)]
    assert a.drained() == [], "nobody asked whether it was blocked, so nobody waits to be told"


def test_whoever_was_told_to_wait_is_told_when_its_data_has_gone():
    a, b = Mux(dialler=True), Mux(dialler=False)
    stream = a.open(HEAD)
    a.write(stream, bytes(3 * KIB))
    assert a.blocked(stream)
    a.take(1 * KIB)
    assert a.drained() == []
    a.take(8 * KIB)
    assert (a.drained(), a.drained(), a.blocked(stream)) == ([stream], [], False)
    assert b is not None


def test_end_follows_the_data_and_nothing_follows_the_end():
    link = Link(4 * KIB)
    stream = link.a.open(HEAD)
    link.a.write(stream, b"a" * 10 * KIB)
    link.a.end(stream)
    link.a.write(stream, b"late")
    for _ in range(10):
        link.tick()
    assert link.received[stream] == 10 * KIB
    assert [f.type for f in link.frames][-1] is FrameType.END


def test_pieces_that_wait_leave_together():
    a, b = Mux(dialler=True), Mux(dialler=False)
    stream = a.open(HEAD)
    b.receive(a.take())
    for piece in (b"to", b"ken", b"s"):
        a.write(stream, piece)
    assert [f.payload for f in b.receive(a.take())] == [b"tokens"]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=30_000)), max_size=12), st.integers(HEADER.size + 1, 9000)
)
def test_any_limit_gives_every_stream_its_octets_in_order(writes, limit):
    a, b = Mux(dialler=True), Mux(dialler=False)
    ids = [a.open(HEAD) for _ in range(5)]
    b.receive(a.take())
    for index, data in writes:
        a.write(ids[index], data)
    for stream in ids:
        a.end(stream)
    received = dict.fromkeys(ids, b"")
    while wire := a.take(limit):
        assert len(wire) <= limit + HEADER.size, "an END may follow the last slice"
        for frame in b.receive(wire):
            received[frame.stream] += frame.payload
            b.consumed(frame.stream, len(frame.payload))
        a.receive(b.take())
    assert list(received.values()) == [b"".join(d for i, d in writes if i == index) for index in range(5)]


def test_a_large_body_is_copied_once():
    """Octets that sending allocates, all told: the body once, not what remains of it at each grant."""
    body = bytes(8 * 1024 * KIB)
    a, b = Mux(dialler=True), Mux(dialler=False)
    stream = a.open(HEAD)
    allocated, sent, grants = 0, 0, []
    tracemalloc.start()
    try:

        def counted(call, *arguments):
            nonlocal allocated
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            result = call(*arguments)
            allocated += tracemalloc.get_traced_memory()[1] - before
            return result

        counted(a.write, stream, body)
        while sent < len(body):
            for grant in grants:
                counted(a.receive, grant)
            wire = counted(a.take, 64 * KIB)
            assert wire, "the sender stopped early"
            for frame in b.receive(wire):
                if frame.type is FrameType.DATA:
                    sent += len(frame.payload)
                    b.consumed(stream, len(frame.payload))
            grants = [b.take()]
    finally:
        tracemalloc.stop()
    assert allocated <= 1.2 * len(body)


FRAMES = st.tuples(
    st.one_of(st.integers(0, 300), st.just(MAX_FRAME_OCTETS), st.integers(0, 2**32 - 1)),
    st.integers(0, 9),
    st.integers(0, 9),
    st.binary(max_size=300),
)


@settings(max_examples=200)
@given(st.lists(FRAMES, max_size=30))
def test_a_hostile_peer_makes_nobody_hold_more_than_it_sent(frames):
    b = Mux(dialler=False)
    wire = [HEADER.pack(length, kind, stream) + payload for length, kind, stream, payload in frames]
    sent = sum(map(len, wire))
    tracemalloc.start()
    try:
        with contextlib.suppress(FramingError):
            for piece in wire:
                b.receive(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * KIB + 8 * sent, "a length that is only announced must allocate nothing"


def test_a_peer_that_sends_and_does_not_read_is_cut_off():
    b = Mux(dialler=False)
    with pytest.raises(FramingError) as stopped:
        for stream in range(1, CONTROL_OCTETS, 2):
            b.receive(HEADER.pack(0, FrameType.OPEN, stream))
            b.reset(stream, "no such service" * 10)
    assert stopped.value.problems[0].code == "FT6201"
