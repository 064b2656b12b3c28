"""What only a Git repository can do to us; the repository is a real one."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fabrictool.base.errors import FabrictoolError, StaleError, UnreachableError
from fabrictool.domain.state import State
from fabrictool.state.backends import git as module_git
from fabrictool.state.backends import gitcommand
from fabrictool.state.backends.git import GitStore


@pytest.fixture
def shelf(shelf_of):
    return shelf_of("git")


def code(error):
    (problem,) = error.value.problems
    return problem.code, problem.transient


def test_other_files_and_the_history_of_the_branch_stay(shelf):
    store = shelf.open()
    start = store.write(State(), read=State())
    shelf.commit({"README.md": b"whose states these are"})
    with store.lease("apply", now=time.time()):
        store.write(start, read=start)
    assert shelf.git("ls-tree", "--name-only", "states").split() == [b"README.md", b"state.json"]
    subjects = shelf.git("log", "--format=%s", "states").decode().splitlines()
    assert subjects[-1] == "fabrictool: state 1"
    assert "fabrictool: state 2" in subjects
    assert "fabrictool: lease: apply" in subjects


def test_a_push_whose_answer_was_lost_counts_as_done(shelf, monkeypatch):
    store = shelf.open()
    start = store.write(State(), read=State())
    run = gitcommand.Git._run

    def cut(self, *arguments, **options):
        done = run(self, *arguments, **options)
        if arguments[0] == "push":
            done.returncode, done.stderr = 128, b"fatal: the remote end hung up unexpectedly"
        return done

    monkeypatch.setattr(gitcommand.Git, "_run", cut)
    assert store.write(start, read=start).serial == 2
    assert shelf.open().read().serial == 2


def test_a_repository_that_does_not_exist_is_refused_and_one_that_does_not_answer_is_transient(tmp_path):
    missing = GitStore(str(tmp_path / "none.git"), "states", tmp_path / "cache")
    with pytest.raises(FabrictoolError) as error:
        missing.read()
    assert code(error) == ("FT4203", False)
    silent = GitStore("git://127.0.0.1:1/none.git", "states", tmp_path / "cache")
    with pytest.raises(UnreachableError) as error:
        silent.read()
    assert code(error) == ("FT4202", True)


def test_a_hanging_repository_ends_in_an_error_and_leaves_no_process(tmp_path, monkeypatch):
    script = tmp_path / "ssh"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(gitcommand, "SECONDS", 0.5)
    environment = os.environ | {"GIT_SSH_COMMAND": str(script)}
    store = GitStore("ssh://git@nowhere/x.git", "states", tmp_path / "cache", environment=environment)
    with pytest.raises(UnreachableError) as error:
        store.read()
    assert code(error) == ("FT4202", True)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_refused_push_says_what_the_repository_says(shelf):
    store = shelf.open()
    start = store.write(State(), read=State())
    hook = shelf.repository / "hooks/pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'this branch is frozen' >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(FabrictoolError) as error:
        store.write(start, read=start)
    assert code(error) == ("FT4203", False)
    assert "declined" in str(error.value)
    hook.unlink()
    assert store.write(start, read=start).serial == 2


def test_a_cache_that_a_kill_left_broken_is_made_anew(shelf):
    store = shelf.open()
    start = store.write(State(), read=State())
    cache = store._cache
    shelf.open().write(start, read=start)
    (cache / "refs/heads").mkdir(parents=True, exist_ok=True)
    (cache / "refs/heads/states.lock").write_text("")
    assert store.read().serial == 2
    (cache / "HEAD").write_text("rubbish")
    assert store.read().serial == 2
    shutil.rmtree(cache)
    assert store.read().serial == 2
    shutil.rmtree(cache)
    assert store.write(store.read(), read=store.read()).serial == 3


def test_a_process_that_was_stopped_in_the_cache_stops_nobody_else(shelf, monkeypatch):
    monkeypatch.setattr(module_git, "PATIENCE_S", 0.05)
    store = shelf.open()
    start = store.write(State(), read=State())
    lock = store._cache.with_name("state.git.lock")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert store.read() == start
        second = store.write(start, read=start)
    assert store.read() == second
    assert shelf.open().read() == second


def test_inside_a_hook_of_another_repository_it_is_not_that_one(shelf, tmp_path):
    other = tmp_path / "other.git"
    subprocess.run(["git", "init", "-q", "--bare", other], check=True)
    environment = os.environ | {"GIT_DIR": str(other), "GIT_INDEX_FILE": "/none", "GIT_OBJECT_DIRECTORY": "/none"}
    store = GitStore(str(shelf.repository), "states", tmp_path / "cache", environment=environment)
    assert store.write(State(), read=State()).serial == 1
    assert store.read().serial == 1
    assert not list((other / "objects").glob("??"))


def test_without_git_it_is_said(shelf, tmp_path):
    environment = os.environ | {"PATH": str(tmp_path)}
    store = GitStore(str(shelf.repository), "states", tmp_path / "cache", environment=environment)
    with pytest.raises(FabrictoolError) as error:
        store.read()
    assert code(error) == ("FT4204", False)


KILLED = """
import os, sys
from pathlib import Path
from fabrictool.state.backends import gitcommand
from fabrictool.domain.state import State
from fabrictool.state.backends.git import GitStore
import signal
step, url, cache = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
run = gitcommand.Git._run
seen = 0
def counted(self, *arguments, **options):
    global seen
    seen += 1
    if seen == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, *arguments, **options)
gitcommand.Git._run = counted
store = GitStore(url, "states", cache)
state = store.read()
with store.lease("apply", now=0.0):
    store.write(state, read=state)
"""


def test_kill_9_before_every_git_command_leaves_a_readable_state(shelf, tmp_path):
    """And at most a lease, which runs out by itself and can be unlocked."""
    store = shelf.open()
    before = store.write(State(), read=State()).serial
    for step in range(1, 100):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(step), str(shelf.repository), str(tmp_path / "victim")],
            check=False,
            capture_output=True,
            timeout=60,
        )
        state, lease = store.read(), store.holder()
        assert state.serial in (before, before + 1)
        before = state.serial
        if lease is not None:
            store.unlock(lease.id)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    else:
        pytest.fail("it never came to its end")
    assert step > 10


def test_a_branch_that_moves_all_the_time_ends_in_an_error(shelf, monkeypatch):
    store = shelf.open()
    start = store.write(State(), read=State())
    monkeypatch.setattr(gitcommand.Git, "push", lambda self, head, commit: False)
    with pytest.raises(FabrictoolError) as error:
        store.write(start, read=start)
    assert code(error) == ("FT4202", True)
    assert not isinstance(error.value, StaleError)
