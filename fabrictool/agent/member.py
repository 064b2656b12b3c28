"""The agent of a replica's further nodes: starts its part of the engine when the leader says so (`agent.crew`)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

import msgspec

from fabrictool.agent.compiled import CompiledCache
from fabrictool.agent.crew import (
    BEAT_S,
    LEADER,
    LINE_OCTETS,
    Arrival,
    PartEnded,
    StartPart,
    StopPart,
    Wire,
    same_session,
)
from fabrictool.agent.engine_address import EngineAddress
from fabrictool.agent.launching import interface_of, launch_of
from fabrictool.agent.ports import PortBlock
from fabrictool.agent.process import EngineProcess
from fabrictool.agent.unit import read_spec, report
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.logs import configure_logging
from fabrictool.base.settings import Settings
from fabrictool.domain.specs import AgentSpec, HostPort
from fabrictool.engines.adapter import adapter
from fabrictool.engines.artifacts import resolve
from fabrictool.engines.protocol import NodeOfSeveral
from fabrictool.mesh.transport.sitelinks import own_address
from fabrictool.mesh.transport.tls import IdentityFiles, client_context

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fabrictool.base.runfolder import RunFolder

_log = logging.getLogger("fabrictool.agent")

_RANK = "SLURM_PROCID"


def rank_here(folder: RunFolder, environment: Mapping[str, str]) -> int:
    """Which of a replica's nodes this is; 0 for the first, and for the only one. The process need not be the first
    that the scheduler's variable is meant for: it counts only where the replica has more than one.
    """
    told = environment.get(_RANK, "")
    if not told.isdecimal() or not int(told):
        return 0
    try:
        return int(told) if int(told) < read_spec(folder, AgentSpec).on_nodes else 0
    except FabrictoolError:
        return 0  # whoever claims the folder says what is wrong with it


def run_member(folder: RunFolder, rank: int) -> int:
    """The member's whole life; returns the exit code."""
    configure_logging("info")
    os.chdir("/")
    try:
        member = MemberAgent(read_spec(folder, AgentSpec), folder, rank, cache=Settings.from_environment().cache_path)
        reason = asyncio.run(member.run())
    except FabrictoolError as error:
        report(error)
        return error.exit_code
    _log.info("node %d ended: %s", rank, reason)
    return 0


class MemberAgent:
    """One node's part of one replica."""

    def __init__(self, spec: AgentSpec, folder: RunFolder, rank: int, *, cache: Path) -> None:
        self._spec, self._folder, self._rank = spec, folder, rank
        self._cache = cache
        self._compiled = CompiledCache(spec, cache)
        self._adapter = adapter(spec.engine)
        self._process = EngineProcess(lambda line: _log.info("engine on node %d: %s", rank, line))
        self._model = ""
        self._watching: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def run(self) -> str:
        """Until the leader is gone; returns why it ended.

        Raises
        ------
        FabrictoolError
            FT7108 when no leader was found in time; FT70xx the model cannot be used.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):  # all nodes get it, and the leader says when to stop
            loop.add_signal_handler(number, self._stop.set)
        self._model = await asyncio.to_thread(resolve, self._spec.source)
        await asyncio.to_thread(self._compiled.fill)
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                wire, leader = await self._link()
        except TimeoutError:
            message = f"node {self._rank} found no leader within {self._spec.start_timeout_s:.0f} s"
            raise FabrictoolError.of("FT7108", message, thing=f"replica/{self._spec.replica}") from None
        if wire is None:
            return "told to stop before it had a leader"
        beating = asyncio.create_task(wire.beat())
        try:
            await self._obey(wire, await own_address([leader]))
        except (EOFError, OSError, ValueError, TimeoutError) as error:
            return f"the first node's agent is gone{f': {error}' if str(error) else ''}"
        finally:
            beating.cancel()
            if self._watching is not None:
                self._watching.cancel()
            await self._process.stop()
            await wire.close()

    # -- internals --------------------------------------------------------------------------------------------

    async def _link(self) -> tuple[Wire | None, HostPort]:
        """The connection to the leader; None when we are told to stop while there is none."""
        files = IdentityFiles(self._folder.identity)
        while not self._stop.is_set():
            try:
                leader = msgspec.json.decode((self._folder.path / LEADER).read_bytes(), type=HostPort)
                reader, writer = await asyncio.open_connection(
                    leader.host, leader.port, ssl=client_context(files), server_hostname="", limit=LINE_OCTETS
                )
            except (OSError, msgspec.DecodeError):
                await asyncio.sleep(BEAT_S / 2)
                continue
            wire = Wire(reader, writer)
            if await asyncio.to_thread(same_session, writer, files):
                wire.send(Arrival(self._rank, socket.gethostname()))
                return wire, leader
            await wire.close()
            await asyncio.sleep(BEAT_S / 2)
        return None, HostPort("", 0)

    async def _obey(self, wire: Wire, host: str) -> NoReturn:
        while True:
            message = await wire.receive()
            if isinstance(message, StartPart):
                await self._halt()
                node = NodeOfSeveral(self._spec.on_nodes, self._rank, message.leader, host, interface_of(host))
                self._watching = asyncio.create_task(self._run(wire, message.number, node))
            elif isinstance(message, StopPart):
                await self._halt()
                wire.send(PartEnded(message.number, "it was told to stop"))

    async def _halt(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await self._process.stop()

    async def _run(self, wire: Wire, number: int, node: NodeOfSeveral) -> None:
        """One start; says how it ended, unless it is told to."""
        try:
            ports = PortBlock.take()
        except OSError as error:
            wire.send(PartEnded(number, str(error), ""))
            return
        with ports:
            command = self._adapter.command(
                launch_of(
                    self._spec,
                    model=self._model,
                    at=EngineAddress(ports.api),
                    ports=ports,
                    python=sys.executable,
                    cache=self._cache,
                    compiled=self._compiled.folder,
                    node=node,
                )
            )
            failed = await self._process.start(command)
            if failed is None:
                await self._process.ended()
                await self._process.log_read()
        lines = self._process.lines
        wire.send(PartEnded(number, failed or self._process.obituary, lines[-1][:500] if lines else ""))
