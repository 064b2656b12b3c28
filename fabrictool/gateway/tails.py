"""How engines' logs ended, as their agents tell it: kept for the status page, so much of each session and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.registry import Registry

SESSIONS_KEPT = 200
OF_A_SESSION_KEPT = 8
"""Engine starts of one session whose ends are remembered: an agent gives up after a few restarts."""


class Tails:
    """The ends of the logs of one provider's engines: its gateway shows them, and takes them from nobody else."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[bytes, str]] = {}
        """Session → engine start → text; who spoke last stands last."""

    def take(
        self, sender: VerifiedSession | None, service: bytes, text: str, registry: Registry, provider: str
    ) -> bool:
        """Whether it is kept: it has to come from an agent of `provider`, about an engine start of its own."""
        if sender is None or (sender.claims.provider, sender.claims.role) != (provider, "agent"):
            return False
        if service not in {body.service for body in registry.services_of(sender.session)}:
            return False
        kept = self._of.pop(sender.session, {})
        kept.pop(service, None)
        kept[service] = text
        self._of[sender.session] = kept
        if len(kept) > OF_A_SESSION_KEPT:
            del kept[next(iter(kept))]
        if len(self._of) > SESSIONS_KEPT:
            del self._of[next(iter(self._of))]
        return True

    def of(self, session: bytes, service: bytes) -> str:
        """Empty where nothing is known."""
        return self._of.get(session, {}).get(service, "")
