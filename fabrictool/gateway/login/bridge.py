"""A whole request of the clients' listener, answered by an ASGI application: the way to Starlette's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabrictool.gateway.openai import GatewayResponse

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from fabrictool.gateway.http import ClientRequest

_OURS = frozenset({"content-type", "content-length"})
"""Written by whoever answers."""


async def answered(app: ASGIApp, request: ClientRequest, scheme: str, host: str, port: int) -> GatewayResponse:
    """What `app` answers; `scheme`, `host` and `port`: of the address that people see."""
    path, _, query = request.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": scheme,
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in (*request.fields.items(), *request.repeated)
        ],
        "client": None,
        "server": (host, port),
    }
    answer = _Answer(request.body)
    await app(scope, answer.receive, answer.send)
    return answer.whole()


def as_answer(response: Response) -> GatewayResponse:
    """A response that no application makes."""
    headers = tuple((name, value) for name, value in response.headers.items() if name not in _OURS)
    return GatewayResponse(response.status_code, bytes(response.body), response.headers["content-type"], headers)


class _Answer:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))

    def whole(self) -> GatewayResponse:
        kind = next((value for name, value in self._headers if name == "content-type"), "text/plain")
        others = tuple((name, value) for name, value in self._headers if name not in _OURS)
        return GatewayResponse(self._status, b"".join(self._parts), kind, others)
