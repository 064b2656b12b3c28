"""Spans in the words of OpenTelemetry: its wire format (OTLP), and its names for requests to models (GenAI).

https://opentelemetry.io/docs/specs/semconv/gen-ai/ names what it can; what only a fabric has begins with ``fabric.``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fabrictool import __version__
from fabrictool.gateway.tracecontext import SAMPLED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.gateway.records import RequestRecord
    from fabrictool.gateway.tracing import SpanIds

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_REMOTE_PARENT = 0x300
"""Flags: it is known where the parent is, and it is in another process."""


def encode(spans: Iterable[tuple[SpanIds, RequestRecord]], fabric: str, gateway: str) -> bytes:
    """The body of a request to a collector."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    about = {
        "service.name": "fabrictool-gateway",
        "service.namespace": fabric,
        "service.instance.id": gateway,
        "service.version": __version__,
    }
    resource.resource.attributes.extend(_attributes(about))
    scope = resource.scope_spans.add()
    scope.scope.name, scope.scope.version = "fabrictool.gateway", __version__
    scope.spans.extend(_span(ids, record) for ids, record in spans)
    return bytes(request.SerializeToString())


def rejected(answer: bytes) -> int:
    """How many spans a collector's 200 says that it did not take."""
    try:
        return int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans)
    except DecodeError:
        return 0


def operation_of(path: str) -> str:
    """OpenTelemetry's word for what is asked, where it has one."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def _span(ids: SpanIds, record: RequestRecord) -> Span:
    operation = operation_of(record.path)
    failed = record.status >= 500 or record.end == "broken"
    told: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "anthropic" if record.path.startswith("/v1/messages") else "openai",
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.stream or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens if record.counted else None,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens if record.counted else None,
        "gen_ai.usage.output_tokens": record.completion_tokens if record.counted or record.completion_tokens else None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "url.path": record.path,
        "error.type": (record.end if record.status < 500 else str(record.status)) if failed else None,
        "fabric.time_per_output_token": record.tpot_s,
        "fabric.provider": record.provider or None,
        "fabric.replica": record.replica or None,
        "fabric.retries": record.retries,
        "fabric.end": record.end,
        "fabric.request": record.id,
    }
    return Span(
        trace_id=ids.trace_id,
        span_id=ids.span_id,
        parent_span_id=ids.parent_id,
        trace_state=ids.state,
        flags=SAMPLED | (_REMOTE_PARENT if ids.parent_id else 0),
        name=f"{operation} {record.model}".rstrip(),
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=int(record.at * 1e9),
        end_time_unix_nano=int((record.at + record.e2e_s) * 1e9),
        attributes=_attributes(told),
        status=Status(code=Status.STATUS_CODE_ERROR) if failed else None,
    )


def _attributes(told: Mapping[str, str | float | bool | None]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in told.items() if value is not None]


def _value(value: str | float | bool) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(string_value=value) if isinstance(value, str) else AnyValue(double_value=value)
