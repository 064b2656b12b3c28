"""The client's side: one connection, requests one after another, parsed by llhttp in its strict mode.

Longer than most modules: a connection is one object with one life, compiled, and asked for all that comes or goes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

import httptools

from fabrictool.base.compiling import mypyc_attr
from fabrictool.gateway.heads import HEADS_LEARNED, KnownHead, known_head
from fabrictool.gateway.openai import MAX_BODY_OCTETS, GatewayResponse, error_response
from fabrictool.gateway.unsent import unacknowledged
from fabrictool.mesh.framing import TEXT_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.gateway.answering import Answering
    from fabrictool.gateway.keys import Consumer
    from fabrictool.gateway.options import RequestOptions
    from fabrictool.gateway.outbox import Outbox
    from fabrictool.gateway.upstream import Headers

_log = logging.getLogger("fabrictool.gateway")

MAX_HEAD_OCTETS: Final = 64 * 1024
HIGH_WATER: Final = 64 * 1024
"""Octets that may wait for a slow client before its replica is paused."""
PIPELINE: Final = 16
IDLE_CLIENT_S: Final = 75.0
"""A client may be silent between requests, or take nothing of its answer, for this long."""
LEAST_TAKEN: Final = 8192
"""Octets that a client has to take of its answer in that time while any wait for it. Who takes an octet a minute would
hold an engine's slot for ever; a line of 1 kbit/s takes a little more, and a token a second is twice as much.
"""
HEAD_S: Final = 30.0
REQUEST_S: Final = 300.0
"""A whole request must have come by then: 32 MiB at 1 Mbit/s take 268 s."""
_NEVER_KNOWN: Final = frozenset({"expect", "transfer-encoding", "upgrade"})
_VERSIONS: Final = ("1.1", "1.0")
field_name: Final = functools.lru_cache(maxsize=1024)(lambda name: name.decode("latin-1").lower())
"""A header's name as text in lower case: all requests have the same few."""
_FIRST_LINES: Final = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n" for status in HTTPStatus}


class ClientRequest:
    """A request, as far as it has come. What most requests never change stands on the class: it costs them nothing."""

    method = ""
    target = ""
    path = ""
    """The target without its query."""
    keep_alive = True
    http10 = False
    head_octets = 0
    body_octets = 0
    refusal: GatewayResponse | None = None
    """Decided when the head was whole; the body is then read past and not kept."""
    consumer: Consumer | None = None
    options: RequestOptions | None = None
    """What its head asks for, as soon as somebody looked."""

    def __init__(self, former: ClientRequest | None = None) -> None:
        """With the head of the `former`, if there is one; nobody changes a head that is whole."""
        self.fields: dict[str, str] = {} if former is None else former.fields
        """Lower-case name → the first header of that name."""
        self.repeated: list[tuple[str, str]] = [] if former is None else former.repeated
        """The headers whose name had come before."""
        self.parts: list[bytes] = []
        """Of the body."""
        if former is not None:
            self.method, self.target, self.path = former.method, former.target, former.path
            self.keep_alive, self.head_octets, self.options = former.keep_alive, former.head_octets, former.options

    def header(self, name: str) -> str:
        """The first header of that lower-case name, or nothing."""
        return self.fields.get(name, "")

    def values(self, name: str) -> list[str]:
        """All headers of that lower-case name."""
        first = self.fields.get(name)
        if first is None:
            return []
        return [first, *(value for key, value in self.repeated if key == name)] if self.repeated else [first]

    @property
    def body(self) -> bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


@mypyc_attr(allow_interpreted_subclasses=True)
class Handler:
    """What answers requests: an `GatewayResponse` at once, or an exchange that answers through the connection. No
    Protocol: see `upstream.Connector`.
    """

    draining = False
    """Whether connections are to be closed after the answer that they are waiting for."""

    def new_id(self) -> str:
        """Of a request whose client gave it none."""
        raise NotImplementedError

    def admit(self, request: ClientRequest) -> GatewayResponse | None:
        """Called when a head is whole, before the body: the refusal, or None; notes the consumer in the request."""
        raise NotImplementedError

    def refused(self, status: int) -> None:
        """Called for each request that was not admitted, or could not be read."""

    def handle(self, request: ClientRequest, connection: ClientConnection) -> GatewayResponse | Answering:
        """Called once for each admitted request; an exchange is not started yet."""
        raise NotImplementedError

    def opened(self, connection: ClientConnection) -> None:
        """It is served until `closed`."""

    def closed(self, connection: ClientConnection) -> None:
        """Nothing more can be written to it."""


class ClientConnection:
    """One client: parses its requests, writes its answers. An asyncio.Protocol by its methods: it is compiled, and a
    compiled class has no base that is not.
    """

    def __init__(self, handler: Handler, clock: Clock, outbox: Outbox) -> None:
        self._handler, self._outbox = handler, outbox
        self.now = clock.monotonic
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self.receiving = ClientRequest()
        """What has come of the next request."""
        self._in_head = True
        self._head_octets = 0
        self._waiting: list[ClientRequest] = []
        self._waiting_octets = 0
        self._current: ClientRequest | None = None
        self._broken = False
        self.surplus = False
        """There are too many clients already: it is told so, and closed."""
        self.writing_paused = False
        """The client does not take what is written."""
        self._request_began: float | None = None
        self._written, self._taken = 0, -1
        """Octets of its answers, and what the client had taken of them at its last progress; below 0: none waited."""
        self._progress = self._last_activity = self.now()
        self._reading = True
        self.exchange: Answering | None = None
        self.request_id = ""
        self._begun = b""
        """The head of a streamed answer, which goes out with its first chunk."""
        self._known: KnownHead | None = None
        self._pattern: ClientRequest | None = None
        """What llhttp made of the head that is known, without a body."""
        self._to_learn = HEADS_LEARNED + 1

    def close_when_answered(self) -> None:
        """Close now if no request is being answered, else after its answer; what was written is still sent."""
        if self._current is None:
            self._outbox.close(self._transport)

    @property
    def unread(self) -> int:
        """Octets that are written and that the client has not taken."""
        return self._transport.get_write_buffer_size()

    def stop(self) -> None:
        """Close now; a request that is being answered is told why."""
        if self.exchange is not None:
            self.exchange.stop()
        self._outbox.close(self._transport)

    def expire(self) -> None:
        """Called every second: give up a client or a replica that has been silent for too long."""
        now, unread = self.now(), self.unread
        if not unread:
            self._taken, self._progress = -1, now
        else:
            taken = self._written - unread - unacknowledged(self._transport)
            if self._taken < 0 or taken - self._taken >= LEAST_TAKEN:
                self._taken, self._progress = taken, now
        if now - self._progress > IDLE_CLIENT_S:
            self._outbox.abort(self._transport)
        elif self.exchange is not None:
            if not self.writing_paused:
                self.exchange.expire(now)
        elif self._current is None and not unread:
            if self._request_began is None:
                late = now - self._last_activity > IDLE_CLIENT_S
            else:
                late = now - self._request_began > (HEAD_S if self._in_head else REQUEST_S)
            if late:
                self._outbox.close(self._transport)

    # -- Client, for exchanges --------------------------------------------------------------------------------

    def answer(self, answer: GatewayResponse) -> None:
        self.deliver(answer.status, answer.content_type, lines_of(answer.headers), answer.body)

    def deliver(self, status: int, kind: str, lines: str, body: bytes) -> None:
        """A whole answer; `kind`: its content type, `lines`: its other headers, as they are written."""
        head = self._head(status, f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n{lines}")
        bare = self._current is not None and self._current.method == "HEAD"
        whole = head if bare else head + body
        self._written += len(whole)
        self._outbox.put(self._transport, whole)
        self._done()

    def proceed(self, ask: Callable[[], GatewayResponse | Answering]) -> None:
        """Answer the current request by what `ask` returns."""
        try:
            self._answer_by(ask())
        except Exception:  # noqa: BLE001 - httptools would take it for the client's mistake and answer nobody
            self._fail()

    def begin(self, status: int, kind: str, lines: str) -> None:
        """The head of a streamed response, which waits for the first chunk; to HTTP/1.0 only the end of the connection
        can end it.
        """
        if self._current is not None and self._current.http10:
            self._current.keep_alive = False
            self._begun = self._head(status, f"content-type: {kind}\r\n{lines}")
        else:
            self._begun = self._head(status, f"content-type: {kind}\r\n{lines}transfer-encoding: chunked\r\n")

    def chunk(self, data: bytes) -> None:
        if self._current is None or not self._current.http10:
            if not data:
                return
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._begun:
            data, self._begun = self._begun + data, b""
        self._written += len(data)
        self._outbox.pass_on(self._transport, data)

    def finish(self) -> None:
        if self._current is not None and not self._current.http10:
            self._outbox.pass_on(self._transport, self._begun + b"0\r\n\r\n")
        elif self._begun:
            self._outbox.pass_on(self._transport, self._begun)
        self._begun = b""
        self._done()

    def break_off(self) -> None:
        self.exchange = None
        self._outbox.abort(self._transport)

    # -- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._handler.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        self._last_activity = self.now()
        between = self._request_began is None
        if between and self._known is not None and self._take_known(data, self._known.body_at(data)):
            return
        if self._in_head:
            self._head_octets += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "FT8110", "upgrades are not supported")
        except httptools.HttpParserError as error:
            self._refuse(400, "FT8110", f"the request is not valid HTTP: {error}")
        if self._in_head and self._head_octets > MAX_HEAD_OCTETS:
            self._refuse(431, "FT8108", "the request's head is too large")
        if between and self._to_learn and self._request_began is None and not self._broken:
            self._learn(data)

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client went away: whatever runs for it is wasted. A half-closed client counts as gone, as in nginx."""
        self._waiting.clear()
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.cancel()
        self._handler.closed(self)

    def pause_writing(self) -> None:
        """The client reads slowly: nothing more is fetched, read or begun for it."""
        self.writing_paused = True
        self._regulate()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.exchange is not None:
            self.exchange.resume()
        self._next()
        self._regulate()

    # -- httptools callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.receiving = ClientRequest()
        self._request_began = self.now()

    def on_url(self, url: bytes) -> None:
        self.receiving.target += url.decode("latin-1")
        if len(self.receiving.target) > TEXT_CHARACTERS:
            self._refuse(414, "FT8108", f"the request's target is over {TEXT_CHARACTERS} octets")

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self.receiving
        request.head_octets += len(name) + len(value)
        key, text = field_name(name), value.decode("latin-1")
        if request.fields.setdefault(key, text) is not text:
            request.repeated.append((key, text))

    def on_headers_complete(self) -> None:
        self._in_head, self._head_octets = False, 0
        request = self.receiving
        request.method = self._parser.get_method().decode()
        version = self._parser.get_http_version()
        request.http10 = version == "1.0"
        request.keep_alive = self._parser.should_keep_alive()
        if request.head_octets > MAX_HEAD_OCTETS:
            self._refuse(431, "FT8108", "the request's head is too large")
        elif version not in _VERSIONS:
            self._refuse(400, "FT8110", f"HTTP/{version} is not supported: speak HTTP/1.1")
        elif wrong := _wrong_head(request, upgrade=self._parser.should_upgrade()):
            self._refuse(400, "FT8110", wrong)
        elif self.surplus:
            text = "this gateway has as many clients as it can have: ask again, or another gateway"
            self._refuse(503, "FT8115", text, (("retry-after", "5"),))
        if self._broken:
            return
        if request.target.startswith("http"):  # absolute form (RFC 9112 §3.2.2)
            request.target = "/" + request.target.partition("://")[2].partition("/")[2]
        request.path = request.target.partition("?")[0]
        request.refusal = self._handler.admit(request)
        if "expect" in request.fields and self._current is None and request.fields["expect"].lower() == "100-continue":
            if request.refusal is None:
                self._outbox.put(self._transport, b"HTTP/1.1 100 Continue\r\n\r\n")
            else:  # the body will not come, or nobody can tell whether it does
                self._broken, self._current = True, request
                self.request_id = self._handler.new_id()
                self._handler.refused(request.refusal.status)
                self.answer(request.refusal)

    def on_body(self, data: bytes) -> None:
        """Body bytes; kept only where somebody will read them."""
        request = self.receiving
        request.body_octets += len(data)
        if request.refusal is None and request.method == "POST" and not self._broken:
            request.parts.append(data)
        if request.body_octets > MAX_BODY_OCTETS:
            self._refuse(413, "FT8108", f"the request's body is over {MAX_BODY_OCTETS >> 20} MiB")

    def on_message_complete(self) -> None:
        """A request is whole: handle it, after those that came before it."""
        self._in_head = True
        self._request_began = None
        if self._broken:
            return
        self._waiting.append(self.receiving)
        self._waiting_octets += self.receiving.body_octets
        self._next()
        self._regulate()

    # -- internals --------------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._waiting and self._current is None and not self.writing_paused:
            if self._transport.is_closing():
                return
            request = self._waiting.pop(0)
            self._waiting_octets -= request.body_octets
            self._current = request
            given = request.header("x-request-id")
            self.request_id = given if given and _usable_id(given) else self._handler.new_id()
            try:
                if request.refusal is not None:
                    self._handler.refused(request.refusal.status)
                self._answer_by(request.refusal or self._handler.handle(request, self))
            except Exception:  # noqa: BLE001 - as in `proceed`
                self._fail()

    def _answer_by(self, outcome: GatewayResponse | Answering) -> None:
        if isinstance(outcome, GatewayResponse):
            self.answer(outcome)
            self._outbox.flush()  # hundreds may follow in this turn: the transport says when it is too much
        elif outcome is not self.exchange:
            self.exchange = outcome
            outcome.start()

    def _take_known(self, data: bytes, body_at: int) -> bool:
        """A whole request, if its body begins there, with the head that is known."""
        if not body_at or self._pattern is None or len(data) > MAX_BODY_OCTETS:
            return False
        request = ClientRequest(self._pattern)
        request.body_octets = len(data) - body_at
        request.refusal = self._handler.admit(request)
        if request.refusal is None:
            request.parts.append(data[body_at:])
        self._to_learn = HEADS_LEARNED
        self.receiving = self._pattern  # the last one that llhttp read may hold a body of megabytes
        self._waiting.append(request)
        self._waiting_octets += request.body_octets
        self._next()
        self._regulate()
        self._pattern.options = request.options
        return True

    def _learn(self, data: bytes) -> None:
        """Know the head of what was received, if that was one request and would be read the same each time."""
        self._to_learn -= 1
        if self._to_learn == HEADS_LEARNED:  # many connections carry one request
            return
        request = self.receiving
        simple = request.keep_alive and not request.http10 and request.fields.keys().isdisjoint(_NEVER_KNOWN)
        # Of a model, whose handling has options: who else answers may ask for the length, which is another's.
        if simple and request.method == "POST" and request.options is not None and "content-length" in request.fields:
            self._known, self._pattern = known_head(data, request.body_octets), ClientRequest(request)

    def _fail(self) -> None:
        """Say in the log what we could not handle, answer it where it has no answer yet, and close."""
        _log.exception("%s failed", self._current.path if self._current is not None else "a request")
        self._broken, request = True, self._current
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        if request is not None:
            text = "the gateway failed; its log says more"
            self.answer(error_response(500, "FT8160", text, path=request.path))

    def _done(self) -> None:
        request, self._current = self._current, None
        self.exchange = None
        self._last_activity = self.now()
        if self._request_began is not None:
            self._request_began = self._last_activity  # it may have waited because we were not reading
        if self._broken or request is None or not request.keep_alive or self._handler.draining:
            self._outbox.close(self._transport)
            return
        self._regulate()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)

    def _regulate(self) -> None:
        """Read no more than can be kept: a client that does not take its answers sends no more requests."""
        full = len(self._waiting) >= PIPELINE or self._waiting_octets > MAX_BODY_OCTETS or self.writing_paused
        if full != self._reading or self._transport.is_closing():
            return
        self._reading = not full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _head(self, status: int, lines: str) -> bytes:
        request = self._current
        if request is not None and self._handler.draining:
            request.keep_alive = False
        last = "connection: close\r\n\r\n" if self._broken or request is None or not request.keep_alive else "\r\n"
        first = _FIRST_LINES.get(status) or f"HTTP/1.1 {status} Status\r\n"
        return f"{first}x-request-id: {self.request_id}\r\n{lines}{last}".encode("latin-1", "replace")

    def _refuse(self, status: int, code: str, message: str, headers: Headers = ()) -> None:
        """Answer a request that cannot be parsed, then close: what follows it cannot be trusted either."""
        if self._broken:
            return
        self._broken = True
        self._waiting.clear()
        self._handler.refused(status)
        if self._current is None:
            self.request_id = self.request_id or self._handler.new_id()
            path = self.receiving.target.partition("?")[0]
            self.answer(error_response(status, code, message, headers=headers, path=path))


def lines_of(headers: Headers) -> str:
    """As they are written."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers])


def _wrong_head(request: ClientRequest, *, upgrade: bool) -> str:
    """What llhttp lets pass, and we do not."""
    if upgrade:
        return "upgrades are not supported"
    if ("host" not in request.fields and not request.http10) or (
        request.repeated and any(name == "host" for name, _ in request.repeated)
    ):
        return "a request has one Host header"
    if "transfer-encoding" in request.fields and [coding.lower() for coding in request.values("transfer-encoding")] != [
        "chunked"
    ]:
        return "no transfer coding but chunked is supported"
    return ""


def _usable_id(given: str) -> bool:
    """Whether the client's own id is harmless."""
    return 0 < len(given) <= 128 and given.isascii() and given.isprintable() and " " not in given
