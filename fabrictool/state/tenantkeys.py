"""The tenants' keys on their way to a gateway: hashes for its key file, and a digest by which a change is seen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.canonical import canonical_json
from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint.secrets import resolve
from fabrictool.domain.evidence import KeysSeen
from fabrictool.gateway.keys import KeyRow, encode_keys, hash_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.blueprint import Blueprint

SCRYPT_COST = 2**14
"""Memory and time of the digest (scrypt's N, RFC 7914): it stands in plans, which others read, and keys that people
made up can be guessed."""


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """Resolved once a command; `file` goes into the gateway's run folder and nowhere else."""

    file: bytes
    digest: str


def keys_seen(blueprint: Blueprint, environment: Mapping[str, str]) -> KeysSeen | None:
    """For evidence; None where a secret cannot be had: a plan can be made and reviewed there, and it says so."""
    try:
        keys = tenant_keys(blueprint, environment)
    except FabrictoolError:
        return None
    return KeysSeen.of(blueprint, keys.digest if keys is not None else "")


def tenant_keys(blueprint: Blueprint, environment: Mapping[str, str]) -> TenantKeys | None:
    """The keys of all tenants, None when the blueprint has none.

    The digest is salted with the fabric's name, so that the same keys elsewhere do not show.

    Raises
    ------
    FabrictoolError
        FT14xx a secret that cannot be had here.
    """
    if not blueprint.tenants:
        return None
    rows = [
        KeyRow(name, hash_key(resolve(tenant.key, environment)), tenant.group)
        for name, tenant in sorted(blueprint.tenants.items())
    ]
    secret = canonical_json([[row.tenant, row.sha256] for row in rows])
    salt = f"fabrictool keys of {blueprint.fabric}".encode()
    return TenantKeys(encode_keys(rows), hashlib.scrypt(secret, salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=8).hex())
