"""Going on with a stream whose replica was lost, at another one: the prompt, and what was said so far.

Only where the client asks for it (`CONTINUE_HEADER`), for what follows is not what the lost replica would have said:
another replica samples anew, the prompt is computed once more, and a tokenizer may cut the text elsewhere. A comment in
the stream says where it happens. Only text can be gone on with: one choice, without tools or a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTINUE_HEADER = "x-fabric-continue"
CONTINUING_ENGINES = frozenset({"vllm", "sglang"})
"""They take a last message of the assistant's for the beginning of their answer (``continue_final_message``)."""
_MORE_THAN_TEXT = ("tools", "functions", "response_format", "logprobs", "top_logprobs", "echo", "suffix", "best_of")
_LIMITS = ("max_tokens", "max_completion_tokens")


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Said(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Said | None = None


_decoder = msgspec.json.Decoder(_Event)


def wants_continuation(headers: Mapping[str, str]) -> bool:
    """Whether a client (lower-case names) takes a stream whose end another replica said."""
    return headers.get(CONTINUE_HEADER, "").strip().lower() in ("yes", "true", "1")


class Utterance:
    """What a stream said so far, and the request that goes on with it."""

    def __init__(self, body: bytes) -> None:
        """`body`: of the request that is answered."""
        self._body = body
        self._pieces: list[str] = []
        self._continuable = True
        self._former = self._told = 0
        """Tokens that others said before, and those that this one says it has said: an event may hold several."""

    def take(self, events: bytes) -> None:
        """Whole events, as the client gets them."""
        for line in events.splitlines():
            if not line.startswith(b"data:") or not self._continuable:
                continue
            data = line[5:].strip()
            try:
                event = _decoder.decode(data) if data.startswith(b"{") else _Event()
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._continuable = False
                return
            for choice in event.choices:
                self._hear(choice)
            if event.usage is not None and event.usage.completion_tokens is not None:
                self._told = event.usage.completion_tokens

    def _hear(self, choice: _Choice) -> None:
        delta = choice.delta or _Delta()
        if choice.index or choice.finish_reason or delta.tool_calls or delta.reasoning_content or delta.reasoning:
            self._continuable = False
        self._pieces.append(choice.text or delta.content or "")

    def turn(self, tokens: int) -> int:
        """Another one goes on; returns how many tokens were said, `tokens` of them seen."""
        self._former, self._told = self._said(tokens), 0
        return self._former

    def _said(self, tokens: int) -> int:
        return max(tokens, self._former + self._told)

    def request(self, tokens: int) -> bytes | None:
        """The body of the request for the rest; None where there can be none. `tokens`: so many were seen."""
        tokens = self._said(tokens)
        if not self._continuable:
            return None
        try:
            asked: dict[str, Any] = msgspec.json.decode(self._body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if any(asked.get(name) for name in _MORE_THAN_TEXT) or asked.get("n", 1) != 1:
            return None
        for name in _LIMITS:
            if isinstance(asked.get(name), int):
                asked[name] -= tokens
                if asked[name] <= 0:
                    return None
        if isinstance(asked.get("min_tokens"), int):
            asked["min_tokens"] = max(0, asked["min_tokens"] - tokens)
        words, messages, prompt = "".join(self._pieces), asked.get("messages"), asked.get("prompt")
        if isinstance(messages, list) and messages:
            asked["messages"] = [*messages, {"role": "assistant", "content": words}] if words else messages
            asked |= {"continue_final_message": True, "add_generation_prompt": False} if words else {}
        elif isinstance(prompt, str):
            asked["prompt"] = prompt + words
        else:
            return None
        return msgspec.json.encode(asked)


def continued_here(provider: str, replica: str) -> bytes:
    """The comment that says so; clients of event streams pass over comments."""
    return f": continued by {provider} {replica}\n\n".encode()
