"""Commands whose work a real Dask cluster does; it starts once for all of them, for that takes longer than they do."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import distributed
import pytest

from fabrictool.cli import executors
from fabrictool.cli.executors import executor_named
from fabrictool.cli.main import main
from tests.cli import test_simulate_sweeps, test_whatif
from tests.cli.children import workers
from tests.cli.test_cases_sheet import long_sheet, many
from tests.planner.fabrics import write_fabric
from tests.planner.test_whatif import EVERYTHING
from tests.ports import free_port
from tests.testbed.waiting import wait_until


@contextlib.contextmanager
def cluster(*names):
    """(its address, its processes): a scheduler and so many workers on loopback, without a dashboard; ended whatever
    happens.
    """
    address = f"127.0.0.1:{free_port()}"
    quiet = ["--no-dashboard", "--host", "127.0.0.1"]
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    commands = [[*dask, *quiet, "--port", address.partition(":")[2]]]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://{address}", *quiet]
    commands += [[*worker, "--nthreads", "1", "--no-nanny", "--name", name] for name in names]
    started = []
    try:
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            started.append(process)
        wait_until("the scheduler does not listen", lambda: listens(address), within_s=60)
        yield address, started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def dask_cluster():
    with cluster("one", "two") as started:
        yield started


def listens(address):
    """On a busy machine its modules alone take longer to load than who connects to it waits."""
    host, _, port = address.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


@pytest.fixture
def fabric(folder):
    return write_fabric(folder, "trust: [alpha]")


def test_whoever_answers_the_sheet_is_the_same(command, folder, dask_cluster):
    address, processes = dask_cluster
    asked = many(folder, 60)
    code, here, err = command(*asked, "--executor", "here")
    assert (code, len(here.splitlines()), "60 cases, 5 with an error" in err) == (0, 61, True)
    for given in (["--executor", "processes"], ["--executor", f"dask://{address}"]):
        code, out, err = command(*asked, *given)
        assert (code, out == here, "60 cases, 5 with an error" in err) == (0, True, True), given
        assert not workers()
    assert all(process.poll() is None for process in processes), "the cluster is not ours to end"


def test_an_interrupted_sheet_is_called_off_on_a_cluster(interrupted, folder, dask_cluster):
    address, processes = dask_cluster
    long_sheet(folder)
    given = ("-o", "out.csv", "--executor", f"dask://{address}")
    code, out, _ = interrupted("cases: ", "simulate", "--cases", "many.csv", *given)
    assert (code, out, (folder / "out.csv").exists()) == (130, "", False)
    with distributed.Client(f"tcp://{address}", set_as_default=False) as client:
        wait_until("work is left", lambda: not any(client.processing().values()), within_s=60)
    assert all(process.poll() is None for process in processes), "the cluster is not ours to end"


def test_whoever_plays_is_the_same(command, folder, dask_cluster):
    address, processes = dask_cluster
    given = ("--seeds", 4, "--scenario", "calm", "--scenario", "rush", "--workload", "poisson,rate=2", "-o", "out.json")
    answer = test_simulate_sweeps.answer
    here = answer(command, *given, "--executor", "here")
    assert [(play["scenario"], play["seed"]) for play in here["models"]] == [
        (scenario, seed) for scenario in ("calm", "rush") for seed in range(4)
    ]
    assert len(here["spreads"]) == 2
    assert json.loads((folder / "out.json").read_text()) == here
    assert answer(command, *given, "--workers", 2) == here
    assert not workers()
    assert answer(command, *given, "--executor", f"dask://{address}") == here
    assert all(process.poll() is None for process in processes), "the cluster is not ours to end"


def test_all_executors_agree(fabric, capsys, dask_cluster):
    address, processes = dask_cluster
    answer = test_whatif.answer
    here = answer(capsys, fabric, "--executor", "here")
    assert [one["expression"] for one in here["outcomes"]] == EVERYTHING
    assert answer(capsys, fabric, "--executor", "processes", "--workers", "2") == here
    assert not workers()
    assert answer(capsys, fabric, "--executor", f"dask://{address}") == here
    assert all(process.poll() is None for process in processes), "the cluster is not ours to end"


def test_both_dask_workers_are_used(dask_cluster):
    address, processes = dask_cluster
    with executor_named(f"dask://{address}", 2, None) as pool:
        deadline = time.monotonic() + 60
        seen = set()
        while len(seen) < 2 and time.monotonic() < deadline:
            seen |= set(pool.map(slow_pid, range(4)))
    assert seen == {process.pid for process in processes[1:]}


def slow_pid(_):
    time.sleep(0.2)
    return os.getpid()


def test_a_scheduler_without_workers(fabric, capsys, monkeypatch):
    monkeypatch.setattr(executors, "PATIENCE_S", 3)
    with cluster() as (address, _):
        assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", "--executor", f"dask://{address}"]) == 69
    assert "has no worker" in capsys.readouterr().err
