"""The operator's trust material on disk: the federation's root and the providers that it signed.

``root.key`` and ``providers/NAME.key`` have mode 0600 and never leave this folder; a provider's own operators hold
only their own pair.
"""

from __future__ import annotations

import ssl
import string
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.base.ids import is_name
from fabrictool.mesh.identity import (
    SESSION_ID_OCTETS,
    Credential,
    create_root,
    describe_chain,
    fingerprint,
    issue_provider,
    issue_session,
)
from fabrictool.mesh.revocation import read_revocation, revoke

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.mesh.identity import UnverifiedChain


SESSION_LONGEST_S = 8 * 86400.0
"""A session that joined by token lasts for a week at most; a revocation outlives it."""


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

    def provider(self, name: str) -> Credential:
        """A provider's signing credential; raises FT6302 when it was not issued, FT6303 for what is no name."""
        _check_name(name)
        return self._read(f"providers/{name}", f"run `fabrictool trust issue {name}`")

    def revoke(self, name: str, *, now: float) -> str:
        """Take back a provider's certificate, or one session's, by its id; returns the id of the revocation.

        Raises
        ------
        FabrictoolError
            FT6302 when there is no such provider, FT6303 for what is neither a provider's name nor a session's id.
        """
        if self.has_provider(name):
            provider = self._read(f"providers/{name}", "")
            revoked, until = fingerprint(provider.chain[0]), describe_chain(provider.chain_pem()).end
        elif len(name) == 2 * SESSION_ID_OCTETS and set(name) <= set(string.hexdigits):
            revoked, until = bytes.fromhex(name), now + SESSION_LONGEST_S
        else:
            hint = (
                "`fabrictool trust show` lists providers, `fabrictool status --json` sessions (32 hexadecimal digits)"
            )
            raise InvalidInputError.of("FT6303", f"{name!r} is neither a provider nor a session's id", hint=hint)
        text = revoke(self.root(), revoked, now=now, until=until)
        folder = self.folder / "revoked"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise file_error(error, folder) from error
        write_atomic(folder / f"{revoked.hex()}.txt", text.encode())
        return revoked.hex()

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

    def is_revoked(self, provider: Credential) -> bool:
        """Whether this certificate of a provider was taken back."""
        return (self.folder / "revoked" / f"{fingerprint(provider.chain[0]).hex()}.txt").exists()

    def has_provider(self, name: str) -> bool:
        return (self.folder / f"providers/{name}.crt").exists()

    def issue(self, provider: str, *, now: float, days: int = 90) -> Credential:
        """Sign a provider, anew if it has a credential already."""
        _check_name(provider)
        credential = issue_provider(self.root(), provider, now=now, days=days)
        self._write(f"providers/{provider}", credential)
        return credential

    def described(self) -> list[UnverifiedChain]:
        """The chains of the root and of all providers, unverified."""
        self.root()  # says what is missing
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
        named = {}
        for file in (self.folder / "providers").glob("*.crt"):
            provider = self._read(f"providers/{file.stem}", "")
            named[fingerprint(provider.chain[0])] = file.stem
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

    def session_files(
        self, provider: str, role: Literal["agent", "gateway"], *, now: float, seconds: float
    ) -> dict[str, bytes]:
        """The identity of one session, as files of a run folder."""
        root = self.root()  # first: without it there is no provider either
        signer = self.provider(provider)
        if self.is_revoked(signer):
            raise FabrictoolError.of(
                "FT6007",
                f"the certificate of provider {provider} was revoked",
                hint=f"`fabrictool trust issue {provider}` lets it in again, with a new one",
            )
        session = issue_session(signer, role, now=now, seconds=seconds)
        return {
            "identity/session.key": session.key_pem(),
            "identity/session.crt": session.chain_pem(),
            "identity/root.crt": root.chain_pem(),
        }

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
