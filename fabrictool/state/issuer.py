"""The issuer's door: one small HTTPS server that signs what join tokens allow, and does nothing else.

It stands where the provider's signing key lies. Its certificate is one of its own provider, with the role *issuer*, so
that who comes with a token can check by the token alone that it talks to the right one. The server is written out
because little is wanted of it and much kept from it: one request a connection, one path, few octets, little time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.identity import IdentityVerifier, claims_of, issue_session
from fabrictool.mesh.issuing import (
    PATH,
    RENEWAL_PATH,
    JoinAnswer,
    JoinRefusal,
    JoinRequest,
    RenewalRequest,
    judge,
    judge_renewal,
)
from fabrictool.mesh.jointoken import JoinTokenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.mesh.identity import Credential
    from fabrictool.state.tokenuses import TokenUses

_log = logging.getLogger("fabrictool.issuer")

MAX_HEAD_OCTETS = 4096
MAX_BODY_OCTETS = 16_384
HANDSHAKE_S = 5.0
REQUEST_S = 10.0
"""From the end of the handshake to its answer's last octet."""
MAX_CONNECTIONS = 64
"""Those whose handshake is not over among them: who has shown nothing yet costs the most."""
BURST, PER_SECOND = 20, 1.0
"""Requests with one token at once beyond its uses, and after them. Not by address: behind a NAT a site has only one."""
TOKENS_KEPT = 4096
RENEW_S = 12 * 3600.0
"""The server's certificate is good for 26 hours; a new one is taken long before."""
_PHRASES = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 429: "Too Many", 500: "Failed"}


class RequestRate:
    """How many requests each token has left; the clock is monotonic seconds. Threads may share it."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, token: str, now: float, *, uses: int = 1) -> bool:
        """Whether one more request with this token may be answered now; all its uses may come at once."""
        burst = float(BURST + uses)
        with self._lock:
            left, at = self._left.pop(token, (burst, now))
            left = min(burst, left + max(0.0, now - at) * PER_SECOND)
            allowed = left >= 1
            self._left[token] = (left - 1 if allowed else left, now)
            if len(self._left) > TOKENS_KEPT:
                self._left.popitem(last=False)
        return allowed


class _Door(asyncio.Protocol):
    """A connection before its handshake; it reads nothing itself."""

    def __init__(self, enter: Callable[[asyncio.Transport], None]) -> None:
        self._enter = enter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast("asyncio.Transport", transport)
        plain.pause_reading()  # what comes is for the handshake
        self._enter(plain)


class _Inside(asyncio.StreamReaderProtocol):
    """A connection after its handshake; TLS knows no half-closed ones."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class Issuer:
    """Signs sessions of one provider for who brings a token, and signs for them again while it lasts."""

    # Wide: who signs, by what it counts, whom it does not sign for, its time.
    def __init__(
        self,
        provider: Credential,
        uses: TokenUses,
        clock: Clock,
        root: bytes,
        revoked: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`root`: the federation's certificate, DER. `revoked` is asked for a session, by its id in hexadecimal."""
        self._provider, self._uses, self._clock = provider, uses, clock
        self._verifier, self._revoked = IdentityVerifier(root), revoked
        self._rate = RequestRate()
        self._visits: set[asyncio.Task[None]] = set()
        """One for each connection, from its first octet on."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0
        self._context.verify_mode = ssl.CERT_OPTIONAL  # who has a session already shows it, to have it renewed
        self._context.load_verify_locations(cadata=root)
        self._renew()

    async def serve(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Answer until cancelled; `ready` gets the address, for port 0 is any free one."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Door(self._enter), host, port)
        async with server:
            address = server.sockets[0].getsockname()
            ready(f"{address[0]}:{address[1]}")
            while True:
                await asyncio.sleep(RENEW_S)
                self._renew()

    def answer(self, body: bytes, address: str, renews: bytes | None = None) -> tuple[int, bytes]:
        """HTTP status and body of what is said to one request; `renews` is the certificate that the other side showed,
        if that is what it asks for.
        """
        try:
            signed = self._sign(body, address) if renews is None else self._sign_again(body, address, renews)
            return 200, msgspec.json.encode(signed)
        except FabrictoolError as error:
            problem = error.problems[0]
            _log.warning("refused %s: %s %s", address, problem.code, problem.message)
            if not isinstance(error, JoinTokenError):  # ours to mend; our paths are none of the other side's business
                return 500, _refusal("FT6411", "the issuer cannot sign now; its log says why")
            return 429 if problem.transient else 403, _refusal(problem.code, problem.message, problem.hint or "")

    def _sign(self, body: bytes, address: str) -> JoinAnswer:
        try:
            request = msgspec.json.decode(body, type=JoinRequest)
        except (msgspec.DecodeError, ValueError) as error:  # its text may repeat what was sent
            raise JoinTokenError.of("FT6408", "the request is not what agents of this release send") from error
        now = self._clock.wall()
        approved = judge(request, self._provider, now=now)
        token = approved.token
        if not self._rate.take(token.id, self._clock.monotonic(), uses=token.uses):
            raise JoinTokenError.of("FT6409", "the issuer is asked too often with this token", transient=True)
        sign = lambda: approved.sign(self._provider, now=now)  # noqa: E731 - called at most once, inside the count
        chain, new = self._uses.spend(token, approved.session, sign, now=now)
        _log.info(
            "%s %s session %s for %s with token %s, shown %r, models %s, %.0f s",
            "signed" if new else "gave again",
            token.role,
            approved.session[:8],
            address,
            token.id[:8],
            request.shown,
            ",".join(token.models) or "any",
            approved.seconds,
        )
        return JoinAnswer(chain=(chain[0], chain[1]))

    def _sign_again(self, body: bytes, address: str, leaf: bytes) -> JoinAnswer:
        """No use of a token: the session is the same."""
        if not leaf:
            raise JoinTokenError.of("FT6408", "the request shows no certificate that could be renewed")
        try:
            request = msgspec.json.decode(body, type=RenewalRequest)
        except (msgspec.DecodeError, ValueError) as error:
            raise JoinTokenError.of("FT6408", "the request is not what agents of this release send") from error
        session, now = claims_of(leaf).session, self._clock.wall()
        if not self._rate.take(session, self._clock.monotonic()):
            raise JoinTokenError.of("FT6409", "the issuer is asked too often for this session", transient=True)
        if self._revoked(session):
            raise JoinTokenError.of("FT6007", f"session {session[:8]} was revoked")
        until = self._uses.renewable_until(session)
        renewal = judge_renewal(request, leaf, self._provider, self._verifier, until, now=now)
        chain = renewal.sign(self._provider, now=now)
        _log.info("renewed session %s for %s, %.0f s", session[:8], address, renewal.seconds)
        return JoinAnswer(chain=(chain[0], chain[1]))

    def _enter(self, transport: asyncio.Transport) -> None:
        if len(self._visits) >= MAX_CONNECTIONS:
            transport.abort()
            return
        visit = asyncio.get_running_loop().create_task(self._visit(transport))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, plain: asyncio.Transport) -> None:
        """One connection: handshake, request, answer."""
        address = str((plain.get_extra_info("peername") or ("?",))[0])
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_HEAD_OCTETS)
        protocol = _Inside(reader)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                transport = await loop.start_tls(plain, protocol, self._context, server_side=True)
            if transport is None:
                return
            reader.set_transport(transport)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            async with asyncio.timeout(REQUEST_S):
                shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
                status, body = await self._exchange(reader, address, shown or b"")
                head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
                head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            _log.info("%s: no request: %s", address, type(error).__name__)
        finally:
            (transport or plain).close()

    async def _exchange(self, reader: asyncio.StreamReader, address: str, shown: bytes) -> tuple[int, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        renews = head[0] == f"POST {RENEWAL_PATH} HTTP/1.1"
        if not renews and head[0] != f"POST {PATH} HTTP/1.1":
            return 404, _refusal("FT6408", "this is an issuer of sessions; there is nothing else here")
        lengths = [line.partition(":")[2].strip() for line in head if line.lower().startswith("content-length:")]
        if len(lengths) != 1 or not lengths[0].isdecimal() or int(lengths[0]) > MAX_BODY_OCTETS:
            return 400, _refusal("FT6408", f"the request must have a length of at most {MAX_BODY_OCTETS} octets")
        body = await reader.readexactly(int(lengths[0]))
        certificate = shown if renews else None
        return await asyncio.to_thread(self.answer, body, address, certificate)  # the count of uses waits for the disk

    def _renew(self) -> None:
        """Take a new certificate; connections that stand keep theirs."""
        session = issue_session(self._provider, "issuer", now=self._clock.wall())
        with tempfile.TemporaryDirectory(prefix="fabrictool-issuer-") as place:  # mode 0700; `ssl` reads files alone
            key, chain = Path(place) / "key", Path(place) / "chain"
            key.touch(mode=0o600)
            key.write_bytes(session.key_pem())
            chain.write_bytes(session.chain_pem())
            self._context.load_cert_chain(chain, key)


def _refusal(code: str, message: str, hint: str = "") -> bytes:
    return msgspec.json.encode(JoinRefusal(code=code, message=message[:500], hint=hint[:500]))
