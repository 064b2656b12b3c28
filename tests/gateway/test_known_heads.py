"""A head that came before is known again: what is made of it is what llhttp makes of it, however it is written."""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabrictool.base.clock import SystemClock
from fabrictool.gateway import http
from fabrictool.gateway.heads import known_head
from fabrictool.gateway.http import ClientConnection
from fabrictool.gateway.openai import GatewayResponse
from fabrictool.gateway.options import RequestOptions
from fabrictool.gateway.outbox import Outbox
from fabrictool.gateway.upstream import AnswerListener, Upstream

HOST = b"Host: h\r\n"


class Transport:
    def __init__(self):
        self.written, self.closed = b"", False

    def set_write_buffer_limits(self, high=None):
        pass

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def close(self):
        self.closed = True

    abort = close


class Handler(http.Handler):
    """Notes what it is asked, and answers at once."""

    draining = False

    def __init__(self):
        self.heard = []

    def new_id(self):
        return "id"

    def admit(self, request):
        refused = "refused" in request.fields
        return GatewayResponse(401, b"no") if refused else None

    def handle(self, request, connection):
        fields = {name: value for name, value in request.fields.items() if name != "content-length"}
        head = (request.method, request.target, request.path, fields, request.repeated)
        self.heard.append((*head, request.body, request.body_octets, request.keep_alive, request.http10))
        request.options = request.options or RequestOptions(request.fields, [])
        return GatewayResponse(200, b"yes")

    def opened(self, connection):
        pass

    def closed(self, connection):
        pass


def heard(chunks, *, learns):
    handler, transport = Handler(), Transport()
    connection = ClientConnection(handler, SystemClock(), Outbox(lambda flush: flush()))
    connection.connection_made(transport)
    if not learns:
        connection._to_learn = 0
    for chunk in chunks:
        if not transport.closed:
            connection.data_received(chunk)
    return handler.heard, transport.written, transport.closed, connection._known


LINES = st.sampled_from(
    [
        b"X-A: 1\r\n", b"x-a: 2\r\n", b"X-Content-Length: 7\r\n", b"Connection: close\r\n", b"Refused: yes\r\n",
        b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"X-B: a\r\n content-length: 3\r\n", b"X-C:\r\n",
        b"Transfer-Encoding: chunked\r\n", b"Connection: Keep-Alive\r\n",
    ]
)  # fmt: skip
LENGTHS = st.sampled_from(
    [
        b"Content-Length: %d",
        b"content-length:%d",
        b"CONTENT-LENGTH: \t%d",
        b"Content-Length: %d ",
        b"Content-Length: 0%d",
    ]
)
WRONG = st.sampled_from([b"Content-Length: +%d", b"Content-Length: %d, %d", b"Content-Length: %d\r\nContent-Length: 1"])
FIRST = st.sampled_from(
    [b"POST /v1/x HTTP/1.1\r\n", b"POST /y?a=b HTTP/1.1\r\n", b"POST /z HTTP/1.0\r\n", b"GET / HTTP/1.1\r\n"]
)


@st.composite
def talks(draw):
    """A client's few heads, its bodies, and the chunks in which all of it comes."""
    heads = [
        (draw(FIRST), draw(st.lists(LINES, max_size=2)), draw(LENGTHS), draw(st.lists(LINES, max_size=1)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    text, ends = b"", []
    for _ in range(draw(st.integers(2, 7))):
        first, before, length, after = draw(st.sampled_from(heads))
        if draw(st.integers(0, 20)) == 0:
            length = draw(WRONG)
        body = draw(st.binary(max_size=12))
        line = length % ((len(body),) * length.count(b"%d"))
        text += first + HOST + b"".join(before) + line + b"\r\n" + b"".join(after) + b"\r\n" + body
        ends.append(len(text))
    cuts = sorted(set(draw(st.lists(st.sampled_from(ends))) + draw(st.lists(st.integers(1, len(text)), max_size=2))))
    if draw(st.booleans()):
        cuts = ends
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


@settings(max_examples=600, deadline=None)
@given(talks())
def test_nothing_is_read_otherwise_because_it_came_before(chunks):
    assert heard(chunks, learns=True)[:3] == heard(chunks, learns=False)[:3]


def request(body, more=b"", length=None):
    length = b"%d" % len(body) if length is None else length
    return b"POST /v1/x HTTP/1.1\r\n" + HOST + b"Content-Length: " + length + b"\r\n" + more + b"\r\n" + body


def test_a_head_is_known_from_its_second_time_on():
    chunks = [request(b"a" * size) for size in (3, 10, 0, 12345)]
    answers, _, _, known = heard(chunks, learns=True)
    assert [len(answer[5]) for answer in answers] == [3, 10, 0, 12345]
    assert [known.body_at(chunk) for chunk in chunks] == [
        len(chunk) - size for chunk, size in zip(chunks, (3, 10, 0, 12345), strict=True)
    ]
    for other in (
        request(b"abc", length=b"4"), request(b"abc", length=b"2"), request(b"abc", length=b""),
        request(b"abc", length=b"-3"), request(b"abc", length=b"3 "), request(b"abc", b"X: y\r\n"),
        request(b"abc") + request(b"abc"), request(b"abc")[:-1], request(b"abc", length=b"000000003"),
        request(b"abc").replace(b"/x", b"/y"), b"",
    ):  # fmt: skip
        assert known.body_at(other) == 0
    assert heard(chunks[:1], learns=True)[3] is None
    assert known_head(request(b"abc"), 2) is None


def test_a_client_whose_heads_all_differ_is_not_looked_at_for_ever():
    chunks = [request(b"abc", b"X-Number: %d\r\n" % number) for number in range(10)]
    handler, transport = Handler(), Transport()
    connection = ClientConnection(handler, SystemClock(), Outbox(lambda flush: flush()))
    connection.connection_made(transport)
    for chunk in chunks:
        connection.data_received(chunk)
    assert len(handler.heard) == 10
    assert connection._to_learn == 0


def test_a_large_body_is_let_go_once_it_was_answered():
    handler, transport = Handler(), Transport()
    connection = ClientConnection(handler, SystemClock(), Outbox(lambda flush: flush()))
    connection.connection_made(transport)
    for _ in range(3):
        connection.data_received(request(b"abc"))
    large = request(b"y" * 100_000)
    connection.data_received(large[:50_000])
    connection.data_received(large[50_000:])
    handler.heard.clear()
    connection.data_received(request(b"abc"))
    assert len(handler.heard) == 1
    assert connection.receiving.parts == []


class Listener(AnswerListener):
    """Notes what it hears; bodies as one."""

    def __init__(self):
        self.heard, self.text = [], b""

    def head(self, status, headers):
        self.heard.append((status, list(headers)))

    def body(self, data):
        self.text += data

    def complete(self, *, sized):
        self.heard.append(("complete", sized, self.text))

    def failed(self, reason, *, refused):
        self.heard.append(("failed", reason, refused, self.text))

    def stale(self):
        self.heard.append("stale")


STATUS_LINES = st.sampled_from([b"HTTP/1.1 200 OK\r\n"] * 4 + [b"HTTP/1.1 404 No\r\n", b"HTTP/1.1 204 None\r\n"])
ANSWER_LINES = st.sampled_from(
    [
        b"Content-Type: application/json\r\n", b"date: today\r\n", b"X-Content-Length: 7\r\n", b"Connection: close\r\n",
        b"Transfer-Encoding: chunked\r\n", b"X-B: a\r\n content-length: 3\r\n", b"X-C:\r\n",
    ]
)  # fmt: skip


@st.composite
def answers(draw):
    """An engine's few heads, its answers one by one, each in its chunks."""
    heads = [
        (draw(STATUS_LINES), draw(st.lists(ANSWER_LINES, max_size=2)), draw(LENGTHS), draw(st.lists(ANSWER_LINES)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    every = []
    for _ in range(draw(st.integers(2, 7))):
        first, before, length, after = draw(st.sampled_from(heads))
        if draw(st.integers(0, 20)) == 0:
            length = draw(WRONG)
        body = draw(st.binary(max_size=12))
        line = length % ((len(body),) * length.count(b"%d"))
        text = first + b"".join(before) + line + b"\r\n" + b"".join(after) + b"\r\n" + body
        text += draw(st.sampled_from([b""] * 10 + [b"HTTP/1.1 200 OK\r\n", b"x"]))
        cuts = draw(st.sampled_from([[], [], [draw(st.integers(1, len(text)))]]))
        every.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b])
    return every


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length:%d\r\n\r\n"


def told(every, *, learns):
    """What was heard of these answers, and whether their connection was kept each time."""
    kept, upstream, heard = [], None, []
    for chunks in every:
        listener = Listener()
        if kept and kept[-1].usable:  # what was sent without being asked for closes it
            upstream = kept.pop()
            upstream.again(listener)
        else:
            upstream = Upstream(listener, kept.append)
            upstream.connection_made(Transport())
        if not learns:
            upstream._to_learn = 0
        for chunk in chunks:
            upstream.data_received(chunk)
        if not kept:
            upstream.connection_lost(None)
        heard.append((listener.heard, bool(kept)))
    return heard, upstream._known


@settings(max_examples=600, deadline=None)
@given(answers())
@example([[WHOLE % 12 + bytes(12), b"HTTP/1.1 200 OK\r\n"], [WHOLE % 0]])
def test_no_answer_is_read_otherwise_because_its_head_came_before(every):
    async def both():
        assert told(every, learns=True)[0] == told(every, learns=False)[0]

    asyncio.run(both())


def test_the_head_of_an_answer_is_known_from_its_second_time_on():
    text = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    bodies = [b"abc", b"a" * 500, b"", b"x"]
    heard, known = told([[text % (len(body), body)] for body in bodies], learns=True)
    assert [entries[-1] for entries, _ in heard] == [("complete", True, body) for body in bodies]
    assert all(kept for _, kept in heard)
    assert known.body_at(text % (3, b"abc")) > 0
