"""When a gateway that joins others may be counted on: another one is stopped when this one says that it serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fabrictool.status.documents import Health

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.mesh.transport.node import MeshNode

SETTLE_S = 15.0
"""A replica that was killed stays in the registry for hours, and a gateway that is gone is dialled for ever: neither is
waited for longer than this, which is less than `apply` waits for a gateway (30 s)."""
LOOK_S = 0.1


class Settling:
    """Ready once it is linked to another gateway, if there are others, and reaches every replica that serves there."""

    def __init__(self, mesh: MeshNode, clock: Clock, *, others: bool) -> None:
        self._mesh = mesh
        self._clock = clock
        self._until = clock.monotonic() + SETTLE_S
        self.settled = not others

    def health(self) -> Health:
        if self.settled:
            return Health(at=self._clock.wall(), ready=True)
        text = "waits for the other gateways, and for the replicas that they reach"
        return Health(at=self._clock.wall(), ready=False, waits_for="replicas", text=text)

    async def run(self, done: Callable[[], None]) -> None:
        """Look until it has settled, which lasts: what is lost later is no reason to call a gateway unready."""
        while not self.settled:
            await asyncio.sleep(LOOK_S)
            self.settled = self._clock.monotonic() > self._until or self._complete()
        done()

    def _complete(self) -> bool:
        """Through a single hub does not count: that may be the one that will be stopped."""
        registry, linked = self._mesh.registry, self._mesh.neighbours
        identities = [registry.session(session) for session in linked]
        serving = {entry.service.session for entry in registry.serving(wall=self._clock.wall())}
        hub = any(identity is not None and identity.claims.role == "gateway" for identity in identities)
        return hub and all(session in linked or len(self._mesh.relays.hubs_to(session)) > 1 for session in serving)
