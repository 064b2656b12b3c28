"""The fields of a key in LiteLLM's words: what is asked of a key, and what is told of it."""

from __future__ import annotations

import calendar
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fabrictool.domain.terms import BudgetTerms, KeyLimits, Period, Terms
from fabrictool.gateway.keys import KEY_DIGITS, hash_key

if TYPE_CHECKING:
    from fabrictool.gateway.keyrecords import IssuedKey, KeyState

SECRET_PREFIX = "sk-"  # noqa: S105 - how secrets begin
MOST_PER_MINUTE = 10**12
METADATA_OCTETS = 16 * 1024
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9})(mo|[smhdw])")
_Words = Annotated[str, Meta(max_length=256)]
_Count = int | float | UnsetType | None


class KeyRefusal(Exception):  # noqa: N818 - it is what the client gets
    """A call that is answered with an error: its status, our code and what is wrong."""

    def __init__(self, status: int, code: str, text: str, *, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.text, self.param = status, code, text, param


class TokenBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ours: LiteLLM's budgets are money, and nobody here knows a price."""

    tokens: Annotated[int, Meta(ge=1, le=2**62)]
    per: Period = "month"


class KeyFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``/key/generate``, ``update`` and ``regenerate`` may say; null takes a limit away, absent leaves it.

    A field that is not here is refused: it might be meant to forbid something.
    """

    key: str | None = None
    key_alias: _Words | UnsetType | None = UNSET
    user_id: _Words | UnsetType | None = UNSET
    team_id: _Words | UnsetType | None = UNSET
    models: Annotated[list[_Words], Meta(max_length=1000)] | UnsetType | None = UNSET
    """None, or none at all: any."""
    duration: str | UnsetType | None = UNSET
    rpm_limit: _Count = UNSET
    tpm_limit: _Count = UNSET
    max_parallel_requests: _Count = UNSET
    token_budget: TokenBudget | UnsetType | None = UNSET
    max_budget: float | UnsetType | None = UNSET
    budget_duration: str | UnsetType | None = UNSET
    blocked: bool | UnsetType | None = UNSET
    metadata: dict[str, Any] | UnsetType | None = UNSET


class KeyNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which keys ``/key/delete`` means: by hash or secret, or by alias."""

    keys: Annotated[list[str], Meta(max_length=1000)] | None = None
    key_aliases: Annotated[list[str], Meta(max_length=1000)] | None = None


def changed(key: IssuedKey, fields: KeyFields, now: float) -> IssuedKey:
    """The key as `fields` want it. Raises KeyRefusal for what cannot be had."""
    for name in ("max_budget", "budget_duration"):
        if getattr(fields, name) not in (None, UNSET):
            text = f"`{name}` is a budget in money, and this fabric has no prices: leave it out, or null"
            raise KeyRefusal(400, "FT8144", f"{text}; `token_budget` limits tokens", param=name)
    changes: dict[str, Any] = {
        kept: _name(value, asked)
        for asked, kept in (("key_alias", "alias"), ("user_id", "user_id"), ("team_id", "team_id"))
        if not isinstance(value := getattr(fields, asked), UnsetType)
    }
    if not isinstance(fields.blocked, UnsetType):
        changes["blocked"] = bool(fields.blocked)
    if not isinstance(fields.metadata, UnsetType):
        changes["metadata"] = fields.metadata or {}
        if len(msgspec.json.encode(changes["metadata"])) > METADATA_OCTETS:
            raise KeyRefusal(400, "FT8140", f"`metadata` is over {METADATA_OCTETS >> 10} KiB", param="metadata")
    return msgspec.structs.replace(key, terms=_terms(key.terms, fields, now), changed_at=now, **changes)


def _terms(terms: Terms, fields: KeyFields, now: float) -> Terms:
    limits, budget = terms.limits, fields.token_budget
    counts = {
        "requests_per_minute": _count(fields.rpm_limit, limits.requests_per_minute, "rpm_limit"),
        "tokens_per_minute": _count(fields.tpm_limit, limits.tokens_per_minute, "tpm_limit"),
        "concurrency": _count(fields.max_parallel_requests, limits.concurrency, "max_parallel_requests"),
    }
    changes: dict[str, Any] = {"limits": KeyLimits(**counts)}
    if not isinstance(fields.models, UnsetType):
        changes["models"] = tuple(fields.models) if fields.models else None
    if not isinstance(fields.duration, UnsetType):
        changes["expires_at"] = _end(fields.duration, now)
    if not isinstance(budget, UnsetType):
        changes["budget"] = None if budget is None else BudgetTerms(budget.tokens, budget.per)
    return msgspec.structs.replace(terms, **changes)


def _name(value: str | None, field: str) -> str:
    if value is None:
        return ""
    if not value or not value.isprintable() or value != value.strip():
        raise KeyRefusal(400, "FT8140", f"`{field}` is to be printable, and not empty", param=field)
    return value


def _count(value: _Count, former: int, field: str) -> int:
    if isinstance(value, UnsetType):
        return former
    if value is None:
        return 0
    if not 1 <= value <= MOST_PER_MINUTE or value != int(value):
        text = f"`{field}` is a whole number from 1 on; null is no limit, and a key that may do nothing is blocked"
        raise KeyRefusal(400, "FT8140", text, param=field)
    return int(value)


def _end(duration: str | None, now: float) -> float | None:
    """Wall seconds; a month ends on its day, or on the last one that there is."""
    if duration is None or duration == "-1":
        return None
    match = _DURATION.fullmatch(duration)
    if match is None:
        text = f"`duration` is a number with s, m, h, d, w or mo, such as 30d, and not {duration!r}"
        raise KeyRefusal(400, "FT8140", text, param="duration")
    try:
        return _later(now, int(match[1]), match[2])
    except (OverflowError, ValueError) as error:
        raise KeyRefusal(400, "FT8140", "`duration` ends after the year 9999", param="duration") from error


def _later(now: float, number: int, unit: str) -> float:
    if unit != "mo":
        return datetime.fromtimestamp(now + number * _UNITS[unit], UTC).timestamp()
    begin = datetime.fromtimestamp(now, UTC)
    years, month = divmod(begin.month - 1 + number, 12)
    year = begin.year + years
    day = min(begin.day, calendar.monthrange(year, month + 1)[1])
    return begin.replace(year=year, month=month + 1, day=day).timestamp()


def hash_of(name: str) -> str:
    """Of a key that is named by its secret, or by its hash."""
    return hash_key(name) if name.startswith(SECRET_PREFIX) else name.lower()


def described(state: KeyState) -> dict[str, Any]:
    """A key as LiteLLM tells of it; `key_name` is what records and `fabrictool usage` call it."""
    key, terms = state.key, state.key.terms
    budget = terms.budget
    return {
        "token": state.sha256,
        "token_id": state.sha256,
        "key_name": state.sha256[:KEY_DIGITS],
        "key_alias": key.alias or None,
        "user_id": key.user_id or None,
        "team_id": key.team_id or None,
        "models": list(terms.models or ()),
        "expires": _instant(terms.expires_at),
        "rpm_limit": terms.limits.requests_per_minute or None,
        "tpm_limit": terms.limits.tokens_per_minute or None,
        "max_parallel_requests": terms.limits.concurrency or None,
        "token_budget": None if budget is None else {"tokens": budget.tokens, "per": budget.per},
        "max_budget": None,
        "budget_duration": None,
        "spend": 0.0,
        "blocked": key.blocked,
        "metadata": key.metadata,
        "created_at": _instant(key.created_at),
        "updated_at": _instant(key.changed_at),
    }


def _instant(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
