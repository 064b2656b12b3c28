"""What an issuer is asked and what it answers: a key and a token in, a provider's signature out.

The key is made where it is used, and never travels: the request carries its public half, and a signature by it that
proves that the private half is there. The signature is over the token too, so it is good for no other request.

Pure: the caller passes the time and keeps the count of uses.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fabrictool.mesh.identity import IdentityError, certify, raw_key, session_id, validity_of
from fabrictool.mesh.jointoken import MAX_TOKEN_OCTETS, JoinTokenError, binding, check_time, read_token

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fabrictool.mesh.identity import Credential, IdentityVerifier, VerifiedSession
    from fabrictool.mesh.jointoken import JoinToken

PATH = "/v1/session"
"""Where an issuer is asked, by POST."""
RENEWAL_PATH = "/v1/renewal"
"""Where it is asked for another certificate, by POST, over a connection that shows the present one."""
SESSION_S = 26 * 3600.0
"""A session's certificate of a job that does not say when it ends."""
MAX_SESSION_S = 7 * 86400.0
"""Of one key, renewed or not: a key that was stolen is good for as long as its certificates are renewed."""
WORTH_IT_S = 60.0
"""What another certificate must last longer than the one that it follows."""
AFTER_END_S = 2 * 3600.0
"""A certificate outlives its job a little: it still has to drain and to say goodbye."""
_DOMAIN = b"fabrictool join request v1\0"


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a joining agent sends, as JSON."""

    token: Annotated[str, msgspec.Meta(max_length=MAX_TOKEN_OCTETS)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Its public key, Ed25519."""
    proof: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    ends_at: float | None = None
    """Wall seconds at which its job ends."""
    shown: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The text that the token is bound to, such as a job's number."""


class RenewalRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a joined agent sends, as JSON. No token and no key: who it is, the connection has shown."""

    ends_at: float | None = None
    """As in `JoinRequest`."""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the issuer answers when it signs."""

    chain: tuple[bytes, bytes]


class JoinRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers when it does not; an error's code, sentence and hint."""

    code: Annotated[str, msgspec.Meta(pattern=r"^FT[0-9]{4}$")]
    message: Annotated[str, msgspec.Meta(max_length=500)]
    hint: Annotated[str, msgspec.Meta(max_length=500)] = ""


@dataclass(frozen=True, slots=True)
class Approved:
    """A request that may be signed, if its token has a use left."""

    token: JoinToken
    key: Ed25519PublicKey
    seconds: float

    @property
    def session(self) -> str:
        return session_id(self.key).hex()

    def sign(self, provider: Credential, *, now: float) -> tuple[bytes, ...]:
        """The chain; raises FT6006 when the provider's own certificate has expired."""
        role, models = self.token.role, self.token.models
        return certify(provider, self.key, role, now=now, seconds=self.seconds, models=models)


@dataclass(frozen=True, slots=True)
class Renewal:
    """Another certificate for the key of a session, that may be signed."""

    session: VerifiedSession
    seconds: float
    began_at: float

    def sign(self, provider: Credential, *, now: float) -> tuple[bytes, ...]:
        """The chain; raises FT6006 when the provider's own certificate has expired."""
        key, models, began = self.session.public_key, self.session.models, self.began_at
        return certify(provider, key, "agent", now=now, seconds=self.seconds, models=models, began_at=began)


# Wide: what it shows, what is known of it, who signs, when.
def judge_renewal(
    request: RenewalRequest,
    leaf: bytes,
    provider: Credential,
    verifier: IdentityVerifier,
    renewable_until: float | None,
    *,
    now: float,
) -> Renewal:
    """Whether `provider` may sign for the key of `leaf` again; the connection proved that its other side holds it.

    `renewable_until` is what the issuer wrote down when it signed the first one; None: it never did.

    Raises
    ------
    JoinTokenError
        FT6417 it may not, or not any longer, FT6010 the key is a week old.
    """
    try:
        session = verifier.verify((leaf, provider.chain[0]), now=now)
        began_at = validity_of(leaf)[0]
    except IdentityError as error:
        message = f"this is no session of {provider.claims.provider}'s present certificate: {error.problems[0].message}"
        raise JoinTokenError.of("FT6417", message, hint="join again with a new token") from error
    name = session.claims.session[:8]
    if session.claims.role != "agent":  # the keys of others are the operator's, who asks for new ones
        raise JoinTokenError.of("FT6417", f"a {session.claims.role}'s certificate is not renewed by its issuer")
    if renewable_until is None:
        raise JoinTokenError.of("FT6417", f"this issuer did not sign session {name}", hint="ask the one that did")
    if now - began_at >= MAX_SESSION_S:
        raise JoinTokenError.of("FT6010", f"the key of session {name} is too old")
    lasts = SESSION_S if request.ends_at is None else request.ends_at - now + AFTER_END_S
    seconds = min(lasts, MAX_SESSION_S, began_at + MAX_SESSION_S - now, renewable_until - now)
    if now + seconds < session.not_after + WORTH_IT_S:
        message = f"the certificate of session {name} lasts as long as its token allows"
        raise JoinTokenError.of("FT6417", message, hint="`fabrictool trust token --renewable` says how long that is")
    return Renewal(session, seconds, began_at)


def ask_for(token: str, key: Ed25519PrivateKey, *, ends_at: float | None, shown: str) -> JoinRequest:
    """The request of the holder of `key`."""
    public, token = raw_key(key.public_key()), token.strip()
    proof = key.sign(_proven(read_token(token).digest, public))
    return JoinRequest(token=token, key=public, proof=proof, ends_at=ends_at, shown=shown)


def judge(request: JoinRequest, provider: Credential, *, now: float) -> Approved:
    """Whether `provider` may sign `request`.

    Raises
    ------
    JoinTokenError
        FT6401 damaged or changed, FT6402 of another federation, FT6403 of another provider, FT6404 not its time,
        FT6406 bound to something else, FT6408 no proof of the key, FT6413 signed by a former key of the provider.
    """
    signed = read_token(request.token)
    token, ours, theirs = signed.token, provider.claims, signed.token.claims
    if theirs.federation != ours.federation:
        raise JoinTokenError.of("FT6402", "the join token is of another federation", hint="ask its own issuer")
    if theirs.provider != ours.provider:
        message = f"the join token is provider {theirs.provider}'s; this is the issuer of {ours.provider}"
        raise JoinTokenError.of("FT6403", message, hint="the token names its issuer's address")
    if token.signer != provider.chain[0]:
        message = f"the join token was signed by another certificate of {ours.provider} than the present one"
        raise JoinTokenError.of("FT6413", message, hint="`fabrictool trust token` makes a new token")
    check_time(token, now=now)
    if token.bound and not hmac.compare_digest(token.bound, binding(token.id, request.shown)):
        message = f"the join token is not bound to {request.shown!r}"
        raise JoinTokenError.of(
            "FT6406", message, hint="give what it is bound to with --bind TEXT; default: the job's id"
        )
    key = Ed25519PublicKey.from_public_bytes(request.key)
    try:
        key.verify(request.proof, _proven(signed.digest, request.key))
    except InvalidSignature as error:
        raise JoinTokenError.of("FT6408", "the request does not prove that its sender holds the key") from error
    lasts = SESSION_S if request.ends_at is None else request.ends_at - now + AFTER_END_S
    return Approved(token, key, max(60.0, min(lasts, MAX_SESSION_S)))


def _proven(digest: bytes, key: bytes) -> bytes:
    return _DOMAIN + digest + key
