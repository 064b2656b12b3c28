"""The parts of engines' answers that say how many tokens they took."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None
"""An engine that says less or more than could be is not believed at all: sums, purses and tables go by what it says."""


class CacheDetails(msgspec.Struct, frozen=True):
    """OpenAI's, under two names: how much of the prompt did not have to be computed."""

    cached_tokens: _Count = None


class EngineUsage(msgspec.Struct, frozen=True):
    """OpenAI's names for chat, its names for responses, and Anthropic's."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: CacheDetails | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: CacheDetails | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None


class FiguredInner(msgspec.Struct, frozen=True):
    """What an event of a stream says of the answer as a whole."""

    id: str = ""
    usage: EngineUsage | None = None


class Figured(msgspec.Struct, frozen=True):
    """An answer, or an event: its usage, or that of the response or message which it tells of."""

    id: str = ""
    usage: EngineUsage | None = None
    response: FiguredInner | None = None
    message: FiguredInner | None = None
    choices: list[msgspec.Raw] | None = None
