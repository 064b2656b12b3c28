"""The tenants' keys on their way to a gateway: hashes for its key file, and a digest by which a change is seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError, Place, Problem
from fabrictool.blueprint.secrets import resolve
from fabrictool.domain.evidence import ADMIN, KeysSeen
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import hash_key, keys_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.blueprint import Blueprint

SHORTEST = 16
"""Characters of a key; shorter ones can be tried one after the other."""


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """Resolved once a command; `file` goes into the gateway's run folder and nowhere else."""

    file: bytes
    digest: str


def keys_seen(blueprint: Blueprint, environment: Mapping[str, str]) -> KeysSeen | None:
    """For evidence; None where a secret cannot be had: a plan can be made and reviewed there, and it says so.

    Raises
    ------
    InvalidInputError
        FT1409 and FT1410 for keys that were had and are not good.
    """
    try:
        keys = tenant_keys(blueprint, environment)
    except InvalidInputError:
        raise
    except FabrictoolError:
        return None
    return KeysSeen.of(blueprint, keys.digest if keys is not None else "")


def tenant_keys(blueprint: Blueprint, environment: Mapping[str, str]) -> TenantKeys | None:
    """The keys of all tenants and of the key API, None when the blueprint has none.

    Raises
    ------
    FabrictoolError
        FT14xx a secret that cannot be had here.
    InvalidInputError
        FT1409 a key that is too short, FT1410 two tenants with the same one.
    """
    api = blueprint.key_api
    if not blueprint.tenants and api is None:
        return None
    resolved = {name: resolve(tenant.key, environment) for name, tenant in sorted(blueprint.tenants.items())}
    admin = "" if api is None else resolve(api.key, environment)
    _check(resolved if api is None else resolved | {ADMIN: admin})
    rows = [KeyRow(name, hash_key(key), blueprint.tenants[name].group) for name, key in resolved.items()]
    admin_hash = hash_key(admin) if admin else ""
    return TenantKeys(encode_keys(rows, admin_hash), keys_digest(blueprint.fabric, rows, admin_hash))


def _whose(name: str) -> str:
    return "the key API" if name == ADMIN else f"tenant {name}"


def _check(keys: Mapping[str, str]) -> None:
    problems = []
    first: dict[str, str] = {}
    for name, key in keys.items():
        place = Place(thing=name if name == ADMIN else f"tenants.{name}.key")
        if len(key) < SHORTEST:
            message = f"the key of {_whose(name)} has {len(key)} characters, at least {SHORTEST} are needed"
            problems.append(Problem("FT1409", message, place, "make one: `openssl rand -hex 24`"))
        if key in first:
            message = (
                f"{_whose(first[key])} and {_whose(name)} have the same key: whose request it is could not be told"
            )
            problems.append(Problem("FT1410", message, place, "give each tenant a key of its own"))
        first.setdefault(key, name)
    if problems:
        raise InvalidInputError(problems)
