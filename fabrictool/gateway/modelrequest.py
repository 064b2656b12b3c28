"""What a client wants of a model: its request as it came, and what the gateway knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fabrictool.gateway.upstream import NOBODY, Caller, Headers
from fabrictool.routing.admission import PATIENCE_S, STANDARD
from fabrictool.routing.requirements import ANYTHING, Requirements

if TYPE_CHECKING:
    from fabrictool.gateway.tracecontext import TraceContext

PASSED_HEADERS: Final = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")
"""Beside the request's id and its trace."""


class ModelRequest:
    """What a client wants of a model, and from whom; nobody changes it."""

    __slots__ = (
        "added_usage", "at", "body", "caller", "continues", "conversation", "follows", "group", "headers", "id", "key",
        "max_wait_s", "method", "model", "most_tokens", "path", "prefix_of", "prefix_share", "priority", "ranks_itself",
        "requested", "required", "stream", "tenant",
    )  # fmt: skip

    # Wide: all that is known of a request.
    def __init__(
        self,
        model: str,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        group: str | None,
        requested: frozenset[str] | None,
        required: Requirements = ANYTHING,
        conversation: int | None = None,
        follows: str = "",
        caller: Caller = NOBODY,
        stream: bool = False,
        continues: bool = False,
        added_usage: bool = False,
        record_id: str = "",
        tenant: str = "",
        key: str = "",
        at: float = 0.0,
        prefix_of: str = "",
        prefix_share: float = 0.0,
        most_tokens: int | None = None,
        priority: int = STANDARD,
        max_wait_s: float | None = None,
        ranks_itself: bool = False,
    ) -> None:
        self.model = model
        self.method = method
        self.path = path
        """With its query."""
        self.headers: Headers = headers
        """Those that an engine may see."""
        self.body = body
        self.group: str | None = group
        """The client's consumer group; None where keys are not asked for, or the key names none."""
        self.requested: frozenset[str] | None = requested
        """The client's own allowlist of providers."""
        self.required: Requirements = required
        self.conversation: int | None = conversation
        """See `routing.affinity`."""
        self.follows = follows
        """Id of the answer that this request continues: only the replica that gave it has what was said."""
        self.caller: Caller = caller
        self.stream = stream
        self.continues = continues
        """If its replica is lost in mid-stream, another one may go on."""
        self.added_usage = added_usage
        """It was us who asked for the figures at the end of the stream: the client does not want that event."""
        self.id: str = record_id
        """See `RequestRecord`."""
        self.tenant = tenant
        self.key = key
        self.at = at
        """Wall time."""
        self.prefix_of = prefix_of
        """See `RequestRecord`."""
        self.prefix_share = prefix_share
        """Of the prompt."""
        self.most_tokens: int | None = most_tokens
        """Of the answer, if the client says."""
        self.priority = priority
        """See `routing.admission`."""
        self.max_wait_s: float | None = max_wait_s
        """For a slot, if the client says."""
        self.ranks_itself = ranks_itself
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
        return ModelRequest(
            self.model,
            self.method,
            self.path,
            self.headers,
            body,
            self.group,
            self.requested,
            self.required,
            self.conversation,
            self.follows,
            self.caller,
            self.stream,
            self.continues,
            self.added_usage,
            self.id,
            self.tenant,
            self.key,
            self.at,
            self.prefix_of,
            self.prefix_share,
            self.most_tokens,
            self.priority,
            self.max_wait_s,
            self.ranks_itself,
        )


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
