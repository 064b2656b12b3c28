"""Wrong clocks, said before they matter: certificates are refused when two clocks differ by more than five minutes.

Nothing but that looks at a clock: order, timeouts and votes do without. So who is an hour off goes on serving, and
does not come back after its tunnels were lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fabrictool.base.clock import duration_text
from fabrictool.mesh.identity import CLOCK_SKEW_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.mesh.transport.node import MeshNode

TOLD_FROM_S = 60.0
"""A fifth of what certificates allow, as `doctor` has it; a beat may be late by some seconds."""
LOOK_S = 1.0


class ClockWatch:
    """Compares our wall clock with the neighbours' beats."""

    def __init__(self, mesh: MeshNode, clock: Clock, note: Callable[[str, str, str], None]) -> None:
        """`note` takes an event's kind, subject and text."""
        self._mesh = mesh
        self._clock = clock
        self._note = note
        self._differs: dict[bytes, bool] = {}
        """Neighbour whose clock differed at the last look → whether that was told."""

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Once. What shows at two looks is told: beats that came while we stood still are old."""
        former, self._differs = self._differs, {}
        for session in self._mesh.neighbours:
            tunnel = self._mesh.tunnel(session)
            theirs = None if tunnel is None else tunnel.peer_wall()
            ahead = 0.0 if theirs is None else theirs - self._clock.wall()
            if abs(ahead) > TOLD_FROM_S:
                if former.get(session) is False:
                    self._note("clock-differs", session.hex()[:8], _sentence(ahead))
                self._differs[session] = session in former
            elif former.get(session):
                self._note("clock-agrees", session.hex()[:8], "its clock agrees with ours again")


def _sentence(ahead: float) -> str:
    text = f"its clock is {duration_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} ours"
    if abs(ahead) <= CLOCK_SKEW_S:
        return text
    return f"{text}: once this link is lost, certificates may be refused until the wrong one is set right"
