"""The shapes of the OpenAI API that the gateway itself speaks: what it peeks at, and its own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from fabrictool.gateway.bodies import Message, RequestBody, StreamOptions

if TYPE_CHECKING:
    from fabrictool.gateway.keys import Keyring

BEGINNING_OCTETS: Final = 1024
"""Of a prompt that is one text."""
MAX_BODY_OCTETS: Final = 32 * 1024 * 1024
_UNSET: Final = msgspec.UNSET


class Peek:
    """The fields of a request that the gateway needs; the body itself is passed on byte for byte."""

    __slots__ = (
        "_body", "answers", "max_completion_tokens", "max_output_tokens", "max_tokens", "model", "names_options",
        "previous_response_id", "ranks_itself", "stream", "tells_usage",
    )  # fmt: skip

    def __init__(self, body: RequestBody) -> None:
        self._body = body
        self.model: str = body.model
        self.previous_response_id: str = body.previous_response_id or ""
        self.stream = body.stream is True
        options = body.stream_options
        self.names_options = options is not _UNSET
        self.tells_usage = self.names_options and isinstance(options, StreamOptions) and bool(options.include_usage)
        """Whether its stream is to end with the figures."""
        self.max_tokens: int | None = body.max_tokens
        self.max_completion_tokens: int | None = body.max_completion_tokens
        self.max_output_tokens: int | None = body.max_output_tokens
        several, best_of = body.n, body.best_of
        self.answers = 1 if several is None and best_of is None else max(1, several or 1, best_of or 1)
        """To a prompt."""
        self.ranks_itself = bool(body.priority)

    @property
    def prompt(self) -> bytes:
        """In JSON, of a completion; empty: none."""
        prompt = self._body.prompt
        return bytes(prompt) if prompt else b""

    @property
    def beginning(self) -> bytes:
        """What distinguishes this conversation from others that share its system prompt; empty: nothing does."""
        body = self._body
        if body.messages:
            try:
                messages = _messages.decode(body.messages)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return b""
            return next((bytes(m.content) for m in messages if m.role not in ("system", "developer")), b"")
        return bytes(body.prompt or body.input)[:BEGINNING_OCTETS]

    @property
    def text(self) -> bytes:
        """What an engine makes a prompt of, in the order in which it does."""
        body = self._body
        question = body.messages or body.prompt or body.input
        return b"".join((body.tools, body.system or body.instructions, question))

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, if the request says, by whichever of its limits is the largest."""
        most, other, newer = self.max_completion_tokens, self.max_tokens, self.max_output_tokens
        if other is not None and (most is None or other > most):
            most = other
        return newer if newer is not None and (most is None or newer > most) else most


TRANSFER_FIELD: Final = "kv_transfer_params"
"""By which vLLM's servers hand a prompt's cache to one another: from whom, and which blocks."""
ROOM_FIELDS: Final = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""By which SGLang's servers find one another for a prompt: where, and under which number."""


class GatewayResponse:
    """A whole response of the gateway's own; nobody changes it."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers: tuple[tuple[str, str], ...] = headers


_peek: Final = msgspec.json.Decoder(RequestBody)
_messages: Final = msgspec.json.Decoder(list[Message])
_fields: Final[msgspec.json.Decoder[dict[str, Any]]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def peek(body: bytes, path: str) -> Peek | GatewayResponse:
    """The routing fields of a request body, or the 400 that it deserves."""
    try:
        read = _peek.decode(body)
        if not (read.kv_transfer_params or read.bootstrap_host or read.bootstrap_port or read.bootstrap_room):
            peeked = Peek(read)
            if peeked.ranks_itself:
                _fields.decode(body)  # it may have to be taken out, and then all names have to be text
            return peeked
        field = next(name for name in (TRANSFER_FIELD, *ROOM_FIELDS) if getattr(read, name))
        text = f"`{field}` names servers and parts of their caches: only a gateway may say it"
        return error_response(400, "FT8162", text, param=field, path=path)
    except msgspec.ValidationError as error:
        where = "model" if "`model`" in str(error) or "$.model" in str(error) else None
        return error_response(400, "FT8101", f"the request is not valid: {error}", param=where, path=path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error_response(400, "FT8101", f"the body is not valid JSON: {error}", path=path)
    except RecursionError:
        return error_response(400, "FT8101", "the body is nested too deeply", path=path)


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """A request's JSON object with one more field, which it must not have yet; all else stays as it was written."""
    at = body.index(b"{") + 1
    comma = b"" if body[at:].lstrip().startswith(b"}") else b","
    return b'%b"%b":%b%b%b' % (body[:at], name.encode(), value, comma, body[at:])


def renamed(peeked: Peek, body: bytes, model: str, path: str) -> tuple[Peek | GatewayResponse, bytes]:
    """A request that was peeked at, for the model `model`: all else in it stays as it was written.

    The 400 where a name in it is no text: `peek` passes over names that it does not know.
    """
    try:
        body = msgspec.json.encode(_fields.decode(body) | {"model": model})
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error_response(400, "FT8101", f"the body is not valid JSON: {error}", path=path), body
    peeked.model = model
    return peeked, body


_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES: Final = {
    "FT8101": "invalid_json",
    "FT8102": "invalid_api_key",
    "FT8103": "model_not_found",
    "FT8104": "no_allowed_provider",
    "FT8105": "model_not_ready",
    "FT8116": "model_not_ready",
    "FT8106": "upstream_failed",
    "FT8107": "not_found",
    "FT8108": "request_too_large",
    "FT8109": "upstream_timeout",
    "FT8110": "invalid_http",
    "FT8113": "stopping",
    "FT8114": "requirement_not_met",
    "FT8115": "too_many_clients",
    "FT8131": "busy",
    "FT8160": "internal_error",
    "FT8140": "invalid_request",
    "FT8141": "key_not_found",
    "FT8142": "alias_taken",
    "FT8143": "keys_unavailable",
    "FT8144": "no_prices",
    "FT8132": "invalid_header",
    "FT8124": "model_not_allowed",
    "FT8125": "rate_limit_exceeded",
    "FT8126": "insufficient_quota",
    "FT8127": "max_tokens_needed",
    "FT8162": "field_not_allowed",
    "FT8163": "not_supported",
}


_ANTHROPICS_TYPES: Final = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
"""Where Anthropic's word is another one."""


def _kind(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _anthropics_kind(status: int) -> str:
    kind = _ANTHROPICS_TYPES.get(status) or _kind(status)
    return "api_error" if kind == "server_error" else kind


def error_object(status: int, code: str, message: str, *, param: str | None = None, path: str = "") -> dict[str, Any]:
    """OpenAI's error envelope; `code` is ours in ``fabric_code``, and the field's usual word in ``code``."""
    if path.startswith("/v1/messages"):  # Anthropic's
        return {"type": "error", "error": {"type": _anthropics_kind(status), "message": f"{message} ({code})"}}
    return {
        "error": {
            "message": message,
            "type": _kind(status),
            "param": param,
            "code": _CODES[code],
            "fabric_code": code,
        }
    }


# Wide: what an error says, and in whose words.
def error_response(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    path: str = "",
) -> GatewayResponse:
    """An error as a whole response, in the words of the API that `path` belongs to."""
    body = msgspec.json.encode(error_object(status, code, message, param=param, path=path))
    return GatewayResponse(status, body, headers=headers)


def not_allowed(method: str, path: str, allowed: str) -> GatewayResponse:
    """405, with the methods that there are at `path`."""
    return error_response(405, "FT8107", f"{method} is not allowed on {path}", headers=(("allow", allowed),), path=path)


def nothing_at(path: str) -> GatewayResponse:
    return error_response(404, "FT8107", f"there is nothing at {path}")


def no_such_key(keyring: Keyring, authorization: str, path: str, *, expired: bool) -> GatewayResponse:
    """What is said to a key that is none, none any more, or not known yet."""
    more = keyring.more
    if authorization and more is not None and not more.ready:
        text = "the keys of this gateway could not be read yet; try again later"
        return error_response(503, "FT8143", text, headers=(("retry-after", "2"),), path=path)
    text = "the API key is not valid" if authorization else "an API key is needed"
    text = "the API key has expired" if expired else (more is not None and more.doubt(authorization)) or text
    header = (("www-authenticate", 'Bearer realm="fabrictool"'),)
    return error_response(401, "FT8102", f"{text}: send Authorization: Bearer KEY", headers=header, path=path)


def no_such_model(name: str, *, may_come: bool, path: str = "") -> GatewayResponse:
    """404; 503 with a time to try again where a replica of it may come."""
    if may_come:
        text = f"no replica of {name!r} serves yet; one may be loading"
        return error_response(503, "FT8105", text, param="model", headers=(("retry-after", "5"),), path=path)
    return error_response(404, "FT8103", f"the model {name!r} does not exist", param="model", path=path)


def error_event(code: str, message: str, *, path: str = "") -> bytes:
    """An error inside a stream that has begun; no ``[DONE]`` follows it."""
    event = b"data: " + msgspec.json.encode(error_object(502, code, message, path=path)) + b"\n\n"
    return b"event: error\n" + event if path in ("/v1/messages", "/v1/responses") else event


# Wide: what the entry says.
def model_object(
    name: str, aliases: list[str], providers: list[str], variants: list[dict[str, Any]], created: int
) -> dict[str, Any]:
    """An entry of ``/v1/models``; `variants` says what its replicas are, ``max_model_len`` is vLLM's name."""
    known = [variant["context"] for variant in variants if variant["context"]]
    entry = {"id": name, "object": "model", "created": created, "owned_by": ",".join(providers)}
    entry |= {"max_model_len": max(known)} if known else {}
    entry |= {"aliases": aliases} if aliases else {}
    return entry | {"providers": providers, "variants": variants}


def json_response(value: Any) -> GatewayResponse:
    """A 200 with `value` as JSON."""
    return GatewayResponse(200, msgspec.json.encode(value))
