"""``python -m fabrictool.agent RUN_FOLDER [ENDS_AT]``: the process that a cluster starts; 0 when it left in order.

ENDS_AT is the wall second at which the scheduler ends the allocation; 0 or no number: it said none.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.agent.agent import Agent
from fabrictool.agent.unit import run_unit
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.base.settings import Settings
from fabrictool.domain.specs import AgentSpec
from fabrictool.mesh.transport.views import views_of
from fabrictool.status.pages import serve_status

if TYPE_CHECKING:
    from fabrictool.base.clock import Clock


async def run(spec: AgentSpec, folder: RunFolder, clock: Clock, cache: Path, ends_at: float | None) -> str:
    """The agent's whole life; returns why it ended."""
    agent = Agent(spec, folder, clock, python=sys.executable, cache=cache, ends_at=ends_at)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.request_stop, f"signal {number.name}")
    pages = await serve_status(agent.status, folder, views=views_of(agent.mesh))
    try:
        folder.write_process(status=f"http://127.0.0.1:{pages.addresses[0][1]}/status", started_at=clock.wall())
        return await agent.run()
    finally:
        await pages.cleanup()


if __name__ == "__main__":
    cache = Settings.from_environment().cache_path
    here = RunFolder(Path(sys.argv[1]))
    told = sys.argv[2] if len(sys.argv) > 2 else ""
    end = float(told) if told.isdecimal() and int(told) else None
    sys.exit(run_unit(here, AgentSpec, lambda spec, folder: run(spec, folder, SystemClock(), cache, end)))
