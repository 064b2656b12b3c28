"""Joins two connections into one pipe, whatever each of them is: a socket, or a stream of a tunnel."""

from __future__ import annotations

import asyncio
from typing import cast


class Splice(asyncio.Protocol):
    """One end of a plain pipe: what comes in goes out at the other end, as fast as that takes it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.opposite = self
        self.lost = False
        """Whether its connection is over."""
        self.reason = ""
        """Why, if its end said."""
        self._over = False

    @classmethod
    def pair(cls) -> tuple[Splice, Splice]:
        first, second = cls(), cls()
        first.opposite, second.opposite = second, first
        return first, second

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """What comes before the other end is there has to wait."""
        self.transport = cast("asyncio.Transport", transport)
        if self._over:
            self.transport.close()
        elif self.opposite.transport is None:
            self.transport.pause_reading()
        else:
            self.opposite.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if (out := self.opposite.transport) is not None and not out.is_closing():
            out.write(data)

    def eof_received(self) -> bool:
        """TLS runs inside: the half that has ended ends both."""
        self.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.reason = True, "" if exc is None else str(exc)
        self.opposite.close()

    def pause_writing(self) -> None:
        if (source := self.opposite.transport) is not None and not source.is_closing():
            source.pause_reading()

    def resume_writing(self) -> None:
        if (source := self.opposite.transport) is not None and not source.is_closing():
            source.resume_reading()

    def close(self) -> None:
        """At once, or as soon as it is made."""
        self._over = True
        if self.transport is not None:
            self.transport.close()
