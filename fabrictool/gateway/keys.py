"""API keys: only their hashes are stored; a lookup is one hash and one dictionary access.

Keys are random and long, so a plain SHA-256 is enough: there is nothing to guess that a slow hash would protect.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from fabrictool.base.canonical import canonical_json
from fabrictool.gateway.keyfile import KeyRow, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.domain.terms import Terms

SCRYPT_COST: Final = 2**14
"""Memory and time of the digest (scrypt's N, RFC 7914): it stands in plans, which others read, and keys that people
made up can be guessed."""
PSEUDONYMS_KEPT: Final = 4096
KEY_DIGITS: Final = 12
NO_TERMS: Final[Mapping[str, Terms]] = MappingProxyType({})


class Consumer:
    """Who sends a request; nobody changes it."""

    __slots__ = ("account", "group", "key", "tenant", "terms")

    # Wide: a key, and whose it is.
    def __init__(
        self, tenant: str, group: str | None, key: str = "", account: str = "", terms: Terms | None = None
    ) -> None:
        self.tenant = tenant
        self.group: str | None = group
        self.key = key
        """The beginning of the key's hash, by which records name it."""
        self.account = account
        """Whose limits and budget count: the tenant, or the key where it has terms of its own."""
        self.terms: Terms | None = terms
        """None: nothing limits it."""

    def expired(self, clock: Clock) -> bool:
        ends = self.terms.expires_at if self.terms is not None else None
        return ends is not None and clock.wall() >= ends

    def may_use(self, model: str) -> bool:
        return self.terms is None or self.terms.models is None or model in self.terms.models


def new_key() -> str:
    """256 random bits, with a prefix that secret scanners can find."""
    return "ftk_" + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_digest(fabric: str, rows: Iterable[KeyRow], admin: str = "") -> str:
    """Of the keys of a fabric: salted with its name, so that the same keys elsewhere do not show."""
    secret = canonical_json([[row.tenant, row.sha256] for row in rows] + ([["", admin]] if admin else []))
    salt = f"fabrictool keys of {fabric}".encode()
    return hashlib.scrypt(secret, salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=8).hex()


def presented_key(authorization: str) -> str:
    """What an ``Authorization`` header holds; empty: no key."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class MoreKeys(Protocol):
    """Keys that are made while the gateway runs."""

    @property
    def accounts(self) -> dict[str, Consumer]: ...

    def consumer(self, authorization: str) -> Consumer | None: ...

    def pseudonym(self, tenant: str) -> str: ...

    def doubt(self, authorization: str) -> str:
        """What is to be said of a key that nobody knows, beside that; empty: nothing."""

    @property
    def ready(self) -> bool:
        """Whether these keys were ever read: before, nobody can say that a key is none."""


class Keyring:
    """The keys that a gateway accepts."""

    def __init__(self, rows: Iterable[KeyRow], fabric: str = "", terms: Mapping[str, Terms] = NO_TERMS) -> None:
        """`fabric`: whose tenants they are, so that a tenant's pseudonyms of two fabrics differ; `terms`: by tenant."""
        self.admin = ""
        """Hash of the key of the key API."""
        rows = sorted(rows, key=lambda row: row.sha256, reverse=True)
        self._consumers = {row.sha256: _consumer(row, terms) for row in rows}
        self._presented: dict[str, Consumer] = {}
        """Header → whose it is, of those that were known: no more than there are keys, as clients write them."""
        self._fabric = fabric
        self._first_key = {row.tenant: row.sha256 for row in rows}
        self.more: MoreKeys | None = None
        """Whose keys are accepted, too."""

    def __len__(self) -> int:
        return len(self._consumers)

    def consumer(self, authorization: str) -> Consumer | None:
        """Who presents this ``Authorization`` header; None when nobody we know."""
        known = self._presented.get(authorization)
        if known is not None:
            return known
        consumer = self._consumers.get(hash_key(presented_key(authorization)))
        if consumer is not None:
            if len(self._presented) > 2 * len(self._consumers):
                self._presented.clear()
            self._presented[authorization] = consumer
        elif self.more is not None:
            return self.more.consumer(authorization)
        return consumer

    @property
    def accounts(self) -> dict[str, Consumer]:
        """Those that have terms."""
        ours = {there.account: there for there in self._consumers.values() if there.terms is not None}
        return ours if self.more is None else ours | self.more.accounts

    @property
    def budgeted(self) -> bool:
        """Whether anybody has a budget."""
        return any(there.terms is not None and there.terms.budget is not None for there in self._consumers.values())

    @property
    def tenants(self) -> tuple[str, ...]:
        """By name, whoever has a key."""
        return tuple(sorted(self._first_key))

    def pseudonym(self, tenant: str) -> str:
        """What the replicas' providers may know of a tenant; the same at all gateways of the fabric."""
        key = self._first_key.get(tenant)
        if key is not None:
            return pseudonym_of(self._fabric, tenant, key)
        return "" if self.more is None else self.more.pseudonym(tenant)


def _consumer(row: KeyRow, terms: Mapping[str, Terms]) -> Consumer:
    digits = row.sha256[:KEY_DIGITS]
    if isinstance(row.terms, msgspec.UnsetType):
        return Consumer(row.tenant, row.group, digits, row.tenant, terms.get(row.tenant))
    return Consumer(row.tenant, row.group, digits, f"{row.tenant}/{digits}", row.terms)


@functools.lru_cache(maxsize=PSEUDONYMS_KEPT)
def pseudonym_of(fabric: str, tenant: str, key_hash: str) -> str:
    """Keyed by the tenant's own API key, which gateways alone hold the hash of: nobody else can go from names to
    pseudonyms. It lasts as long as that key. Slow at its first use, for the reason of `SCRYPT_COST`.
    """
    salt = f"fabrictool pseudonyms of {fabric}".encode()
    key = hashlib.scrypt(key_hash.encode(), salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=32)
    return hmac.digest(key, tenant.encode(), "sha256")[:16].hex()


def read_keys(path: Path) -> Keyring:
    """The keyring of a key file; raises FT8002 when it is wrong or readable by others."""
    return Keyring(read_rows(path))
