"""How an agent that nobody placed gets its session: a token from a file, a key of its own, a signature for it."""

from __future__ import annotations

import http.client
import os
import random
import ssl
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UnreachableError
from fabrictool.base.files import file_error
from fabrictool.base.text import visible
from fabrictool.base.tlswords import spoken
from fabrictool.mesh.identity import Credential, IdentityError, IdentityVerifier, claims_of, raw_key
from fabrictool.mesh.issuing import PATH, RENEWAL_PATH, JoinAnswer, JoinRefusal, JoinRequest, RenewalRequest, ask_for
from fabrictool.mesh.jointoken import MAX_TOKEN_OCTETS, JoinTokenError, is_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.mesh.jointoken import JoinToken
    from fabrictool.mesh.transport.tls import IdentityFiles

ANSWER_S = 15.0
ATTEMPTS = 6
PAUSE_S = 2.0
"""After the first attempt; twice as long after each further one, for a whole job array may ask at once."""
MAX_ANSWER_OCTETS = 16_384
SHARED = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs"})
"""File systems that other machines see too."""


def private_text(path: str, what: str) -> str:
    """The line in the file `path`, which holds a token, say; ``-`` is the standard input.

    Raises
    ------
    JoinTokenError
        FT6410 when others can read the file, FT6418 when `path` is the token itself. FT4302: it cannot be read.
    """
    if is_token(path):
        raise JoinTokenError.of("FT6418", f"this is the {what} itself, and all on this machine can read command lines")
    if path == "-":
        return sys.stdin.read(MAX_TOKEN_OCTETS + 1).strip()
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise JoinTokenError.of(
                    "FT6410", f"the {what} can be read by others", file=path, hint=f"chmod 600 {path}"
                )
            return file.read(MAX_TOKEN_OCTETS + 1).decode(errors="replace").strip()
    except OSError as error:
        raise file_error(error, path) from error


def private_folder(chosen: str, environment: Mapping[str, str]) -> Path:
    """A new folder for the key that only this user and this machine see; in memory where there is such a place.

    Raises
    ------
    InvalidInputError
        FT6415 when there is none, or `chosen` cannot be used.
    """
    named = ("/dev/shm", environment.get("XDG_RUNTIME_DIR", ""), environment.get("TMPDIR", ""), "/tmp")  # noqa: S108 - looked at, and used through mkdtemp alone
    kinds = mounted(Path("/proc/self/mountinfo").read_text())
    refused = []
    for place in [Path(chosen)] if chosen else [Path(name) for name in named if name]:
        if not chosen and kind_of(place.absolute(), kinds) in SHARED:
            refused.append(f"{place} is shared with other machines")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="fabrictool-join-", dir=place.absolute()))  # mode 0700
        except OSError as error:
            refused.append(f"{place}: {(error.strerror or str(error)).lower()}")
    message = f"no private place for the key: {'; '.join(refused)}"
    raise InvalidInputError.of("FT6415", message, hint="give one with --folder DIR, on a local disk or in memory")


def mounted(mountinfo: str) -> dict[str, str]:
    """Mount point → kind of file system, from the text of ``/proc/self/mountinfo``."""
    kinds = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            kinds[fields[4].replace("\\040", " ")] = after.split()[0]
    return kinds


def kind_of(place: Path, kinds: Mapping[str, str]) -> str:
    """Of the file system that holds `place`; "" when that cannot be known."""
    here = place.resolve()
    return next((kinds[str(folder)] for folder in (here, *here.parents) if str(folder) in kinds), "")


def ask_issuer(token: JoinToken, text: str, *, ends_at: float | None, shown: str) -> Credential:
    """A new key with the chain that the issuer of `token` signed for it; the key stays in this process.

    Raises
    ------
    JoinTokenError
        FT64xx as the issuer said, or FT6416 what no issuer says.
    UnreachableError
        FT6411 no answer, FT6412 a stranger's; the token was not sent to him.
    """
    key = Ed25519PrivateKey.generate()
    request = ask_for(text, key, ends_at=ends_at, shown=shown)
    pause = PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            chain = _once(token, request)
            break
        except FabrictoolError as error:
            if attempt == ATTEMPTS or not all(problem.transient for problem in error.problems):
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause *= 2
    session = Credential(key, chain)
    try:
        verified = IdentityVerifier(token.root).verify(chain, now=time.time())
    except IdentityError as error:
        raise _strange(error) from error
    if raw_key(verified.public_key) != request.key or verified.claims.provider != token.claims.provider:
        raise JoinTokenError.of("FT6416", "the issuer's certificate is for another key or provider")
    return session


def ask_renewal(token: JoinToken, files: IdentityFiles, *, ends_at: float | None) -> tuple[bytes, ...]:
    """Another chain for the key in `files`, of the issuer that signed the present one. One attempt.

    Raises
    ------
    JoinTokenError
        FT64xx, FT6007 or FT6010 as the issuer said.
    UnreachableError
        FT6411 no answer, FT6412 a stranger's.
    """
    context = _context(token)
    context.load_cert_chain(files.chain, files.key)
    chain = _exchange(token, RENEWAL_PATH, RenewalRequest(ends_at=ends_at), context)
    try:
        renewed = IdentityVerifier(token.root).verify(chain, now=time.time())
    except IdentityError as error:
        raise _strange(error) from error
    if renewed.claims != claims_of(files.read()[0].chain[0]):
        raise JoinTokenError.of("FT6416", "the issuer's certificate is for another session")
    return chain


def _once(token: JoinToken, request: JoinRequest) -> tuple[bytes, ...]:
    return _exchange(token, PATH, request, _context(token))


def _exchange(
    token: JoinToken, path: str, request: JoinRequest | RenewalRequest, context: ssl.SSLContext
) -> tuple[bytes, ...]:
    address = str(token.issuer)
    connection = http.client.HTTPSConnection(token.issuer.host, token.issuer.port, timeout=ANSWER_S, context=context)
    with closing(connection):
        try:
            connection.connect()
            _check_issuer(connection.sock.getpeercert(binary_form=True), token)
            connection.request("POST", path, msgspec.json.encode(request), {"content-type": "application/json"})
            answer = connection.getresponse()
            status, body = answer.status, answer.read(MAX_ANSWER_OCTETS)
        except ssl.SSLCertVerificationError as error:
            raise _stranger(address, spoken(error)) from error
        except (OSError, http.client.HTTPException) as error:
            message = f"the issuer at {address} does not answer: {spoken(error)}"
            raise UnreachableError.of("FT6411", message, transient=True) from error
    try:
        if status == 200:
            return msgspec.json.decode(body, type=JoinAnswer).chain
        refusal = msgspec.json.decode(body, type=JoinRefusal)
    except (msgspec.DecodeError, ValueError) as error:
        raise JoinTokenError.of("FT6416", f"{address} answered HTTP {status}, but not as an issuer does") from error
    kind = UnreachableError if status == 500 else JoinTokenError
    raise kind.of(
        refusal.code, visible(refusal.message), hint=visible(refusal.hint) or None, transient=status in (429, 500)
    )


def _context(token: JoinToken) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who it is stands in its certificate: see `_check_issuer`
    context.load_verify_locations(cadata=token.root)
    return context


def _check_issuer(certificate: bytes | None, token: JoinToken) -> None:
    """Before anything is sent: the other side is the issuer of the provider that signed the token, nobody else of the
    federation either.
    """
    try:
        IdentityVerifier(token.root, ("issuer",)).verify((certificate or b"", token.signer), now=time.time())
    except IdentityError as error:
        raise _stranger(str(token.issuer), error.problems[0].message) from error


def _stranger(address: str, why: str) -> FabrictoolError:
    message = f"what answers at {address} is not the token's issuer: {why}; the token was not sent"
    return UnreachableError.of("FT6412", message)


def _strange(error: IdentityError) -> FabrictoolError:
    return JoinTokenError.of("FT6416", f"the issuer's certificate is not valid: {error.problems[0].message}")
