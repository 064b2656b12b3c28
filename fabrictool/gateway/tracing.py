"""Spans of requests: which of them are kept, and what their engines are told of them.

A span is what a request's record says, and the ids by which it has its place in a trace. What the gateway refuses
before it looks for a replica has none. Whether a span is kept depends on the id of its trace alone, by the rule of
OpenTelemetry's SDKs, so that all gateways, and clients with the same share, keep the same traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fabrictool.gateway.tracecontext import SAMPLED, TraceContext

if TYPE_CHECKING:
    import random

    from fabrictool.gateway.records import RequestRecord

QUEUE = 8192
"""Spans that may wait for the collector: some seconds of a busy gateway, and 5 MB."""
_ONE = 1 << 64

RecordSink = Callable[["RequestRecord"], None]


class SpanIds(msgspec.Struct, frozen=True):
    """Where a span belongs."""

    trace_id: bytes
    """16 octets."""
    span_id: bytes
    """8 octets."""
    parent_id: bytes = b""
    """Of the client's span; empty: the client has none."""
    state: str = ""
    """The client's ``tracestate``."""


class Tracer:
    """`begin` when a request is sent on, `take` for the collector."""

    def __init__(self, share: float, rng: random.Random, count: Callable[[str, int], None]) -> None:
        """`share` of traces that are kept; `count` is told outcomes, and of how many spans."""
        self._bound = round(share * _ONE)
        self._rng = rng
        self.count = count
        self._ended: deque[tuple[SpanIds, RequestRecord]] = deque()

    def __len__(self) -> int:
        return len(self._ended)

    def begin(self, came: TraceContext | None, ended: RecordSink) -> tuple[TraceContext | None, RecordSink]:
        """What the engine is told, and who is told of the request's end in the place of `ended`.

        The engine's parent is this request's own span where that is kept, else what the client said.
        """
        if came is None:
            trace_id = self._rng.getrandbits(128) or 1
            if trace_id % _ONE >= self._bound:
                return None, ended
            ids = SpanIds(trace_id.to_bytes(16, "big"), self._new_span_id())
        else:
            if not came.sampled or int.from_bytes(came.trace_id[8:], "big") >= self._bound:
                return came, ended
            ids = SpanIds(came.trace_id, self._new_span_id(), came.span_id, came.state)
        passed = TraceContext(f"00-{ids.trace_id.hex()}-{ids.span_id.hex()}-{SAMPLED:02x}", ids.state)
        return passed, partial(self._end, ids, ended)

    def take(self, most: int) -> list[tuple[SpanIds, RequestRecord]]:
        """The oldest that wait."""
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    def _end(self, ids: SpanIds, ended: RecordSink, record: RequestRecord) -> None:
        """The span waits for the collector, if there is room."""
        if len(self._ended) >= QUEUE:
            self.count("dropped", 1)
        else:
            self._ended.append((ids, record))
        ended(record)

    def _new_span_id(self) -> bytes:
        return (self._rng.getrandbits(64) or 1).to_bytes(8, "big")
