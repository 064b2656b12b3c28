"""A request's place in its engine's queue, where that goes by ``priority`` and the smallest comes first.

It is the order of the gateway's own queue (`routing.admission`): the more important class before the others, in a class
the earlier deadline. The number is the deadline in milliseconds, in a band for each class; all are negative, so that a
request without one, which nobody ranked, comes last. A client's own ``priority`` never reaches such an engine: what it
may ask for is a class (``x-fabric-priority``), no more important than its tenant's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.engines.paths import CHAT_PATHS
from fabrictool.gateway.openai import with_field
from fabrictool.routing.admission import PRIORITIES

if TYPE_CHECKING:
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.gateway.upstream import Headers

FIELD = "priority"
HEADER = "x-vllm-priority"
"""vLLM's from 0.32 on; it counts more than the field, and on every path. Earlier releases overlook it."""
_FIELD_PATHS = CHAT_PATHS | {"/v1/responses"}
_BAND = 1 << 42
"""Milliseconds: no deadline of our times is later."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rank_of(priority: int, due: float) -> int:
    """Of a class, and of a deadline in wall seconds."""
    return (priority - len(PRIORITIES)) * _BAND + max(0, min(int(1000 * due), _BAND - 1))


def ranked(asked: ModelRequest) -> tuple[Headers, bytes]:
    """The headers and the body with the request's place."""
    rank = str(rank_of(asked.priority, asked.at + asked.patience_s))
    headers, body = (*asked.headers, (HEADER, rank)), asked.body
    if asked.path.partition("?")[0] in _FIELD_PATHS:
        body = with_field(unranked(body) if asked.ranks_itself else body, FIELD, rank.encode())
    return headers, body


def unranked(body: bytes) -> bytes:
    """A request's JSON object without the client's own word; all else stays as it was written.

    Raises msgspec.DecodeError where a name in it is no text: `peek` passes over names that it does not know.
    """
    fields = _fields.decode(body)
    fields.pop(FIELD, None)
    return msgspec.json.encode(fields)
