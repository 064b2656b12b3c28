"""`top` on real processes, in a real terminal: what it shows, records and answers when units are killed."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from fabrictool.status.sightings import read_recording
from tests.e2e.test_apply import ask

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Terminal:
    """A program in a terminal of 120 columns and 36 lines."""

    def __init__(self, bed, *arguments):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fabrictool.cli.main", *arguments],
            cwd=bed.folder, env=bed.environment | {"TERM": "xterm-256color"},
            stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = b""

    def until(self, words, seconds=60):
        """Read until they were written; everything since the last call."""
        end, since = time.monotonic() + seconds, len(self.shown)
        while words.encode() not in self.shown[since:]:
            assert time.monotonic() < end, screen_of(self.shown)
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.ours, 1 << 16)
                except OSError:  # it has ended
                    break

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def end(self):
        """Its exit code; what it still writes is read, or it would wait for that."""
        end = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    os.read(self.ours, 1 << 16)
                except OSError:
                    break
        if self.process.poll() is None:
            self.process.kill()
        os.close(self.ours)
        return self.process.wait(timeout=30)


def screen_of(octets):
    """The last of what a terminal was sent, without its colours, for whoever reads why a test failed."""
    text = octets[-20_000:].decode(errors="replace")
    return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", re.sub("\x1b\\[[0-9]+;1H", "\n", text))[-4000:]


def test_top_in_a_terminal_records_what_a_killed_replica_looked_like(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=2)
    bed.up()
    ask(bed)
    seen = bed.folder / "seen.ndjson"
    top = Terminal(bed, "top", "--record", str(seen), "--interval", "0.5s")
    try:
        top.until("nothing needs you")
        top.press("2")
        top.until("TTFT p95")
        top.press("3")
        top.until("reference bf16")
        top.press("4")
        top.until("replica/tiny/0")
        top.press("3")
        killed = bed.units()["replica/tiny/1", "running"]
        os.kill(killed.pid, signal.SIGKILL)
        top.until("lost")
        top.press("1")
        top.until("fabrictool logs")
        top.press("q")
    finally:
        code = top.end()
    assert code == 0
    sightings = read_recording(seen)
    lost = [s for s in sightings if s.gateway and any(not node.connected for node in s.gateway.nodes)]
    assert lost, "the recording has what the screen had"
    seen_by_operator = [s.operator for s in sightings if s.operator is not None]
    assert any(len(operator.units) == 3 for operator in seen_by_operator), [o.warnings for o in seen_by_operator]
    shown = bed.run("top", "--replay", str(seen), "--snapshot", COLUMNS="120", LINES="36").stdout
    assert f"replay {len(sightings)}/{len(sightings)}" in shown


def test_a_terminal_that_is_gone_ends_it(fabric_bed):
    top = Terminal(fabric_bed, "top", "--demo", "--interval", "0.2s")
    top.until("made-up")
    os.close(top.ours)
    assert top.process.wait(timeout=60) is not None


def test_a_snapshot_of_a_running_fabric_and_of_none(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.up()
    ask(bed)
    shown = bed.run("top", "--snapshot", "--screen", "models", COLUMNS="120", LINES="30").stdout
    (row,) = [line for line in shown.splitlines() if line.strip().startswith("tiny")]
    assert row.split()[1:3] == ["ok", "1/1"]
    shown = bed.run("top", "--snapshot", "--screen", "nodes", COLUMNS="160", LINES="30").stdout
    assert "tiny/0" in shown
    words = {"_FABRICTOOL_COMPLETE": "complete_bash", "COMP_WORDS": "fabrictool logs re", "COMP_CWORD": "2"}
    program = [
        sys.executable,
        "-c",
        "from fabrictool.cli.main import main; import sys; sys.argv[0] = 'fabrictool'; main()",
    ]
    tab = subprocess.run(
        program, cwd=bed.folder, env=bed.environment | words, capture_output=True, text=True, check=False
    )
    assert tab.stdout.split() == ["replica/tiny/0"]
    bed.run("destroy", "--yes")
    gone = bed.run("top", "--snapshot", code=None)
    assert gone.returncode != 0
    assert "FT5202" in gone.stderr
