"""Usage of issued keys in the shape of LiteLLM's ``/user/daily/activity``."""

from __future__ import annotations

import math
from datetime import date, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.gateway.keyrecords import KeyUsage

_EPOCH = date(1970, 1, 1)


def daily_activity(usage: Iterable[KeyUsage], page: int, size: int) -> dict[str, Any]:
    """A page of `size` days with usage, from 1 on; `usage` in the order of days. Nobody here knows prices: spend is 0.

    All keys of a day are on one page, so that nobody who adds up pages misses some or counts them twice.
    """
    days = [(day, list(entries)) for day, entries in groupby(usage, key=lambda entry: entry.day)]
    pages = math.ceil(len(days) / size)
    everything = _metrics([entry for _, entries in days for entry in entries])
    totals = {f"total_{name}": value for name, value in everything.items() if name != "total_tokens"}
    return {
        "results": [_day(day, entries) for day, entries in days[(page - 1) * size : page * size]],
        "metadata": totals
        | {"total_tokens": everything["total_tokens"], "page": page, "total_pages": pages, "has_more": page < pages},
    }


def _day(day: int, entries: Sequence[KeyUsage]) -> dict[str, Any]:
    by_model: dict[str, list[KeyUsage]] = {}
    by_key: dict[str, list[KeyUsage]] = {}
    for entry in entries:
        by_model.setdefault(entry.model, []).append(entry)
        by_key.setdefault(entry.sha256, []).append(entry)
    models = {model: {"metrics": _metrics(its), "metadata": {}} for model, its in by_model.items() if model}
    return {
        "date": (_EPOCH + timedelta(days=day)).isoformat(),
        "metrics": _metrics(entries),
        "breakdown": {
            "models": models,
            "model_groups": models,
            "api_keys": {
                sha256: {"metrics": _metrics(its), "metadata": _metadata(its[0])} for sha256, its in by_key.items()
            },
        },
    }


def _metadata(entry: KeyUsage) -> dict[str, str | None]:
    key = entry.key
    return {"key_alias": key.alias or None, "team_id": key.team_id or None, "user_id": key.user_id or None}


def _metrics(entries: Sequence[KeyUsage]) -> dict[str, float | int]:
    prompt, completion = (
        sum(getattr(entry, f"{kind}_tokens") for entry in entries) for kind in ("prompt", "completion")
    )
    requests, failed = sum(entry.requests for entry in entries), sum(entry.failed for entry in entries)
    return {
        "spend": 0.0,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cache_read_input_tokens": sum(entry.cached_tokens for entry in entries),
        "total_tokens": prompt + completion,
        "api_requests": requests,
        "successful_requests": requests - failed,
        "failed_requests": failed,
    }
