"""``python -m fabrictool.gateway RUN_FOLDER``: the process that a cluster starts."""

from __future__ import annotations

import sys
from pathlib import Path

from fabrictool.agent.unit import run_unit
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec
from fabrictool.gateway.loop import run_loop
from fabrictool.gateway.run import run_on_mesh

if __name__ == "__main__":
    here = RunFolder(Path(sys.argv[1]))
    sys.exit(run_unit(here, GatewaySpec, lambda spec, folder: run_on_mesh(spec, folder, SystemClock()), run_loop))
