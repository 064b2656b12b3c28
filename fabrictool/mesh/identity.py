"""Who is who: federation root → provider certificate → session certificate, all Ed25519 X.509.

The chain is three deep and carries one URI per certificate, ``fabric://FEDERATION/PROVIDER/ROLE/SESSION``:

* the *root* of a federation is kept offline by the operators and signs providers;
* a *provider* certificate belongs to one institution and signs the sessions of its own nodes, no others;
* a *session* certificate lives as long as one run of one node agent. Its key signs that agent's records, and
  carries its TLS connections. The session's id is a hash of the key, so nobody can squat on another's id.

Pure: certificates and keys as bytes in, values out; the caller passes the time.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError

_K = TypeVar("_K")
_V = TypeVar("_V")
_Validity = tuple[str, float, float]
"""Whose certificate, and the wall seconds from and to which it is valid."""
Role = Literal["root", "provider", "agent", "gateway", "issuer", "controller"]
SessionRole = Literal["agent", "gateway", "issuer", "controller"]
MEMBERS: tuple[SessionRole, ...] = ("agent", "gateway", "controller")
"""Roles that may link to the mesh; an issuer only answers those who want to. A controller speaks for no node of its
own: its certificate is good for assignments and nothing else.
"""

SESSION_ID_OCTETS = 16
MAX_CERTIFICATE_OCTETS = 1024
MAX_MODELS_OCTETS = 300
"""Of all names of models in one certificate, with commas between them."""
_MODELS = x509.ObjectIdentifier("2.25.236018329764216083012367845120943716502")
"""Extension of a session's certificate: the models that it may serve; without it, any."""
CHAINS_KEPT = 4096
"""Checked chains that a node remembers, about 1 KiB each: a chain comes with HELLO and with each node record."""
CLOCK_SKEW_S = 300
"""How far two clocks of a federation may differ when validity is checked (mesh.md §5)."""


class IdentityError(FabrictoolError):
    """A certificate or signature does not prove what it claims (FT60xx)."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a certificate says of its holder."""

    federation: str
    provider: str
    role: Role
    session: str

    def uri(self) -> str:
        """The URI that stands in the certificate's subject alternative name."""
        return f"fabric://{self.federation}/{self.provider or '-'}/{self.role}/{self.session or '-'}"

    @classmethod
    def from_uri(cls, uri: str) -> Claims:
        """Parse `uri`; raises FT6003 on any other form."""
        scheme, _, rest = uri.partition("://")
        parts = rest.split("/")
        if scheme != "fabric" or len(parts) != 4 or parts[2] not in get_args(Role):
            raise IdentityError.of("FT6003", f"certificate names {uri!r}, which is not an identity of a fabric")
        federation, provider, role, session = parts
        return cls(federation, provider.strip("-"), cast("Role", role), session.strip("-"))


@dataclass(frozen=True, slots=True)
class Credential:
    """A private key with the certificates that speak for it, leaf first; the root itself is not in the chain."""

    key: Ed25519PrivateKey
    chain: tuple[bytes, ...]
    """DER certificates."""

    @property
    def claims(self) -> Claims:
        return claims_of(self.chain[0])

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature of `message`, 64 octets."""
        return self.key.sign(message)

    def key_pem(self) -> bytes:
        """PKCS#8 PEM of the private key, unencrypted: write it with mode 0600 or not at all."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def chain_pem(self) -> bytes:
        """The chain as concatenated PEM, leaf first."""
        return chain_pem(self.chain)

    @classmethod
    def from_pem(cls, key: bytes, chain: bytes) -> Credential:
        """The inverse of `key_pem` and `chain_pem`; raises FT6002 when the bytes are something else."""
        try:
            private = serialization.load_pem_private_key(key, password=None)
            certificates = x509.load_pem_x509_certificates(chain)
        except ValueError as error:
            raise IdentityError.of("FT6002", f"not a key and certificate chain in PEM form: {error}") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise IdentityError.of("FT6002", "the private key is not Ed25519")
        return cls(private, tuple(c.public_bytes(serialization.Encoding.DER) for c in certificates))


def chain_pem(chain: tuple[bytes, ...]) -> bytes:
    """Concatenated PEM of DER certificates."""
    return b"".join(x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM) for der in chain)


def chain_of(pem: bytes) -> tuple[bytes, ...]:
    """The inverse of `chain_pem`; raises FT6002 when the bytes are something else."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise IdentityError.of("FT6002", f"not a certificate: {error}") from error
    return tuple(certificate.public_bytes(serialization.Encoding.DER) for certificate in certificates)


def session_id(public_key: Ed25519PublicKey) -> bytes:
    """16 octets that only the holder of the key can claim."""
    return hashlib.sha256(raw_key(public_key)).digest()[:SESSION_ID_OCTETS]


def claims_of(certificate: bytes) -> Claims:
    """The claims in a DER certificate, unverified."""
    return _claims(_load(certificate))


def validity_of(certificate: bytes) -> tuple[float, float]:
    """Wall seconds from and to which a DER certificate is valid, unverified."""
    return _validity(_load(certificate), claims_of(certificate))[1:]


@dataclass(frozen=True, slots=True)
class UnverifiedChain:
    """What a chain says, unverified."""

    claims: Claims
    """Of the first certificate."""
    begin: float
    """Wall seconds from which the first certificate is valid."""
    end: float
    """Wall seconds after which one of them is no longer valid."""


def describe_chain(pem: bytes) -> UnverifiedChain:
    """Claims and validity of the chain in `pem`; raises FT6002 when the bytes are something else."""
    try:
        chain = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise IdentityError.of("FT6002", f"not a certificate: {error}") from error
    end = min(certificate.not_valid_after_utc.timestamp() for certificate in chain)
    return UnverifiedChain(_claims(chain[0]), chain[0].not_valid_before_utc.timestamp(), end)


def create_root(fabric: str, *, now: float, days: int = 3650) -> Credential:
    """A new federation: a key pair and its self-signed certificate."""
    key = Ed25519PrivateKey.generate()
    federation = session_id(key.public_key()).hex()
    claims = Claims(federation, "", "root", "")
    certificate = _build(
        f"{fabric} federation root", claims, key.public_key(), key, None, now, days * 86400, path_length=1
    )
    return Credential(key, (certificate,))


def issue_provider(root: Credential, provider: str, *, now: float, days: int = 90) -> Credential:
    """An institution's signing credential, whose chain does not repeat the root; it ends with the root at the latest.

    Raises
    ------
    IdentityError
        FT6006 when the root has expired.
    """
    key = Ed25519PrivateKey.generate()
    claims = Claims(root.claims.federation, provider, "provider", "")
    issuer = _load(root.chain[0])
    certificate = _build(
        f"provider {provider}", claims, key.public_key(), root.key, issuer, now, days * 86400, path_length=0
    )
    return Credential(key, (certificate,))


def issue_session(
    provider: Credential, role: SessionRole, *, now: float, seconds: float = 26 * 3600, models: tuple[str, ...] = ()
) -> Credential:
    """A new key with what `certify` says of it."""
    key = Ed25519PrivateKey.generate()
    return Credential(key, certify(provider, key.public_key(), role, now=now, seconds=seconds, models=models))


# Wide: what a certificate says.
def certify(
    provider: Credential,
    key: Ed25519PublicKey,
    role: SessionRole,
    *,
    now: float,
    seconds: float,
    models: tuple[str, ...] = (),
    began_at: float | None = None,
) -> tuple[bytes, ...]:
    """The chain for one run of one agent or gateway, signed by its provider and valid no longer than that one's.

    With `models` the session may serve these and no others. A certificate that is renewed says when the session
    `began_at`: by that its key's age is known.

    Raises
    ------
    IdentityError
        FT6006 when the provider's certificate has expired.
    """
    session = session_id(key).hex()
    signer = provider.claims
    claims = Claims(signer.federation, signer.provider, role, session)
    issuer = _load(provider.chain[0])
    name = f"{role} {session[:8]}"
    certificate = _build(
        name, claims, key, provider.key, issuer, now, seconds, path_length=None, models=models, began_at=began_at
    )
    return certificate, provider.chain[0]


def raw_key(key: Ed25519PublicKey) -> bytes:
    """The 32 octets of a public key."""
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


@dataclass(frozen=True, slots=True)
class VerifiedSession:
    """A session whose chain was checked: only `IdentityVerifier` makes these."""

    claims: Claims
    public_key: Ed25519PublicKey
    not_after: float
    """Wall time in seconds after which no record of this session counts."""
    issuer: bytes = b""
    """Fingerprint of the provider's certificate that signed it."""
    models: tuple[str, ...] = ()
    """What it may serve; empty: anything."""
    certificate: bytes = b""
    """Fingerprint of its own."""

    @property
    def session(self) -> bytes:
        return bytes.fromhex(self.claims.session)

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether this session's key signed `message`."""
        return _signed(self.public_key, signature, message)


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs for a federation or a provider, as against a session."""

    provider: str
    public_key: Ed25519PublicKey
    not_after: float
    """Wall seconds at which its certificate ends."""

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether its key signed `message`."""
        return _signed(self.public_key, signature, message)


def _signed(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def fingerprint(certificate: bytes) -> bytes:
    """16 octets that stand for a DER certificate."""
    return hashlib.sha256(certificate).digest()[:SESSION_ID_OCTETS]


class IdentityVerifier:
    """Checks chains against one federation's root; of what was checked once only the dates are looked at again."""

    def __init__(self, root_certificate: bytes, roles: tuple[SessionRole, ...] = MEMBERS) -> None:
        self._root = _load(root_certificate)
        self._roles = roles
        claims = _claims(self._root)
        if claims.role != "root":
            raise IdentityError.of("FT6003", "the trust anchor is not a federation root")
        self.federation = claims.federation
        self._providers: OrderedDict[bytes, x509.Certificate] = OrderedDict()
        """Certificates that the root signed."""
        self._sessions: OrderedDict[tuple[bytes, ...], tuple[VerifiedSession, list[_Validity]]] = OrderedDict()

    def verify(self, chain: tuple[bytes, ...], *, now: float) -> VerifiedSession:
        """The session that `chain` (leaf, provider) proves.

        Raises
        ------
        IdentityError
            FT6003 wrong shape or role, FT6004 wrong signature or issuer, FT6005 expired or not yet valid.
        """
        entry = self._sessions.get(chain)
        if entry is None:
            entry = self._check(chain)
            _keep(self._sessions, chain, entry)
        session, validities = entry
        for uri, begin, end in validities:
            if not begin - CLOCK_SKEW_S <= now <= end + CLOCK_SKEW_S:
                raise IdentityError.of("FT6005", f"the certificate of {uri} {_out_of_time(begin, end, now)}")
        return session

    def _check(self, chain: tuple[bytes, ...]) -> tuple[VerifiedSession, list[_Validity]]:
        """All but the dates."""
        if len(chain) != 2:
            raise IdentityError.of("FT6003", f"a session's chain has two certificates, not {len(chain)}")
        leaf, provider = _load(chain[0]), self._provider(chain[1])
        _check_issued(leaf, provider)
        leaf_claims, provider_claims = _claims(leaf), _claims(provider)
        if leaf_claims.federation != self.federation or provider_claims.federation != self.federation:
            raise IdentityError.of("FT6004", "the certificate belongs to another federation")
        if provider_claims.role != "provider" or leaf_claims.role not in self._roles:
            raise IdentityError.of("FT6003", "the chain is not provider → session")
        if leaf_claims.provider != provider_claims.provider:
            raise IdentityError.of("FT6004", f"provider {provider_claims.provider} signed for {leaf_claims.provider}")
        key = leaf.public_key()
        if not isinstance(key, Ed25519PublicKey) or session_id(key).hex() != leaf_claims.session:
            raise IdentityError.of("FT6004", "the session's id is not the hash of its key")
        end, issuer = leaf.not_valid_after_utc.timestamp(), fingerprint(chain[1])
        session = VerifiedSession(leaf_claims, key, end, issuer, _models(leaf), fingerprint(chain[0]))
        return session, [_validity(leaf, leaf_claims), _validity(provider, provider_claims)]

    def authority(self, chain: tuple[bytes, ...], provider: str, *, now: float) -> Authority:
        """Who may revoke: the root, for which `provider` is empty, or a provider with its certificate as the chain.

        Raises
        ------
        IdentityError
            As `verify`.
        """
        certificate = self._root if not provider else self._provider(chain[0] if len(chain) == 1 else b"")
        claims = _claims(certificate)
        if claims.provider != provider or claims.role != ("provider" if provider else "root"):
            raise IdentityError.of("FT6004", f"{claims.uri()} may not speak for {provider or 'the federation'}")
        _, begin, end = _validity(certificate, claims)
        key = certificate.public_key()
        if not begin - CLOCK_SKEW_S <= now <= end + CLOCK_SKEW_S or not isinstance(key, Ed25519PublicKey):
            raise IdentityError.of("FT6005", f"the certificate of {claims.uri()} {_out_of_time(begin, end, now)}")
        return Authority(provider, key, end)

    def provider_key(self, der: bytes) -> Ed25519PublicKey:
        """The key of the provider's certificate `der`, whatever its dates; raises FT6003 or FT6004."""
        provider = self._provider(der)
        claims, key = _claims(provider), provider.public_key()
        if claims.role != "provider" or not isinstance(key, Ed25519PublicKey):
            raise IdentityError.of("FT6003", "this is not a provider's certificate")
        if claims.federation != self.federation:
            raise IdentityError.of("FT6004", "the certificate belongs to another federation")
        return key

    def _provider(self, der: bytes) -> x509.Certificate:
        provider = self._providers.get(der)
        if provider is None:
            provider = _load(der)
            _check_issued(provider, self._root)
            _keep(self._providers, der, provider)
        return provider


def _keep(cache: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    cache[key] = value
    if len(cache) > CHAINS_KEPT:
        cache.popitem(last=False)


def _check_issued(certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise IdentityError.of("FT6004", "the certificate chain does not lead to this federation") from error


def _validity(certificate: x509.Certificate, claims: Claims) -> _Validity:
    return claims.uri(), certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def _out_of_time(begin: float, end: float, now: float) -> str:
    if now < begin:
        return f"is valid in {duration_text(begin - now)} only, or our clock is behind"
    return f"ended {duration_text(now - end)} ago, or our clock is ahead"


def _load(der: bytes) -> x509.Certificate:
    if len(der) > MAX_CERTIFICATE_OCTETS:
        raise IdentityError.of("FT6003", f"certificate of {len(der)} octets refused")
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise IdentityError.of("FT6003", "not a DER certificate") from error


def _models(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_oid(_MODELS).value
    except x509.ExtensionNotFound:
        return ()
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise IdentityError.of("FT6003", "the certificate's list of models cannot be read")
    return tuple(extension.value.decode(errors="replace").split(","))


def _claims(certificate: x509.Certificate) -> Claims:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError) as error:
        raise IdentityError.of("FT6003", "the certificate names no identity of a fabric") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise IdentityError.of("FT6003", "the certificate names no identity of a fabric")
    return Claims.from_uri(uris[0])


# Wide: what makes the three kinds of certificate differ.
def _build(
    common_name: str,
    claims: Claims,
    key: Ed25519PublicKey,
    signer: Ed25519PrivateKey,
    issuer: x509.Certificate | None,
    now: float,
    seconds: float,
    *,
    path_length: int | None,
    models: tuple[str, ...] = (),
    began_at: float | None = None,
) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    begin = dt.datetime.fromtimestamp(now - 60, dt.UTC)
    end = begin + dt.timedelta(seconds=seconds + 60)
    if issuer is not None:
        if issuer.not_valid_after_utc.timestamp() <= now:
            raise IdentityError.of(
                "FT6006",
                f"the certificate of {_claims(issuer).uri()} expired on {issuer.not_valid_after_utc:%Y-%m-%d}",
                hint="`fabrictool trust issue PROVIDER` renews a provider's certificate",
            )
        end = min(end, issuer.not_valid_after_utc)
    if began_at is not None:
        begin = dt.datetime.fromtimestamp(began_at, dt.UTC)
    authority = path_length is not None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims.uri())]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=path_length), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not authority:
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if models:
        listed = x509.UnrecognizedExtension(_MODELS, ",".join(models).encode())
        builder = builder.add_extension(listed, critical=False)
    return builder.sign(signer, None).public_bytes(serialization.Encoding.DER)
