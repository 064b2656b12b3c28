"""TLS 1.3 with mutual authentication, the federation's root as the only authority.

Host names play no part: the peer's identity is the URI in its certificate, checked against the chain in its HELLO
(`tunnel.py`), so a node may move between addresses and still prove who it is.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.files import write_atomic
from fabrictool.mesh.identity import Credential, IdentityError

if TYPE_CHECKING:
    from pathlib import Path

ALPN = "fabric/1"


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """Where a session's credential lies; the key file has mode 0600."""

    folder: Path

    @property
    def root(self) -> Path:
        """PEM of the federation's root certificate."""
        return self.folder / "root.crt"

    @property
    def chain(self) -> Path:
        """PEM of the session's chain, leaf first."""
        return self.folder / "session.crt"

    @property
    def key(self) -> Path:
        """PEM of the session's private key."""
        return self.folder / "session.key"

    def write(self, credential: Credential, root: Credential) -> None:
        """Store a session's credential; the key readable by its owner alone."""
        write_atomic(self.key, credential.key_pem(), mode=0o600)
        write_atomic(self.chain, credential.chain_pem())
        write_atomic(self.root, root.chain_pem())

    def read(self) -> tuple[Credential, bytes]:
        """The session's credential and the root certificate in DER form.

        Raises
        ------
        IdentityError
            FT6001 when a file is missing or the key can be read by others; FT6002 when a file holds something else.
        """
        try:
            if self.key.stat().st_mode & 0o077:
                raise IdentityError.of(
                    "FT6001", "the private key can be read by others", file=str(self.key), hint=f"chmod 600 {self.key}"
                )
            credential = Credential.from_pem(self.key.read_bytes(), self.chain.read_bytes())
            root = ssl.PEM_cert_to_DER_cert(self.root.read_text())
        except OSError as error:
            raise IdentityError.of(
                "FT6001", f"cannot read the session's identity: {error.strerror}", file=str(error.filename)
            ) from error
        except ValueError as error:
            raise IdentityError.of("FT6002", f"not a certificate: {error}", file=str(self.root)) from error
        return credential, root


def server_context(files: IdentityFiles) -> ssl.SSLContext:
    """For the side that listens: every client must prove its session."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no resumption: every connection proves itself anew, there is no 0-RTT to replay
    return _prepare(context, files)


def client_context(files: IdentityFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # identity is the chain, not the address: see the module's docstring
    return _prepare(context, files)


def _prepare(context: ssl.SSLContext, files: IdentityFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=files.root.read_text())
    context.load_cert_chain(files.chain, files.key)
    context.set_alpn_protocols([ALPN])
    return context
