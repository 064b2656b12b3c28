"""How many tokens a request took, as its engine says, in the words of each API that the gateway passes on.

Nothing is parsed but the part of an answer that holds the figures: of a stream the last event that has any.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from fabrictool.gateway.figures import EngineUsage, Figured
from fabrictool.gateway.openai import with_field

_TOKEN: Final = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|arguments|delta|thinking|partial_json)"\s*:\s*"(?!")'
)
"""Text in a streamed event: an engine sends one such event a token, and others for the role, the usage and the end."""
_FIGURES: Final = re.compile(rb'"usage"\s*:\s*\{')
TAIL_OCTETS: Final = 64 * 1024
"""Of a whole answer that is too large to be held: its figures stand at its end."""
_decoder: Final = msgspec.json.Decoder(Figured)


class Usage:
    """Of one request, so far."""

    __slots__ = ("cached", "completion", "counted", "fresh", "prompt", "response", "stored")

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = 0
        self.completion = 0
        self.counted = False
        """The engine has said what all of it took, and not only its prompt."""
        self.response: str = ""
        """The id of the answer, by which a later request may refer to it."""
        self.fresh = 0
        """Of Anthropic's figures: the prompt without what came from a cache, or went into one."""
        self.stored = 0

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
        self._take(usage)
        # Anthropic's streams tell the prompt at their beginning, with an answer of nothing.
        self.counted = self.counted or holder.message is None
        return holder.choices == []

    def read_end(self, tail: bytes) -> None:
        """Take the figures that stand last in a JSON text of which only the end is known."""
        places = list(_FIGURES.finditer(tail))
        if places:
            try:
                text = tail[places[-1].end() - 1 :].decode()
                figures, _ = json.JSONDecoder().raw_decode(text)
                self._take(msgspec.convert(figures, EngineUsage))
            except (ValueError, UnicodeDecodeError, RecursionError):  # msgspec's errors are ValueErrors
                return
            self.counted = True

    def _take(self, usage: EngineUsage) -> None:
        """What is not said again stands."""
        input_tokens, input_details = usage.input_tokens, usage.input_tokens_details
        cache_read = usage.cache_read_input_tokens
        details, prompt = usage.prompt_tokens_details or input_details, usage.prompt_tokens
        if prompt is not None:
            self.prompt = prompt
        if details is not None and details.cached_tokens is not None:
            self.cached = details.cached_tokens
        if input_tokens is not None and input_details is not None:
            self.prompt = input_tokens
        elif input_tokens is not None or cache_read is not None:
            self.fresh = self.fresh if input_tokens is None else input_tokens
            self.cached = self.cached if cache_read is None else cache_read
            stored = usage.cache_creation_input_tokens
            self.stored = self.stored if stored is None else stored
            self.prompt = self.fresh + self.cached + self.stored
        completion = usage.completion_tokens
        if completion is None:
            completion = usage.output_tokens
        if completion is not None:
            self.completion = completion

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


def with_usage(body: bytes, *, options: bool, always: bool = False) -> bytes:
    """A request's JSON object with the wish for a last event that holds the figures, or for figures in all of them.

    `options`: it names ``stream_options``, whose other wishes stay.
    """
    more = {"continuous_usage_stats": True} if always else {}
    if not options:
        return with_field(body, "stream_options", msgspec.json.encode({"include_usage": True} | more))
    fields = _fields.decode(body)
    named = msgspec.json.decode(fields["stream_options"])
    wishes = (named if isinstance(named, dict) else {}) | {"include_usage": True} | more
    return msgspec.json.encode(fields | {"stream_options": wishes})


_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
