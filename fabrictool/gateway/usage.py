"""How many tokens a request took, as its engine says, in the words of each API that the gateway passes on.

Nothing is parsed but the part of an answer that holds the figures: of a stream the last event that has any.
"""

from __future__ import annotations

import re

import msgspec

from fabrictool.gateway.openai import with_field

_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments|delta)"\s*:\s*"(?!")')
"""Text in a streamed event: an engine sends one such event a token, and others for the role, the usage and the end."""
_FIGURES = re.compile(rb'"usage"\s*:\s*\{')


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    """OpenAI's names for chat, its names for responses, and Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Inner(msgspec.Struct, frozen=True):
    id: str = ""
    usage: _Usage | None = None


class _Holder(msgspec.Struct, frozen=True):
    """An answer, or an event: its usage, or that of the response or message which it tells of."""

    id: str = ""
    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    choices: list[msgspec.Raw] | None = None


_decoder = msgspec.json.Decoder(_Holder)


class Usage(msgspec.Struct):
    """Of one request, so far."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    counted: bool = False
    response: str = ""
    """The id of the answer, by which a later request may refer to it."""

    def read(self, text: bytes) -> bool:
        """Take the figures of one JSON text; returns whether they were all that it said, without any choice."""
        try:
            holder = _decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        inner = holder.response or holder.message
        self.response = (inner.id if inner is not None else holder.id) or self.response
        usage = holder.usage or (inner.usage if inner is not None else None)
        if usage is None:
            return False
        details = usage.prompt_tokens_details or usage.input_tokens_details
        prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        completion = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
        cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
        # Anthropic tells the prompt at the beginning and the rest at the end: what is not said again stands.
        self.prompt = prompt if prompt is not None else self.prompt
        self.cached = cached if cached is not None else self.cached
        self.completion = completion if completion is not None else self.completion
        self.counted = True
        return holder.choices == []

    def read_events(self, events: bytes) -> bytes | None:
        """Take the figures of whole events that hold any; returns the events without those that are nothing else.

        None: there are no figures in them.
        """
        if _FIGURES.search(events) is None:
            return None
        kept = []
        for event in _events(events):
            only = False
            if _FIGURES.search(event) is not None:
                data = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
                only = self.read(data)
            if not only:
                kept.append(event)
        return b"".join(kept)


def tokens_in(events: bytes) -> int:
    """Events that hold a piece of text."""
    return len(_TOKEN.findall(events))


def _events(events: bytes) -> list[bytes]:
    """Each with the empty line that ends it."""
    return [event for event in re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", events) if event]


def with_usage(body: bytes) -> bytes:
    """A request's JSON object with the wish for a last event that holds the figures; it must not name any itself."""
    return with_field(body, "stream_options", b'{"include_usage":true}')
