"""Times and limits of a connection; tests shorten them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """All times in seconds."""

    connect_s: float = 10.0
    """Until a host accepts the connection."""
    login_s: float = 20.0
    """From then on until we are logged in, for each host on the way."""
    keepalive_s: float = 15.0
    """Silence after which the other side is asked for a sign of life."""
    keepalive_count: int = 3
    """Unanswered questions after which the connection counts as broken."""
    channels: int = 4
    """Commands at a time; OpenSSH allows 10 sessions by default and frees them late."""
    refused_s: float = 20.0
    """How long a refused session is tried again, with growing pauses."""
