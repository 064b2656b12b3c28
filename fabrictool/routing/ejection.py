"""Which servers to leave alone for a while: passive outlier detection, from the requests themselves. Pure.

A server that refuses connections has no load, so whoever looks for the least loaded one would send it everything. So it
is *out* at once when it refuses, and after two failures on end when it breaks off or answers 5xx before its head: for a
second, doubled each time up to 30. Then one request may try it (half-open); if that is answered, it is back. A try may
end without a verdict, as where its client goes away, and a whole answer takes minutes before it says anything: so it
bars others for as long as the outage lasted and no longer, and nobody has to say that it is over. Each try while the
one before is still open makes that time twice as long: who hangs is not sent a request a second. An answer of 4xx is
the client's fault and no failure (sglang #25811: a client's 400s took a whole fleet out). What was begun before a
server went out and fails later tells nothing new: it would be out for half a minute after one restart.

If everybody is out, nobody is: a wrong verdict must not refuse what somebody might have served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILURES: Final = 2
"""On end, that take a server out which does accept connections."""
OUT_S: Final = 1.0
OUT_MAX_S: Final = 30.0
ALIKE: Final = 5
"""Answers of 500 on end to one asker that count as his requests' fault; see `Ejection.heard`."""
_NOT_IMPLEMENTED: Final = 501


class Ejection:
    """Of one server. All times in monotonic seconds."""

    __slots__ = ("_alike", "_asker", "_failures", "_lasts", "_open", "_tried_from", "_went_out", "out_until")

    def __init__(self) -> None:
        self.out_until = 0.0
        """0: it is not out. Then, and again and again after it, one request may try it."""
        self._went_out = -1.0
        self._lasts = 0.0
        self._failures = 0
        self._asker, self._alike = "", 0
        """Who got the last 500s on end, and how many."""
        self._tried_from = -1.0
        """When a request first tried it since it went out; below 0: none did."""
        self._open = False
        """Whether nothing was heard of the last one that tried it."""

    def available(self, now: float) -> bool:
        """Whether a request may go there: it is not out, or it is time to try it."""
        return now >= self.out_until

    def began(self, now: float) -> None:
        """A request goes there."""
        if not self.out_until or now < self.out_until:
            return
        if self._open:
            self._lasts = self._longer()
        if self._tried_from < 0.0:
            self._tried_from = now
        self._open, self.out_until = True, now + self._lasts

    def answered(self) -> None:
        """It answered, whatever it said of the request."""
        self.out_until, self._lasts, self._failures, self._alike = 0.0, 0.0, 0, 0
        self._tried_from, self._open = -1.0, False

    def heard(self, status: int, now: float, began: float, asker: str) -> None:
        """The head of its answer to a request that `began` then; `asker`: the tenant, if keys are asked for.

        501 says that it has no such thing, as llama-server does of embeddings: it is well. 500 may be the request's
        own fault, as where a template fails at what somebody sends again and again; so the next ones to the same asker
        count only from `ALIKE` on end on, with nothing answered between: one tenant puts no busy server out, and
        one that is broken does not draw all requests to itself, not even where there is one tenant alone. 502, 503 and
        504 say that it cannot serve.
        """
        if status < 500 or status == _NOT_IMPLEMENTED:
            self.answered()
            return
        if status == 500 and began > self._went_out:
            self._alike = self._alike + 1 if asker == self._asker else 1
            self._asker = asker
            if 1 < self._alike < ALIKE:
                self.given_up()
                return
        self.failed(now, began)

    def given_up(self) -> None:
        """Nothing is known of it: the client went away, its agent ends, or what it said was the request's fault."""
        self._open = False

    def failed(self, now: float, began: float, *, refused: bool = False) -> None:
        """An attempt that `began` then broke off or got 5xx before its head or, `refused`, could not connect."""
        if self.out_until:
            if self._tried_from < 0.0 or began < self._tried_from:  # it was asked before, or only since all are out
                return
        elif began <= self._went_out:
            return
        self._failures += 1
        if refused or self.out_until or self._failures >= FAILURES:
            self._lasts = self._longer()
            self._went_out, self.out_until = now, now + self._lasts
            self._tried_from, self._open = -1.0, False

    def _longer(self) -> float:
        """How long it is out the next time, in seconds."""
        return min(OUT_MAX_S, max(OUT_S, 2.0 * self._lasts))


class Ejectable(Protocol):
    """What can be out."""

    @property
    def ejection(self) -> Ejection: ...


E = TypeVar("E", bound=Ejectable)


def available(candidates: Sequence[E], now: float) -> Sequence[E]:
    """Those that are not out; all, if everybody is."""
    return [c for c in candidates if not c.ejection.out_until or c.ejection.available(now)] or candidates
