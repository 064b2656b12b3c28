"""The operator's trust material on disk: the federation's root and the providers that it signed.

``root.key`` and ``providers/NAME.key`` have mode 0600 and never leave this folder; a provider's own operators hold
only their own pair, and for others' sessions the join tokens (``tokens/NAME.ROLE``) that these gave them.
"""

from __future__ import annotations

import ssl
import string
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fabrictool.agent.admission import ask_issuer, private_text
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.base.ids import is_name
from fabrictool.mesh.identity import (
    SESSION_ID_OCTETS,
    Credential,
    IdentityError,
    IdentityVerifier,
    certify,
    chain_of,
    chain_pem,
    create_root,
    describe_chain,
    fingerprint,
    issue_provider,
    issue_session,
)
from fabrictool.mesh.issuing import AFTER_END_S
from fabrictool.mesh.jointoken import JoinTokenError, check_time, read_token
from fabrictool.mesh.revocation import read_revocation, revoke
from fabrictool.planner.succession import KEY_LIFE_S

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.mesh.identity import UnverifiedChain
    from fabrictool.mesh.jointoken import JoinToken

SessionRole = Literal["agent", "gateway"]
PLANNED_BEFORE_S = 86400.0
"""A plan may be carried out so much later."""


@dataclass(frozen=True, slots=True)
class TrustStore:
    """See the module's docstring."""

    folder: Path

    @property
    def exists(self) -> bool:
        try:
            return (self.folder / "root.crt").exists()
        except OSError as error:
            raise file_error(error, self.folder) from error

    def init(self, fabric: str, *, now: float) -> Credential:
        """Make a federation; raises FT6301 when there is one."""
        if self.exists:
            hint = "a new root would cut off every node that runs; move the folder away if that is what you want"
            raise InvalidInputError.of(
                "FT6301", "this fabric has a federation root already", file=str(self.folder), hint=hint
            )
        root = create_root(fabric, now=now)
        self._write("root", root)
        return root

    def root(self) -> Credential:
        """The root; raises FT6302 when there is none."""
        return self._read("root", "run `fabrictool trust init` once for this fabric")

    def root_certificate(self) -> bytes:
        """The root's certificate, DER: a provider's own folder has it without the key. Raises FT6302, FT6002."""
        path = self.folder / "root.crt"
        try:
            return ssl.PEM_cert_to_DER_cert(path.read_text())
        except FileNotFoundError as error:
            hint = "copy root.crt from the federation's operators; `fabrictool trust init` makes a new federation"
            raise FabrictoolError.of("FT6302", "there is no root.crt", file=str(path), hint=hint) from error
        except OSError as error:
            raise file_error(error, path) from error
        except ValueError as error:
            raise FabrictoolError.of("FT6002", f"not a certificate: {error}", file=str(path)) from error

    def root_pem(self) -> bytes:
        """The same as a file of a run folder."""
        return ssl.DER_cert_to_PEM_cert(self.root_certificate()).encode()

    def provider(self, name: str) -> Credential:
        """A provider's signing credential; raises FT6302 when it was not issued, FT6303 for what is no name."""
        _check_name(name)
        hint = f"`fabrictool trust issue {name}` signs it; of another institution: `fabrictool trust accept TOKENFILE`"
        return self._read(f"providers/{name}", hint)

    def revoke(self, name: str, *, now: float) -> list[str]:
        """Take back all certificates of a provider that have not ended, or one session; returns what was revoked.

        Raises
        ------
        FabrictoolError
            FT6302 when there is no such provider, FT6303 for what is neither a provider's name nor a session's id.
        """
        if self.has_provider(name):
            taken_back = {fp: end for fp, (provider, end) in self._issued().items() if provider == name and end > now}
        elif len(name) == 2 * SESSION_ID_OCTETS and set(name) <= set(string.hexdigits):
            taken_back = {bytes.fromhex(name): max([now, *(end for _, end in self._issued().values())])}
        else:
            hint = (
                "`fabrictool trust show` lists providers, `fabrictool status --json` sessions (32 hexadecimal digits)"
            )
            raise InvalidInputError.of("FT6303", f"{name!r} is neither a provider nor a session's id", hint=hint)
        folder = self.folder / "revoked"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise file_error(error, folder) from error
        for revoked, until in taken_back.items():
            text = revoke(self.root(), revoked, now=now, until=until)
            write_atomic(folder / f"{revoked.hex()}.txt", text.encode())
        return [revoked.hex() for revoked in taken_back]

    def _issued(self) -> dict[bytes, tuple[str, float]]:
        """Fingerprint of each provider's certificate that was ever issued → whose it is, and when it ends.

        No session outlasts the certificate of the provider that signed it.
        """
        certificates = {}
        for file in sorted((self.folder / "providers").glob("**/*.crt")):
            try:
                pem = file.read_text()
            except OSError as error:
                raise file_error(error, file) from error
            chain = describe_chain(pem.encode())
            certificates[fingerprint(ssl.PEM_cert_to_DER_cert(pem))] = (chain.claims.provider, chain.end)
        return certificates

    def session_revoked(self, session: str) -> bool:
        """Whether it was revoked here; `session` in hexadecimal."""
        return (self.folder / "revoked" / f"{session}.txt").exists()

    def revocations(self, *, now: float) -> tuple[str, ...]:
        """Those that still count, as text, by their id."""
        texts = []
        for file in sorted((self.folder / "revoked").glob("*.txt")):
            try:
                text = file.read_text().strip()
            except OSError as error:
                raise file_error(error, file) from error
            if read_revocation(text)[1].until > now:
                texts.append(text)
        return tuple(texts)

    def signer(self, provider: str) -> Credential:
        """A provider's credential, to sign with; raises FT6007 when it was revoked, and what `provider` does."""
        credential = self.provider(provider)
        self._check_signer(provider, credential.chain[0])
        return credential

    def _check_signer(self, provider: str, certificate: bytes) -> None:
        if (self.folder / "revoked" / f"{fingerprint(certificate).hex()}.txt").exists():
            raise FabrictoolError.of(
                "FT6007",
                f"the certificate of provider {provider} was revoked",
                hint=f"`fabrictool trust issue {provider}` lets it in again, with a new one",
            )

    def others(self, name: str) -> bool:
        """Whether its sessions are started by a token: it is another institution's."""
        return not (self.folder / f"providers/{name}.key").exists() and any(
            self._token_file(name, role).exists() for role in get_args(SessionRole)
        )

    def signs(self) -> dict[str, float]:
        """Providers whose key is here → wall seconds at which their certificate ends."""
        ends = {}
        for key in sorted((self.folder / "providers").glob("*.key")):
            with suppress(OSError, FabrictoolError):  # of what cannot be read whoever signs with it complains
                ends[key.stem] = describe_chain(key.with_suffix(".crt").read_bytes()).end
        return ends

    def may_start(self, name: str) -> bool:
        return self.has_provider(name) or self.others(name)

    def has_provider(self, name: str) -> bool:
        return (self.folder / f"providers/{name}.crt").exists()

    def issue(self, provider: str, *, now: float, days: int = 90) -> Credential:
        """Sign a provider, anew if it has a credential already."""
        _check_name(provider)
        credential = issue_provider(self.root(), provider, now=now, days=days)
        if self.has_provider(provider):
            former = (self.folder / f"providers/{provider}.crt").read_text()
            name = f"{provider}-{fingerprint(ssl.PEM_cert_to_DER_cert(former)).hex()}.crt"
            write_atomic(self.folder / "providers/former" / name, former.encode())  # to be revoked, should it be stolen
        self._write(f"providers/{provider}", credential)
        return credential

    def described(self) -> list[UnverifiedChain]:
        """The chains of the root and of all providers, unverified."""
        self.root_certificate()  # says what is missing
        files = [self.folder / "root.crt", *sorted((self.folder / "providers").glob("*.crt"))]
        chains = []
        for file in files:
            try:
                chains.append(describe_chain(file.read_bytes()))
            except OSError as error:
                raise file_error(error, file) from error
        return chains

    def revoked(self, *, now: float) -> list[dict[str, str]]:
        """What was revoked and still counts: its id, whose it is if that is known, and the day it ends by itself."""
        named = {fp: provider for fp, (provider, _) in self._issued().items()}
        bodies = [read_revocation(text)[1] for text in self.revocations(now=now)]
        return [
            {
                "id": body.session.hex(),
                "provider": named.get(body.session, ""),
                "until": time.strftime("%Y-%m-%d", time.gmtime(body.until)),
            }
            for body in bodies
        ]

    def certificates(self) -> list[dict[str, str]]:
        """Root and providers: name, federation, and the day on which each ends."""
        return [
            {
                "name": chain.claims.provider or "root",
                "federation": chain.claims.federation,
                "not_after": time.strftime("%Y-%m-%d", time.gmtime(chain.end)),
            }
            for chain in self.described()
        ]

    def accept(self, text: str, fabric: str, *, now: float) -> JoinToken:
        """Keep a join token of another provider, to start its sessions with; in place of a former one.

        Raises
        ------
        JoinTokenError
            FT6401 damaged, FT6402 of another federation or fabric, FT6404 not its time, FT6406 bound to a job, FT6407
            not needed, for that provider's own key is here.
        FabrictoolError
            FT6007 its signer was revoked.
        """
        token = read_token(text).token
        if token.root != self.root_certificate():
            hint = "it was made with another root.crt than the one here"
            raise JoinTokenError.of("FT6402", "the join token is of another federation", hint=hint)
        if token.fabric != fabric:
            raise JoinTokenError.of("FT6402", f"the join token is for the fabric {token.fabric}, not for {fabric}")
        if token.bound:
            raise JoinTokenError.of("FT6406", "the join token is bound to one job", hint="ask for one without --bind")
        provider = token.claims.provider
        if (self.folder / f"providers/{provider}.key").exists():
            raise JoinTokenError.of("FT6407", f"the key of {provider} is here, so no token of it is needed")
        check_time(token, now=now)
        self._check_signer(provider, token.signer)
        path = self._token_file(token.claims.provider, token.role)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise file_error(error, path.parent) from error
        write_atomic(path, text.strip().encode() + b"\n", mode=0o600)
        return token

    def check_sessions(self, provider: str, role: SessionRole, model: str = "", *, now: float) -> None:
        """Raises what `session_files` would raise that can be known without asking anybody."""
        self.root_certificate()  # first: without it there is no provider either
        token = self._token(provider, role)
        if token is None:
            self.signer(provider)
            return
        check_time(token[0], now=now)
        self._check_signer(provider, token[0].signer)
        if model and token[0].models and model not in token[0].models:
            message = f"the join token of {provider} allows {', '.join(token[0].models)}, not {model}"
            raise JoinTokenError.of("FT6407", message, hint="ask the provider for a token that names it")

    def session_files(self, provider: str, role: SessionRole, *, now: float, seconds: float) -> dict[str, bytes]:
        """The identity of one session, as files of a run folder: signed here, or where a kept token's issuer is."""
        root = self.root_pem()
        kept = self._token(provider, role)
        if kept is None:
            session = issue_session(self.signer(provider), role, now=now, seconds=seconds)
        else:
            token, text = kept
            session = ask_issuer(token, text, ends_at=now + seconds - AFTER_END_S, shown="")
        return {
            "identity/session.key": session.key_pem(),
            "identity/session.crt": session.chain_pem(),
            "identity/root.crt": root,
        }

    def renewed_files(
        self, provider: str, role: SessionRole, pem: bytes, *, now: float, seconds: float
    ) -> dict[str, bytes]:
        """Another certificate for the session that `pem` proves, as the file of its run folder.

        The key and its age are taken from a certificate that the provider signed, never from what a site says.

        Raises
        ------
        IdentityError
            FT6002 to FT6005 `pem` is not the chain of such a session, or has ended.
        FabrictoolError
            FT6007 the session or the signer was revoked, FT6010 the key is too old; FT6301, FT6302 as `provider` does.
        """
        signer, described = self.signer(provider), describe_chain(pem)
        session = IdentityVerifier(self.root_certificate()).verify(chain_of(pem), now=now)
        if (session.claims.provider, session.claims.role) != (provider, role):
            raise IdentityError.of("FT6003", f"{session.claims.uri()} is not {provider}'s {role}")
        if self.session_revoked(session.claims.session):
            raise FabrictoolError.of("FT6007", f"session {session.claims.session[:8]} was revoked")
        if now - described.begin > KEY_LIFE_S + PLANNED_BEFORE_S:
            raise FabrictoolError.of("FT6010", f"the key of session {session.claims.session[:8]} is too old")
        renewed = certify(signer, session.public_key, role, now=now, seconds=seconds, began_at=described.begin)
        return {"identity/session.crt": chain_pem(renewed)}

    def _token_file(self, provider: str, role: SessionRole) -> Path:
        _check_name(provider)
        return self.folder / "tokens" / f"{provider}.{role}"

    def _token(self, provider: str, role: SessionRole) -> tuple[JoinToken, str] | None:
        """The kept token and its text; None where the provider's own key is here, or no token is."""
        path = self._token_file(provider, role)
        if (self.folder / f"providers/{provider}.key").exists() or not path.exists():
            return None
        text = private_text(str(path), "token")
        return read_token(text).token, text

    def _write(self, name: str, credential: Credential) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise file_error(error, path.parent) from error
        write_atomic(path.with_name(path.name + ".key"), credential.key_pem(), mode=0o600)
        write_atomic(path.with_name(path.name + ".crt"), credential.chain_pem())

    def _read(self, name: str, hint: str) -> Credential:
        key, chain = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        try:
            if key.stat().st_mode & 0o077:
                raise FabrictoolError.of(
                    "FT6001", "the private key can be read by others", file=str(key), hint=f"chmod 600 {key}"
                )
            return Credential.from_pem(key.read_bytes(), chain.read_bytes())
        except FileNotFoundError as error:
            raise FabrictoolError.of(
                "FT6302", f"trust material {name!r} not found", file=str(key), hint=hint
            ) from error
        except OSError as error:
            raise file_error(error, key) from error


def _check_name(provider: str) -> None:
    if not is_name(provider):
        raise InvalidInputError.of(
            "FT6303", f"{provider!r} is not a valid provider name", hint="lower-case letters, digits, . _ -"
        )
