"""What a login node can be asked, whichever SSH implementation carries it.

Blocking calls, safe from several threads; an adapter may keep one connection behind them. Nothing here knows of
schedulers. A command is an argument list: adapters quote it, so no caller builds shell text. Secrets go through
`stdin` or `put`, never through an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

RUN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An SSH server; host keys are pinned, there is no trust on first use."""

    host: str
    port: int
    user: str
    host_keys: tuple[str, ...]
    """Public keys as in ``known_hosts``: ``ssh-ed25519 AAAA…``, or ``@cert-authority ssh-ed25519 AAAA…``."""
    jumps: tuple[Endpoint, ...] = ()
    """Hosts to go through, nearest first; each has keys of its own."""
    identity: str = ""
    """File of the private key (its certificate beside it as ``FILE-cert.pub``); "": the agent's and the usual ones."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended; a signal gives 128 + its number, as in a shell."""

    status: int
    stdout: bytes
    stderr: bytes


class Connection(Protocol):
    """One way to one endpoint, opened when first used and again after it broke.

    Raises
    ------
    FabrictoolError
        Each verb raises a coded error with `transient` set right: what did not answer may answer later, a host key
        that is not the pinned one never will. Whether a command that broke off has run is not known to the caller.
    """

    @property
    def endpoint(self) -> Endpoint: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = RUN_SECONDS) -> Completed:
        """Run a command to its end; a status other than 0 is an answer and no error."""

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file whole or not at all: beside its place, then renamed; relative paths begin at the home."""

    def get(self, path: str) -> bytes:
        """The bytes of a file; raises FT5331 to FT5334."""

    def forward(self, host: str, port: int) -> AbstractContextManager[tuple[str, int]]:
        """A loopback address here that leads to `host`:`port` as the endpoint sees it, while the context lasts."""

    def stream(self, argv: Sequence[str]) -> AbstractContextManager[Iterator[bytes]]:
        """The lines of a command's output as they come, without line ends; leaving the context ends the command."""

    def close(self) -> None:
        """End it; a later call opens it again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
