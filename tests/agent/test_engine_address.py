"""Folders of sockets: an agent that was killed leaves one, and the next agent removes it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fabrictool.agent import engine_address
from fabrictool.agent.engine_address import PREFIX, YOUNG_S, socket_folder

HOLDER = """\
import sys, time
from fabrictool.agent import engine_address
engine_address.tempfile.tempdir, engine_address.LONGEST = sys.argv[1], 4096
with engine_address.socket_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_address.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine_address, "LONGEST", 4096)
    return tmp_path


@pytest.fixture
def holder(here):
    """Another agent's process, and its folder, which looks as if it were long there."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(here)], stdout=subprocess.PIPE, text=True)
    folder = process.stdout.readline().strip()
    past = time.time() - 2 * YOUNG_S
    os.utime(folder, (past, past))
    yield process, folder
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_killed_agent_left_is_removed(here, holder):
    process, folder = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [str(path) for path in here.iterdir()] == [folder]
    with socket_folder() as own:
        assert list(here.iterdir()) == [own]
    assert list(here.iterdir()) == []


def test_what_a_living_agent_holds_stays_though_its_engine_is_gone(here, holder):
    _, folder = holder
    with socket_folder() as own:
        assert {str(path) for path in here.iterdir()} == {folder, str(own)}


def test_a_folder_that_is_just_being_made_stays(here):
    young = here / f"{PREFIX}young"
    young.mkdir()
    with socket_folder():
        assert young.is_dir()
    past = time.time() - 2 * YOUNG_S
    os.utime(young, (past, past))
    with socket_folder():
        assert not young.exists()


def test_what_an_agent_of_an_earlier_release_made_stays(here):
    earlier = here / "ft-engine-earlier"
    earlier.mkdir()
    past = time.time() - 2 * YOUNG_S
    os.utime(earlier, (past, past))
    with socket_folder():
        assert earlier.is_dir()


def test_where_nothing_can_be_held_nothing_is_removed(here, monkeypatch):
    old = here / f"{PREFIX}old"
    old.mkdir()
    past = time.time() - 2 * YOUNG_S
    os.utime(old, (past, past))

    def impossible(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(engine_address.fcntl, "flock", impossible)
    with socket_folder() as own:
        assert own.is_dir()
        assert old.is_dir()
