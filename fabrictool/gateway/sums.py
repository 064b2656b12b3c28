"""What `fabrictool usage` adds up: requests, tokens and times of a store of records, by hour, tenant, model …"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import case, func, select

from fabrictool.gateway.keyrecords import IssuedKey, KeyUsage
from fabrictool.gateway.tables import KEYS, REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Select

    from fabrictool.gateway.store import RecordStore

_of = REQUESTS.c
GROUPINGS: Mapping[str, ColumnElement[Any]] = {
    "hour": _of.hour,
    "day": _of.hour // 24,
    "fabric": _of.fabric,
    "gateway": _of.gateway,
    "tenant": _of.tenant,
    "key": _of.key,
    "model": _of.model,
    "provider": _of.provider,
}
"""Hours and days of UTC, since 1970."""


class UsageRow(msgspec.Struct, frozen=True):
    """Of the requests that have `group` in common."""

    group: dict[str, str | int]
    """A value for each word of `GROUPINGS` that was asked for."""
    requests: int
    failed: int
    """Without a whole answer, or with a status of 400 and more."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    uncounted: int
    """Requests that got an answer whose engine did not say how many tokens it had: it broke off."""
    e2e_s: float | None
    """Mean, of those that were answered."""
    ttft_s: float | None
    """Mean, of streams."""


def usage(
    store: RecordStore, by: Sequence[str], *, since: float, until: float, equals: Mapping[str, str]
) -> list[UsageRow]:
    """Sums over ``since <= at < until`` (wall time, seconds) of rows whose columns are `equals`, in the groups' order.
    Raises StoreAwayError.
    """
    return [_row(by, row) for row in store.read(_query(by, since, until, equals))]


def key_usage(store: RecordStore, fabric: str, *, since: float, until: float) -> list[KeyUsage]:
    """The same over requests with issued keys, also with those that ended: by day, secret and model, in the order of
    days. Raises StoreAwayError.
    """
    day, whole = _of.hour // 24, (_of.end == "answered") & (_of.status < 400)
    query = (
        select(
            day,
            KEYS.c.sha256,
            func.max(KEYS.c.document),
            _of.model,
            func.count(),
            func.sum(case((whole, 0), else_=1)),
            *map(func.sum, (_of.prompt_tokens, _of.cached_tokens, _of.completion_tokens)),
        )
        .join(KEYS, (KEYS.c.digits == _of.key) & (KEYS.c.fabric == _of.fabric))
        .where(_of.fabric == fabric, _of.at >= since, _of.at < until)
        .group_by(day, KEYS.c.sha256, _of.model)
        .order_by(day, KEYS.c.sha256, _of.model)
    )
    decode = msgspec.json.Decoder(IssuedKey).decode
    return [KeyUsage(row[0], row[1], decode(row[2]), row[3], *map(int, row[4:])) for row in store.read(query)]


def _query(by: Sequence[str], since: float, until: float, equals: Mapping[str, str]) -> Select[Any]:
    groups = [GROUPINGS[word] for word in by]
    whole = (_of.end == "answered") & (_of.status < 400)
    uncounted = ~_of.counted & (_of.completion_tokens > 0)
    query = select(
        *groups,
        func.count(),
        func.sum(case((whole, 0), else_=1)),
        *map(func.sum, (_of.prompt_tokens, _of.cached_tokens, _of.completion_tokens)),
        func.sum(case((uncounted, 1), else_=0)),
        func.avg(case((whole, _of.e2e_s))),
        func.avg(_of.ttft_s),
    ).where(_of.at >= since, _of.at < until, *(GROUPINGS[word] == value for word, value in equals.items()))
    return query.group_by(*groups).order_by(*groups) if groups else query


def _row(by: Sequence[str], row: Sequence[Any]) -> UsageRow:
    group, (requests, failed, prompt, cached, completion, uncounted, e2e, ttft) = row[: len(by)], row[len(by) :]
    return UsageRow(
        group=dict(zip(by, group, strict=True)),
        requests=requests,
        failed=int(failed or 0),
        prompt_tokens=int(prompt or 0),  # PostgreSQL's sums of big integers are decimals
        cached_tokens=int(cached or 0),
        completion_tokens=int(completion or 0),
        uncounted=int(uncounted or 0),
        e2e_s=e2e,
        ttft_s=ttft,
    )
