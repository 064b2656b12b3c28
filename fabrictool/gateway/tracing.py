"""Spans of requests: which of them are kept, and what their engines are told of them.

A span is what a request's record says, and the ids by which it has its place in a trace. It is made when the record is;
until then nothing is kept but the ids. Whether it is kept depends on the id of its trace alone, by the rule of
OpenTelemetry's SDKs, so that all gateways, and clients with the same share, keep the same traces.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from fabrictool.gateway.tracecontext import SAMPLED, TraceContext

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from fabrictool.gateway.records import RequestRecord

QUEUE = 8192
"""Spans that may wait for the collector: some seconds of a busy gateway, and 5 MB."""
_ONE = 1 << 64


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
    """Of one gateway."""

    def __init__(self, share: float, rng: random.Random, count: Callable[[str, int], None]) -> None:
        """`share` of traces that are kept; `count` is told outcomes, and of how many spans."""
        self._bound = round(share * _ONE)
        self._rng = rng
        self.count = count
        self._open: dict[str, SpanIds] = {}
        """By the id of the record that will be made."""
        self._ended: deque[tuple[SpanIds, RequestRecord]] = deque()

    def __len__(self) -> int:
        return len(self._ended)

    def begin(self, record: str, came: TraceContext | None) -> TraceContext | None:
        """What the engine is told: this request's own span where that is kept, else what the client said."""
        if came is None:
            trace_id = self._rng.getrandbits(128) or 1
            if trace_id % _ONE >= self._bound:
                return None
            ids = SpanIds(trace_id.to_bytes(16, "big"), self._new_span_id())
        else:
            if not came.sampled or int.from_bytes(came.trace_id[8:], "big") >= self._bound:
                return came
            ids = SpanIds(came.trace_id, self._new_span_id(), came.span_id, came.state)
        self._open[record] = ids
        return TraceContext(f"00-{ids.trace_id.hex()}-{ids.span_id.hex()}-{SAMPLED:02x}", ids.state)

    def ended(self, record: RequestRecord) -> None:
        """A request is over: its span waits for the collector, if it is kept and there is room."""
        ids = self._open.pop(record.id, None)
        if ids is None:
            return
        if len(self._ended) >= QUEUE:
            self.count("dropped", 1)
        else:
            self._ended.append((ids, record))

    def take(self, most: int) -> list[tuple[SpanIds, RequestRecord]]:
        """The oldest that wait."""
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    def _new_span_id(self) -> bytes:
        return (self._rng.getrandbits(64) or 1).to_bytes(8, "big")
