"""What all adapters share: `run`, `put` and `get` over one primitive that carries a line of text to the login shell.

Files travel over a command's stdin and stdout, not SFTP: SFTP breaks where a login shell prints something, is switched
off at some sites, and its version 3 cannot say "disk full". One way for all adapters gives one set of answers.
"""

from __future__ import annotations

import posixpath
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections import commands, errors
from fabrictool.clusters.connections.protocol import RUN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.clusters.connections.protocol import Completed, Endpoint

TRANSFER_SECONDS = 600.0
"""A file's time; a dead link is found by keepalives much earlier."""
_END_SECONDS = 6.0
_HOST = r"[A-Za-z0-9_:][A-Za-z0-9._:%-]*"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"

# The size is compared because a connection that breaks looks like the end of stdin.
_PUT = """\
umask 077; LC_ALL=C; export LC_ALL
if [ -d "$1" ]; then echo "Is a directory" >&2; exit 1; fi
cat >"$2" && [ "$(wc -c <"$2")" -eq "$3" ] && chmod "$4" "$2" && mv -f "$2" "$1" && exit 0
rm -f "$2"; exit 1"""
_GET = 'LC_ALL=C; export LC_ALL; exec cat "$1"'


@dataclass(frozen=True, slots=True)
class ShellOutcome:
    """What came of one line sent to the login shell."""

    ending: Literal["ended", "timeout", "lost"]
    stdout: bytes = b""
    stderr: bytes = b""
    status: int | None = None
    why: str = ""


class ShellVerbs(ABC):
    """A `Connection` that still lacks its wire."""

    def __init__(self, endpoint: Endpoint) -> None:
        for hop in (*endpoint.jumps, endpoint):
            if not re.fullmatch(_HOST, hop.host):
                raise errors.bad_name("host name or address", hop.host)
            if not re.fullmatch(_USER, hop.user):
                raise errors.bad_name("user name", hop.user)
        self._endpoint = endpoint

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @abstractmethod
    def _carry(self, text: str, stdin: bytes, timeout_s: float, *, urgent: bool = False) -> ShellOutcome:
        """Send a line to the login shell; `urgent` ones wait for no free channel. Tries again only what never ran."""

    @abstractmethod
    def forward(self, host: str, port: int) -> AbstractContextManager[tuple[str, int]]:
        """A loopback address here that leads to `host`:`port` as the endpoint sees it, while the context lasts."""

    @abstractmethod
    def stream(self, argv: Sequence[str]) -> AbstractContextManager[Iterator[bytes]]:
        """The lines of a command's output as they come, without line ends; leaving the context ends the command."""

    @abstractmethod
    def close(self) -> None:
        """End it; a later call opens it again."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = RUN_SECONDS) -> Completed:
        """Run a command to its end; its time begins when it does, not when it waits for the connection."""
        return self._run(argv, errors.named(argv), stdin, timeout_s)

    def _run(self, argv: Sequence[str], what: str, stdin: bytes, timeout_s: float) -> Completed:
        wrapped = commands.wrap(argv)
        outcome = self._carry(wrapped.text, stdin, timeout_s)
        if outcome.ending == "timeout":
            ended = self._end_group(wrapped.begun(outcome.stdout))
            raise errors.timed_out(self._endpoint, what, timeout_s, ended=ended)
        if outcome.ending == "lost":
            raise errors.lost(self._endpoint, what, outcome.why)
        answer = wrapped.completed(outcome.stdout, outcome.stderr, outcome.status)
        if answer is not None:
            return answer
        if wrapped.begun(outcome.stdout) is not None or outcome.status is None:
            raise errors.lost(self._endpoint, what, "it was stopped from outside")
        raise errors.no_shell(self._endpoint, outcome.status, outcome.stdout + outcome.stderr)

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        place = _operand(path)
        token = commands.fresh_token()
        beside = posixpath.join(posixpath.dirname(place), f".{token}.tmp")
        argv = ["/bin/sh", "-c", _PUT, "put", place, beside, str(len(data)), f"{mode:o}"]
        done = self._run(argv, f"writing {path}", data, TRANSFER_SECONDS)
        if done.status != 0:
            raise errors.file_failure(self._endpoint, path, done.stderr)

    def get(self, path: str) -> bytes:
        done = self._run(["/bin/sh", "-c", _GET, "get", _operand(path)], f"reading {path}", b"", TRANSFER_SECONDS)
        if done.status != 0:
            raise errors.file_failure(self._endpoint, path, done.stderr)
        return done.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_group(self, group: int | None) -> bool:
        """End what ran too long; False when that is not known to have worked."""
        if group is None:
            return False
        argv = ["/bin/sh", "-c", commands.END_GROUP, "end", str(group)]
        wrapped = commands.wrap(argv)
        with suppress(FabrictoolError):
            outcome = self._carry(wrapped.text, b"", _END_SECONDS, urgent=True)
            answer = wrapped.completed(outcome.stdout, outcome.stderr, outcome.status)
            return outcome.ending == "ended" and answer is not None and answer.status == 0
        return False


def _operand(path: str) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path
