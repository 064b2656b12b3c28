"""Who signed in, what that lets them do, and the keys that they have made."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.ids import random_id
from fabrictool.gateway.keyapi import new_secret
from fabrictool.gateway.keyfields import KeyRefusal
from fabrictool.gateway.keyrecords import IssuedKey, KeyState
from fabrictool.gateway.keys import hash_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.specs import LoginSpec
    from fabrictool.gateway.issued import IssuedKeys

NAME_CHARACTERS = 60
_NAMES = ("preferred_username", "email", "name", "sub")


class Person(msgspec.Struct, frozen=True):
    """Somebody who signed in, as the session's cookie says it."""

    id: str
    """128 bits of a hash over issuer and subject: the same for ever, whatever else changes at the provider."""
    name: str
    """What the provider calls them now; others may be called the same."""
    group: str
    """Consumer group of the keys that they make now."""


def person_of(spec: LoginSpec, claims: Mapping[str, Any]) -> Person | None:
    """Of an ID token's claims; None for who is in no group that gets keys."""
    subject = str(claims.get("sub") or "")
    group = _group(spec, claims.get(spec.claim))
    if not subject or not group:
        return None
    name = next((text for claim in _NAMES if (text := _printable(claims.get(claim)))), "somebody")
    digest = hashlib.sha256(f"{spec.issuer}\n{subject}".encode()).hexdigest()
    return Person(digest[:32], name, group)


def _group(spec: LoginSpec, claimed: Any) -> str:
    theirs = claimed if isinstance(claimed, list) else [claimed]
    return next((group for name, group in spec.groups if name in theirs), spec.group)


def _printable(value: Any) -> str:
    text = str(value or "") if isinstance(value, str | int) else ""
    return "".join(letter for letter in text if letter.isprintable() and letter not in "~/").strip()[:NAME_CHARACTERS]


class OwnKeys:
    """Of the people who sign in, among all keys that were made."""

    def __init__(self, issued: IssuedKeys, spec: LoginSpec) -> None:
        self._issued = issued
        self._spec = spec

    async def of(self, person: Person, now: float) -> list[KeyState]:
        """Those that still are keys, the newest first. Raises FabrictoolError where the store does not answer."""
        await self._issued.refresh()
        return sorted(_theirs(self._issued.live, person, now), key=lambda state: -state.key.created_at)

    async def make(self, person: Person, label: str, now: float) -> tuple[str, KeyState]:
        """A new secret, which is shown once. Raises KeyRefusal FT8173 and FT8174, and FabrictoolError."""
        label = _printable(label)
        if not label:
            raise KeyRefusal(400, "FT8174", "a key needs a name, such as laptop")
        secret = ""

        def add(live: Mapping[str, KeyState]) -> list[KeyState]:
            nonlocal secret
            theirs = _theirs(live, person, now)
            if len(theirs) >= self._spec.keys:
                raise KeyRefusal(409, "FT8173", f"you have {len(theirs)} keys, and may have {self._spec.keys}")
            expired = [state for state in live.values() if state.key.person == person.id and state not in theirs]
            alias = f"{person.name}~{person.id[:6]}/{label}"
            if any(state.key.alias == alias for state in live.values() if state not in expired):
                raise KeyRefusal(409, "FT8174", f"you have a key named {label!r} already")
            secret = new_secret()
            key = IssuedKey(
                id=random_id(16),
                created_at=now,
                changed_at=now,
                alias=alias,
                user_id=person.name,
                person=person.id,
                group=person.group,
                terms=msgspec.structs.replace(self._spec.terms, expires_at=now + self._spec.keep_s),
            )
            return [*(msgspec.structs.replace(state, ended=True) for state in expired), KeyState(hash_key(secret), key)]

        *_, state = await self._issued.change(add)
        return secret, state

    async def end(self, person: Person, sha256: str) -> KeyState:
        """Raises KeyRefusal FT8141 for a key that is not theirs, and FabrictoolError."""

        def end(live: Mapping[str, KeyState]) -> list[KeyState]:
            state = live.get(sha256)
            if state is None or state.key.person != person.id:
                raise KeyRefusal(404, "FT8141", "you have no such key")
            return [msgspec.structs.replace(state, ended=True)]

        (state,) = await self._issued.change(end)
        return state


def label_of(state: KeyState) -> str:
    """What its owner calls a key."""
    return state.key.alias.rpartition("/")[2]


def _theirs(live: Mapping[str, KeyState], person: Person, now: float) -> list[KeyState]:
    return [
        state
        for state in live.values()
        if state.key.person == person.id and (state.key.terms.expires_at or now + 1) > now
    ]
