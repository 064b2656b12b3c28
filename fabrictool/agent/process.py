"""One engine process: started, its log read, stopped gently and then surely, dead when its agent is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.engines.adapter import EngineCommand

_log = logging.getLogger("fabrictool.agent")

STOP_SECONDS = 10.0
LOG_SECONDS = 1.0
"""What a stopped engine has still to say is read for this long."""
LOG_LINES = 200
LINE_OCTETS = 8192
"""A longer line of an engine's log is cut into pieces of this size."""

_PR_SET_PDEATHSIG = 1


class EngineProcess:
    """A process group of its own; it can be started again when it is over."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        """`on_line` hears each line of its log."""
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._sentinel: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.lines: deque[str] = deque(maxlen=LOG_LINES)

    @property
    def pid(self) -> int | None:
        """Of the process, while it lives."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of the process that has ended and was not yet cleared away by `stop`."""
        return None if self._process is None else self._process.returncode

    @property
    def obituary(self) -> str:
        code = self.returncode
        return f"it ended with code {code}" if code is None or code >= 0 else f"it was killed by signal {-code}"

    async def start(self, command: EngineCommand) -> str | None:
        """Returns why that failed, if it did."""
        reading, writing = os.pipe()  # our own: asyncio's would make wait() wait for whoever else holds it
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=environment_of(command, os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # one prctl call, no locks: safe after fork
            )
            self._sentinel = await _sentinel(self._process.pid)
        except OSError as error:
            os.close(reading)
            return f"cannot start {command.argv[0]}: {(error.strerror or str(error)).lower()}"
        finally:
            os.close(writing)
        self._reader = asyncio.create_task(self._read_log(reading))
        return None

    async def ended(self) -> None:
        """Returns when it has; at once when it never began."""
        if self._process is not None:
            await self._process.wait()

    async def log_read(self) -> None:
        """Wait a moment for what it has still to say."""
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):  # a worker that left the group may hold the log open for ever
                async with asyncio.timeout(LOG_SECONDS):
                    await self._reader

    async def stop(self) -> None:
        """TERM to its group, then KILL; returns when it is gone."""
        process = self._process
        if process is not None and process.returncode is None:
            signal_group(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):  # Python 3.11's wait_for may swallow a cancellation
                    await process.wait()
            except TimeoutError:
                _log.warning("engine ignored TERM for %.0f s; killing it", STOP_SECONDS)
        if process is not None:
            signal_group(process.pid, signal.SIGKILL)  # what the engine left behind in its group
            await process.wait()
        if self._sentinel is not None:
            with contextlib.suppress(ProcessLookupError):
                self._sentinel.kill()
            await self._sentinel.wait()
            self._sentinel = None
        await self.log_read()
        self._process = self._reader = None

    # -- internals --------------------------------------------------------------------------------------------

    async def _read_log(self, descriptor: int) -> None:
        """Keep the tail, and pass every line on."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            rest = b""
            while data := await reader.read(LINE_OCTETS):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) >= LINE_OCTETS:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._log_line(line)
            if rest:
                self._log_line(rest)
        finally:
            transport.close()

    def _log_line(self, line: bytes) -> None:
        for begin in range(0, max(1, len(line)), LINE_OCTETS):
            text = line[begin : begin + LINE_OCTETS].decode(errors="replace").rstrip()
            self.lines.append(text)
            self._on_line(text)


def environment_of(command: EngineCommand, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the command's process sees."""
    kept = {name: value for name, value in inherited.items() if name not in command.unset}
    return command.unless_set | kept | command.env


def signal_group(pid: int, number: signal.Signals) -> None:
    """To a process group, if there is one still."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def die_with_parent() -> Callable[[], object]:
    """For the child: be killed when the agent dies, however it dies; an engine without an agent helps nobody."""
    libc = ctypes.CDLL(None)  # loaded before the fork: the child only makes the system call
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _sentinel(group: int) -> asyncio.subprocess.Process:
    """A shell that outlives us and kills the engine's whole group when its stdin, held by us alone, closes.

    The parent-death signal reaches the engine but not the workers that it started.
    """
    return await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        f"read -r _; kill -s KILL -- -{group}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
