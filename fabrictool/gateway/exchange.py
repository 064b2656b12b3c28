"""One request through the gateway: pick, send, retry before the first octet, splice, count.

Retry rules (gateway.md §5.1): only while the client has not been sent an octet; never twice on one replica; on a
connection that fails, an answer that breaks off before its head, and the engine's own 502, 503 and 504. What failed
fast is tried elsewhere until nobody is left; what failed slowly (`SLOW_S`) as often as the fabric allows and the budget
of all requests has left (`routing.retry_budget`), for it costs the client's time and an engine's. A kept connection
that its server closed meanwhile is no failure: the same replica is asked by another one. A 4xx is the client's business
and passes; so does an agent's own 403, which says that its provider does not serve this group. A whole JSON answer is
held until it is complete, so that a replica that dies while writing it costs a retry and not the request; a stream is
passed on as it comes, and if its replica dies the client gets a well-formed error event and no ``[DONE]``, or, if it
asked for that, the rest from another replica (`continuing`).

Every request that gets this far ends in `_finish`, which writes its record. Longer than most modules: it is one object
with one life, and whatever were taken out would change the same fields from elsewhere.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from fabrictool.engines.paths import CHAT_PATHS
from fabrictool.engines.protocol import FULL_HEADER
from fabrictool.gateway.continuing import CONTINUING_ENGINES, Utterance, continued_here
from fabrictool.gateway.directory import Unmet
from fabrictool.gateway.openai import error_event, error_response, no_such_model
from fabrictool.gateway.patience import STREAM
from fabrictool.gateway.ranking import ranked
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.recounting import COUNT_PATHS
from fabrictool.gateway.upstream import AnswerListener
from fabrictool.gateway.usage import TAIL_OCTETS, Usage, tokens_in
from fabrictool.mesh.framing import LEFT_HEADER
from fabrictool.routing.admission import Waiter, with_room
from fabrictool.routing.affinity import preferred
from fabrictool.routing.candidates import ready
from fabrictool.routing.dealing import part_of
from fabrictool.routing.ejection import available
from fabrictool.routing.making_room import MOST_MOVES, RunningStream
from fabrictool.routing.protocol import LOST, PASSED_OVER, RequestOutcome
from fabrictool.workload.prefixes import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.gateway.accounts import Ticket
    from fabrictool.gateway.admission import Admission, Admitted
    from fabrictool.gateway.directory import Directory, RoutingTarget
    from fabrictool.gateway.http import ClientConnection
    from fabrictool.gateway.metrics import GatewayMetrics
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.gateway.moving import Streams
    from fabrictool.gateway.records import End
    from fabrictool.gateway.rules import RoutingRules
    from fabrictool.gateway.upstream import Upstream
    from fabrictool.gateway.waking import Waking
    from fabrictool.routing.admission import Busy
    from fabrictool.routing.candidates import Refusal
    from fabrictool.routing.headroom import HeadroomPolicy

HOLD_OCTETS: Final = 8 * 1024 * 1024
"""A JSON answer larger than this is passed on as it comes."""
SLOW_S: Final = 1.0
"""An attempt that failed after longer counts against the retries that a fabric allows."""
SHARE: Final = 0.5
"""Of what is left of a request's time, for an attempt while somebody else could answer and nothing is known of how long
its model's answers take: the first one must not use up all of it.
"""
LEAST_SHARE_S: Final = 30.0
"""For an attempt that begins when little is left."""
SOONEST_S: Final = 1.0
"""No replica is given up before, for nothing less can be declared: streams in full flow are not looked at further."""
CHAT_PATH: Final = "/v1/chat/completions"
NOT_FOUND: Final = 404
UNAVAILABLE: Final = 503
CLIENT_GONE: Final = 499
"""As nginx writes it down."""
_OWN_ENDS: Final = frozenset({"FT8113", "FT8115"})
"""Of a request that no replica is to blame for."""
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_FULL_HEADER: Final = FULL_HEADER.encode()
_RETRIED_STATUS: Final = frozenset({502, 503, 504})
_PASSED_HEADERS: Final = frozenset({
    b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry",
    b"x-accel-buffering",
})  # fmt: skip


class Exchange(AnswerListener):
    """See the module's docstring; one object for each request."""

    __slots__ = (
        "_admission",
        "_answer_lines",
        "_attempt_began",
        "_began",
        "_client",
        "_content_type",
        "_directory",
        "_event_stream",
        "_finished",
        "_first_attempt_began",
        "_first_byte",
        "_first_token",
        "_former_tokens",
        "_held",
        "_learns",
        "_left",
        "_metrics",
        "_moves",
        "_over",
        "_partial",
        "_passing",
        "_request",
        "_retries",
        "_rules",
        "_slow_retries",
        "_status",
        "_streams",
        "_tail",
        "_target",
        "_ticket",
        "_tokens",
        "_tried",
        "_upstream",
        "_usage",
        "_utterance",
        "_waiter",
        "_waking",
        "last_activity",
    )  # fmt: skip

    # Wide: whom it serves, what it may use, and who hears how it ended.
    def __init__(
        self,
        client: ClientConnection,
        request: ModelRequest,
        rules: RoutingRules,
        directory: Directory,
        metrics: GatewayMetrics,
        finished: Callable[[RequestRecord], None],
        admission: Admission | None = None,
        waking: Waking | None = None,
        streams: Streams | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        self._client = client
        self._request = request
        self._rules, self._learns = rules, rules.routing_policy.learns
        self._directory = directory
        self._metrics = metrics
        self._finished = finished
        self._admission = admission
        """None: it waits for no slot."""
        self._waking = waking
        """None: it waits for no replica."""
        self._streams = streams
        """None: none moves so that it gets a place, and it does not move for others."""
        self._ticket = ticket
        """Of what it may take, to be settled at its end; None: nothing limits it."""
        self._moves = 0
        self._left = False
        """Whether the agent that was asked last takes nothing any more."""
        self._waiter: Waiter[Admitted] | None = None
        self._retries = self._slow_retries = 0
        self._tried: list[RoutingTarget] = []
        self._target: RoutingTarget | None = None
        self._upstream: Upstream | None = None
        self._status = 0
        self._answer_lines = ""
        """The headers of its answer, but for the content type."""
        self._content_type = ""
        self._passing = False
        self._event_stream = False
        self._held: list[bytes] = []
        self._partial = b""
        """The beginning of an event whose end has not come."""
        self._tail = b""
        """The last event, or the end of it."""
        self._usage = Usage()
        self._utterance = Utterance(request.body) if request.continues else None
        self._tokens = self._former_tokens = 0
        self._first_token: float | None = None
        self._began = self._attempt_began = self._first_attempt_began = self.last_activity = client.now()
        self._first_byte: float | None = None
        self._over = False

    def start(self) -> None:
        """Pick a replica and send; answers at once when there is none."""
        self._metrics.begun()
        self._attempt(None, self._began)

    def cancel(self) -> None:
        """The client has gone: free the engine's slot."""
        if not self._over:
            self._metrics.cancelled("stream" if self._passing else "head")
            if self._target is not None and self._first_byte is None:
                self._target.ejection.given_up()
            self._finish(self._status if self._passing else CLIENT_GONE, "cancelled")

    def expire(self, now: float) -> None:
        """Called every second: give up a replica that has been silent for too long."""
        silent_s = now - self.last_activity
        if silent_s < SOONEST_S:
            return
        patience, model = self._metrics.patience, self._request.model
        limit = patience.limit(model, self._form()) if self._first_byte is None else patience.idle(model)
        if silent_s <= limit:
            if self._first_byte is None and silent_s > self._share() and self._others_able(now):
                self._try_elsewhere(now)
        elif self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
            self._lost("FT8109", "timeout", "the replica sent nothing for too long", status=504)

    # -- Admitted, for admission ------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self._request.model

    @property
    def priority(self) -> int:
        return self._request.priority

    @property
    def waiter(self) -> Waiter[Admitted]:
        if self._waiter is None:
            asked = self._request
            kind = (asked.group, asked.requested, asked.required, asked.follows)
            self._waiter = Waiter(self, asked.priority, self._began + asked.patience_s, kind)
        return self._waiter

    def able(self) -> Sequence[RoutingTarget]:
        candidates = self._candidates()
        return () if isinstance(candidates, str | Unmet) else available(candidates, self._client.now())

    def admitted(self) -> None:
        self._attempt(None, self._client.now(), its_turn=True)

    def refused(self, busy: Busy) -> None:
        """429, with a time to try again."""
        why = "too many requests wait for it" if busy.full else "its turn would come too late"
        again = (("retry-after", str(int(busy.retry_after_s))),)
        text = f"all replicas of {self.model!r} are busy, and {why}"
        self._client.answer(error_response(429, "FT8131", text, headers=again, path=self._request.path))
        self._finish(429, "refused")

    # -- Movable, for moving ----------------------------------------------------------------------------------

    def as_stream(self, policy: HeadroomPolicy) -> RunningStream[RoutingTarget] | None:
        at, asked = self._target, self._request
        if at is None or not self._tokens or not self._event_stream or self._moves >= MOST_MOVES:
            return None
        target = policy.target_of(asked.model)
        return RunningStream(
            asked.id,
            asked.model,
            at,
            asked.priority,
            asked.prompt_tokens + self._tokens - self._former_tokens,
            self._began + target.ttft_s + target.tpot_s * self._tokens,
            self._places,
        )

    def move(self, to: RoutingTarget) -> bool:
        body = None if self._utterance is None else self._utterance.request(self._tokens)
        if body is None or self._target is None or self._utterance is None:
            return False
        self._moves += 1
        self._metrics.retried("moved")
        self._tried.remove(self._target)  # it is as good as before
        self._turn_to(self._utterance, body)
        self._go(to, self._client.now())
        return True

    def _places(self) -> Sequence[RoutingTarget]:
        """Where it could go on now."""
        able = self.able()
        return able if self._admission is None else with_room(able, self.priority)

    # -- Sleeper, for waking ----------------------------------------------------------------------------------

    def awake(self) -> None:
        self._attempt(None, self._client.now())

    def still_asleep(self, again_s: float) -> None:
        """503, with a time to try again."""
        seconds = max(1, round(again_s))
        text = f"no replica of {self.model!r} runs, for nobody asked for it; one is to be started, try in {seconds} s"
        again = (("retry-after", str(seconds)),)
        self._client.answer(error_response(503, "FT8116", text, headers=again, path=self._request.path))
        self._finish(503, "refused")

    def stop(self) -> None:
        """The gateway ends and cannot wait any longer."""
        if not self._over:
            self._break("FT8113", "the gateway is being stopped", status=503)

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume(self) -> None:
        """The client reads again; the replica's silence meanwhile was our doing."""
        self.last_activity = self._client.now()
        if self._upstream is not None:
            self._upstream.resume_reading()

    # -- AnswerListener ---------------------------------------------------------------------------------------

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Decide whether to pass, hold or retry."""
        self.last_activity = now = self._client.now()
        target = self._target
        if target is None:
            return
        self._left = full = False
        if status == UNAVAILABLE:
            self._left = any(name == LEFT_HEADER for name, _ in headers)
            full = any(name == _FULL_HEADER for name, _ in headers)
        if full:
            self._attempt_began = now  # that it took until now is no slow failure: whoever is left is asked
            target.ejection.answered()
        elif self._left:
            target.ejection.given_up()
        else:
            target.ejection.heard(status, now, self._attempt_began, self._request.tenant)
        if status in _RETRIED_STATUS and self._may_retry(now):
            self._drop_attempt(PASSED_OVER if full else LOST)
            self._attempt(str(status), now)
            return
        if status == NOT_FOUND and self._is_kept_elsewhere(now):
            self._attempt_began = now  # that it took until now is no slow failure: whoever is left is asked
            self._drop_attempt(PASSED_OVER)
            self._attempt("elsewhere", now)
            return
        if self._passing and status != 200:
            if not self._continue(str(status), now):
                self._break("FT8106", f"{target.replica} would not go on ({status})", status=502)
            return
        self._status = status
        lines, kind = "", ""
        for name, value in headers:
            if name == b"content-type":
                kind = value.decode("latin-1")
            elif name in _PASSED_HEADERS:
                lines += f"{name.decode()}: {value.decode('latin-1')}\r\n"
        took_ms = int(1000.0 * (now - self._attempt_began) + 0.5)
        self._answer_lines = f"{lines}{target.introduction}server-timing: engine;dur={took_ms}\r\n"
        self._content_type = kind
        self._event_stream = kind.startswith("text/event-stream")

    def body(self, data: bytes) -> None:
        self.last_activity = self._client.now()
        if self._first_byte is None:
            self._first_byte = self.last_activity
        if self._event_stream:
            self._pass_events(data)
        elif self._passing:
            self._tail = (self._tail + data)[-TAIL_OCTETS:]
            self._client.chunk(data)
        else:
            self._held.append(data)
            if len(data) > HOLD_OCTETS or (len(self._held) > 64 and sum(map(len, self._held)) > HOLD_OCTETS):
                self._tail = b"".join(self._held)[-TAIL_OCTETS:]
                self._pass()

    def complete(self, *, sized: bool) -> None:
        """The replica's answer is whole, or its connection ended where only that could end it."""
        self._upstream = None
        if not sized and not self._looks_whole():
            self._lost("FT8106", "broken", "the engine closed the connection in mid-answer", status=502)
            return
        if self._partial:
            self._held.append(self._partial)
            self._partial = b""
            self._pass()
        if self._passing:
            if not self._event_stream and self._status == 200:
                self._usage.read_end(self._tail)
            self._client.finish()
        else:
            text = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            if self._status == 200:
                self._usage.read(text)
            kind = self._content_type or "application/json"
            self._client.deliver(self._status, kind, self._answer_lines, text)
        self._finish(self._status, "answered")

    def failed(self, reason: str, *, refused: bool) -> None:
        self._upstream = None
        self._lost("FT8106", "refused" if refused else "broken", reason, status=502)

    def exhausted(self, reason: str) -> None:
        """This process has no file left for a connection: no replica's fault."""
        self._upstream = None
        if self._target is not None:
            self._target.ejection.given_up()
        self._break("FT8115", f"this gateway cannot open a connection more: {reason.lower()}", status=503)

    def stale(self) -> None:
        if self._target is not None:
            self._send(self._target, anew=True)

    # -- internals --------------------------------------------------------------------------------------------

    def _attempt(self, retry_reason: str | None, now: float, *, its_turn: bool = False) -> None:
        candidates = self._candidates()
        if not isinstance(candidates, list):
            self._refuse(candidates)
            return
        if retry_reason is not None:
            if not self._retries:
                self._first_attempt_began = self._attempt_began
            self._retries += 1
            # Whoever goes on with a stream asks no budget, and spends none: its client has seen a part of it.
            if now - self._attempt_began > SLOW_S and not self._passing:
                self._slow_retries += 1
                self._metrics.retry_budget.spend(now)
            self._metrics.retried(retry_reason)
        able, policy = available(candidates, now), self._rules.routing_policy
        target = None
        if self._streams is not None and retry_reason is None and self._rules.makes_room is not None:
            target = self._streams.make_room(self._request, able, self._admission, self._rules.makes_room, now)
        if target is None and self._admission is not None and retry_reason is None:
            asked = self._request
            roomy = (
                with_room(able, asked.priority) if its_turn else self._admission.free(asked.model, asked.priority, able)
            )
            able = roomy or self._admission.enter(self, able, now)
            if not able:
                return
        talk = self._request.conversation
        if target is None and talk is not None:
            target = preferred(able, talk, part_of(able, self._request.group) if self._rules.by_weight else None)
        self._go(target or policy.pick(able, self._request, now), now)

    def _go(self, target: RoutingTarget, now: float) -> None:
        if self._learns:
            self._rules.routing_policy.on_request_start(target, self._request, now)
        self._tried.append(target)
        self._target = target
        target.in_flight += 1
        target.requests += 1
        target.ejection.began(now)
        self._held = []
        self._partial = b""
        self._first_byte = None
        self._attempt_began = self.last_activity = now
        if self._passing:
            self._client.chunk(continued_here(target.provider, target.replica))
        if self._streams is not None and self._utterance is not None:
            self._streams.add(self._request.id, self)
        self._send(target, anew=False)

    def _send(self, target: RoutingTarget, *, anew: bool) -> None:
        asked = self._request
        headers, body = ranked(asked) if target.by_priority else (asked.headers, asked.body)
        self._upstream = target.connector.start(asked.method, asked.path, headers, body, asked.caller, self, anew=anew)

    def _candidates(self) -> list[RoutingTarget] | Refusal | Unmet:
        """The replicas that may answer and have not been tried."""
        asked = self._request
        entitled = self._directory.entitled(
            asked.model, self._rules.trust, asked.group, asked.requested, asked.required
        )
        if not isinstance(entitled, tuple):
            return entitled
        keeper = self._directory.keeper(asked.follows) if asked.follows else None
        if keeper is not None:
            entitled = tuple(target for target in entitled if target.key == keeper)
            if not entitled:
                return Unmet(f"the one that gave {asked.follows}: it is gone, and what was said with it")
        if self._passing and asked.path.startswith(CHAT_PATH):
            entitled = tuple(target for target in entitled if target.engine in CONTINUING_ENGINES)
        return ready(entitled, self._tried) or "not-ready"

    def _is_in_time(self, now: float) -> bool:
        """Whether it is not too late to begin another attempt."""
        return now - self._began <= self._metrics.patience.deadline(self._request.model)

    def _may_retry(self, now: float) -> bool:
        if self._passing or not self._is_in_time(now):
            return False
        if now - self._attempt_began > SLOW_S:
            most = min(self._rules.retries, self._metrics.patience.kind(self._request.model).retries)
            if self._slow_retries >= most or not self._metrics.retry_budget.allows(now):
                return False
        return isinstance(self._candidates(), list) or self._may_sleep()

    def _is_kept_elsewhere(self, now: float) -> bool:
        """Whether the answer that is continued may be with another replica: another gateway may have asked it, or this
        one in its life before.
        """
        follows = self._request.follows
        if not follows or self._passing or self._directory.keeper(follows) is not None:
            return False
        return self._is_in_time(now) and isinstance(self._candidates(), list)

    def _share(self) -> float:
        """How long this attempt may be silent while others could answer: without end where its model's limit is known,
        for that is what healthy answers take.
        """
        patience, model = self._metrics.patience, self._request.model
        if patience.knows(model, self._form()):
            return inf
        gone_s = self._attempt_began - self._first_attempt_began if self._retries else 0.0
        return max(LEAST_SHARE_S, SHARE * (patience.deadline(model) - gone_s))

    def _try_elsewhere(self, now: float) -> None:
        """Somebody else gets what is left of the time. It may be well, and its answer only long: it is not put out."""
        if self._target is not None:
            self._target.ejection.given_up()
        self._drop_attempt()
        self._attempt("timeout", now)

    def _others_able(self, now: float) -> bool:
        """Whether the request could go on elsewhere, to somebody who is not out: then no attempt takes all its time."""
        candidates = self._candidates()
        if not isinstance(candidates, list) or not self._may_retry(now):
            return False
        return any(candidate.ejection.available(now) for candidate in candidates)

    def _may_sleep(self) -> bool:
        """Whether nobody serves its model because nobody asked for it, and somebody will."""
        model = self._request.model
        if self._waking is None or self._passing or model not in self._waking.rules:
            return False
        gone = self._left or not self._directory.of_model(model)
        return gone and self._rules.trust.sees(self._request.group, model)

    def _lost(self, code: str, word: str, reason: str, *, status: int) -> None:
        now = self._client.now()
        if self._target is not None:
            self._target.failures += 1
            self._target.ejection.failed(now, self._attempt_began, refused=word in ("refused", "timeout"))
        if self._may_retry(now):
            self._drop_attempt()
            self._attempt(word, now)
        elif not self._continue(word, now):
            self._break(code, reason, status=status)

    def _continue(self, word: str, now: float) -> bool:
        """Have another replica say the rest of a stream; False where none can."""
        if self._utterance is None or not self._event_stream or not self._passing or not self._is_in_time(now):
            return False
        body = self._utterance.request(self._tokens)
        if body is None or not isinstance(self._candidates(), list):
            return False
        self._turn_to(self._utterance, body)
        self._attempt(word, now)
        return True

    def _turn_to(self, utterance: Utterance, body: bytes) -> None:
        """The rest of the stream is asked for by this one."""
        self._drop_attempt()
        self._former_tokens = self._tokens = utterance.turn(self._tokens)
        self._request = self._request.saying(body)

    def _break(self, code: str, reason: str, *, status: int) -> None:
        """There is no answer, or no more of it."""
        model, path = self._request.model, self._request.path
        if not self._passing:
            where = f" (tried {', '.join(target.replica for target in self._tried)})" if code not in _OWN_ENDS else ""
            text = f"no replica of {model!r} answered: {reason}{where}"
            again = (("retry-after", "5"),) if status == 503 else ()
            self._client.answer(error_response(status, code, text, headers=again, path=path))
            self._finish(status, "refused")
        elif self._event_stream:
            self._client.chunk(error_event(code, f"the replica was lost in mid-stream: {reason}", path=path))
            self._client.finish()
            self._finish(self._status, "broken")
        else:
            self._client.break_off()
            self._finish(self._status, "broken")

    def _refuse(self, refusal: Refusal | Unmet) -> None:
        model, path = self._request.model, self._request.path
        if self._waking is not None and self._may_sleep():
            again_s = self._waking.hold(self, self._began, self._request.max_wait_s)
            if again_s is not None:
                self.still_asleep(again_s)
            return
        if self._tried:
            answer = error_response(502, "FT8106", f"every replica of {model!r} failed", path=path)
        elif isinstance(refusal, Unmet):
            message = f"no replica of {model!r} that may serve this request is {refusal.words}"
            answer = error_response(422, "FT8114", message, path=path)
        elif refusal == "unknown-model":
            sees = self._rules.trust.sees(self._request.group, model)
            may_come = sees and self._directory.may_come(model, self._client.now())
            answer = no_such_model(model, may_come=may_come, path=path)
        elif refusal == "not-allowed":
            message = f"no provider that may serve this request serves {model!r}"
            answer = error_response(403, "FT8104", message, path=path)
        else:
            message = f"no replica of {model!r} is ready; try again"
            answer = error_response(503, "FT8105", message, headers=(("retry-after", "2"),), path=path)
        self._client.answer(answer)
        self._finish(answer.status, "refused", known=refusal != "unknown-model")

    def _form(self) -> str:
        """Of its answer, as `Patience` knows them."""
        return STREAM if self._request.stream else self._path()

    def _path(self) -> str:
        """Without what its client may write behind it, which has no end."""
        path = self._request.path
        return path if "?" not in path else path.partition("?")[0]

    def _looks_whole(self) -> bool:
        """Whether an answer without a length or chunks came to its end."""
        if self._event_stream:
            end = self._tail + self._partial
            return b"data: [DONE]" in end or b"message_stop" in end or b"response.completed" in end
        if not self._content_type.startswith("application/json") or self._passing:
            return True
        try:
            msgspec.json.decode(b"".join(self._held))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    def _pass_events(self, data: bytes) -> None:
        """Pass whole events only: what a lost replica leaves half said is dropped, and the error event is readable."""
        if not self._partial and data.endswith(_EVENT_ENDS):  # most events
            whole = data
        else:
            begin = max(0, len(self._partial) - 3)
            self._partial += data
            ends = [(self._partial.rfind(mark, begin), len(mark)) for mark in _EVENT_ENDS]
            end = max(at + size if at >= 0 else 0 for at, size in ends)
            if not end and len(self._partial) > HOLD_OCTETS:
                end = len(self._partial)
            if not end:
                return
            whole, self._partial = self._partial[:end], self._partial[end:]
        if self._utterance is not None:
            self._utterance.take(whole)
        tokens = tokens_in(whole)
        if tokens:
            if self._first_token is None:
                self._first_token = self.last_activity
            self._tokens += tokens
        without_figures = self._usage.read_events(whole)
        self._tail = whole[-256:]
        if without_figures is not None and self._request.added_usage:
            whole = without_figures
        if whole:
            self._held.append(whole)
            self._pass()

    def _pass(self) -> None:
        if not self._passing:
            self._passing = True
            self._client.begin(self._status, self._content_type, self._answer_lines)
        held, self._held = self._held, []
        self._client.chunk(held[0] if len(held) == 1 else b"".join(held))

    def _drop_attempt(self, outcome: RequestOutcome = LOST) -> None:
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        if self._target is not None:
            self._target.in_flight -= 1
            if self._learns:
                self._rules.routing_policy.on_request_end(self._target, self._request, outcome)
            self._target = None

    def _finish(self, status: int, end: End, *, known: bool = True) -> None:
        """The one way out: free what is held, and write down what happened."""
        if self._over:
            return
        self._over = True
        target, asked, usage = self._target, self._request, self._usage
        if end == "answered" and target is not None and usage.response and asked.path.startswith("/v1/responses"):
            self._directory.keeps(usage.response, target.key)
        now = self._client.now()
        tokens = usage.completion + self._former_tokens
        if not usage.counted or end != "answered":  # what was cut off has no last figures
            tokens = max(tokens, self._tokens)
        first = self._first_token if self._former_tokens else self._first_byte
        tpot = None
        if self._event_stream and tokens > 1 and status == 200:
            tpot = (now - (self._first_token or self._first_byte or now)) / (tokens - 1)
        prompt_tokens = self._prompt_tokens(status, end)
        prefix_tokens, prefix_of = self._shared(prompt_tokens)
        record = RequestRecord(  # by the order of its fields: by their names it takes twice as long
            asked.id,
            asked.at,
            self._path(),
            status,
            end,
            now - self._began,
            asked.tenant,
            asked.key,
            asked.model if known else "",
            target.provider if target is not None else "",
            target.replica if target is not None else "",
            self._retries,
            self._event_stream,
            prompt_tokens,
            usage.cached,
            tokens,
            usage.counted,
            prefix_of,
            prefix_tokens,
            first - self._began if self._event_stream and first is not None else None,
            tpot,
        )
        if end == "answered" and status == 200 and not self._former_tokens:
            self._learn(record)
        self._drop_attempt(self._outcome(record))
        if self._waking is not None:
            self._waking.leave(self)
        if self._streams is not None:
            self._streams.discard(asked.id)
        if self._admission is not None:
            if self._waiter is not None:
                self._admission.leave(self)
            self._admission.pump(now)
        self._metrics.in_flight -= 1
        if self._ticket is not None:
            self._ticket.settle(record)
        teller = self._teller(target, end, now) if self._is_estimated(status, end) else None
        if teller is None or not self._metrics.recounts.ask(teller, asked, partial(self._recounted, record)):
            self._book(record)

    def _book(self, record: RequestRecord) -> None:
        self._metrics.count(record)
        self._finished(record)

    def _recounted(self, record: RequestRecord, prompt_tokens: int | None) -> None:
        """Write down what an engine said of the prompt; None: it said nothing, and the estimate stands."""
        if prompt_tokens is not None:
            prompt = max(0, prompt_tokens - self._former_tokens)
            shared, of = self._shared(prompt)
            record = structs.replace(record, prompt_tokens=prompt, prefix_tokens=shared, prefix_of=of)
            if self._ticket is not None:
                self._ticket.correct(record)
        self._book(record)

    def _shared(self, prompt_tokens: int) -> tuple[int, str]:
        """What of its prompt was that of an earlier request, in tokens, and of which."""
        shared = int(prompt_tokens * self._request.prefix_share) // BLOCK_TOKENS * BLOCK_TOKENS
        return shared, self._request.prefix_of if shared else ""

    def _teller(self, target: RoutingTarget | None, end: End, now: float) -> RoutingTarget | None:
        """Who can say what the prompt was: who read it, else another one of the same provider, who may know it, too."""
        if target is None or self._path() not in CHAT_PATHS:
            return None
        if end == "cancelled":
            return target
        asked = self._request
        entitled = self._directory.entitled(
            asked.model, self._rules.trust, asked.group, asked.requested, asked.required
        )
        able = [
            other
            for other in (ready(entitled, self._tried) if isinstance(entitled, tuple) else ())
            if other.provider == target.provider and other.engine in COUNT_PATHS and other.ejection.available(now)
        ]
        return min(able, key=lambda other: other.load, default=None)

    def _is_estimated(self, status: int, end: End) -> bool:
        """Whether a prompt was read, and no engine said what it was."""
        return bool(not self._usage.prompt and end != "answered" and self._first_byte is not None and status == 200)

    def _prompt_tokens(self, status: int, end: End) -> int:
        """As the engine says; of a stream that began and did not come to its end, about."""
        asked, usage, density = self._request, self._usage, self._metrics.density
        read = usage.prompt
        if usage.counted:
            if end == "answered" and not self._former_tokens:
                density.learn(asked.model, self._path(), len(asked.body), read)
        elif self._is_estimated(status, end) and self._target is not None:
            read = density.tokens(asked.model, self._path(), len(asked.body), self._target.context)
        return max(0, read - self._former_tokens)  # what was said is counted as an answer

    def _learn(self, record: RequestRecord) -> None:
        """How long the replica that answered took to begin, whatever came before it."""
        first, target = self._first_byte, self._target
        if first is None or target is None:
            return
        took_s = first - self._attempt_began
        form = STREAM if self._request.stream else record.path
        self._metrics.patience.learn(record.model, form, took_s, record.completion_tokens)
        if record.ttft_s is not None:
            target.timed(took_s, record.tpot_s)

    def _outcome(self, record: RequestRecord) -> RequestOutcome:
        """As routing is told it."""
        if not self._learns or record.end != "answered" or record.status >= 400:
            return LOST
        # What a retry cost is no fault of the replica that answered.
        if record.ttft_s is None or self._former_tokens:
            return RequestOutcome(True, None, None, record.prompt_tokens, record.completion_tokens)
        ttft_s = record.ttft_s - (self._attempt_began - self._began)
        return RequestOutcome(True, ttft_s, record.tpot_s, record.prompt_tokens, record.completion_tokens)
