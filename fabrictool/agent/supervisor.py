"""One engine process: started, watched, restarted with a pause, stopped gently and then surely.

The supervisor decides nothing about the mesh; it calls `on_change` whenever its state moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shlex
import signal
import socket
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import aiohttp

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.domain.specs import BroughtEngine
    from fabrictool.engines.adapter import EngineAdapter, EngineCommand
    from fabrictool.status.documents import EngineState

_log = logging.getLogger("fabrictool.agent")

WATCH_SECONDS = 1.0
FAILED_CHECKS = 3
MAX_RESTARTS = 5
STABLE_SECONDS = 300.0
"""An engine that served this long starts counting its restarts anew."""
PROBE_S = 120.0
"""To see whether an engine is installed: a shared file system may be slow, and an image has to be unpacked."""
REFUSES = 65
"""An engine that ends so, before it was ever ready, says that its input is wrong (EX_DATAERR of sysexits.h)."""
STOP_SECONDS = 10.0
LOG_SECONDS = 1.0
"""What a stopped engine has still to say is read for this long."""
LOG_LINES = 200
LINE_OCTETS = 8192
"""A longer line of an engine's log is cut into pieces of this size."""

_PR_SET_PDEATHSIG = 1


class EngineFailedError(FabrictoolError):
    """The engine did not start, or fell over too often (FT7103)."""


class Supervisor:
    """Runs one engine and knows how it is.

    `command` makes the command line for a port; it is asked anew at every start, so a port that was taken in
    between costs one restart and not the replica. A server that a job has `brought` running is watched and
    neither started nor stopped. Without a `model` it is the only one that the engine lists, of those that are allowed.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        command: Callable[[int], EngineCommand],
        model: str,
        on_change: Callable[[], None],
        *,
        start_timeout_s: float,
        brought: BroughtEngine | None = None,
    ) -> None:
        self._adapter = adapter
        self._command = command
        self.model = model
        self._running_at = brought.port if brought is not None else 0
        self._allowed = brought.models if brought is not None else ()
        self._on_change = on_change
        self._start_timeout = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._sentinel: asyncio.subprocess.Process | None = None
        self._installed = False
        self._reader: asyncio.Task[None] | None = None
        self.state: EngineState = "starting"
        self.port: int | None = None
        self.restarts = 0
        self.progress = ""
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        self.lines: deque[str] = deque(maxlen=LOG_LINES)

    @property
    def pid(self) -> int | None:
        """Of the engine, while it lives."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def run(self) -> None:
        """Start and watch until cancelled; raises EngineFailedError when restarts are used up."""
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while True:
                began = loop.time()
                reason = await self._run_once(http)
                if self.state == "loading" and self._process is not None and self._process.returncode == REFUSES:
                    await self._refused()
                if loop.time() - began > STABLE_SECONDS:
                    self.restarts = 0
                if self.restarts >= MAX_RESTARTS:
                    self._move("failed")
                    raise EngineFailedError.of(
                        "FT7103",
                        f"engine {self._adapter.name} failed {self.restarts + 1} times, the last time: {reason}",
                        thing=f"engine/{self._adapter.name}",
                        hint=f"its last line: {self.lines[-1] if self.lines else 'none'}",
                    )
                self.restarts += 1
                self.progress = f"restart {self.restarts} of {MAX_RESTARTS}: {reason}"
                _log.warning("engine %s: %s; starting it again", self._adapter.name, reason)
                self._move("unhealthy")
                await self.stop()
                await asyncio.sleep(min(30.0, 0.5 * 2**self.restarts))
                self._move("starting")

    async def _refused(self) -> NoReturn:
        """The same input would be refused again: said once, with the engine's own words."""
        self._move("failed")
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOG_SECONDS):
                    await self._reader
        words = " ".join(line.strip() for line in list(self.lines)[-2:]) or f"it ended with code {REFUSES}"
        raise EngineFailedError.of(
            "FT7105",
            f"engine {self._adapter.name} refuses its model or its options: {words}",
            thing=f"engine/{self._adapter.name}",
            hint="starting it again would not help; `fabrictool doctor` checks the model",
        )

    async def stop(self) -> None:
        """TERM to the engine's process group, then KILL; returns when it is gone."""
        process = self._process
        if process is not None and process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):  # Python 3.11's wait_for may swallow a cancellation
                    await process.wait()
            except TimeoutError:
                _log.warning("engine ignored TERM for %.0f s; killing it", STOP_SECONDS)
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)  # what the engine left behind in its group
            await process.wait()
        if self._sentinel is not None:
            with contextlib.suppress(ProcessLookupError):
                self._sentinel.kill()
            await self._sentinel.wait()
            self._sentinel = None
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):  # a worker that left the group may hold the log open for ever
                async with asyncio.timeout(LOG_SECONDS):
                    await self._reader
            self._reader = None
        self._process = None

    # -- internals --------------------------------------------------------------------------------------------

    async def _run_once(self, http: aiohttp.ClientSession) -> str:
        """One life of the engine; returns why it ended."""
        if not self._running_at:
            failed = await self._start()
            if failed is not None:
                return failed
        else:
            self.port = self._running_at
        self._move("loading")
        why = await self._until_ready(http)
        if why is None:
            self._move("ready")
            why = await self._watch(http)
        return why

    async def _start(self) -> str | None:
        """Start the process; why that failed, if it did."""
        self.port = free_port("127.0.0.1")
        command = self._command(self.port)
        environment = {name: value for name, value in os.environ.items() if name not in command.unset} | command.env
        if command.probe and not self._installed:
            await self._look_for(command.probe, environment)
        reading, writing = os.pipe()  # our own: asyncio's would make wait() wait for whoever else holds it
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=_die_with_parent(),  # one prctl call, no locks: safe after fork
            )
            self._sentinel = await _sentinel(self._process.pid)
        except OSError as error:
            os.close(reading)
            return f"cannot start {command.argv[0]}: {(error.strerror or str(error)).lower()}"
        finally:
            os.close(writing)
        self._reader = asyncio.create_task(self._read_log(reading))
        return None

    async def _look_for(self, probe: tuple[str, ...], environment: dict[str, str]) -> None:
        """What is not installed is not there at the next start either: said once, and nothing is started."""
        try:
            process = await asyncio.create_subprocess_exec(
                *probe,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError as error:
            words = f"{probe[0]}: {(error.strerror or str(error)).lower()}"
        else:
            try:
                async with asyncio.timeout(PROBE_S):
                    output, _ = await process.communicate()
            except TimeoutError:
                _log.warning("nothing said within %.0f s whether engine %s is installed", PROBE_S, self._adapter.name)
                return
            finally:
                if process.returncode is None:
                    _signal_group(process.pid, signal.SIGKILL)
                    await process.wait()
            if process.returncode == 0:
                self._installed = True
                return
            lines = output.decode(errors="replace").strip().splitlines()
            words = lines[-1] if lines else f"looked for with {shlex.join(probe)}"
        self._move("failed")
        raise EngineFailedError.of(
            "FT7107",
            f"engine {self._adapter.name} is not installed where the inventory says: {words}",
            thing=f"engine/{self._adapter.name}",
            hint="correct `software.engines` of the cluster, or have it installed there",
        )

    async def _until_ready(self, http: aiohttp.ClientSession) -> str | None:
        readiness = self._adapter.readiness
        deadline = asyncio.get_running_loop().time() + self._start_timeout
        while asyncio.get_running_loop().time() < deadline:
            if self._ended:
                return self._obituary()
            if await self._healthy(http, readiness.path):
                served = await self._served_models(http)
                self.model = self.model or only_model(served, self._allowed)
                if self.model in served:
                    return None
                if served:
                    return f"it serves {', '.join(served)}, not {self.model or 'exactly one allowed model'}"
            await asyncio.sleep(readiness.interval_s)
        return f"not ready after {self._start_timeout:.0f} s"

    async def _watch(self, http: aiohttp.ClientSession) -> str:
        failures = 0
        while failures < FAILED_CHECKS:
            await asyncio.sleep(WATCH_SECONDS)
            if self._ended:
                return self._obituary()
            if await self._healthy(http, self._adapter.readiness.path):
                failures = 0
                await self._scrape(http)
            else:
                failures += 1
        return f"{failures} health checks in a row failed"

    @property
    def _ended(self) -> bool:
        return not self._running_at and self.pid is None

    def _obituary(self) -> str:
        code = None if self._process is None else self._process.returncode
        return f"it ended with code {code}" if code is None or code >= 0 else f"it was killed by signal {-code}"

    async def _healthy(self, http: aiohttp.ClientSession, path: str) -> bool:
        try:
            async with http.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _served_models(self, http: aiohttp.ClientSession) -> list[str]:
        try:
            async with http.get(f"http://127.0.0.1:{self.port}/v1/models") as answer:
                document = await answer.json()
                return [str(entry["id"]) for entry in document["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return []

    async def _scrape(self, http: aiohttp.ClientSession) -> None:
        names = self._adapter.metrics
        try:
            async with http.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        values = samples(text)
        self.running = int(values.get(names.running, 0))
        self.waiting = int(values.get(names.waiting, 0))
        self.kv_use = values.get(names.kv_use, 0.0) if names.kv_use else 0.0

    async def _read_log(self, descriptor: int) -> None:
        """Keep the tail, and pass every line on to our own log, which is the unit's log file."""
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
            if self.state == "loading":
                self.progress = text[:200]
            _log.info("engine: %s", text)

    def _move(self, state: EngineState) -> None:
        if state == "ready":
            self.progress = ""
        if state != self.state:
            self.state = state
            self._on_change()


def only_model(served: list[str], allowed: tuple[str, ...]) -> str:
    """The model that is meant where none is named; "" when that is open."""
    candidates = [name for name in served if not allowed or name in allowed]
    return candidates[0] if len(candidates) == 1 else ""


def samples(text: str) -> dict[str, float]:
    """Prometheus text → metric name → sum over its label sets."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = line.split("{", 1)[0].split(" ", 1)[0]
            with contextlib.suppress(ValueError, IndexError):
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return values


def free_port(host: str) -> int:
    """Of this machine's address `host`; raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


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


def _die_with_parent() -> Callable[[], object]:
    """For the child: be killed when the agent dies, however it dies; an engine without an agent helps nobody."""
    libc = ctypes.CDLL(None)  # loaded before the fork: the child only makes the system call
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
