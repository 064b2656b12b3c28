"""What a client wants of a model: its request as it came, and what the gateway knows of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.gateway.upstream import NOBODY, Caller, Headers
from fabrictool.routing.admission import PATIENCE_S, STANDARD
from fabrictool.routing.requirements import ANYTHING, Requirements

if TYPE_CHECKING:
    from fabrictool.gateway.tracecontext import TraceContext

PASSED_HEADERS = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")
"""Beside the request's id and its trace."""


@dataclass(slots=True)
class ModelRequest:
    """What a client wants of a model, and from whom; nobody changes it."""

    model: str
    method: str
    path: str
    """With its query."""
    headers: Headers
    """Those that an engine may see."""
    body: bytes
    group: str | None
    """The client's consumer group; None where keys are not asked for, or the key names none."""
    requested: frozenset[str] | None
    """The client's own allowlist of providers."""
    required: Requirements = ANYTHING
    conversation: int | None = None
    """See `routing.affinity`."""
    follows: str = ""
    """Id of the answer that this request continues: only the replica that gave it has what was said."""
    caller: Caller = NOBODY
    stream: bool = False
    continues: bool = False
    """If its replica is lost in mid-stream, another one may go on."""
    added_usage: bool = False
    """It was us who asked for the figures at the end of the stream: the client does not want that event."""
    id: str = ""
    """See `RequestRecord`."""
    tenant: str = ""
    key: str = ""
    at: float = 0.0
    """Wall time."""
    prefix_of: str = ""
    """See `RequestRecord`."""
    prefix_share: float = 0.0
    """Of the prompt."""
    most_tokens: int | None = None
    """Of the answer, if the client says."""
    priority: int = STANDARD
    """See `routing.admission`."""
    max_wait_s: float | None = None
    """For a slot, if the client says."""
    ranks_itself: bool = False
    """Its body has a ``priority`` of the client's own; see `ranking`."""

    @property
    def patience_s(self) -> float:
        """For which it waits for a slot, from `at` on."""
        return PATIENCE_S[self.priority] if self.max_wait_s is None else self.max_wait_s

    @property
    def prompt_tokens(self) -> int:
        """About, for routing: English has four letters in a token."""
        return len(self.body) >> 2

    def saying(self, body: bytes) -> ModelRequest:
        """The same with another body."""
        return replace(self, body=body)


def bearer(key: str) -> str:
    """The header of Anthropic's SDKs, as one of OpenAI's."""
    return f"Bearer {key}" if key else ""


def passed_on(request_id: str, trace: TraceContext | None, own: Headers) -> Headers:
    """What an engine may see: `own` headers of the client's, and the `trace` of which its answer is a part."""
    if trace is None:
        return (("x-request-id", request_id), *own)
    state = (("tracestate", trace.state),) if trace.state else ()
    return (("x-request-id", request_id), ("traceparent", trace.parent), *state, *own)


def providers_in(lists: list[str]) -> frozenset[str] | None:
    """Who is in every list: an empty one allows nobody, and none at all leaves the choice to the group."""
    named = [frozenset(name.strip() for name in line.split(",") if name.strip()) for line in lists]
    return frozenset.intersection(*named) if named else None
