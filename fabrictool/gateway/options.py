"""What the head of a request asks for. It depends on the headers alone: one that is sent again asks for the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fabrictool.gateway.admission import longest_wait, priority_of
from fabrictool.gateway.continuing import wants_continuation
from fabrictool.gateway.modelrequest import PASSED_HEADERS, providers_in
from fabrictool.routing.requirements import ANYTHING, Requirements, requirements_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.gateway.upstream import Headers

PROVIDERS_HEADER: Final = "x-fabric-providers"
"""A client's own allowlist: comma-separated providers; it narrows its group's list and never widens it."""
RECORD_HEADER: Final = "x-fabric-record"
"""``no``: not to be recorded, where the fabric lets its clients ask for that."""


class RequestOptions:
    """Beside its model and its body: who may serve it, how soon, and what is written down of it."""

    __slots__ = (
        "continues", "max_wait_s", "named", "passed", "priority", "requested", "required", "traced", "unrecorded",
        "wrong",
    )  # fmt: skip

    def __init__(self, fields: dict[str, str], providers: Sequence[str]) -> None:
        """`fields`: lower-case name → the first header of that name; `providers`: all headers with lists of them."""
        self.wrong: tuple[str, str] | None = None
        """Code and text of what is the matter with it."""
        required = requirements_of(fields)
        if isinstance(required, str):
            self.wrong, required = ("FT8114", required), ANYTHING
        self.required: Requirements = required
        priority = priority_of(fields)
        if isinstance(priority, str):
            self.wrong, priority = ("FT8132", priority), None
        self.priority: int | None = priority
        """The class that it asks for."""
        max_wait_s = longest_wait(fields)
        if isinstance(max_wait_s, str):
            self.wrong, max_wait_s = ("FT8132", max_wait_s), None
        self.max_wait_s: float | None = max_wait_s
        self.requested: frozenset[str] | None = providers_in(list(providers)) if providers else None
        self.unrecorded = fields.get(RECORD_HEADER, "").strip().lower() == "no"
        self.continues = wants_continuation(fields)
        self.traced = "traceparent" in fields
        self.named = "x-request-id" in fields
        """Whether the client calls the request by a name of its own."""
        self.passed: Headers = tuple([(name, fields[name]) for name in PASSED_HEADERS if name in fields])
        """What an engine may see of it."""
