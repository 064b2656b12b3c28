"""What `top` costs: octets to the terminal and time of a core, a look a second, at a fabric that is made up.

Of each screen: octets of the first picture, octets a second after it, and the share of a core; against 15 kB/s and 5 %,
which is what a terminal behind a slow line and an operator's laptop should bear.
"""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

PROGRAM = """
import sys, time
from fabrictool.tui.app import Top
from fabrictool.tui.feeds import MadeUpFabric
Top(MadeUpFabric(int(sys.argv[1]), begun=time.time()), 1.0, shown=sys.argv[2]).run()
"""
SECONDS = 20
MOST_OCTETS, MOST_CORE = 15_000, 0.05


def measured(nodes, screen):
    """(octets at first, octets a second, share of a core)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(nodes), screen],
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)

    def read(seconds):
        octets, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    octets += len(os.read(ours, 1 << 16))
                except OSError:  # it has ended
                    break
        return octets

    def used():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    first = read(6)
    before = used()
    later = read(SECONDS)
    core = (used() - before) / SECONDS
    os.write(ours, b"q")
    end = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < end:
        read(0.2)
    process.kill()
    process.wait()
    os.close(ours)
    return first, later / SECONDS, core


def main(sizes):
    print(f"{'nodes':>6} {'screen':<9} {'first kB':>8} {'kB/s':>6} {'core':>6}")
    missed = False
    for nodes in map(int, sizes or ("300", "5000")):
        for screen in ("overview", "models", "nodes", "jobs"):
            first, rate, core = measured(nodes, screen)
            over = rate > MOST_OCTETS or core > MOST_CORE
            word = "  over" if over and nodes <= 300 else ""
            missed |= bool(word)
            print(f"{nodes:>6} {screen:<9} {first / 1000:>8.1f} {rate / 1000:>6.2f} {core:>6.1%}{word}", flush=True)
    print(f"300 nodes are to stay under {MOST_OCTETS / 1000:g} kB/s and {MOST_CORE:.0%} of a core.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
