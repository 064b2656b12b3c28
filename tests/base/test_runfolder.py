"""A unit's log stays bounded while somebody writes it."""

import subprocess
import sys

from fabrictool.base.runfolder import RunFolder

MOST = 1 << 20
BATCH = 1000  # lines of about 87 octets
WRITER = """
import os, sys
for number in range(int(sys.argv[1])):
    os.write(1, b"line %d %b\\n" % (number, b"x" * 80))
    if number % 1000 == 999:
        os.write(2, b".")
        sys.stdin.readline()
"""


def test_a_log_is_cut_to_its_younger_half_while_its_writer_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    folder.bound_log(MOST)  # there is none yet
    with folder.log.open("ab") as log:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(30 * BATCH)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
    largest = 0
    try:
        while writer.stderr.read(1):  # never more than a batch ahead
            writer.stdin.write(b"\n")
            folder.bound_log(MOST)
            largest = max(largest, folder.log.stat().st_size)
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
        writer.stderr.close()
    folder.bound_log(MOST)
    lines = folder.log.read_text().splitlines()
    assert "(older lines were cut off)" in lines[: BATCH + 1]  # before it, what came while the kept half was written
    assert int(lines[-1].split()[1]) > 15 * BATCH  # what came in the moment of the last cut is lost
    assert folder.log.stat().st_size <= MOST
    assert all(line.startswith(("line ", "(older")) and len(line) < 100 for line in lines)
    assert largest < MOST + MOST // 4


def test_a_short_log_is_left_as_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.write_bytes(b"one\ntwo\n")
    before = folder.log.stat()
    folder.bound_log(MOST)
    assert (folder.log.read_bytes(), folder.log.stat().st_mtime_ns) == (b"one\ntwo\n", before.st_mtime_ns)


def test_a_log_whose_writer_does_not_append_is_cut_once_and_not_for_ever(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.log.open("wb") as log:
        log.write(b"y" * 99 + b"\n")
        for _ in range(20_000):
            log.write(b"z" * 99 + b"\n")
        log.flush()
        folder.bound_log(MOST)
        log.write(b"after\n")
        log.flush()
        size = folder.log.stat().st_size
        folder.bound_log(MOST)
        assert folder.log.stat().st_size == size  # mostly a hole, which takes no room
    assert folder.log_tail(1)[0].endswith("after")
