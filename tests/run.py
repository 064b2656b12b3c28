"""``make test``: four lanes side by side, because most tests mostly wait; the output of three comes at the end.

=========== ============================================================================================
testbed     what runs on the Slurm testbed (marker ``bed``)
processes   what starts sshd and whole fabrics on this machine
commands    what calls the command line again and again, gateways and agents
the others  everything else; its output is seen as it comes
=========== ============================================================================================

Arguments go to one pytest instead, which runs what they say.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest"]
PROCESSES = ["tests/clusters/connections", "tests/e2e", "tests/gitops"]
COMMANDS = ["tests/cli", "tests/docs", "tests/state", "tests/test_install.py", "tests/gateway", "tests/agent"]
SLOWEST = "--durations=15"
GIVING_WAY = ["nice", "-n", "10"]
"""What the last two begin with: they compute, and the lanes beside them must hear heartbeats in time."""
NOTHING_COLLECTED = 5
LEFT_OUT = "not extended and not long and not vllm"


def main(arguments):
    """The worst of the exit codes."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments, "-m", LEFT_OUT])
    lanes = {
        "the tests on the Slurm testbed": [*PYTEST, "-m", f"bed and {LEFT_OUT}"],
        "the tests that start programs": [*PYTEST, "-m", f"not bed and {LEFT_OUT}", *PROCESSES],
        "the tests of the command line, gateways and agents": [
            *GIVING_WAY, *PYTEST, "-m", f"not bed and {LEFT_OUT}", *COMMANDS,
        ],
    }  # fmt: skip
    others = [word for path in (*PROCESSES, *COMMANDS) for word in ("--ignore", path)]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, (name, command) in enumerate(lanes.items()):
            path = Path(folder, str(number))
            with path.open("wb") as output:
                process = subprocess.Popen([*command, SLOWEST], stdout=output, stderr=subprocess.STDOUT)
            started.append((name, process, path))
        try:
            codes = [subprocess.call([*GIVING_WAY, *PYTEST, SLOWEST, "-m", f"not bed and {LEFT_OUT}", *others])]
            for name, process, path in started:
                print(f"\n== {name} ==", flush=True)
                code = process.wait()
                codes.append(0 if code == NOTHING_COLLECTED else code)
                print(path.read_text(errors="replace"), flush=True)
        except KeyboardInterrupt:
            for _, process, _ in started:
                process.send_signal(signal.SIGINT)
            for _, process, _ in started:
                process.wait()
            raise
    return max(codes, key=abs)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
