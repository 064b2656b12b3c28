"""How often join tokens were used: a small database beside the provider's key, so that a restart forgets nothing."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.identity import CLOCK_SKEW_S
from fabrictool.mesh.issuing import MAX_SESSION_S
from fabrictool.mesh.jointoken import JoinTokenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.mesh.jointoken import JoinToken

BUSY_S = 10.0
"""How long one request waits for another one's transaction."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS uses (
    token TEXT NOT NULL, session TEXT NOT NULL, at REAL NOT NULL, expires REAL NOT NULL,
    leaf BLOB NOT NULL, PRIMARY KEY (token, session)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY, renewable_until REAL NOT NULL, forget REAL NOT NULL
) WITHOUT ROWID;
"""


class TokenUses:
    """Sessions by the token that started them; several processes may use one file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with closing(self._open()) as base:
                base.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    def spend(
        self, token: JoinToken, session: str, sign: Callable[[], tuple[bytes, ...]], *, now: float
    ) -> tuple[tuple[bytes, ...], bool]:
        """The chain that `sign` makes, and whether it is new: who asks again, as after a lost answer, gets the same.

        The use is on the disk before this returns.

        Raises
        ------
        JoinTokenError
            FT6405 when the token has no use left.
        FabrictoolError
            FT4302 when the database cannot be used: then nothing is signed.
        """
        try:
            with closing(self._open()) as base:
                base.execute("BEGIN IMMEDIATE")  # one writer at a time: counting and adding are one step
                base.execute("DELETE FROM uses WHERE expires < ?", (now - 2 * CLOCK_SKEW_S,))
                rows = dict(base.execute("SELECT session, leaf FROM uses WHERE token = ?", (token.id,)).fetchall())
                if session in rows:
                    return (rows[session], token.signer), False
                if len(rows) >= token.uses:
                    message = f"the join token is used up: it was good for {token.uses}"
                    hint = f"used by session {', '.join(name[:8] for name in sorted(rows)[:4])}; ask for a new token"
                    raise JoinTokenError.of("FT6405", message, hint=hint)
                chain = sign()
                row = (token.id, session, now, token.expires, chain[0])
                base.execute("INSERT INTO uses (token, session, at, expires, leaf) VALUES (?, ?, ?, ?, ?)", row)
                if not isinstance(token.renewable_until, msgspec.UnsetType):
                    base.execute("DELETE FROM sessions WHERE forget < ?", (now,))
                    kept = (session, token.renewable_until, now + MAX_SESSION_S)
                    base.execute("INSERT INTO sessions (session, renewable_until, forget) VALUES (?, ?, ?)", kept)
                base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return chain, True

    def renewable_until(self, session: str) -> float | None:
        """Wall seconds, by the token that started it; None for a session that is renewed by nobody, or not by us.

        Raises
        ------
        FabrictoolError
            FT4302 when the database cannot be used.
        """
        try:
            with closing(self._open()) as base:
                row = base.execute("SELECT renewable_until FROM sessions WHERE session = ?", (session,)).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return None if row is None else float(row[0])

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        base.execute("PRAGMA synchronous = FULL")
        return base

    def _failed(self, error: Exception) -> FabrictoolError:
        return FabrictoolError.of(
            "FT4302",
            f"cannot use {self._path}: {error}",
            file=str(self._path),
            hint="without its count of uses an issuer signs nothing; look after the file and its folder",
        )
