"""The life of an agent's process, whoever started it: signals, status page, the agent itself."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from fabrictool.agent.agent import Agent
from fabrictool.agent.idle import IdleAgent
from fabrictool.base.openfiles import raise_open_files
from fabrictool.mesh.transport.views import views_of
from fabrictool.status.pages import serve_status

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.domain.specs import AgentSpec


async def run_agent(spec: AgentSpec, folder: RunFolder, clock: Clock, cache: Path, ends_at: float | None) -> str:
    """The agent's whole life; returns why it ended."""
    raise_open_files()
    kind = Agent if isinstance(spec.idle, msgspec.UnsetType) else IdleAgent
    agent = kind(spec, folder, clock, python=sys.executable, cache=cache, ends_at=ends_at)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.request_stop, f"signal {number.name}")
    pages = await serve_status(agent.status, folder, views=views_of(agent.mesh))
    try:
        folder.write_process(status=f"http://127.0.0.1:{pages.addresses[0][1]}/status", started_at=clock.wall())
        return await agent.run()
    finally:
        await pages.cleanup()
