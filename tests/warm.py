"""The command line again and again without its start-up time: a process that imports once and forks for each call.

What a call does is the real command's, from its arguments to its exit code; only the two seconds in which Python loads
modules are spent once. Tests of the start itself, of signals and of terminals start processes of their own.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("applier", "blueprint", "cli", "clusters", "planner", "state", "status")


class WarmCommandLine:
    """Calls of `fabrictool`, one at a time, with the answers of `subprocess.run`."""

    def __init__(self, popen=subprocess.Popen):
        """`popen` starts the process that forks, where it is to run."""
        self._popen = popen
        self._process = None
        self._turn = threading.Lock()

    def run(self, arguments, *, cwd, env, timeout, kill_after=None):
        """As subprocess.run(…, capture_output=True, text=True); `kill_after` seconds the command is killed."""
        call = {"argv": list(arguments), "cwd": str(cwd), "env": dict(env), "timeout": timeout, "kill": kill_after}
        with self._turn:
            if self._process is None:
                self._process = self._popen(
                    [sys.executable, "-m", "tests.warm"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        if answer["late"]:
            raise subprocess.TimeoutExpired(call["argv"], timeout, answer["out"], answer["err"])
        return subprocess.CompletedProcess(call["argv"], answer["code"], answer["out"], answer["err"])

    def close(self):
        """The process hears that nobody calls any more."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()


# -- in the process that forks ------------------------------------------------------------------------------------


def serve():
    """Answers calls, a JSON line each, until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w")
    _load()
    assert threading.active_count() == 1, "a fork would lose a thread"
    for line in sys.stdin:
        call = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _become(call, out, err)
                return
            code, late = _end(child, call["timeout"], call["kill"])
            out.seek(0)
            err.seek(0)
            answer = {
                "code": code, "late": late,
                "out": out.read().decode(errors="replace"), "err": err.read().decode(errors="replace"),
            }  # fmt: skip
        print(json.dumps(answer), file=answers, flush=True)


def _load():
    """All that commands import, and what a plan loads as it goes."""
    from tests.conftest import FabricBed

    for package in PACKAGES:
        path = importlib.import_module(f"fabrictool.{package}").__path__
        for module in pkgutil.walk_packages(path, f"fabrictool.{package}."):
            importlib.import_module(module.name)
    from fabrictool.cli.main import main

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        bed = FabricBed(Path(folder), "/m.gguf")
        os.environ.update(bed.environment)
        with contextlib.chdir(folder):
            code = main(["plan"])
    assert code == 0, said.getvalue()
    gc.freeze()


def _become(call, out, err):
    """In the child: the command, to its end."""
    from fabrictool.cli.main import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["env"])
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.argv = ["fabrictool", *call["argv"]]
    try:
        run()
    except SystemExit as end:
        threading._shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)  # taking a thousand modules down would take longer than most commands


def _end(child, timeout, kill_after):
    """The exit code, and whether it came too late."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], timeout if kill_after is None else kill_after)[0]:
            os.kill(child, signal.SIGKILL)
            late = kill_after is None
        else:
            late = False
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), late


if __name__ == "__main__":
    serve()
