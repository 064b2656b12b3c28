"""Host certificates for an SSH library that takes their keys without looking at what is certified."""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization


def authority_of(blob: bytes) -> bytes:
    """The public key that signed a certificate, both in wire form; empty when it is no certificate."""
    found = _parse(blob)
    return b"" if found is None else _wire(found)


def complaint(blob: bytes, host: str, now: float) -> str:
    """Why a host certificate is not to be believed at `now` (wall seconds), its authority aside; "" if it is."""
    found = _parse(blob)
    if found is None:
        return "not a certificate"
    try:
        found.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return "its signature is wrong"
    if found.type is not serialization.SSHCertificateType.HOST:
        return "it is a user's and no host's"
    if found.critical_options:
        return "it has options that are not known here"
    if now < found.valid_after:
        return "not yet valid"
    if now >= found.valid_before:
        return "expired"
    if found.valid_principals and host.encode() not in found.valid_principals:
        return f"it is not for {host}"
    return ""


def _parse(blob: bytes) -> serialization.SSHCertificate | None:
    size = int.from_bytes(blob[:4], "big")
    try:
        found = serialization.load_ssh_public_identity(blob[4 : 4 + size] + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, serialization.SSHCertificate) else None


def _wire(found: serialization.SSHCertificate) -> bytes:
    text = found.signature_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return base64.b64decode(text.split()[1])
