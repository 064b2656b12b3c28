"""One HTTP request at a time, with a token in a header and nowhere else; redirects are not followed."""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import FabrictoolError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 30.0
MAX_OCTETS = 64 * 2**20


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    body: bytes
    tag: str
    """Its ETag; "" without one."""


class Requests:
    """`secret` is called once, with the first request; with a `user` the token is its password (HTTP Basic)."""

    def __init__(self, user: str, secret: Callable[[], str] | None) -> None:
        self._user = user
        self._secret = secret
        self._header = ""
        self._opener = urllib.request.build_opener(_Stay)

    def ask(self, method: str, address: str, body: bytes | None = None, *, tag: str = "") -> Answer:
        """Any answer below 500 but 401 and 403.

        Raises
        ------
        FabrictoolError
            FT4202 no answer, or the server is in trouble (transient); FT4203 it wants other credentials.
        """
        request = urllib.request.Request(address, data=body, method=method)  # noqa: S310 - http(s), by the blueprint's check
        request.add_header("Accept", "application/json")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if tag:
            request.add_header("If-Match", tag)
        if self._secret is not None:
            request.add_unredirected_header("Authorization", self._authorization(self._secret))
        try:
            with self._opener.open(request, timeout=SECONDS) as response:
                answer = Answer(response.status, response.read(MAX_OCTETS), response.headers.get("ETag") or "")
        except urllib.error.HTTPError as error:
            with error:
                answer = Answer(error.code, _body(error), "")
        except ValueError:  # from http.client, with the header's value in it: not to be repeated
            message = "the token or the address cannot be sent: it has characters that no header may have"
            raise FabrictoolError.of("FT4203", message, file=address, hint="check the secret of `token`") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", None) or error)[:200] or type(error).__name__
            raise _silent(address, f"the server does not answer: {reason}") from error
        if answer.status in (401, 403):
            message = f"the server refuses {method} (HTTP {answer.status})"
            hint = "check `token` and `user` under `state` in the blueprint, and what the token may do"
            raise FabrictoolError.of("FT4203", message, file=address, hint=hint)
        if answer.status == 429 or (answer.status >= 500 and answer.status != 501):
            raise _silent(address, f"the server is in trouble: {method} was answered with HTTP {answer.status}")
        return answer

    def _authorization(self, secret: Callable[[], str]) -> str:
        if not self._header:
            token = secret()
            pair = base64.b64encode(f"{self._user}:{token}".encode()).decode()
            self._header = f"Basic {pair}" if self._user else f"Bearer {token}"
        return self._header


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: a token must not travel to where another server points."""

    def redirect_request(self, *_: Any) -> None:
        """None: not followed."""


def _body(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(MAX_OCTETS)
    except (OSError, http.client.HTTPException):
        return b""


def _silent(address: str, message: str) -> FabrictoolError:
    return UnreachableError.of("FT4202", message, file=address, hint="run the command again later", transient=True)
