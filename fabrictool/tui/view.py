"""What all screens are drawn from: the newest look, what went before it, and the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fabrictool.base.text import visible
from fabrictool.status.documents import AgentStatus, GatewayStatus
from fabrictool.status.fleet import FleetStatus
from fabrictool.tui.fleet_rows import fleet_headline
from fabrictool.tui.history import History
from fabrictool.tui.problems import Trouble, troubles
from fabrictool.tui.rows import GAP, STALE_S, age_text, headline, passed_text, stamp, until_text

if TYPE_CHECKING:
    from fabrictool.status.documents import Event
    from fabrictool.status.sightings import Sighting

OPERATOR_STALE_S = 45.0
"""Clusters and journal are asked every quarter of a minute."""
MOVED_S = 3600.0
"""So long it is worth a line that somebody else answered before."""


@dataclass(frozen=True)
class ScreenView:
    """The newest sighting, what came before it, and the time."""

    moment: Sighting
    now: float
    """Wall time; of a replay that of its look."""
    history: History = field(default_factory=History)

    @property
    def age_s(self) -> float:
        """Since the newest answer came: by one clock, whatever that of who answers says."""
        return max(0.0, self.now - self.moment.heard)

    @property
    def there(self) -> float:
        """The time now by the clock of who answers, by which its document's times are."""
        live = self.moment.live
        return self.now if live is None else live.at + self.age_s

    @property
    def stale(self) -> bool:
        """Whether what stands here may not be so any more."""
        return bool(self.moment.trouble) or (self.moment.live is not None and self.age_s > STALE_S)

    @cached_property
    def troubles(self) -> list[Trouble]:
        return troubles(self.moment, self.history, self.there)

    @property
    def events(self) -> list[tuple[str, Event]]:
        """(whose, what), oldest first: of who is asked, and of the last apply."""
        live = self.moment.live
        if isinstance(live, GatewayStatus):
            return [("gateway", event) for event in live.events]
        return [(live.replica or live.node, event) for event in live.events] if isinstance(live, AgentStatus) else []

    def headline(self) -> str:
        """Whose view it is and how old, what comes in, and what is worst."""
        live = self.moment.live
        if live is None:
            return f"asking {self.moment.asked or 'for a gateway'} …"
        told = age_text(self.age_s)
        if isinstance(live, FleetStatus):
            return fleet_headline(live, told)
        lines = headline(live, told).splitlines()
        if isinstance(live, GatewayStatus):
            lines[1:] = [self._figures(live)]
        return "\n".join(lines)

    def _figures(self, gateway: GatewayStatus) -> str:
        requests, tokens, failing = (self.history.rate(what) for what in ("requests", "tokens", "failures"))
        agents = [node for node in gateway.nodes if node.role != "gateway"]
        linked = sum(node.connected for node in agents)
        ends = [node.ends_at for node in agents if node.connected and node.ends_at is not None]
        bad = sum(trouble.level == "bad" for trouble in self.troubles)
        missing = sum(len(model.missing) for model in gateway.models)
        parts = [
            f"▲ {bad} bad, {len(self.troubles) - bad} worth a look" if self.troubles else "all well",
            f"nodes {linked}/{len(agents)} linked"
            + (f", {missing} replica{'s'[: missing != 1]} missing" if missing else ""),
            f"req/s {rate_text(requests)} {self.history.trend('requests')}".rstrip(),
            f"tok/s {rate_text(tokens)} {self.history.trend('tokens')}".rstrip(),
            f"open {gateway.totals.in_flight}",
            f"failed {gateway.totals.failures}" + (f" ({failing:.2g}/s)" if failing else ""),
            f"next end {until_text(min(ends), self.there)}" if ends else "",
        ]
        return GAP.join(filter(None, parts))

    def trouble_line(self) -> str:
        """Why there is no news, for how long, and that it is not over; "": there is."""
        look = self.moment
        if not look.trouble:
            return ""
        silent = f" for {self.age_s:.0f} s" if look.live is not None else ""
        return f"! NO ANSWER{silent}: {visible(look.trouble)}; asking again"

    def moved_line(self) -> str:
        """Who was asked before, since when it does not answer and why; "": nobody, or that is long ago."""
        moved = self.moment.moved
        if moved is None or self.now - moved.since > MOVED_S:
            return ""
        return visible(f"~ {moved.before} does not answer since {stamp(moved.since, '%H:%M:%SZ')}: {moved.why}")

    def operator_line(self) -> str:
        """How old the operator's side is, and why, where that is worth a word."""
        operator = self.moment.operator
        if operator is None:
            return ""
        age = max(0.0, self.now - operator.at)
        if not operator.trouble:
            return f"clusters and journal: {passed_text(age)} old  STALE" if age > OPERATOR_STALE_S else ""
        return f"! clusters and journal: {passed_text(age)} old: {visible(operator.trouble)}; asking again"


def rate_text(rate: float | None) -> str:
    """Three digits, and words for many."""
    if rate is None:
        return "–"
    return f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}" if rate >= 0.05 or rate == 0 else "<0.1"
