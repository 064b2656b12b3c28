"""``fabrictool demo elastic`` with the real model: what it shows, and what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "fabrictool.cli.main", "demo", "elastic"]


@pytest.fixture
def environment(tmp_path):
    """Engines keep their folders here, and say so to whoever looks for them."""
    return {**os.environ, "FABRICTOOL_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}


def engines(folder):
    """Processes whose socket is in `folder`."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if "fabrictool.engines.reference" in line and str(folder) in line]


@pytest.mark.extended  # 100 s, most of them with both cores; what it shows is tested in engines, sharing and examples
def test_models_share_and_replicas_merge(environment, tmp_path):
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    shared, merged = done.stderr.split("\n2. ")
    assert "code (" in shared
    assert re.search(
        r"\[0\+1\] one group.*\n.*burst of sixteen(.*\n)*.*\[0\] \[1\] apart(.*\n)*.*\[0\+1\] one group", merged
    )
    rows = [re.split(r"  +", line.strip()) for line in done.stdout.splitlines()]
    assert rows[0] == ["part", "model", "first token", "each further", "tokens"]
    assert len(rows) == 1 + 12 + 19
    assert all(int(row[-1]) > 0 for row in rows[1:])
    assert engines(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_an_interrupt_leaves_no_engine(environment, tmp_path):
    demo = subprocess.Popen(COMMAND, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not engines(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert errors.rstrip().endswith("interrupted")
    assert engines(tmp_path) == []
    assert not list(tmp_path.glob("ft-demo-*"))
