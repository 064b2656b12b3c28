"""What an API key may do: as a gateway's key file and spec say it."""

from __future__ import annotations

from typing import Literal

import msgspec

Period = Literal["day", "month", "total"]


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """At one gateway; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers."""
    concurrency: int = 0
    """Open requests."""


class BudgetTerms(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """At all gateways together."""

    tokens: int
    """Of prompts and answers."""
    per: Period = "total"
    """Of UTC."""


class Terms(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Of one key, or of one tenant's."""

    models: tuple[str, ...] | None = None
    """None: any."""
    expires_at: float | None = None
    """Wall time in seconds from which it is no key any more."""
    limits: KeyLimits = KeyLimits()
    budget: BudgetTerms | None = None
