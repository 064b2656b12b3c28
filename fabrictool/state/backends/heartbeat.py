"""A lease that lives as long as somebody renews it, for places where no operating system ends it with its process."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError, StaleError
from fabrictool.state.backends.document import lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabrictool.base.clock import Clock
    from fabrictool.domain.state import Lease

TTL_S = 120.0
"""A lease without a renewal ends after this; a longer one blocks longer after a crash, a shorter one is lost to a
shorter break of the network."""
BEATS = 3
"""Renewals in that time: two may fail."""
SKEW_S = 30.0
"""Another machine's clock may be ahead by this before it takes over a lease that still counts."""


def expired(lease: Lease, now: float) -> bool:
    """Whether its holder has not renewed it for so long that another may take it; `now` in wall seconds."""
    return lease.expires is not None and now > lease.expires + SKEW_S


class LeaseHeartbeat:
    """Renews one lease from a thread, and says whether it still counts.

    `renew` gets the lease with its new expiry and puts it there; it raises FT4201 when another one is there.
    """

    def __init__(
        self, lease: Lease, renew: Callable[[Lease], None], *, clock: Clock, place: str, ttl_s: float = TTL_S
    ) -> None:
        self._lease = lease
        self._renew = renew
        self._clock = clock
        self._place = place
        self._ttl_s = ttl_s
        self._stop = threading.Event()
        self._lost: FabrictoolError | None = None
        self._lock = threading.Lock()
        """One renewal at a time: the thread's, or the one that a write asks for."""

    @property
    def id(self) -> str:
        return self._lease.id

    @property
    def lost(self) -> bool:
        """Whether it is known that somebody else has it now."""
        return self._lost is not None

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def check(self) -> None:
        """Before a write; raises FT4201 when the lease is gone, FT4202 when that cannot be found out."""
        if self._lost is not None:
            raise self._lost
        if self._lease.expires is not None and self._clock.wall() >= self._lease.expires:
            self.renew()  # this machine slept, or the network was away: it is ours if nobody took it since

    def renew(self) -> None:
        with self._lock:
            expires = None if self._lease.expires is None else self._clock.wall() + self._ttl_s
            lease = msgspec.structs.replace(self._lease, expires=expires)
            try:
                self._renew(lease)
            except StaleError as error:
                self._lost = error
                raise
            self._lease = lease

    def gone(self, why: str) -> FabrictoolError:
        """The error for a lease that a write found to be gone."""
        self._lost = lost(self._lease, why, self._place)
        return self._lost

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl_s / BEATS) and self._lost is None:
            with contextlib.suppress(FabrictoolError):  # a write says it, and the next beat may be luckier
                self.renew()
