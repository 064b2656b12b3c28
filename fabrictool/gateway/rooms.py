"""Requests that two replicas share at once: both get one, and find each other in a *room*: a number of its own.

As SGLang's servers do (its PD disaggregation). The one for the prompt waits in the room until the other one has asked
it for the cache; then it answers with a token that nobody wants. What the client gets is the other's. Neither can do
without: one for decoding refuses a request that has no room, and if the prompt's replica fails it waits for minutes. So
a request goes only where both are, a prefill replica's failure ends the attempt as the other's own does, and where no
two are left the client hears 503 at once.

A record of the mesh says where a prefill replica is found, and the decode replica connects there: whoever lies in one
has another one connect to wherever it likes, and write into its caches. So both must be of one provider and site.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from fabrictool.engines.paths import CHAT_PATHS
from fabrictool.gateway.bodies import Computed
from fabrictool.gateway.exchange import UNAVAILABLE, Exchange
from fabrictool.gateway.openai import ROOM_FIELDS, GatewayResponse, error_response, with_field
from fabrictool.gateway.pairs import HANDED_OCTETS, PairExchange
from fabrictool.gateway.upstream import AnswerListener
from fabrictool.mesh.framing import LEFT_HEADER
from fabrictool.routing.candidates import ready
from fabrictool.routing.ejection import available

if TYPE_CHECKING:
    from fabrictool.gateway.directory import Directory, RoutingTarget, Unmet
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.gateway.upstream import Upstream
    from fabrictool.routing.candidates import Refusal
    from fabrictool.routing.protocol import RequestOutcome

ROOMS: Final = (1 << 63) - (1 << 16)
"""Rooms are positive numbers of 64 bits; for each further prompt of a request the engines take the next one."""
ALONE_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""They compute no prompt."""
_ONE: Final = (b"null", b"1")
_NOTHING: Final = (b"null", b"false", b"0")

_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


_computed: Final = msgspec.json.Decoder(Computed)


def unfit(path: str, body: bytes) -> str:
    """Why two such replicas cannot share a request; "": they can."""
    path = path.partition("?")[0]
    if path in ALONE_PATHS:
        return ""
    if path not in CHAT_PATHS:
        return f"{path}: only {' and '.join(sorted(CHAT_PATHS))} can be"
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "its body cannot be read"
    # Their several answers to a prompt would all be in its one room.
    several = [name for name in ("n", "best_of") if bytes(fields.get(name, b"null")) not in _ONE]
    if several:
        return f"`{several[0]}` asks for several answers to a prompt: send it once for each"
    if all(bytes(fields.get(name, b"null")) not in _NOTHING for name in ("echo", "logprobs")):
        return "`echo` with `logprobs` asks for figures of the prompt, which the replica that answers never has"
    return ""


def whole(body: bytes) -> bytes:
    """A request for a stream as one for a whole answer: a failure has a status then."""
    kept = {name: value for name, value in _fields.decode(body).items() if name != "stream_options"}
    return msgspec.json.encode(kept | {"stream": False})


class Room(AnswerListener):
    """The prompt's half of one attempt: an `AnswerListener` whose answer is read, judged and thrown away."""

    __slots__ = ("_asked", "_body", "_held", "_owner", "_status", "_upstream", "began", "fields", "over", "prefiller")

    def __init__(self, owner: RoomExchange, prefiller: RoutingTarget, asked: ModelRequest, now: float) -> None:
        self._owner, self._asked, self.began = owner, asked, now
        self.prefiller = prefiller
        self.over = False
        """Whether it is computed, or will never be."""
        self._status, self._held = 0, b""
        self._upstream: Upstream | None = None
        host, port = prefiller.meets_at or ("", 0)
        self.fields = tuple(zip(ROOM_FIELDS, (host, port, secrets.randbelow(ROOMS)), strict=True))
        self._body = self.entered(whole(asked.body) if asked.stream else asked.body)
        prefiller.in_flight += 1
        prefiller.requests += 1
        prefiller.ejection.began(now)

    def entered(self, body: bytes) -> bytes:
        """A request with the way to this room; all else stays as it was written."""
        for name, value in self.fields:
            body = with_field(body, name, msgspec.json.encode(value))
        return body

    def begin(self, *, anew: bool = False) -> None:
        asked = self._asked
        self._upstream = self.prefiller.connector.start(
            asked.method, asked.path, asked.headers, self._body, asked.caller, self, anew=anew
        )

    def leave(self) -> None:
        """Whether it is over or not: nothing more is heard of it."""
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        if not self.over:
            self.over = True
            self.prefiller.ejection.given_up()
            self.prefiller.in_flight -= 1

    # -- AnswerListener ---------------------------------------------------------------------------------------

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        ejection = self.prefiller.ejection
        leaves = status == UNAVAILABLE and any(name == LEFT_HEADER for name, _ in headers)
        if leaves:
            ejection.given_up()
        else:
            ejection.heard(status, self._owner.last_look(), self.began, self._asked.tenant)
            self.prefiller.failures += status >= 500
        if status >= 500:
            self._end()
            self._owner.prompt_lost(str(status), f"it answered {status}")

    def body(self, data: bytes) -> None:
        if len(self._held) <= HANDED_OCTETS:
            self._held += data

    def complete(self, *, sized: bool) -> None:
        del sized  # an answer that breaks off is no JSON
        self._upstream = None
        given_up = False
        if len(self._held) <= HANDED_OCTETS:
            try:
                given_up = _computed.decode(self._held).given_up
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                given_up = True
        if self._status >= 400:
            self._end()
            self._owner.prompt_refused(self._status, self._held)
        elif self._status != 200 or given_up:
            self._fail("abort", "it gave the prompt up")
        else:
            self._end()
            now = self._owner.prompt_computed()
            self.prefiller.timed(now - self.began, None)

    def exhausted(self, reason: str) -> None:
        self._upstream = None
        self._owner.exhausted(reason)

    def failed(self, reason: str, *, refused: bool) -> None:
        self._upstream = None
        self._fail("refused" if refused else "broken", reason, refused=refused)

    def stale(self) -> None:
        self.begin(anew=True)

    # -- internals --------------------------------------------------------------------------------------------

    def _fail(self, word: str, reason: str, *, refused: bool = False) -> None:
        self.prefiller.failures += 1
        self.prefiller.ejection.failed(self._owner.last_look(), self.began, refused=refused)
        self._end()
        self._owner.prompt_lost(word, reason)

    def _end(self) -> None:
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        self.over = True
        self.prefiller.in_flight -= 1


class RoomExchange(PairExchange):
    """`PairExchange`, where some of a model's replicas share requests at once; the others go on as ever."""

    __slots__ = ("_room", "_unfit", "_useless")

    def start(self) -> None:
        self._room: Room | None = None
        """Of the attempt that is under way, if it has one."""
        self._useless: list[RoutingTarget] = []
        """Prefill replicas that failed this request."""
        self._unfit = unfit(self._request.path, self._request.body)
        super().start()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        room, target, now = self._room, self._target, self._client.now()
        if room is not None and target is not None and status == 500:
            self._useless.append(room.prefiller)  # a cache that did not come is its word for many things
            if self._may_retry(now):
                target.ejection.heard(status, now, self._attempt_began, self._request.tenant)
                self._drop_attempt()
                self._attempt("500", now)
                return
        super().head(status, headers)

    def body(self, data: bytes) -> None:
        if self._room is not None and self._first_byte is None and self._status == 200:
            self._metrics.handed(self.model, "handed")
        super().body(data)

    def exhausted(self, reason: str) -> None:
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        super().exhausted(reason)

    # -- for its room -----------------------------------------------------------------------------------------

    def last_look(self) -> float:
        """Now, in the client's monotonic seconds."""
        return self._client.now()

    def prompt_computed(self) -> float:
        """The other one's time runs from here."""
        self.last_activity = now = self._client.now()
        return now

    def prompt_refused(self, status: int, text: bytes) -> None:
        """The request itself is wrong, or may not go there. The other one may say so as well, or wait for its cache."""
        if self._first_byte is not None:
            return
        target, upstream, self._upstream = self._target, self._upstream, None
        if upstream is not None:
            upstream.abort()
        if target is not None:
            target.ejection.given_up()
        if self._passing:
            self._break("FT8106", f"the prompt was refused ({status})", status=502)
            return
        self._client.answer(GatewayResponse(status, text))
        self._finish(status, "answered")

    def prompt_lost(self, word: str, reason: str) -> None:
        """Without its cache the other one waits in vain: begin anew, with another prefill replica."""
        room, target, now = self._room, self._target, self._client.now()
        if room is None or target is None:
            return
        self._useless.append(room.prefiller)
        if self._first_byte is not None:
            return  # its cache had come
        target.ejection.given_up()
        self._tried.remove(target)
        self._again(word, f"{room.prefiller.replica} did not compute the prompt: {reason}", now)

    # -- internals --------------------------------------------------------------------------------------------

    def _again(self, word: str, reason: str, now: float) -> None:
        if self._may_retry(now):
            self._drop_attempt()
            self._attempt(word, now)
        elif self._passing and self._continue(word, now):
            return
        elif self._passing or isinstance(candidates := self._candidates(), list):
            self._break("FT8106", reason, status=502)
        else:
            self._drop_attempt()
            self._refuse(candidates)

    def _send(self, target: RoutingTarget, *, anew: bool) -> None:
        if not target.in_rooms or self._request.path.partition("?")[0] in ALONE_PATHS:
            super()._send(target, anew=anew)
            return
        if self._room is None:
            now, here = self._client.now(), (target.provider, target.site)
            near = [other for other in self._computing() if (other.provider, other.site) == here]
            prefiller = min(available(near, now), key=lambda other: ((other.load + 1) / other.weight, other.key))
            self._room = Room(self, prefiller, self._request, now)
            self._handed_by, self._sender = prefiller.replica, prefiller.site
            self._room.begin()
        asked = self._request
        body = self._room.entered(asked.body)
        self._upstream = target.connector.start(
            asked.method, asked.path, asked.headers, body, asked.caller, self, anew=anew
        )

    def _computing(self) -> list[RoutingTarget]:
        """Who may compute the prompt in a room, and did not fail at it."""
        asked = self._request
        entitled = self._directory.entitled(
            asked.model, self._rules.trust, asked.group, asked.requested, asked.required, prefill=True
        )
        if isinstance(entitled, tuple):
            able = (other for other in entitled if other.in_rooms and other.phase == "prefill" and other.meets_at)
            return ready(able, self._useless)
        return []

    def _candidates(self) -> list[RoutingTarget] | Refusal | Unmet:
        candidates = super()._candidates()
        if not isinstance(candidates, list):
            return candidates
        alone = self._request.path.partition("?")[0] in ALONE_PATHS
        shared = not self._unfit and not alone
        places = {(other.provider, other.site) for other in self._computing()} if shared else set()
        able = [
            target
            for target in candidates
            if not target.in_rooms or (target.phase == "decode" and (alone or (target.provider, target.site) in places))
        ]
        return able or "not-ready"

    def _refuse(self, refusal: Refusal | Unmet) -> None:
        candidates, path = super()._candidates(), self._request.path
        if not isinstance(candidates, list):
            super()._refuse(refusal)
            return
        if self._unfit:
            text = f"two replicas of {self.model!r} share a request, and cannot share this one: {self._unfit}"
            answer = error_response(400, "FT8163", text, path=path)
        else:
            lacking = "prefill" if any(target.phase == "decode" for target in candidates) else "decode"
            text = f"no {lacking} replica of {self.model!r} is ready where its other half is: neither answers alone"
            answer = error_response(503, "FT8105", text, headers=(("retry-after", "2"),), path=path)
        self._client.answer(answer)
        self._finish(answer.status, "refused")

    def _lost(self, code: str, word: str, reason: str, *, status: int) -> None:
        room, target, now = self._room, self._target, self._client.now()
        if word != "timeout" or room is None or target is None or self._first_byte is not None:
            super()._lost(code, word, reason, status=status)
            return
        # Each waits for the other one, so that nothing says which of them stands still.
        for member, began in ((target, self._attempt_began), (room.prefiller, room.began)):
            member.failures += 1
            member.ejection.failed(now, began)
        self._useless.append(room.prefiller)
        if not isinstance(self._candidates(), list):
            self._tried.remove(target)
        if self._may_retry(now):
            self._drop_attempt()
            self._attempt(word, now)
        else:
            self._break(code, reason, status=status)

    def _drop_attempt(self, *outcome: RequestOutcome) -> None:
        super()._drop_attempt(*outcome)
        if self._room is not None:
            room, self._room = self._room, None
            room.leave()
            self._handed_by = ""


def exchange_for(model: str, directory: Directory) -> type[Exchange]:
    """What becomes of its requests, by what its replicas are to one another."""
    if model in directory.in_rooms:
        return RoomExchange
    return PairExchange if model in directory.split else Exchange
