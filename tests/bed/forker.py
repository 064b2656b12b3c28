"""The command line again and again without its start-up time: imports once, forks for each call, kills when told to.

Reads a JSON line {"argv": [...], "kill_after": seconds or null, "out": file} and prints the child's wait status.
"""

import json
import os
import signal
import sys
import time

import asyncssh  # noqa: F401 - what children would load anyway

import fabrictool.applier.apply
import fabrictool.blueprint
import fabrictool.clusters.kinds
import fabrictool.planner.plan
import fabrictool.planner.solvers.registry  # noqa: F401
from fabrictool.cli.main import main


def call(argv, kill_after, out):
    child = os.fork()
    if child == 0:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["fabrictool", *argv]
        try:
            code = main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.01)


for line in sys.stdin:
    told = json.loads(line)
    print(call(told["argv"], told["kill_after"], told["out"]), flush=True)
