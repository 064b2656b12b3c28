"""Taking back what was certified: signed by the federation's root, or by a provider for its own sessions. Pure.

As text a revocation is public: it stands in a gateway's spec, and the gateway spreads it (`Registry.revoked`).
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import msgspec

from fabrictool.mesh.records import Envelope, RecordError, RevocationBody, decode, seal

if TYPE_CHECKING:
    from fabrictool.mesh.identity import Credential


def revoke(signer: Credential, revoked: bytes, *, now: float, until: float) -> str:
    """`revoked`: a session's id, or a certificate's fingerprint; it counts until `until`, when that ends by itself."""
    claims = signer.claims
    body = RevocationBody(federation=claims.federation, session=revoked, provider=claims.provider, at=now, until=until)
    chain = (signer.chain[0],) if claims.provider else ()
    return base64.b64encode(msgspec.msgpack.encode(seal(body, signer.sign, chain).envelope)).decode()


def read_revocation(text: str) -> tuple[Envelope, RevocationBody]:
    """The inverse of `revoke`, its signature unchecked; raises FT6102 on anything else."""
    try:
        envelope = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=Envelope)
    except ValueError as error:
        raise RecordError.of("FT6102", f"not a revocation: {error}") from error
    body = decode(envelope).body
    if not isinstance(body, RevocationBody):
        raise RecordError.of("FT6102", "not a revocation: it is another kind of record")
    return envelope, body
