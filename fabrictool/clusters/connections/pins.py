"""Pinned host keys: from the inventory's text to what each SSH implementation wants. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.clusters.connections import errors

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Endpoint

# Signature algorithms by type of key, best first. SHA-1 signatures are not among them.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
AUTHORITY = "@cert-authority"
_CERTIFICATE = "-cert-v01@openssh.com"


@dataclass(frozen=True, slots=True)
class HostKeyPin:
    """One key, or one authority whose certificates are believed."""

    authority: bool
    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)

    def __str__(self) -> str:
        """For people: ``ssh-ed25519 SHA256:…``."""
        return f"{AUTHORITY + ' ' if self.authority else ''}{self.kind} {self.fingerprint}"

    def line(self) -> str:
        """As in a file of keys: ``ssh-ed25519 AAAA…``."""
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"

    def known_hosts(self, pattern: str) -> str:
        return f"{AUTHORITY + ' ' if self.authority else ''}{pattern} {self.line()}"


def fingerprint(blob: bytes) -> str:
    """Of a public key's wire form."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def pins(endpoint: Endpoint) -> tuple[HostKeyPin, ...]:
    """The pinned keys of one host.

    Raises
    ------
    FabrictoolError
        FT5304 when there is none: there is no trust on first use; FT5305 when one is no public key.
    """
    if not endpoint.host_keys:
        raise errors.no_pins(endpoint)
    return tuple(_pin(endpoint, text) for text in endpoint.host_keys)


def _pin(endpoint: Endpoint, text: str) -> HostKeyPin:
    words = text.split()
    authority = bool(words) and words[0] == AUTHORITY
    kind, encoded = [*words[authority:], "", ""][:2]
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    # The blob repeats the key's type after its length.
    if kind not in SIGNATURES or blob[:4] != len(kind).to_bytes(4, "big") or blob[4 : 4 + len(kind)] != kind.encode():
        raise errors.bad_pin(endpoint, text)
    return HostKeyPin(authority, kind, blob)


def algorithms(pinned: tuple[HostKeyPin, ...]) -> list[str]:
    """Host key algorithms to ask for: those that can be verified first, others so that a wrong key is *seen*.

    Certificates are asked for only when an authority is pinned; without one they could not be verified, and the server
    would show no plain key.
    """
    every = [name for names in SIGNATURES.values() for name in names]
    plain = [name for pin in pinned if not pin.authority for name in SIGNATURES[pin.kind]]
    certified = [name + _CERTIFICATE for name in every] if any(pin.authority for pin in pinned) else []
    return list(dict.fromkeys([*certified, *plain, *every]))
