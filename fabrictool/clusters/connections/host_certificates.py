"""Host certificates for an SSH library that takes their keys without looking at what is certified."""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization


def authority_of(blob: bytes) -> bytes:
    """The public key that signed a certificate, both in wire form; empty when it is no certificate."""
    certificate = _parse(blob)
    return b"" if certificate is None else _wire(certificate)


def complaint(blob: bytes, host: str, now: float) -> str:
    """Why a host certificate is not to be believed at `now` (wall seconds), its authority aside; "" if it is."""
    certificate = _parse(blob)
    if certificate is None:
        return "not a certificate"
    try:
        certificate.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return "its signature is wrong"
    if certificate.type is not serialization.SSHCertificateType.HOST:
        return "it is for a user, not for a host"
    if certificate.critical_options:
        return "it has unknown options"
    if now < certificate.valid_after:
        return "not yet valid"
    if now >= certificate.valid_before:
        return "expired"
    if certificate.valid_principals and host.encode() not in certificate.valid_principals:
        return f"it is not for {host}"
    return ""


def _parse(blob: bytes) -> serialization.SSHCertificate | None:
    size = int.from_bytes(blob[:4], "big")
    try:
        identity = serialization.load_ssh_public_identity(blob[4 : 4 + size] + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        return None
    return identity if isinstance(identity, serialization.SSHCertificate) else None


def _wire(certificate: serialization.SSHCertificate) -> bytes:
    text = certificate.signature_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return base64.b64decode(text.split()[1])
