"""Our HTTP client, for all that asks servers from the operator's side; compute nodes do without it.

Proxies and certificates come from the environment, as for other programs: ``HTTPS_PROXY``, ``NO_PROXY``,
``SSL_CERT_FILE``. What listens on this machine is never asked through a proxy.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx2

MAX_OCTETS = 64 * 2**20
"""What a server sends is held in memory; none of ours has reason to send more."""


class NoAnswerError(Exception):
    """Nobody answered, or not with HTTP."""


class UnsendableError(ValueError):
    """The address or a header has characters that HTTP cannot carry. Which is not said: it may be a secret."""


class HttpResponse(msgspec.Struct, frozen=True):
    """What a server answered, whatever its status."""

    status: int
    reason: str
    body: bytes
    tag: str
    """Its ETag; "" without one."""


# Wide: what a request has, and how far it may go.
def ask(
    method: str,
    address: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    body: bytes | None = None,
    direct: bool = False,
    redirects: int = 0,
) -> HttpResponse:
    """Send one request; `timeout_s` bounds each wait for the other side, not their sum.

    `direct` passes any proxy by. At most so many `redirects` are followed: give none where a token travels, for it
    must not go where another server points.

    Raises
    ------
    NoAnswerError
        No connection, no answer in time, or one of more than 64 MiB.
    UnsendableError
        The address or a header cannot be sent.
    """
    import httpx2  # noqa: PLC0415 - --help must not pay for these

    from fabrictool.base.tlswords import spoken  # noqa: PLC0415

    try:
        with (
            _client(address, timeout_s, direct=direct) as client,
            client.stream(method, address, headers={"Accept-Encoding": "identity", **headers}, content=body) as answer,
        ):
            content = bytearray()
            for part in answer.iter_bytes():
                content += part
                if len(content) > MAX_OCTETS:
                    raise NoAnswerError(f"the answer is longer than {MAX_OCTETS >> 20} MiB")
    except (httpx2.LocalProtocolError, httpx2.InvalidURL, UnicodeError):
        raise UnsendableError("the address or a header has characters that HTTP cannot carry") from None
    except httpx2.HTTPError as error:
        raise NoAnswerError(spoken(error)) from error
    if answer.has_redirect_location and redirects:
        there = urljoin(address, answer.headers["Location"])
        return ask(method, there, headers=headers, timeout_s=timeout_s, direct=direct, redirects=redirects - 1)
    return HttpResponse(answer.status_code, answer.reason_phrase, bytes(content), answer.headers.get("ETag", ""))


def _client(address: str, timeout_s: float, *, direct: bool) -> httpx2.Client:
    """Knows the way to `address` alone: its proxy, and the certificates to trust where it is asked over TLS."""
    import ssl  # noqa: PLC0415 - --help must not pay for these
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415

    import httpx2  # noqa: PLC0415

    parts = urlsplit(address)
    host = parts.hostname or ""
    proxy = None if direct or _is_loopback(host) or proxy_bypass(host) else getproxies().get(parts.scheme)
    if proxy is not None and "://" not in proxy:
        proxy = f"http://{proxy}"
    # Reading the certificates takes 70 ms, which a page that is read every second should not cost.
    trust = ssl.create_default_context() if parts.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx2.Client(proxy=proxy, verify=trust, trust_env=False, timeout=timeout_s)
    except (httpx2.InvalidURL, ImportError, ValueError) as error:
        raise NoAnswerError(f"the environment's proxy cannot be used: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
