"""One HTTP request at a time, with a token in a header and nowhere else; redirects are not followed."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.http import HttpResponse, NoAnswerError, UnsendableError, ask

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 30.0


class Requests:
    """`secret` is called once, with the first request; with a `user` the token is its password (HTTP Basic)."""

    def __init__(self, user: str, secret: Callable[[], str] | None) -> None:
        self._user = user
        self._secret = secret
        self._header = ""

    def ask(self, method: str, address: str, body: bytes | None = None, *, tag: str = "") -> HttpResponse:
        """Any answer below 500 but 401 and 403.

        Raises
        ------
        FabrictoolError
            FT4202 no answer, or the server is in trouble (transient); FT4203 it wants other credentials.
        """
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if tag:
            headers["If-Match"] = tag
        if self._secret is not None:
            headers["Authorization"] = self._authorization(self._secret)
        try:
            answer = ask(method, address, headers=headers, body=body, timeout_s=SECONDS)
        except UnsendableError:
            message = "the token or the address cannot be sent: it has characters that no header may have"
            raise FabrictoolError.of("FT4203", message, file=address, hint="check the secret of `token`") from None
        except NoAnswerError as error:
            raise _silent(address, f"the server does not answer: {str(error)[:200]}") from error
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


def _silent(address: str, message: str) -> FabrictoolError:
    return UnreachableError.of("FT4202", message, file=address, hint="run the command again later", transient=True)
