"""Which keys a login would use, and when their certificates end.

Some sites sign keys for a day: an apply that outlives its certificate is refused before it is planned.
"""

from __future__ import annotations

import base64
import datetime as dt
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fabrictool.clusters.connections import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.clusters.connections.protocol import Endpoint

_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
_AGENT_SECONDS = 2.0
_LIST_IDENTITIES = 11
_IDENTITIES = 12
_FOR_EVER = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Keys:
    """What a login may offer, in order."""

    files: tuple[Path, ...]
    """Private keys without a passphrase."""
    agent: str = ""
    """Socket of the SSH agent; "" when it is not to be asked."""
    only: tuple[Path, ...] = ()
    """Public keys and certificates to which the agent is held; empty: all of its keys."""

    def __str__(self) -> str:
        """For a person: what was tried."""
        names = [str(path) for path in (*self.files, *self.only)]
        if self.agent and not self.only:
            names.append("the SSH agent's keys")
        return ", ".join(names) or "no key found"


def keys(endpoint: Endpoint) -> Keys:
    """The keys of an endpoint.

    Raises
    ------
    FabrictoolError
        FT5309 when the file that the endpoint names is missing, not readable, or has a passphrase that no agent knows.
    """
    agent = os.environ.get("SSH_AUTH_SOCK", "")
    if not endpoint.identity:
        return Keys(tuple(path for path in usual_files() if _passphrase(path) is False), agent)
    path = Path(endpoint.identity).expanduser()
    locked = _passphrase(path)
    if locked is None:
        raise errors.no_identity(
            endpoint, f"the private key {endpoint.identity} cannot be read", "check `identity` in the inventory"
        )
    if not locked:
        return Keys((path,))
    public = tuple(file for file in (Path(f"{path}.pub"), certificate_file(path)) if file.is_file())
    if not agent or not public:
        raise errors.no_identity(
            endpoint, f"the private key {endpoint.identity} has a passphrase", f"unlock it: ssh-add {endpoint.identity}"
        )
    return Keys((), agent, public)


def usual_files() -> tuple[Path, ...]:
    """The private keys that ssh would try by itself, as far as they exist."""
    return tuple(path for name in _USUAL if (path := Path("~/.ssh", name).expanduser()).is_file())


def certificate_file(path: Path) -> Path:
    return Path(f"{path}-cert.pub")


def _passphrase(path: Path) -> bool | None:
    """Whether a private key has one; None: it cannot be read."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    load = serialization.load_ssh_private_key if b"BEGIN OPENSSH" in text[:60] else serialization.load_pem_private_key
    try:
        load(text, password=None)
    except TypeError:
        return True
    except (ValueError, UnsupportedAlgorithm):
        return None if b"PRIVATE KEY" not in text else False  # a kind that only some implementation knows
    return False


# -- certificates ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserCertificate:
    """Of a user's key."""

    valid_after: float
    """Wall seconds."""
    valid_before: float
    """Wall seconds; infinite for one without an end."""
    key: bytes
    """The certified public key, as text without a comment."""


def certificate_end(endpoint: Endpoint) -> float | None:
    """Wall seconds at which the certificate that would be used ends; None when a key without one may be used."""
    certificate = _certificate(endpoint)
    return None if certificate is None else certificate.valid_before


def check_certificate(endpoint: Endpoint, now: float, needed_s: float) -> None:
    """Refuse a certificate that is not good from `now` (wall seconds) for `needed_s`.

    Raises
    ------
    FabrictoolError
        FT5307 when it has expired or is not valid yet, FT5308 when it ends too soon. Jump hosts are checked too.
    """
    for hop in (*endpoint.jumps, endpoint):
        certificate = _certificate(hop)
        if certificate is None:
            continue
        if now >= certificate.valid_before:
            raise errors.certificate_unusable(hop, f"expired at {_instant(certificate.valid_before)}")
        if now < certificate.valid_after:
            raise errors.certificate_unusable(hop, f"is not valid before {_instant(certificate.valid_after)}")
        if now + needed_s > certificate.valid_before:
            left = f"{(certificate.valid_before - now) / 60:.0f} min from now; {needed_s / 60:.0f} min are needed"
            raise errors.certificate_ends_soon(hop, f"ends at {_instant(certificate.valid_before)}, {left}")


def _certificate(endpoint: Endpoint) -> UserCertificate | None:
    """The longest-lived one, unless a key without a certificate might be accepted instead."""
    offered = keys(endpoint)
    certificates: list[UserCertificate] = []
    bare: list[bytes] = []
    for path in offered.files:
        certificate = _read(certificate_file(path))
        if certificate is None:
            return None
        certificates.append(certificate)
    if offered.agent:
        # A named key with its certificate beside it stands for itself; the agent only signs.
        own = [certificate for path in offered.only if (certificate := _read(path)) is not None]
        for text in () if own else _agent_keys(offered.agent):
            held = _parse(text)
            if held is None:
                bare.append(text)
            else:
                certificates.append(held)
        certificates += own
    certified = {certificate.key for certificate in certificates}
    if any(key not in certified for key in bare):
        return None
    return max(certificates, key=lambda certificate: certificate.valid_before, default=None)


def _read(path: Path) -> UserCertificate | None:
    with suppress(OSError):
        return _parse(path.read_bytes())
    return None


def _parse(text: bytes) -> UserCertificate | None:
    try:
        identity = serialization.load_ssh_public_identity(text)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(identity, serialization.SSHCertificate):
        return None
    key = identity.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    before = float("inf") if identity.valid_before == _FOR_EVER else float(identity.valid_before)
    return UserCertificate(float(identity.valid_after), before, key)


def _instant(wall: float) -> str:
    try:
        return dt.datetime.fromtimestamp(wall, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "a time far away"


def _agent_keys(path: str) -> Iterator[bytes]:
    """The public keys and certificates that the agent holds, as lines; none when it does not answer."""
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(_AGENT_SECONDS)
            agent.connect(path)
            agent.sendall(struct.pack(">IB", 1, _LIST_IDENTITIES))
            stream = agent.makefile("rb")
            (size,) = struct.unpack(">I", stream.read(4))
            answer = stream.read(size)
        if len(answer) < 5 or answer[0] != _IDENTITIES:
            return
        (count,) = struct.unpack_from(">I", answer, 1)
        at = 5
        for _ in range(count):
            blob, at = _string(answer, at)
            _, at = _string(answer, at)
            kind, _ = _string(blob, 0)
            yield kind + b" " + base64.b64encode(blob)
    except (OSError, struct.error):
        return


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(">I", data, at)
    return data[at + 4 : at + 4 + size], at + 4 + size
