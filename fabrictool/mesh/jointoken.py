"""The paper that lets a stranger's job ask for a session: a join token, signed by a provider.

A token is one line of text, ``ftjoin1.PAYLOAD.SIGNATURE``. It says whom its bearer is to trust (the federation's root),
who signed it (the provider's certificate), where to go with it (the issuer), where the gateways are, and what it is
good for. It is no key: the bearer makes one itself and has the issuer sign it.

Pure: text and keys in, values out; the caller passes the time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidSignature

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.identity import CLOCK_SKEW_S, MAX_MODELS_OCTETS, IdentityError, IdentityVerifier, claims_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from fabrictool.mesh.identity import Claims, Credential

MAX_TOKEN_OCTETS = 8192
MAX_USES = 10_000
_PREFIX = "ftjoin1"
_DOMAIN = b"fabrictool join token v1\0"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class JoinTokenError(InvalidInputError):
    """A token, or a request made with it, is not good (FT64xx)."""


class JoinToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a provider signed; the texts of the fields are bounded by the size of the token."""

    id: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
    """Random; the issuer counts by it."""
    fabric: _Name
    root: bytes
    """The federation's root certificate, DER."""
    signer: bytes
    """The provider's certificate, DER; its key signed this token."""
    issuer: HostPort
    gateways: Annotated[tuple[HostPort, ...], msgspec.Meta(min_length=1, max_length=16)]
    role: Literal["agent", "gateway"] = "agent"
    """What its sessions are."""
    uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]
    """How many sessions it may start; a session that asks again counts once."""
    created: float
    """Wall seconds, like `expires`."""
    expires: float
    models: tuple[_Name, ...] = ()
    """What its sessions may serve; empty: anything."""
    renewable_until: float | msgspec.UnsetType = msgspec.UNSET
    """Wall seconds until which the issuer renews certificates of its sessions; unset, as in tokens of earlier releases:
    it renews none."""
    bound: str = ""
    """`binding` of the text that its bearer must show; empty: none."""

    @property
    def claims(self) -> Claims:
        """Of the provider that signed it."""
        return claims_of(self.signer)


@dataclass(frozen=True, slots=True)
class SignedToken:
    """A token whose signature was checked: only `read_token` makes these."""

    token: JoinToken
    digest: bytes
    """Of its text."""


def write_token(token: JoinToken, provider: Credential) -> str:
    """The line of text; raises FT6407 for models that no certificate can name."""
    check_models(token.models)
    payload = msgspec.msgpack.encode(token, order="deterministic")
    return f"{_PREFIX}.{_text(payload)}.{_text(provider.sign(_DOMAIN + payload))}"


def is_token(text: str) -> bool:
    """By its look; see `read_token`."""
    return text.startswith(f"{_PREFIX}.")


def read_token(text: str) -> SignedToken:
    """The token in `text`, whose signature is its provider's and whose provider is one of its root's.

    That root may still be a stranger's, and its time may be over: see `check_time`.

    Raises
    ------
    JoinTokenError
        FT6401 when it is no token, or was changed.
    """
    parts = text.strip().split(".")
    if len(text) > MAX_TOKEN_OCTETS or len(parts) != 3 or parts[0] != _PREFIX:
        raise _damaged("this is not a join token")
    try:
        payload, signature = _octets(parts[1]), _octets(parts[2])
        token = msgspec.msgpack.decode(payload, type=JoinToken)
        _signer_key(token).verify(signature, _DOMAIN + payload)
    except (ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise _damaged("the join token is damaged: it cannot be read") from error
    except IdentityError as error:
        raise _damaged("the join token is damaged: its certificates do not belong together") from error
    except InvalidSignature as error:
        raise _damaged("the join token was changed: its provider did not sign this") from error
    return SignedToken(token, hashlib.sha256(text.strip().encode()).digest())


def check_time(token: JoinToken, *, now: float) -> None:
    """Raises FT6404 unless `now` lies between the token's making and its end, with a federation's skew of clocks."""
    if now > token.expires + CLOCK_SKEW_S:
        raise JoinTokenError.of("FT6404", "the join token has expired", hint="ask its provider for a new one")
    if now < token.created - CLOCK_SKEW_S:
        message = "the join token was made in the future: the clocks differ by more than five minutes"
        raise JoinTokenError.of("FT6404", message, hint="correct the clock of this machine or of the token's maker")


def check_models(models: tuple[str, ...]) -> None:
    """Raises FT6407 for names that a certificate cannot carry."""
    if any("," in model or not model.isprintable() for model in models):
        raise JoinTokenError.of("FT6407", "a model's name in a join token has no comma and no control character")
    if len(",".join(models).encode()) > MAX_MODELS_OCTETS:
        message = f"the models' names are longer than {MAX_MODELS_OCTETS} octets together"
        raise JoinTokenError.of("FT6407", message, hint="leave them out, or make several tokens")


def binding(token_id: str, text: str) -> str:
    """What a token holds of a text that its bearer must show; another one in every token."""
    return hashlib.sha256(f"fabrictool join binding\0{token_id}\0{text}".encode()).hexdigest()


def _signer_key(token: JoinToken) -> Ed25519PublicKey:
    return IdentityVerifier(token.root).provider_key(token.signer)


def _damaged(message: str) -> FabrictoolError:
    hint = "copy the whole line again; `fabrictool trust token PROVIDER -o FILE` makes a new one"
    return JoinTokenError.of("FT6401", message, hint=hint)


def _text(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()


def _octets(text: str) -> bytes:
    if not text.isascii():
        raise ValueError(text[:20])
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
