"""The shapes of the OpenAI API that the gateway itself speaks: what it peeks at, and its own answers."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_BODY_OCTETS = 32 * 1024 * 1024


class Peek(msgspec.Struct, frozen=True):
    """The field of a request that routing needs; the body itself is passed on byte for byte."""

    model: str


class GatewayResponse(msgspec.Struct, frozen=True):
    """A whole response of the gateway's own."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


_peek = msgspec.json.Decoder(Peek)


def peek(body: bytes) -> Peek | GatewayResponse:
    """The routing fields of a request body, or the 400 that it deserves."""
    try:
        return _peek.decode(body)
    except msgspec.ValidationError as error:
        where = "model" if "`model`" in str(error) or "$.model" in str(error) else None
        return error_response(400, "FT8101", f"the request is not valid: {error}", param=where)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error_response(400, "FT8101", f"the body is not valid JSON: {error}")


_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_CODES = {
    "FT8101": "invalid_json",
    "FT8102": "invalid_api_key",
    "FT8103": "model_not_found",
    "FT8104": "no_allowed_provider",
    "FT8105": "model_not_ready",
    "FT8106": "upstream_failed",
    "FT8107": "not_found",
    "FT8108": "request_too_large",
    "FT8109": "upstream_timeout",
    "FT8110": "invalid_http",
}


def error_object(status: int, code: str, message: str, *, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error envelope; `code` is ours in ``fabric_code``, and the field's usual word in ``code``."""
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            "param": param,
            "code": _CODES[code],
            "fabric_code": code,
        }
    }


def error_response(
    status: int, code: str, message: str, *, param: str | None = None, headers: tuple[tuple[str, str], ...] = ()
) -> GatewayResponse:
    """An error as a whole response."""
    return GatewayResponse(
        status, msgspec.json.encode(error_object(status, code, message, param=param)), headers=headers
    )


def no_such_model(name: str, *, may_come: bool) -> GatewayResponse:
    """404; 503 with a time to try again where a replica of it may come."""
    if may_come:
        text = f"no replica of {name!r} serves yet; one may be loading"
        return error_response(503, "FT8105", text, param="model", headers=(("retry-after", "5"),))
    return error_response(404, "FT8103", f"the model {name!r} does not exist", param="model")


def error_event(code: str, message: str) -> bytes:
    """An error inside a stream that has begun; no ``[DONE]`` follows it."""
    return b"data: " + msgspec.json.encode(error_object(502, code, message)) + b"\n\n"


def model_object(name: str, providers: list[str], created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": ",".join(providers)}


def json_response(value: Any) -> GatewayResponse:
    """A 200 with `value` as JSON."""
    return GatewayResponse(200, msgspec.json.encode(value))
