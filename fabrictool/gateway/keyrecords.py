"""Keys that the key API made, as they lie in the store and go between it and gateways; no secret is among them."""

from __future__ import annotations

from typing import Any

import msgspec

from fabrictool.domain.terms import Terms


class IssuedKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a key is and may do, whatever its secret is at the moment. Times are wall times in seconds."""

    id: str
    """128 random bits, which no answer shows; it stays when the key gets a new secret."""
    created_at: float
    changed_at: float
    alias: str = ""
    """Empty: it has none. No two live keys of a fabric have the same."""
    user_id: str = ""
    team_id: str = ""
    person: str = ""
    """Who made it after a login, by a hash; `user_id` is what the login's provider calls that person now."""
    group: str = ""
    """Consumer group; empty: that of the key API."""
    blocked: bool = False
    terms: Terms = Terms()
    metadata: dict[str, Any] = {}

    @property
    def tenant(self) -> str:
        """Whose it is, as records say it. Tenants of a blueprint have no slash in their names."""
        if self.person:
            return f"login/{self.user_id}~{self.person[:6]}"
        if self.team_id:
            return f"team/{self.team_id}"
        if self.user_id:
            return f"user/{self.user_id}"
        return f"key/{self.alias or self.id[:12]}"


class KeyState(msgspec.Struct, frozen=True):
    """One secret of a key, by its hash."""

    sha256: str
    key: IssuedKey
    revision: int = 0
    """Of the store's keys, with which it was written; 0: it is not there yet."""
    ended: bool = False
    """It is no key any more; its usage still has a name."""


class KeyChanges(msgspec.Struct, frozen=True):
    """What a gateway does not know yet of a fabric's keys."""

    revision: int
    """The newest one; others may have been written meanwhile, and are told of again."""
    states: list[KeyState]
    whole: bool
    """These are all live keys there are, and not only what changed."""


class KeyUsage(msgspec.Struct, frozen=True):
    """Sums over the requests with one secret, of one model, on one day of UTC."""

    day: int
    """Since 1970."""
    sha256: str
    key: IssuedKey
    model: str
    requests: int
    failed: int
    """As `fabrictool usage` counts them: without a whole answer, or with a status of 400 and more."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
