"""``make test``: the tests on the testbed beside all others, because they mostly wait; their output comes at the end.

Arguments go to one pytest instead, which runs what they say.
"""

import signal
import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments):
    """The worse of the two exit codes; 5 (nothing collected) counts as good for the testbed's part."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments, "-m", "not extended"])
    with tempfile.TemporaryFile("w+") as output:
        beside = subprocess.Popen([*PYTEST, "-m", "bed and not extended"], stdout=output, stderr=subprocess.STDOUT)
        try:
            code = subprocess.call([*PYTEST, "-m", "not bed and not extended"])
            print("\n== the tests on the Slurm testbed ==", flush=True)
            other = beside.wait()
        except KeyboardInterrupt:
            beside.send_signal(signal.SIGINT)
            beside.wait()
            raise
        output.seek(0)
        print(output.read(), flush=True)
    return code or (0 if other == 5 else other)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
