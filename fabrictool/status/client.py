"""Reads status documents over HTTP: for the command line at once, for the terminal UI again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.http import NoAnswerError, UnsendableError, ask
from fabrictool.status.documents import decode

if TYPE_CHECKING:
    from fabrictool.status.documents import StatusDocument

MOST_REDIRECTS = 10


class StatusUnavailableError(UnreachableError):
    """Nobody answered with a status document (FT5201)."""


def fetch(url: str, *, timeout_s: float = 5.0, key: str = "") -> StatusDocument:
    """The document at `url`, whose path defaults to ``/status``.

    Raises
    ------
    StatusUnavailableError
        FT5201 when nobody answers, or the answer is something else.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StatusUnavailableError.of("FT5201", f"{url!r} is not a URL: {error}", thing=url) from error
    if parts.scheme not in ("http", "https"):
        hint = "http://HOST:PORT of a gateway or an agent"
        raise StatusUnavailableError.of("FT5201", f"{url!r} is not an http URL", thing=url, hint=hint)
    full = url if parts.path not in ("", "/") else url.rstrip("/") + "/status"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # Past any proxy: agents and gateways are asked from within their network.
        follow = 0 if key else MOST_REDIRECTS
        answer = ask("GET", full, headers=headers, timeout_s=timeout_s, direct=True, redirects=follow)
    except (NoAnswerError, UnsendableError) as error:
        raise _unavailable(full, str(error)) from error
    if answer.status in (401, 403):
        raise _unavailable(full, "the key is not accepted" if key else "it asks for a key", "--key secret://env/NAME")
    if answer.status != 200:
        raise _unavailable(full, f"HTTP {answer.status} {answer.reason}")
    try:
        return decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"what {full} answers is not a status document: {error}"
        raise StatusUnavailableError.of("FT5201", message, thing=full) from error


def _unavailable(address: str, reason: str, hint: str = "is it running? `fabrictool status`") -> FabrictoolError:
    return StatusUnavailableError.of(
        "FT5201",
        f"no status from {address}: {reason}",
        thing=address,
        hint=hint,
        transient=True,
    )
