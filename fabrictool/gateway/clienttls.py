"""TLS for clients, from two files on the gateway's host that whoever renews them replaces: they are read again."""

from __future__ import annotations

import ssl
from pathlib import Path

from fabrictool.base.errors import FabrictoolError

LOOK_S = 10.0
"""Between two looks at the files."""


class ClientTls:
    """The context of the clients' listener; connections that begin after a renewal have the new certificate."""

    def __init__(self, certificate: str, key: str) -> None:
        """Paths of PEM files, the certificate with its chain.

        Raises
        ------
        FabrictoolError
            FT8006 when they cannot be read, or do not belong together.
        """
        self._certificate, self._key = Path(certificate), Path(key)
        self._seen = self._state()
        self.context = self._loaded()

    def look(self) -> str:
        """Take over files that were replaced; returns what is worth an event, or nothing. What is wrong with them keeps
        the old certificate in use.
        """
        state = self._state()
        if state == self._seen:
            return ""
        self._seen = state
        try:
            self._loaded()  # an attempt on the context in use could leave a new certificate with an old key
            self.context.load_cert_chain(self._certificate, self._key)
        except FabrictoolError as error:
            return f"the new certificate is not used: {error.problems[0].message}"
        return "another certificate is used from now on"

    def _state(self) -> list[tuple[int, int]]:
        """What changes when a file is replaced; of one that is not there nothing."""
        known = []
        for path in (self._certificate, self._key):
            try:
                stat = path.stat()
                known.append((stat.st_mtime_ns, stat.st_ino))
            except OSError:
                known.append((0, 0))
        return known

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            wrong = "they are not PEM, or do not belong together" if isinstance(error, ssl.SSLError) else None
            reason = wrong or error.strerror or str(error)
            raise FabrictoolError.of(
                "FT8006",
                f"cannot use {self._certificate} with {self._key} for clients: {reason.lower()}",
                thing=str(self._certificate),
                hint="PEM files on the gateway's host, the certificate with its chain, readable for its account",
            ) from error
        return context
