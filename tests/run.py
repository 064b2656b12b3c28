"""``make test``: four lanes side by side, because most tests mostly wait; the output of three comes at the end.

=========== ============================================================================================
testbed     what runs on the Slurm testbed (``tests/bed``), and beside it the terminal's screens
processes   what starts sshd and whole fabrics on this machine, and the adapters of clusters
commands    what calls the command line again and again, gateways and agents
the others  everything else; its output is seen as it comes
=========== ============================================================================================

Arguments go to one pytest instead, which runs what they say.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest"]
TESTBED = ["tests/bed", "tests/tui"]
PROCESSES = ["tests/clusters", "tests/e2e", "tests/gitops"]
COMMANDS = ["tests/cli", "tests/docs", "tests/state", "tests/test_install.py", "tests/gateway", "tests/agent"]
SLOWEST = "--durations=15"
ENVIRONMENT = os.environ | dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""NumPy's threads wait for each other by spinning, and here the lanes have use for every core."""
GIVING_WAY = ["nice", "-n", "10"]
"""What the last two begin with: they compute, and the lanes beside them must hear heartbeats in time."""
NOTHING_COLLECTED = 5
LEFT_OUT = "not extended and not long and not vllm"


def main(arguments):
    """The worst of the exit codes."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments, "-m", LEFT_OUT])
    lanes = {
        "the tests on the Slurm testbed, and of screens": [*PYTEST, "-m", LEFT_OUT, *TESTBED],
        "the tests that start programs, and of clusters": [*PYTEST, "-m", LEFT_OUT, *PROCESSES],
        "the tests of the command line, gateways and agents": [*GIVING_WAY, *PYTEST, "-m", LEFT_OUT, *COMMANDS],
    }
    others = [word for path in (*TESTBED, *PROCESSES, *COMMANDS) for word in ("--ignore", path)]
    with tempfile.TemporaryDirectory() as folder:
        seen = subprocess.Popen([*GIVING_WAY, *PYTEST, SLOWEST, "-m", LEFT_OUT, *others], env=ENVIRONMENT)
        started = []
        try:
            compile_once()
            for number, (name, command) in enumerate(lanes.items()):
                path = Path(folder, str(number))
                with path.open("wb") as output:
                    process = subprocess.Popen(
                        [*command, SLOWEST], stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT
                    )
                started.append((name, process, path))
            codes = [seen.wait()]
            for name, process, path in started:
                print(f"\n== {name} ==", flush=True)
                code = process.wait()
                codes.append(0 if code == NOTHING_COLLECTED else code)
                print(path.read_text(errors="replace"), flush=True)
        except KeyboardInterrupt:
            lanes_running = [seen, *(process for _, process, _ in started)]
            for process in lanes_running:
                process.send_signal(signal.SIGINT)
            for process in lanes_running:
                process.wait()
            raise
    return max(codes, key=abs)


def compile_once():
    """What each of three lanes would else do by itself in their first minute: half a minute for the simulator's loop,
    and a third of what every program of ours takes to start. The fourth does not come to that so soon.
    """
    subprocess.call([sys.executable, "-m", "compileall", "-q", "fabrictool"], cwd=ROOT)
    subprocess.call([sys.executable, "-m", "tests.warm"], cwd=ROOT, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
