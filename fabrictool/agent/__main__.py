"""``python -m fabrictool.agent RUN_FOLDER [ENDS_AT]``: the process that a cluster starts; 0 when it left in order.

Of a replica over several nodes it runs on each; all but the first only start their part of the engine.
ENDS_AT is the wall second at which the scheduler ends the allocation; 0 or no number: it said none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fabrictool.agent.member import rank_here, run_member
from fabrictool.agent.running import run_agent
from fabrictool.agent.unit import run_unit
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.base.settings import Settings
from fabrictool.domain.specs import AgentSpec

if __name__ == "__main__":
    cache = Settings.from_environment().cache_path
    here = RunFolder(Path(sys.argv[1]))
    rank = rank_here(here, os.environ)
    if rank:
        sys.exit(run_member(here, rank))
    told = sys.argv[2] if len(sys.argv) > 2 else ""
    end = float(told) if told.isdecimal() and int(told) else None
    sys.exit(run_unit(here, AgentSpec, lambda spec, folder: run_agent(spec, folder, SystemClock(), cache, end)))
