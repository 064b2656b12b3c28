"""One engine process: started, watched, restarted with a pause, stopped gently and then surely.

The supervisor decides nothing about the mesh; it calls `on_change` whenever its state moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import aiohttp
import msgspec

from fabrictool.agent.engine_address import EngineAddress, socket_folder
from fabrictool.agent.ports import PortBlock
from fabrictool.agent.process import EngineProcess, die_with_parent, environment_of, signal_group
from fabrictool.base.errors import FabrictoolError
from fabrictool.status.elastic import ElasticState

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Awaitable, Callable

    from fabrictool.domain.specs import BroughtEngine
    from fabrictool.engines.adapter import EngineAdapter, EngineCommand
    from fabrictool.status.documents import EngineState

_log = logging.getLogger("fabrictool.agent")

WATCH_SECONDS = 1.0
ANSWER_S = 5.0
"""For a look at its health or its figures."""
FAILED_CHECKS = 3
MAX_RESTARTS = 5
STABLE_SECONDS = 300.0
"""An engine that served this long starts counting its restarts anew."""
PROBE_S = 120.0
"""To see whether an engine is installed: a shared file system may be slow, and an image has to be unpacked."""
REFUSES = 65
"""An engine that ends so, before it was ever ready, says that its input is wrong (EX_DATAERR of sysexits.h)."""
HANG_S = 300.0
"""An engine whose requests got no further for this long hangs: one of its workers stands still, or waits for another
that is gone. vLLM gives one step as long (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), and on CPUs one may take minutes."""


class EngineFailedError(FabrictoolError):
    """The engine did not start, or fell over too often (FT7103)."""


class Crew(Protocol):
    """The other nodes of an engine that stands on several."""

    @property
    def broken(self) -> str:
        """Why the engine is whole no more; "": it is."""

    @property
    def lost(self) -> bool:
        """Whether a node is gone, so that another start would be in vain."""

    async def begin(self, port: int) -> str | None:
        """Have the engine's processes started there, to meet at this node's `port`; why that failed, if it did."""

    async def end(self) -> None:
        """Returns when none of them runs there any more."""


class Supervisor:
    """Runs one engine and knows how it is.

    `command` makes the command line for an address and ports; it is asked anew at every start, so a port that was taken
    in between costs one restart and not the replica. An engine that can listens at a socket, which no other user of its
    node reaches. A server that a job has `brought` running is watched and neither started nor stopped. An engine on
    several nodes has a `crew` on the others. Without a `model` it is the only one that the engine lists, of those that
    are allowed.
    """

    # Wide: what is run, how that is seen, and whom it has beside it.
    def __init__(
        self,
        adapter: EngineAdapter,
        command: Callable[[EngineAddress, PortBlock], EngineCommand],
        model: str,
        on_change: Callable[[], None],
        *,
        start_timeout_s: float,
        brought: BroughtEngine | None = None,
        crew: Crew | None = None,
        hang_s: float = HANG_S,
        before_ready: Callable[[EngineAddress], Awaitable[None]] | None = None,
    ) -> None:
        """`before_ready` has the engine to itself, once it answers and before anybody else is told."""
        self._adapter = adapter
        self._command = command
        self.model = model
        self._running_at = brought.port if brought is not None else 0
        self._allowed = brought.models if brought is not None else ()
        self._on_change = on_change
        self._start_timeout = start_timeout_s
        self._on_socket = adapter.capabilities.sockets and not self._running_at
        self._crew = crew
        self._hang_s = hang_s
        self._before_ready = before_ready
        self._sign: tuple[tuple[float, float, float], float] | None = None
        """What its figures say of how far its requests are, and since when they say so."""
        self._process = EngineProcess(self._log_line)
        self._installed = False
        self.state: EngineState = "starting"
        self.address = EngineAddress(self._running_at)
        self.restarts = 0
        self.progress = ""
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        self.elastic: ElasticState | None = None
        """What the engine said last of how it has changed; None of one that does not."""
        self._advance = 0.0

    @property
    def lines(self) -> deque[str]:
        """What its log says last."""
        return self._process.lines

    @property
    def pid(self) -> int | None:
        """Of the engine, while it lives."""
        return self._process.pid

    async def run(self) -> None:
        """Start and watch until cancelled; raises EngineFailedError when restarts are used up."""
        loop = asyncio.get_running_loop()
        with socket_folder() if self._on_socket else contextlib.nullcontext() as folder:
            while True:
                began = loop.time()
                reason = await self._run_once(folder)
                if self.state == "loading" and self._process.returncode == REFUSES:
                    await self._refused()
                if self._crew is not None and self._crew.lost:
                    self._move("failed")
                    raise EngineFailedError.of("FT7108", reason, thing=f"engine/{self._adapter.name}")
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
        await self._process.log_read()
        words = " ".join(line.strip() for line in list(self.lines)[-2:]) or f"it ended with code {REFUSES}"
        raise EngineFailedError.of(
            "FT7105",
            f"engine {self._adapter.name} refuses its model or its options: {words}",
            thing=f"engine/{self._adapter.name}",
            hint="starting it again would not help; `fabrictool doctor` checks the model",
        )

    async def stop(self) -> None:
        """Returns when it is gone, everywhere."""
        if self._crew is None:
            await self._process.stop()
        else:
            await asyncio.gather(self._process.stop(), self._crew.end())

    # -- internals --------------------------------------------------------------------------------------------

    async def _run_once(self, folder: Path | None) -> str:
        """One life of the engine; returns why it ended."""
        if self._running_at:
            return await self._life()
        try:
            ports = PortBlock.take()
        except OSError as error:
            return str(error)
        with ports:
            return await self._start(ports, folder) or await self._life()

    async def _life(self) -> str:
        """From its start to its end; returns why that came."""
        self._move("loading")
        async with self.address.http(ANSWER_S) as http:
            why = await self._until_ready(http)
            if why is None and self._before_ready is not None:
                await self._before_ready(self.address)
                why = self._over or None
            if why is None:
                self._sign = None
                self._move("ready")
                why = await self._watch(http)
        return why

    async def _start(self, ports: PortBlock, folder: Path | None) -> str | None:
        """Start the process, and those on other nodes; why that failed, if it did."""
        if self._crew is not None:
            failed = await self._crew.begin(ports.meeting)
            if failed is not None:
                return failed
        if folder is None:
            self.address = EngineAddress(ports.api)
        else:
            self.address = EngineAddress(socket=str(folder / "api.sock"))
            # That of the start before: engines take no address that is there already.
            await asyncio.to_thread(Path(self.address.socket).unlink, missing_ok=True)
        command = self._command(self.address, ports)
        if command.probe and not self._installed:
            await self._look_for(command.probe, environment_of(command, os.environ))
        return await self._process.start(command)

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
                preexec_fn=die_with_parent(),
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
                    signal_group(process.pid, signal.SIGKILL)
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
            if self._over:
                return self._over
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
            if self._over:
                return self._over
            if await self._healthy(http, self._adapter.readiness.path):
                failures = 0
                await self._scrape(http)
                await self._ask_state(http)
                if self._hangs():
                    return f"its {self.running} requests got no further for {self._hang_s:.0f} s: it hangs"
            else:
                failures += 1
        return f"{failures} health checks in a row failed"

    @property
    def _over(self) -> str:
        """Why the engine is none any more; "": it is."""
        if not self._running_at and self.pid is None:
            return self._process.obituary
        return "" if self._crew is None else self._crew.broken

    def _hangs(self) -> bool:
        """Whether it has requests and has done nothing for them for too long."""
        now = asyncio.get_running_loop().time()
        sign = (self._advance, self.kv_use, float(self.running))
        if self._sign is None or self._sign[0] != sign or not self.running:
            self._sign = (sign, now)
        return bool(self._adapter.metrics.advances) and now - self._sign[1] >= self._hang_s

    async def _healthy(self, http: aiohttp.ClientSession, path: str) -> bool:
        try:
            async with http.get(f"{self.address.url}{path}") as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _served_models(self, http: aiohttp.ClientSession) -> list[str]:
        try:
            async with http.get(f"{self.address.url}/v1/models") as answer:
                document = await answer.json()
                return [str(entry["id"]) for entry in document["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return []

    async def _scrape(self, http: aiohttp.ClientSession) -> None:
        names = self._adapter.metrics
        try:
            async with http.get(f"{self.address.url}/metrics") as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        values = samples(text)
        self.running = int(values.get(names.running, 0))
        self.waiting = int(values.get(names.waiting, 0))
        self.kv_use = values.get(names.kv_use, 0.0) if names.kv_use else 0.0
        self._advance = sum(values.get(name, 0.0) for name in names.advances)

    async def _ask_state(self, http: aiohttp.ClientSession) -> None:
        path = self._adapter.capabilities.elastic_state
        if not path:
            return
        try:
            async with http.get(f"{self.address.url}{path}") as answer:
                body = await answer.read()
            self.elastic = msgspec.json.decode(body, type=ElasticState) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            self.elastic = None

    def _log_line(self, text: str) -> None:
        if self.state == "loading":
            self.progress = text[:200]
        _log.info("engine: %s", text)

    def _move(self, state: EngineState) -> None:
        if state == "ready":
            self.progress = ""
        else:
            self.elastic = None
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
