"""What went before: rates, trends, and who changes all the time. From looks alone, so that a replay shows the same."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.status.documents import GatewayStatus
    from fabrictool.status.sightings import Sighting

KEPT_S = 900.0
"""Seconds of the past that curves and rates can look at."""
RATE_S = 30.0
"""Rates are means over so long."""
TREND_S = 10.0
"""Of one column of a trend."""
TREND_COLUMNS = 12
FLAPPING_S, FLAPPING = 600.0, 4
"""Who changed so often within so long is flapping."""
MOST_COUNTED = 10**15
"""Nobody counts further in a quarter of an hour, and a larger integer may be none that can be divided."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of a moment, of the whole gateway or of one model."""

    at: float
    requests: int
    failures: int
    tokens: int


NOTHING: deque[Counts] = deque()


class History:
    """Of one fabric in the eyes of one gateway after the other; a gateway that began anew counts from there."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[Counts]] = defaultdict(deque)
        """By model; "" for all."""
        self._changes: dict[str, deque[tuple[float, str]]] = defaultdict(deque)
        """Replica or node → (when, what it was from then on)."""
        self._turned: dict[str, float] = {}
        """Replica or node → when it came up or went, last."""
        self._seen: dict[str, float] = {}
        """Replica or node → when it was seen last."""
        self._session = ""

    def add(self, look: Sighting) -> None:
        """The newest look; one of the same moment as the last adds nothing."""
        gateway = look.gateway
        if gateway is None or look.trouble:
            return
        if gateway.session != self._session:
            self._session = gateway.session
            self._counts.clear()
        totals = gateway.totals
        self._count("", Counts(gateway.at, totals.requests, totals.failures, totals.tokens))
        for model in gateway.models:
            self._count(model.model, Counts(gateway.at, model.requests, model.failures, model.tokens))
        for name, state in states_of(gateway).items():
            self._seen[name] = gateway.at
            changes = self._changes[name]
            if changes and (changes[-1][1] == "up") != (state == "up"):
                self._turned[name] = gateway.at
            if not changes or changes[-1][1] != state:
                changes.append((gateway.at, state))
            while changes and changes[0][0] < gateway.at - KEPT_S and len(changes) > 1:
                changes.popleft()
        self._forget(gateway.at - KEPT_S)

    def _forget(self, before: float) -> None:
        """Names that were not seen since: nodes come and go, each under a new one."""
        for name in [name for name, at in self._seen.items() if at < before]:
            del self._seen[name], self._changes[name]
            self._turned.pop(name, None)
        for model in [model for model, counts in self._counts.items() if counts[-1].at < before]:
            del self._counts[model]

    def rate(self, what: str, model: str = "") -> float | None:
        """Requests, failures or tokens a second, over the last `RATE_S`; None as long as there is one look alone."""
        counts = self._counts.get(model, NOTHING)
        if len(counts) < 2:
            return None
        last = counts[-1]
        first = next(count for count in counts if count.at >= last.at - RATE_S)
        if first is last:
            first = counts[-2]
        return _a_second(first, last, what) if last.at > first.at else None

    def trend(self, what: str, model: str = "") -> str:
        """A bar for each of the last `TREND_COLUMNS` times `TREND_S`, as high as the rate then."""
        counts = self._counts.get(model, NOTHING)
        if len(counts) < 2:
            return ""
        ends = [counts[-1].at - TREND_S * back for back in reversed(range(TREND_COLUMNS))]
        return bars([_rate_before(counts, end, what) for end in ends if end > counts[0].at])

    def since(self, name: str) -> float | None:
        """Since when it is up, or is not, in whatever way; None: from the first look on."""
        return self._turned.get(name)

    def flapping(self, now: float) -> dict[str, int]:
        """Who changed often lately, and how often."""
        lately = {
            name: sum(at >= now - FLAPPING_S for at, _ in list(changes)[1:]) for name, changes in self._changes.items()
        }
        return {name: count for name, count in sorted(lately.items()) if count >= FLAPPING}

    def _count(self, model: str, counts: Counts) -> None:
        mine = self._counts[model]
        if mine and counts.at <= mine[-1].at:
            return
        mine.append(counts)
        while mine[0].at < counts.at - KEPT_S:
            mine.popleft()


def states_of(gateway: GatewayStatus) -> Mapping[str, str]:
    """Node or replica → whether it serves."""
    states: dict[str, str] = {}
    for node in gateway.nodes:
        names = [service.replica for service in node.services if service.lifecycle in ("JOIN", "SERVING")]
        for name in names or [node.node or node.session[:8]]:
            if node.connected or states.get(name) != "up":  # another one may serve what a lost one did
                states[name] = "up" if node.connected else "lost"
    for model in gateway.models:
        for replica in model.missing:
            states[replica] = "missing"
    return states


def bars(values: Sequence[float]) -> str:
    """One character each; the largest is full, and a tenth of it can be told from nothing."""
    most = max(values, default=0.0)
    if most <= 0.0:
        return BARS[0] * len(values)
    return "".join(BARS[min(len(BARS) - 1, int(value / most * (len(BARS) - 1) + 0.999))] for value in values)


def _a_second(first: Counts, last: Counts, what: str) -> float:
    counted, passed = getattr(last, what) - getattr(first, what), last.at - first.at
    return max(0, min(counted, MOST_COUNTED)) / passed if passed > 0 else 0.0


def _rate_before(counts: Iterable[Counts], end: float, what: str) -> float:
    """Mean over the `TREND_S` before `end`."""
    inside = [count for count in counts if end - TREND_S <= count.at <= end]
    if len(inside) < 2:
        return 0.0
    return _a_second(inside[0], inside[-1], what)
