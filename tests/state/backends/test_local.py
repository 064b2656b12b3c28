"""What only a folder has: versions, locks that end with their process, full disks."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.state import State
from fabrictool.state.backends import local
from fabrictool.state.backends.local import KEPT, LocalStore
from fabrictool.state.folder import FabricFolder


def test_the_last_twenty_versions_are_kept(tmp_path):
    store, state = LocalStore(tmp_path), State()
    for _ in range(KEPT + 5):
        state = store.write(state, read=state)
    assert [version.state.serial for version in store.history()] == list(range(KEPT + 5, 5, -1))
    assert len(list((tmp_path / "state-history").iterdir())) == KEPT
    (tmp_path / "state-history/9.json").write_text("damaged")
    (tmp_path / "state-history/notes.txt").write_text("mine")
    assert len(store.history()) == KEPT - 1


def test_a_version_that_cannot_be_kept_leaves_the_state_as_it_was(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    state = store.write(State(), read=State())
    monkeypatch.setattr(local, "write_atomic", lambda *_, **__: refuse())
    with pytest.raises(FabrictoolError):
        store.write(state, read=state)
    assert store.read() == state


def refuse():
    raise FabrictoolError.of("FT4301", "no space left")


def test_files_are_the_owners_alone(tmp_path):
    store = FabricFolder(tmp_path / "t").store
    store.write(State(), read=State())
    with store.lease("apply", now=0.0):
        modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "t").rglob("*") if p.is_file()}
    assert set(modes) == {"state.json", "1.json", "lease", "state.lock"}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700


HOLDING = """
import sys
from pathlib import Path
from fabrictool.state.backends.local import LocalStore
with LocalStore(Path(sys.argv[1])).lease("apply", now=0.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_holder_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        store = LocalStore(tmp_path)
        assert store.holder().pid == holder.pid
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=20)
        assert store.holder() is None
        with store.lease("another", now=0.0):
            pass


def test_a_process_that_was_stopped_while_it_wrote_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PATIENCE_S", 0.05)
    store = LocalStore(tmp_path)
    state = store.write(State(), read=State())
    with (tmp_path / "state.lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FabrictoolError) as error:
            store.write(state, read=state)
    assert error.value.problems[0].code == "FT4202"
    assert store.write(state, read=state).serial == 2
