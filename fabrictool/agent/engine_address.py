"""Where an engine's API is, for its agent alone.

Engines ask nobody who they are. A port of loopback can be reached by every user of a shared node; a socket in a folder
of the agent's cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "ft-api-"
"""Not that of earlier releases, whose living agents do not hold their folders."""
YOUNG_S = 60.0
"""A younger folder may not be held yet."""
LONGEST = 100
"""Octets of a Unix socket's path; Linux takes 107."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A Unix socket, or a port of loopback where there is none."""

    port: int = 0
    socket: str = ""

    def __str__(self) -> str:
        return self.socket or f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return "http://localhost" if self.socket else f"http://127.0.0.1:{self.port}"

    def http(self, timeout_s: float) -> aiohttp.ClientSession:
        """Asks this engine, whatever the host of a URL is."""
        connector = aiohttp.UnixConnector(self.socket) if self.socket else aiohttp.TCPConnector()
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """A connection of its own for `protocol`; raises OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        if self.socket:
            await loop.create_unix_connection(protocol, self.socket)
        else:
            await loop.create_connection(protocol, "127.0.0.1", self.port)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Only this user can enter it."""
    usual = Path(tempfile.gettempdir())
    short = usual if len(str(usual)) < LONGEST - len(f"/{PREFIX}12345678/api.sock") else Path("/tmp")  # noqa: S108 - mkdtemp
    _remove_abandoned(short)
    temporary = tempfile.TemporaryDirectory(prefix=PREFIX, dir=short, ignore_cleanup_errors=True)
    with temporary as folder, contextlib.ExitStack() as holding:
        with contextlib.suppress(OSError):  # on a file system without such locks nobody removes it, either
            holding.enter_context(_held(Path(folder)))
        yield Path(folder)


def _remove_abandoned(parent: Path) -> None:
    """Folders of our user's agents that were killed: nobody holds them any more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held, or another agent removes it, too
            its = folder.stat()
            if its.st_uid == os.getuid() and time.time() - its.st_mtime > YOUNG_S:
                with _held(folder):
                    shutil.rmtree(folder)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """As long as this process lives at most; raises OSError where another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
