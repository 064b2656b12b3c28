"""What the owner of a node hears of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.records import Record
    from fabrictool.mesh.transport.tunnel import TunnelStream

Load = tuple[tuple[bytes, int, int, float, int], ...]
"""As in `Beat.load`."""


class Listener(Protocol):
    """All calls come from the event loop."""

    def record_changed(self, record: Record) -> None:
        """The registry holds something new."""

    def session_ended(self, reason: str) -> None:
        """The others will not hear this session any more; only a new one."""

    def tail_heard(self, session: bytes, service: bytes, text: str) -> None:
        """A neighbour of our provider tells how its engine's log ended."""

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None:
        """A neighbour's tunnel came or went: the earliest evidence of life and death."""

    def load_reported(self, session: bytes, load: Load) -> None:
        """Nothing in it: it is not known any more."""

    def load(self, peer: bytes) -> Load:
        """Our own volatile load, for the next beat to this neighbour."""

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        """A neighbour asks for one of our services; None refuses."""
