"""What an answer that is not there at once looks like to the connection that waits for it."""

from __future__ import annotations

from typing import Protocol


class Answering(Protocol):
    """What makes an answer through a connection, such as an exchange."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """The gateway ends: what can still be said is said now."""

    def cancel(self) -> None:
        """The client is gone: nothing is to be said any more."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def expire(self, now: float) -> None:
        """Called every second, with the monotonic time, while the client takes what is written."""
