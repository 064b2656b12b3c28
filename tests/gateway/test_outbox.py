"""What a turn writes: its order, its end, and what becomes of it when a connection ends."""

import pytest

from fabrictool.gateway.outbox import MOST_OCTETS, Outbox


class FakeTransport:
    def __init__(self, *, broken=False):
        self.told, self.closing, self.broken = [], False, broken

    def is_closing(self):
        return self.closing

    def write(self, data):
        if self.broken:
            raise RuntimeError("a fault of the transport")
        self.told.append(data)

    def close(self):
        self.closing = True
        self.told.append("closed")

    def abort(self):
        self.closing = True
        self.told.append("aborted")


@pytest.fixture
def turn():
    """An outbox, and the calls that wait for the end of its turn."""
    calls = []
    return Outbox(calls.append), calls


def test_what_a_turn_writes_goes_out_at_its_end_in_order(turn):
    outbox, calls = turn
    first, second = FakeTransport(), FakeTransport()
    outbox.put(first, b"1")
    outbox.put(second, b"2")
    outbox.pass_on(first, b"3")
    assert first.told == second.told == []
    (flush,) = calls
    flush()
    assert (first.told, second.told) == ([b"1", b"3"], [b"2"])
    outbox.put(first, b"4")
    assert len(calls) == 2, "the next turn has an end of its own"


def test_a_token_is_sent_at_once_where_nothing_waits(turn):
    outbox, calls = turn
    transport = FakeTransport()
    outbox.pass_on(transport, b"1")
    assert (transport.told, calls) == ([b"1"], [])


def test_much_does_not_wait_for_the_end_of_a_turn(turn):
    """Whoever reads from a fast engine hears within the turn that its client's transport is full."""
    outbox, _ = turn
    transport = FakeTransport()
    for _ in range(10):
        outbox.put(transport, bytes(MOST_OCTETS // 4))
    assert len(transport.told) == 10, "five and five, without an end of the turn"
    outbox.put(transport, b"1")
    assert len(transport.told) == 10


def test_close_and_abort_come_after_what_was_put(turn):
    outbox, _ = turn
    closed, aborted = FakeTransport(), FakeTransport()
    outbox.put(closed, b"1")
    outbox.put(aborted, b"2")
    outbox.close(closed)
    outbox.abort(aborted)
    assert (closed.told, aborted.told) == ([b"1", "closed"], [b"2", "aborted"])
    outbox.put(closed, b"3")
    outbox.flush()
    assert closed.told == [b"1", "closed"], "nobody is there any longer"


def test_one_connection_that_cannot_be_written_to_does_not_keep_the_others_from_it(turn, caplog):
    outbox, _ = turn
    broken, whole = FakeTransport(broken=True), FakeTransport()
    outbox.put(broken, b"1")
    outbox.put(whole, b"2")
    outbox.flush()
    assert (broken.told, whole.told) == (["aborted"], [b"2"])
    assert "could not be written to" in caplog.text


def test_a_turn_whose_end_could_not_be_asked_for_is_asked_for_again():
    calls = []

    def soon(call):
        if not calls:
            calls.append(None)
            raise RuntimeError("no running loop")
        calls.append(call)

    outbox, transport = Outbox(soon), FakeTransport()
    with pytest.raises(RuntimeError):
        outbox.put(transport, b"1")
    outbox.put(transport, b"2")
    calls[-1]()
    assert transport.told == [b"1", b"2"]
