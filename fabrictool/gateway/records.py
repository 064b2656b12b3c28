"""What the gateway keeps of one request: counts and times, never a word of what was said."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fabrictool.base.errors import FabrictoolError

End = Literal["answered", "broken", "cancelled", "refused"]
"""The client had a whole answer; its stream was cut after the head; it went away; the gateway itself said no."""

HOUR_S = 3600
"""Records are summed up by the hour in which they began."""
LAYOUT = "0003"
"""Of a store of this release: its newest migration."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""What fits into a column of any store; it is looked at where a record is read."""


class StoreAwayError(FabrictoolError):
    """The record store does not answer, or cannot take anything now: what is kept for it must wait."""


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, whatever became of it. Times in seconds."""

    id: str
    """The gateway's own, unique; the client's ``x-request-id`` need not be."""
    at: float
    """Wall time at which its head was whole."""
    path: str
    """Of the API, such as ``/v1/chat/completions``, without a query."""
    status: _Count
    """As the client got it; 499 where it went away before the head of an answer."""
    end: End
    e2e_s: float
    tenant: str = ""
    key: str = ""
    """The first 12 hexadecimal digits of the key's hash."""
    model: str = ""
    """Empty where the gateway knows no such model, so that a client cannot fill the books with names."""
    provider: str = ""
    replica: str = ""
    retries: _Count = 0
    stream: bool = False
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0
    """Of the prompt, what the engine had in its cache."""
    completion_tokens: _Count = 0
    counted: bool = False
    """The engine said how many tokens there were; otherwise the completion's are the events that passed."""
    prefix_of: str = ""
    """Id of an earlier request, on the same gateway, whose prompt began as this one's did."""
    prefix_tokens: _Count = 0
    """How many of the prompt's, about and in blocks of 16, both have in common."""
    ttft_s: float | None = None
    """Of a stream: from the request's head to the first octet of the answer's body. Others begin as they end."""
    tpot_s: float | None = None
    """Between tokens, of a stream with more than one."""
