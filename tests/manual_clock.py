"""Virtual time."""


class ManualClock:
    """A clock that moves only when told to: virtual time for tests and simulations."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        """Seconds since the start of virtual time."""
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now += seconds
