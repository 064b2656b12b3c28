"""How much a key, or a model, may take: rates, open requests, and a budget that cannot be overspent. Pure.

A rate is a bucket that fills steadily and holds a minute's worth. How many tokens a request takes is known at its end:
then they are taken out, and who is below nothing waits until that is made good. So a rate can be exceeded by what is
open, and is kept over time.

A budget is another matter. What a request can cost at most is set aside before it is sent, out of tokens that this
gateway took from the fabric's ledger before (`Purse`), and what it did not use is put back. The ledger gives all
gateways together no more than the budget; a purse gives no more than it holds; so nothing is overspent, whoever dies
and when. What a gateway that dies has in its purse is lost to the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from fabrictool.domain.terms import KeyLimits

Limited = Literal["requests", "tokens", "concurrency"]
MINUTE_S: Final = 60.0
RETRY_S: Final = 1.0
"""Nobody knows when an open request ends."""


class Bucket:
    """Full at first; `level` may be negative."""

    __slots__ = ("at", "level", "per_minute")

    def __init__(
        self,
        per_minute: int,
        level: float,
        at: float,
    ) -> None:
        self.per_minute = per_minute
        self.level = level
        self.at = at

    def fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / MINUTE_S)
        self.at = now

    def wait(self, least: float) -> float:
        """Seconds until there is that much."""
        return max(0.0, (least - self.level) * MINUTE_S / self.per_minute)


class Allowance:
    """The limits of one key or one model; times are seconds of a monotonic clock."""

    __slots__ = ("_concurrency", "_elsewhere", "_open", "_requests", "_tokens", "begun", "used")

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self._concurrency = limits.concurrency
        self._open = 0
        self._elsewhere: dict[str, int] = {}
        """Another process that shares these limits → how many of its requests are open."""
        self.begun = 0
        """Requests, of this process."""
        self.used = 0
        """Tokens of those that have ended."""
        self._requests = Bucket(limits.requests_per_minute, limits.requests_per_minute, now)
        self._tokens = Bucket(limits.tokens_per_minute, limits.tokens_per_minute, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        """Other limits from now on; what is open stays counted, and nobody gains a full bucket."""
        for bucket, rate in (
            (self._requests, limits.requests_per_minute),
            (self._tokens, limits.tokens_per_minute),
        ):
            bucket.fill(now)
            bucket.level = min(bucket.level, rate) if bucket.per_minute else rate
            bucket.per_minute = rate
        self._concurrency = limits.concurrency

    def refusal(self, now: float) -> tuple[Limited, float] | None:
        """What is exceeded, and after how many seconds to ask again; None: go on, and `begin`."""
        elsewhere = sum(self._elsewhere.values()) if self._elsewhere else 0
        if self._concurrency and self._open + elsewhere >= self._concurrency:
            return "concurrency", RETRY_S
        if self._requests.per_minute:
            self._requests.fill(now)
            if self._requests.level < 1:
                return "requests", self._requests.wait(1)
        if self._tokens.per_minute:
            self._tokens.fill(now)
            if self._tokens.level < 1:
                return "tokens", self._tokens.wait(1)
        return None

    def begin(self) -> None:
        """A request that was not refused."""
        self._open += 1
        self.begun += 1
        self._requests.level -= 1

    def end(self, tokens: int) -> None:
        """It is over, and took so many."""
        self._open -= 1
        self.correct(tokens)

    def correct(self, tokens: int) -> None:
        """What is over took so many more than was told."""
        self.used += tokens
        self._tokens.level -= tokens

    @property
    def open(self) -> int:
        """Requests of this process."""
        return self._open

    def took_elsewhere(self, process: str, requests: int, tokens: int, open_: int, now: float) -> None:
        """What another process let begin, and what came to its end, since it was heard last; and what is open there."""
        self._requests.fill(now)
        self._tokens.fill(now)
        self._requests.level -= requests
        self._tokens.level -= tokens
        self.left(process)
        if open_:
            self._elsewhere[process] = open_

    def left(self, process: str) -> None:
        """Its requests are open no more."""
        self._elsewhere.pop(process, None)


class Purse:
    """What one gateway holds of one budget for one period; in tokens."""

    __slots__ = ("held", "reserved", "used_at", "wanted")

    def __init__(self, now: float) -> None:
        self.held = 0
        """Taken from the ledger, and neither used nor set aside."""
        self.reserved = 0
        self.wanted = 0
        """Since it was filled: the sum of what it could not set aside, or the largest amount that it could."""
        self.used_at = now

    def reserve(self, most: int, now: float) -> bool:
        """Set aside what a request can cost; False: there is not so much here."""
        self.used_at = now
        if most > self.held:
            self.wanted += most
            return False
        self.wanted = max(self.wanted, most)
        self.held -= most
        self.reserved += most
        return True

    def settle(self, most: int, used: int) -> None:
        """The request for which `most` was set aside took `used`."""
        self.reserved -= most
        self.held += most - used

    def correct(self, more: int) -> None:
        """What is settled took so many more than was told; no more than there is here, for that is a budget's end."""
        self.held -= min(more, self.held)

    def missing(self, block: int) -> int:
        """How much to take from the ledger, so that it is filled seldom and holds what is asked for."""
        full = max(block, 2 * self.wanted)
        return full - self.held if self.held < full / 2 else 0
