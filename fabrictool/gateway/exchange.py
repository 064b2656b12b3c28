"""One request through the gateway: pick, send, retry before the first byte, splice, count.

Retry rules (gateway.md §5.1): only while the client has not been sent a byte; never twice on one replica; on a
connection that fails, an answer that breaks off before its head, and the engine's own 502, 503 and 504. A 4xx is the
client's business and passes; so does an agent's own 403, which says that its provider does not serve this group. A
whole JSON answer is held until it is complete, so that a replica that dies while writing it costs a retry and not the
request; a stream is passed on as it comes, and if its replica dies the client gets a well-formed error event and no
``[DONE]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from fabrictool.gateway.openai import GatewayResponse, error_event, error_response, no_such_model
from fabrictool.gateway.upstream import Caller, Response
from fabrictool.mesh.attestation import NoAttestation
from fabrictool.routing.candidates import select

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fabrictool.gateway.directory import Directory, RoutingTarget
    from fabrictool.gateway.metrics import GatewayMetrics
    from fabrictool.gateway.upstream import Headers
    from fabrictool.mesh.attestation import Attestation
    from fabrictool.routing.candidates import Refusal, Selection, TrustPolicy
    from fabrictool.routing.policies import RoutingPolicy

HOLD_OCTETS = 8 * 1024 * 1024
"""A JSON answer larger than this is passed on as it comes."""
_USAGE = re.compile(rb'"usage"\s*:\s*\{[^}]*')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_TOKEN = re.compile(rb'"(?:content|reasoning_content|text|arguments)"\s*:\s*"(?!")')
"""Text in a streamed chunk: an engine sends one such chunk a token, and others for the role, the usage and the end."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_RETRIED_STATUS = frozenset({502, 503, 504})
_PASSED_HEADERS = frozenset({b"content-type", b"cache-control", b"retry-after", b"x-accel-buffering"})


class Downstream(Protocol):
    """The connection that asked; it owns framing (chunked or sized)."""

    def answer(self, answer: GatewayResponse) -> None: ...

    def begin(self, status: int, headers: Headers) -> None:
        """The head of a streamed response."""

    def chunk(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def break_off(self) -> None:
        """It cannot be ended properly: close the connection."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """How a gateway chooses a replica, the same for every request."""

    routing_policy: RoutingPolicy
    trust: TrustPolicy
    retries: int
    """Attempts after the first."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By `weight_key`; what is not there has 1."""
    attestation: Attestation = field(default_factory=NoAttestation)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a client wants, and from whom."""

    model: str
    method: str
    path: str
    headers: Headers
    """Those that an engine may see."""
    body: bytes
    group: str | None
    """The client's consumer group; None where keys are not asked for, or the key names none."""
    requested: Collection[str] | None
    """The client's own allowlist of providers."""
    tenant: str = ""
    """The client's pseudonym."""


class Exchange:
    """See the module's docstring; one object for each request."""

    def __init__(
        self,
        client: Downstream,
        request: CompletionRequest,
        rules: RoutingRules,
        directory: Directory,
        metrics: GatewayMetrics,
    ) -> None:
        self._client = client
        self._request = request
        self._rules = rules
        self._directory = directory
        self._metrics = metrics
        self._model = request.model
        self._retries_left = rules.retries
        self._tried: list[RoutingTarget] = []
        self._target: RoutingTarget | None = None
        self._response: Response | None = None
        self._status = 0
        self._answer_headers: Headers = ()
        self._passing = False
        self._event_stream = False
        self._held = bytearray()
        self._partial = b""
        """The beginning of an event whose end has not come."""
        self._tail = b""
        self._tokens = 0
        self._first_token: float | None = None
        self._began = client.now()
        self._first_byte: float | None = None
        self._over = False
        self.last_activity = self._began

    def start(self) -> None:
        """Pick a replica and send; answers at once when there is none."""
        self._metrics.in_flight.inc()
        self._attempt(None)

    def cancel(self) -> None:
        """The client has gone: free the engine's slot."""
        if not self._over:
            self._metrics.cancelled("stream" if self._passing else "head")
            self._end()

    def time_out(self) -> None:
        """Nothing has come for too long."""
        if self._response is not None:
            response, self._response = self._response, None
            response.abort()
            self._lost("FT8109", "timeout", "the replica sent nothing for too long", status=504)

    def pause(self) -> None:
        if self._response is not None:
            self._response.pause_reading()

    def resume(self) -> None:
        """The client reads again; the replica's silence meanwhile was our doing."""
        self.last_activity = self._client.now()
        if self._response is not None:
            self._response.resume_reading()

    # -- ResponseListener -------------------------------------------------------------------------------------

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Decide whether to pass, hold or retry."""
        self.last_activity = self._client.now()
        if status in _RETRIED_STATUS and self._may_retry():
            self._drop_attempt()
            self._attempt(str(status))
            return
        self._status = status
        target = self._target
        passed = [
            (k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in headers if k.lower() in _PASSED_HEADERS
        ]
        if target is not None:
            passed += [("x-fabric-provider", target.provider), ("x-fabric-replica", target.replica)]
        self._answer_headers = tuple(passed)
        kind = dict(passed).get("content-type", "")
        self._event_stream = kind.startswith("text/event-stream")

    def body(self, data: bytes) -> None:
        self.last_activity = self._client.now()
        if self._first_byte is None:
            self._first_byte = self.last_activity
        if self._event_stream:
            self._pass_events(data)
        elif self._passing:
            self._pass_on(data)
        else:
            self._held += data
            if len(self._held) > HOLD_OCTETS:
                self._pass()

    def complete(self) -> None:
        """The replica's answer is whole, or its connection ended where only that could end it."""
        response, self._response = self._response, None
        if response is not None and not response.sized and not self._looks_whole():
            self._lost("FT8106", "broken", "the engine closed the connection in mid-answer", status=502)
            return
        if self._partial:
            self._held += self._partial
            self._partial = b""
            self._pass()
        if self._passing:
            self._client.finish()
            self._measure(self._tail)
        else:
            content_type = dict(self._answer_headers).get("content-type", "application/json")
            headers = tuple((k, v) for k, v in self._answer_headers if k != "content-type")
            self._client.answer(GatewayResponse(self._status, bytes(self._held), content_type, headers))
            self._measure(bytes(self._held))
        self._answered(self._status)

    def failed(self, reason: str) -> None:
        self._response = None
        self._lost("FT8106", "broken", reason, status=502)

    # -- internals --------------------------------------------------------------------------------------------

    def _attempt(self, retry_reason: str | None) -> None:
        selection = self._select()
        if selection.refusal is not None:
            self._refuse(selection.refusal)
            return
        if retry_reason is not None:
            self._retries_left -= 1
            self._metrics.retried(retry_reason)
        target = self._rules.routing_policy.pick(selection.candidates)
        self._tried.append(target)
        self._target = target
        target.in_flight += 1
        target.requests += 1
        self._held.clear()
        self._partial = b""
        self._first_byte = None
        self._response = Response(self)
        asked = self._request
        caller = Caller(asked.group or "", asked.tenant)
        target.connector.start(asked.method, asked.path, asked.headers, asked.body, caller, self._response)

    def _select(self) -> Selection[RoutingTarget]:
        """The replicas that may answer and have not been tried."""
        return select(
            self._directory.of_model(self._model),
            model=self._model,
            trust=self._rules.trust,
            group=self._request.group,
            requested=self._request.requested,
            exclude=self._tried,
        )

    def _may_retry(self) -> bool:
        return not self._passing and self._retries_left > 0 and bool(self._select().candidates)

    def _lost(self, code: str, word: str, reason: str, *, status: int) -> None:
        if self._target is not None:
            self._target.failures += 1
        if self._may_retry():
            self._drop_attempt()
            self._attempt(word)
            return
        if not self._passing:
            where = f" (tried {', '.join(target.replica for target in self._tried)})"
            self._client.answer(
                error_response(status, code, f"no replica of {self._model!r} answered: {reason}{where}")
            )
            self._answered(status)
        elif self._event_stream:
            self._client.chunk(error_event(code, f"the replica was lost in mid-stream: {reason}"))
            self._client.finish()
            self._answered(self._status, broken=True)
        else:
            self._client.break_off()
            self._answered(self._status, broken=True)

    def _refuse(self, refusal: Refusal) -> None:
        if self._tried:
            self._client.answer(error_response(502, "FT8106", f"every replica of {self._model!r} failed"))
            self._answered(502)
            return
        match refusal:
            case "unknown-model":
                answer = no_such_model(self._model, may_come=self._directory.may_come(self._model, self._client.now()))
                self._client.answer(answer)
                self._end(answer.status)
            case "not-allowed":
                message = f"no provider that may serve this request serves {self._model!r}"
                self._client.answer(error_response(403, "FT8104", message))
                self._answered(403)
            case "not-ready":
                message = f"no replica of {self._model!r} is ready; try again"
                self._client.answer(error_response(503, "FT8105", message, headers=(("retry-after", "2"),)))
                self._answered(503)

    def _looks_whole(self) -> bool:
        """Whether an answer without a length or chunks came to its end."""
        if self._event_stream:
            return b"data: [DONE]" in self._tail + self._partial
        if not dict(self._answer_headers).get("content-type", "").startswith("application/json") or self._passing:
            return True
        try:
            msgspec.json.decode(self._held)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return True

    def _pass_events(self, data: bytes) -> None:
        """Pass whole events only: what a lost replica leaves half said is dropped, and the error event is readable."""
        begin = max(0, len(self._partial) - 3)
        self._partial += data
        ends = [(self._partial.rfind(mark, begin), len(mark)) for mark in _EVENT_ENDS]
        end = max(at + size if at >= 0 else 0 for at, size in ends)
        if not end and len(self._partial) > HOLD_OCTETS:
            end = len(self._partial)
        if not end:
            return
        whole, self._partial = self._partial[:end], self._partial[end:]
        tokens = len(_TOKEN.findall(whole))
        if tokens and self._first_token is None:
            self._first_token = self.last_activity
        self._tokens += tokens
        self._held += whole
        self._pass()

    def _pass(self) -> None:
        if not self._passing:
            self._passing = True
            self._client.begin(self._status, self._answer_headers)
        held = bytes(self._held)
        self._held.clear()
        self._pass_on(held)

    def _pass_on(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-2048:]
        self._client.chunk(data)

    def _measure(self, text: bytes) -> None:
        now = self._client.now()
        usage = _USAGE.findall(text)
        completion = 0
        if usage:
            prompt_match, completion_match = _PROMPT.search(usage[-1]), _COMPLETION.search(usage[-1])
            completion = int(completion_match[1]) if completion_match else 0
            self._metrics.used(self._model, int(prompt_match[1]) if prompt_match else 0, completion)
        if self._status == 200 and self._first_byte is not None and self._event_stream:
            tokens, first = completion or self._tokens, self._first_token or self._first_byte
            tpot = (now - first) / (tokens - 1) if tokens > 1 else None
            self._metrics.timed(self._model, self._first_byte - self._began, tpot)

    def _drop_attempt(self) -> None:
        if self._response is not None:
            response, self._response = self._response, None
            response.abort()
        if self._target is not None:
            self._target.in_flight -= 1
            self._target = None

    def _answered(self, status: int, *, broken: bool = False) -> None:
        provider = self._target.provider if self._target is not None else ""
        self._metrics.answered(self._model, provider, status, broken=broken)
        self._end()

    def _end(self, unknown_model_status: int | None = None) -> None:
        if unknown_model_status is not None:
            self._metrics.answered("", "", unknown_model_status)
        if not self._over:
            self._over = True
            self._drop_attempt()
            self._metrics.in_flight.dec()
