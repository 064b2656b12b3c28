"""Reads status documents over HTTP: for the command line at once, for the terminal UI again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.http import NoAnswerError, UnsendableError, ask
from fabrictool.status.documents import decode
from fabrictool.status.fleet import FleetStatus, RecordsStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from urllib.parse import SplitResult

    from fabrictool.base.http import HttpResponse
    from fabrictool.status.documents import StatusDocument

_D = TypeVar("_D")

MOST_REDIRECTS = 10


class StatusUnavailableError(UnreachableError):
    """Nobody answered with a status document (FT5201)."""


class NoFleetError(FabrictoolError):
    """What answers shows nothing of the mesh (FT5203)."""


def fetch(url: str, *, timeout_s: float = 5.0, key: str = "", redirects: int = MOST_REDIRECTS) -> StatusDocument:
    """The document at `url`, whose path defaults to ``/status``; no redirect is followed with a `key`.

    Raises
    ------
    StatusUnavailableError
        FT5201 when nobody answers, or the answer is something else.
    """
    parts = _parts(url)
    full = url if parts.path not in ("", "/") else url.rstrip("/") + "/status"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = _answer(full, headers, timeout_s, 0 if key else redirects)
    if answer.status in (401, 403):
        raise _unavailable(
            full, "the key is not accepted" if key else "it asks for a key", "give one with --key secret://env/NAME"
        )
    if answer.status != 200:
        raise _unavailable(full, f"HTTP {answer.status} {answer.reason}")
    return _decoded(full, answer.body, decode)


def fetch_fleet(url: str, *, timeout_s: float = 5.0, redirects: int = MOST_REDIRECTS) -> FleetStatus:
    """The mesh as the unit with the status page `url` sees it.

    Raises
    ------
    FabrictoolError
        FT5201 nobody answers, or not with such a document; FT5203 what answers has no such page.
    """
    return _view(url, "/fleet", msgspec.json.Decoder(FleetStatus).decode, timeout_s, redirects)


def fetch_records(url: str, *, timeout_s: float = 5.0) -> RecordsStatus:
    """All records of the unit with the status page `url`; raises as `fetch_fleet` does."""
    return _view(url, "/records", msgspec.json.Decoder(RecordsStatus).decode, timeout_s, MOST_REDIRECTS)


def _view(url: str, page: str, reader: Callable[[bytes], _D], timeout_s: float, redirects: int) -> _D:
    parts = _parts(url)
    full = parts._replace(path=page, query="", fragment="").geturl()
    answer = _answer(full, {}, timeout_s, redirects)
    if answer.status == 200:
        return _decoded(full, answer.body, reader)
    if answer.status in (401, 403, 404, 405):
        raise NoFleetError.of(
            "FT5203",
            f"{parts.netloc} shows nothing of the mesh (HTTP {answer.status})",
            thing=url,
            hint="give the loopback status address of an agent or a gateway (`fabrictool status --json`: status_url);"
            " units of an earlier release have no such page until they are replaced",
        )
    raise _unavailable(full, f"HTTP {answer.status} {answer.reason}")


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StatusUnavailableError.of("FT5201", f"{url!r} is not a URL: {error}", thing=url) from error
    if parts.scheme not in ("http", "https"):
        hint = "http://HOST:PORT of a gateway or an agent"
        raise StatusUnavailableError.of("FT5201", f"{url!r} is not an http URL", thing=url, hint=hint)
    return parts


def _answer(full: str, headers: Mapping[str, str], timeout_s: float, redirects: int) -> HttpResponse:
    """Past any proxy: agents and gateways are asked from within their network."""
    try:
        return ask("GET", full, headers=headers, timeout_s=timeout_s, direct=True, redirects=redirects)
    except (NoAnswerError, UnsendableError) as error:
        raise _unavailable(full, str(error)) from error


def _decoded(full: str, body: bytes, reader: Callable[[bytes], _D]) -> _D:
    try:
        return reader(body)
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
