"""Requests whose prompt one replica computes and another one answers: prefill/decode pairs.

The replica that answers is chosen first, by all the rules of an `Exchange`, and a place in it is kept. Then a prefill
replica, at its site if one is there, computes the prompt and says where its key-value cache lies; with that the request
goes on. The words are vLLM's (``kv_transfer_params``, NIXL connector). A prefill replica helps and is never needed:
where none answers, the other computes the prompt by itself. ThunderServe (paper 002, section 3) plans such pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from fabrictool.engines.paths import CHAT_PATHS
from fabrictool.gateway.bodies import Prompted
from fabrictool.gateway.exchange import SLOW_S, UNAVAILABLE, Exchange
from fabrictool.gateway.openai import TRANSFER_FIELD, with_field
from fabrictool.mesh.framing import LEFT_HEADER
from fabrictool.routing.candidates import ready

if TYPE_CHECKING:
    from fabrictool.gateway.directory import RoutingTarget, Unmet
    from fabrictool.gateway.records import End
    from fabrictool.routing.candidates import Refusal
    from fabrictool.routing.protocol import RequestOutcome

LEAST_OCTETS: Final = 1024
"""Of a body whose prompt is worth a second replica: about 16 blocks of vLLM's cache; a shorter one costs decoding no
more than a step."""
HANDED_OCTETS: Final = 1 << 20
"""Of a prefill replica's answer: one token, and the numbers of the cache's blocks."""
TRIES: Final = 2
HANDED_HEADER: Final = "x-fabric-prefill"

_TO_BE_FETCHED: Final = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
_NEVER_SPLIT: Final = ("echo", "best_of", "prompt_logprobs", "use_beam_search")
"""They ask for something of the prompt itself, or for several answers."""
_LEFT_OUT: Final = ("stream_options", "max_completion_tokens", "min_tokens")
_EMPTY: Final = (b"null", b"false", b"0", b"1")


_prompted: Final = msgspec.json.Decoder(Prompted)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def prompt_request(path: str, body: bytes) -> bytes | None:
    """The body of the request for a prompt's cache and nothing more; None where it is too short, or of another kind."""
    if path.partition("?")[0] not in CHAT_PATHS or len(body) < LEAST_OCTETS:
        return None
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if any(bytes(fields.get(name, b"null")) not in _EMPTY for name in (*_NEVER_SPLIT, "n")):
        return None
    prompt = bytes(fields.get("prompt", b""))
    if prompt.startswith(b"[") and not prompt[1:].lstrip()[:1].isdigit():
        return None  # several prompts, and not the tokens of one
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    return msgspec.json.encode(kept | {"stream": False, "max_tokens": 1, TRANSFER_FIELD: _TO_BE_FETCHED})


class PairExchange(Exchange):
    """`Exchange`, with a turn at a prefill replica before the first attempt."""

    __slots__ = (
        "_asked_of",
        "_handed_by",
        "_prefiller",
        "_prompt",
        "_prompt_held",
        "_prompt_octets",
        "_sender",
        "_split",
    )

    def start(self) -> None:
        self._split = False
        """Whether the prompt was asked for, whatever came of it."""
        self._prompt: bytes | None = None
        """The body for a prefill replica, while it is asked."""
        self._prompt_held: list[bytes] = []
        self._prompt_octets = 0
        self._prefiller: RoutingTarget | None = None
        self._asked_of: list[RoutingTarget] = []
        self._handed_by = ""
        self._sender = ""
        """Site of who computed the prompt."""
        super().start()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._prefiller is None:
            super().head(status, headers)
            if self._handed_by:
                self._answer_lines += f"{HANDED_HEADER}: {self._handed_by}\r\n"
            return
        self.last_activity = now = self._client.now()
        if status == UNAVAILABLE and any(name == LEFT_HEADER for name, _ in headers):
            self._prefiller.ejection.given_up()
        else:
            self._prefiller.ejection.heard(status, now, self._attempt_began, self._request.tenant)
        self._status = status

    def body(self, data: bytes) -> None:
        if self._prefiller is None:
            super().body(data)
            return
        self.last_activity = self._client.now()
        self._prompt_octets += len(data)
        if self._prompt_octets <= HANDED_OCTETS:
            self._prompt_held.append(data)

    def complete(self, *, sized: bool) -> None:
        if self._prefiller is None:
            super().complete(sized=sized)
            return
        self._upstream = None
        if self._status >= 500:
            self._without(again=True)
            return
        try:
            handed = bytes(_prompted.decode(b"".join(self._prompt_held)).kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            handed = b"null"
        if self._status != 200 or not handed.startswith(b"{"):
            self._without(again=False)  # its answer ended with the prompt, or the request is wrong: the other says so
            return
        self._handed_by, self._sender = self._prefiller.replica, self._prefiller.site
        took_s = self._client.now() - self._attempt_began
        self._prefiller.timed(took_s, None)
        # It is waited for as for the answer itself, and takes longer.
        self._metrics.patience.learn(self.model, self._form(), took_s)
        self._metrics.handed(self.model, "handed")
        self._answer(handed)

    def exhausted(self, reason: str) -> None:
        if self._prefiller is not None:
            self._prefiller.ejection.given_up()
        self._release()
        super().exhausted(reason)

    # -- internals --------------------------------------------------------------------------------------------

    def _send(self, target: RoutingTarget, *, anew: bool) -> None:
        asked = self._request
        if not self._split:
            self._split = True
            self._prompt = prompt_request(asked.path, asked.body)
            if self._prompt is not None and self._ask_prefiller(target, anew=False):
                return
            self._metrics.handed(self.model, "alone")
        elif self._prefiller is not None:  # the connection that was kept turned out to be closed
            self._send_prompt(self._prefiller, anew=True)
            return
        super()._send(target, anew=anew)

    def _ask_prefiller(self, target: RoutingTarget, *, anew: bool) -> bool:
        """Have the prompt computed near `target`; False where nobody can."""
        now = self._client.now()
        able = [other for other in self._prefillers() if other not in self._asked_of and other.ejection.available(now)]
        near = [other for other in able if (other.provider, other.site) == (target.provider, target.site)]
        if not able or len(self._asked_of) >= TRIES:
            return False
        prefiller = min(near or able, key=lambda other: ((other.load + 1) / other.weight, other.key))
        self._asked_of.append(prefiller)
        self._prefiller = prefiller
        prefiller.in_flight += 1
        prefiller.requests += 1
        prefiller.ejection.began(now)
        self._attempt_began = self.last_activity = now  # what it takes is not the one's who was asked before it
        self._send_prompt(prefiller, anew=anew)
        return True

    def _send_prompt(self, prefiller: RoutingTarget, *, anew: bool) -> None:
        asked = self._request
        self._prompt_held, self._prompt_octets = [], 0
        self._upstream = prefiller.connector.start(
            asked.method, asked.path, asked.headers, self._prompt or b"", asked.caller, self, anew=anew
        )

    def _prefillers(self) -> list[RoutingTarget]:
        asked = self._request
        entitled = self._directory.entitled(
            asked.model, self._rules.trust, asked.group, asked.requested, asked.required, prefill=True
        )
        if not isinstance(entitled, tuple):
            return []
        return ready(target for target in entitled if target.phase == "prefill" and not target.in_rooms)

    def _candidates(self) -> list[RoutingTarget] | Refusal | Unmet:
        """Where nobody else is left, a prefill replica answers as any other would."""
        candidates = super()._candidates()
        if isinstance(candidates, list):
            return candidates
        return ready(self._prefillers(), self._tried) or candidates

    def _answer(self, handed: bytes) -> None:
        """The second half: the replica whose place was kept fetches the cache and goes on."""
        target, whole = self._target, self._request
        self._release()
        self._attempt_began = self.last_activity = self._client.now()
        if target is None:
            return
        # Another attempt computes the prompt by itself: who fetched a cache has let go of it.
        self._request = whole.saying(with_field(whole.body, TRANSFER_FIELD, handed))
        super()._send(target, anew=False)
        self._request = whole

    def _without(self, *, again: bool) -> None:
        """The prefill replica was of no use; `again`: another one may be."""
        target = self._target
        self._release()
        if target is None or (again and self._ask_prefiller(target, anew=False)):
            return
        self._metrics.handed(self.model, "alone")
        self._attempt_began = self.last_activity = self._client.now()
        super()._send(target, anew=False)

    def _lost(self, code: str, word: str, reason: str, *, status: int) -> None:
        prefiller = self._prefiller
        if prefiller is None:
            super()._lost(code, word, reason, status=status)
            return
        now = self._client.now()
        prefiller.failures += 1
        prefiller.ejection.failed(now, self._attempt_began, refused=word in ("refused", "timeout"))
        self._without(again=now - self._attempt_began <= SLOW_S)

    def _try_elsewhere(self, now: float) -> None:
        """Where it is the prompt that is waited for, the replica whose place is kept computes it."""
        if self._prefiller is None:
            super()._try_elsewhere(now)
            return
        self._prefiller.ejection.given_up()
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.abort()
        self._without(again=False)

    def _finish(self, status: int, end: End, *, known: bool = True) -> None:
        if self._handed_by and self._target is not None and self._usage.prompt:
            way = (self.model, self._sender, self._target.site)
            tokens = self._usage.prompt
            self._metrics.cross(way, tokens, tokens * self._directory.cache_octets.get(self.model, 0.0))
            self._handed_by = ""
        super()._finish(status, end, known=known)

    def _drop_attempt(self, *outcome: RequestOutcome) -> None:
        super()._drop_attempt(*outcome)
        if self._prefiller is not None:
            self._prefiller.ejection.given_up()
        self._release()

    def _release(self) -> None:
        if self._prefiller is not None:
            self._prefiller.in_flight -= 1
            self._prefiller = None
