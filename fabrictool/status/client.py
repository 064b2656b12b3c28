"""Reads status documents over HTTP: for the command line at once, for the terminal UI again and again."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.errors import UnreachableError
from fabrictool.status.documents import decode

if TYPE_CHECKING:
    from fabrictool.status.documents import StatusDocument

MAX_OCTETS = 64 * 1024 * 1024


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
    request = urllib.request.Request(full, headers=headers)  # noqa: S310 - the scheme was checked above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return decode(answer.read(MAX_OCTETS))
    except (OSError, urllib.error.URLError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StatusUnavailableError.of(
            "FT5201",
            f"no status from {full}: {reason}",
            thing=full,
            hint="is it running? `fabrictool status`",
            transient=True,
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"what {full} answers is not a status document: {error}"
        raise StatusUnavailableError.of("FT5201", message, thing=full) from error
