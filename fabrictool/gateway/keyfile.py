"""The file in which a gateway finds the hashes of its keys, and whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class KeyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key: whose it is, and the hash that proves it."""

    tenant: str
    sha256: str
    group: str | None = None
    """Consumer group, for the allowlist; None may use every provider."""
    terms: Terms | msgspec.UnsetType = msgspec.UNSET
    """Of this key; unset: those of its tenant, if it has any."""


class KeyFile(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of ``keys.json``."""

    keys: list[KeyRow]
    admin: str = ""
    """Hash of the key of the key API; empty: there is none."""


def encode_keys(rows: Iterable[KeyRow], admin: str = "") -> bytes:
    """The bytes of a key file."""
    return msgspec.json.encode(KeyFile(list(rows), admin))


def read_rows(path: Path) -> list[KeyRow]:
    """The rows of a key file; raises what `read_key_file` raises."""
    return read_key_file(path).keys


def read_key_file(path: Path) -> KeyFile:
    """A key file; raises FT8002 when it is wrong, readable by others or has a key twice."""
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidInputError.of(
                "FT8002", "the key file can be read by others", file=str(path), hint=f"chmod 600 {path}"
            )
        file = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as error:
        raise file_error(error, path) from error
    except msgspec.DecodeError as error:
        hint = 'it holds {"keys": [{"tenant": …, "sha256": …, "group": …}]}; make one with `fabrictool keys create`'
        raise InvalidInputError.of("FT8002", f"not a key file: {error}", file=str(path), hint=hint) from error
    first: dict[str, str] = {}
    for row in file.keys:
        if row.sha256 in first:
            message = f"the same key is listed twice: for {first[row.sha256]} and for {row.tenant}"
            hint = "remove one of the rows; `fabrictool keys create` makes a new key"
            raise InvalidInputError.of("FT8002", message, file=str(path), hint=hint)
        first[row.sha256] = row.tenant
    return file
