"""``plan --what-if`` on this process, on processes and on a real Dask cluster."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec
import pytest

from fabrictool.cli import executors, whatif
from fabrictool.cli.executors import executor_named
from fabrictool.cli.main import main
from fabrictool.domain.plan import ModelForecast
from tests.cli.children import workers
from tests.planner.fabrics import write_fabric
from tests.planner.test_whatif import EVERYTHING


@pytest.fixture
def fabric(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    return write_fabric(tmp_path, "trust: [alpha]")


def ask(fabric, *arguments):
    expressions = [word for expression in EVERYTHING for word in ("--what-if", expression)]
    return main(["plan", "-b", str(fabric), *expressions, *arguments])


def answer(capsys, fabric, *arguments):
    assert ask(fabric, "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_a_line_an_expression(fabric, capsys):
    assert ask(fabric, "--executor", "here") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "if", "unserved", "cost", "open", "requests", "replicas"]
    assert lines[1].startswith("as it is")
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(EVERYTHING)]] == EVERYTHING
    assert re.search(r"CHF/h \(−[0-9.]+\)", next(line for line in lines if line.startswith("price.")))
    assert "infeasible" in next(line for line in lines if line.startswith("replicas.m.min"))
    assert lines[-1].startswith("  ▲ replicas.m.min=20: ")


def test_each_row_has_the_verdict_of_a_plan(fabric, capsys):
    text = fabric.read_text().replace("objective: [cost]", "objective: [slo, cost]")
    slo = "replicas: {min: 1, max: 40}\n    slo: {ttft_p95: 2s, tpot_p95: 50ms}"
    fabric.write_text(text.replace("replicas: {min: 1, max: 40}", slo))
    asked = ["plan", "-b", str(fabric), "--what-if", "replicas.m.max=1", "--executor", "here"]
    assert main(asked) == 0
    headings, base, changed, complaint = capsys.readouterr().out.splitlines()
    assert "SLO" in headings.split()
    assert "2 meet" in base
    assert "1 meets, 1 misses" in changed
    assert complaint == "  ▲ replicas.m.max=1: misses: m"
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", "-b", str(fabric), "--json"]) == 0
    lines = {line["model"]: line for line in json.loads(capsys.readouterr().out)["forecast"]["models"]}
    for name, model in found["base"]["models"].items():
        assert (model["slo"], model["attainment"]) == (lines[name]["slo"], lines[name]["replay"]["attainment"])
    assert found["outcomes"][0]["models"]["m"]["why"] == "replicas.max is 1, and so many are placed"


def test_many_that_miss_are_not_all_named():
    line = ModelForecast(
        model="", replicas=1, utilisation=0.5, served=1.0, **dict.fromkeys(("ttft_p95_s", "tpot_p95_s", "e2e_p95_s"))
    )
    many = [msgspec.structs.replace(line, model=f"m{at}", slo="misses") for at in range(7)]
    many += [msgspec.structs.replace(line, model="u", slo="undecided"), msgspec.structs.replace(line, model="n")]
    assert whatif._verdicts(many) == "7 miss, 1 undecided"
    assert whatif._complaint(many) == "misses: m0, m1, m2, m3, m4 and 2 more; undecided: u"
    assert (whatif._verdicts(many[-2:]), whatif._verdicts(many[-1:])) == ("undecided", "–")


def test_an_infeasible_base_is_an_exit_code(fabric, capsys):
    fabric.write_text(fabric.read_text().replace("replicas: {min: 1, max: 40}", "replicas: {min: 40, max: 40}"))
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", "--executor", "here"]) == 3
    assert "infeasible" in capsys.readouterr().out.splitlines()[1]


def test_it_changes_nothing(fabric, tmp_path):
    before = sorted(path for path in tmp_path.rglob("*"))
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2"]) == 0
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-o", "plan.json"], 64, "FT9001"),
        (["--plot", "plan.png"], 64, "FT9001"),
        (["--chart"], 64, "FT9001"),
        (["--explain"], 64, "FT9001"),
        (["--executor", "cloud"], 64, "FT2013"),
        (["--executor", "here", "--workers", "2"], 64, "FT2013"),
        (["--executor", "dask://127.0.0.1:9", "--workers", "2"], 64, "FT2013"),
        (["--executor", "dask://nowhere"], 64, "FT9002"),
        (["--workers", "0"], 64, "FT9001"),
        (["--what-if", "more"], 64, "FT2011"),
    ],
)
def test_misuse_has_a_code(fabric, capsys, arguments, code, said):
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", *arguments]) == code
    assert said in capsys.readouterr().err


def test_of_a_fabric_that_is_not_there_yet(fabric, capsys, monkeypatch):
    """No cluster is asked, and nothing of what was applied counts."""

    def refused(*_arguments):
        raise AssertionError("somebody asked the clusters")

    monkeypatch.setattr("fabrictool.cli.source.Source.fabric", refused)
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", "--executor", "here", "--assume-empty"]) == 0
    assert "rate.*=2" in capsys.readouterr().out


def test_a_scheduler_that_does_not_answer(fabric, capsys, monkeypatch):
    monkeypatch.setattr(executors, "PATIENCE_S", 1)
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", "--executor", "dask://127.0.0.1:9"]) == 69
    assert "FT2013" in capsys.readouterr().err


class KilledWorker(Exception):  # noqa: N818 - its name there
    __module__ = "distributed.scheduler"


@pytest.mark.parametrize(
    "error", [BrokenProcessPool("gone"), CancelledError(), ModuleNotFoundError("fabrictool"), KilledWorker("one")]
)
def test_workers_that_are_lost(fabric, capsys, monkeypatch, error):
    def lost(*_, **__):
        raise error

    monkeypatch.setattr(whatif, "sweep", lost)
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2"]) == 1
    assert "FT2013" in capsys.readouterr().err


def test_our_own_mistakes_are_not_the_executors(fabric, monkeypatch):
    monkeypatch.setattr(whatif, "sweep", lambda *_, **__: [].pop())
    with pytest.raises(IndexError):
        main(["plan", "-b", str(fabric), "--what-if", "rate.*=2"])


def test_a_process_that_dies_breaks_the_executor():
    with pytest.raises(BrokenExecutor), executor_named("processes", 2, 2) as pool:
        pool.submit(os._exit, 1).result()
    assert not workers()


def test_without_the_extra(fabric, capsys, monkeypatch):
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    assert main(["plan", "-b", str(fabric), "--what-if", "rate.*=2", "--executor", "dask://127.0.0.1:9"]) == 1
    assert "fabrictool[dask]" in capsys.readouterr().err


def test_one_expression_starts_no_process(monkeypatch):
    monkeypatch.setattr(executors, "_processes", None)
    with executor_named("", 1, None) as doer:
        assert doer.submit(os.getpid).result() == os.getpid()


def test_an_interrupted_sweep_leaves_no_process():
    with pytest.raises(KeyboardInterrupt), executor_named("processes", 4, 2) as pool:
        futures = [pool.submit(time.sleep, 600) for _ in range(4)]
        while not workers():
            time.sleep(0.05)
        assert not any(future.done() for future in futures)
        raise KeyboardInterrupt
    assert not workers()


def test_ctrl_c_is_not_lost_while_processes_start(monkeypatch):
    def pressed_meanwhile(pool, *words):
        future = submit(pool, *words)
        os.kill(os.getpid(), signal.SIGINT)
        return future

    submit = ProcessPoolExecutor.submit
    monkeypatch.setattr(ProcessPoolExecutor, "submit", pressed_meanwhile)
    with pytest.raises(KeyboardInterrupt), executor_named("processes", 2, 2):
        pytest.fail("the block began")
    assert not workers()


def commandline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_ctrl_c_that_another_thread_takes_leaves_no_child_half_told(monkeypatch, capfd):
    def pressed_meanwhile(*words):
        pids.append(start(*words))
        if "--multiprocessing-fork" in words[1] and not pressed.is_set():  # not Python's own tracker of resources
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # until the other thread has heard it
        return pids[-1]

    start, pids = multiprocessing.util.spawnv_passfds, []
    pressed, over = threading.Event(), threading.Event()
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", pressed_meanwhile)
    solver = threading.Thread(target=over.wait)  # hears Ctrl-C while the main thread holds it back
    solver.start()
    try:
        with pytest.raises(KeyboardInterrupt), executor_named("processes", 2, 2):
            pytest.fail("the block began")
    finally:
        over.set()
        solver.join()
    for pid in pids:
        while b"spawn_main" in commandline(pid):  # one that was never told all is nobody's
            time.sleep(0.05)
    assert not workers()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_command_and_its_processes(fabric):
    many = [word for i in range(400) for word in ("--what-if", f"rate.*={i + 1}")]
    command = [sys.executable, "-m", "fabrictool.cli.main", "plan", "-b", str(fabric), *many, "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, text=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 240
        while len(children.read_text().split()) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        below = [int(pid) for pid in children.read_text().split()]
        assert len(below) >= 2
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.1)


def test_long_sweeps_tell_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(whatif, "PATIENCE_S", -1.0)
    whatif._progress(3)(1)
    assert "1 of 3 tried" in capsys.readouterr().err


def test_a_front_is_printed_and_makes_no_plan(fabric, capsys):
    asked = ["plan", "-b", str(fabric), "--pareto", "cost,energy", "--assume-empty"]
    assert main(asked) == 0
    captured = capsys.readouterr()
    assert "→" in captured.out
    assert "not replayed" in captured.err
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["type"], told["complete"]) == ("pareto", True)
    assert [point["chosen"] for point in told["points"]].count(True) == 1
    for more in (["--what-if", "rate.m*=2"], ["-o", "plan.json"], ["--solver", "cp"], ["--explain"]):
        assert main([*asked, *more]) == 64
        assert "--pareto makes no plan" in capsys.readouterr().err
    assert main(["plan", "-b", str(fabric), "--pareto", "cost", "--assume-empty"]) == 64
    assert "FT2031" in capsys.readouterr().err


def test_a_horizon_is_printed_and_makes_no_plan(fabric, capsys):
    written = fabric.read_text("utf-8")
    hours = ", hours: [" + ", ".join(["1"] * 12 + ["3"] * 12) + "]"
    demand = "{rate: 1 req/s, input: 500 tok, output: 100 tok"
    fabric.write_text(written.replace(demand, demand + hours), "utf-8")
    asked = ["plan", "-b", str(fabric), "--assume-empty", "--horizon", "24h", "--step", "6h"]
    assert main([*asked, "--at", "2026-12-01T00:00:00Z"]) == 0
    captured = capsys.readouterr()
    assert "Tue 01 Dec 18:00" in captured.out
    assert all(len(line) <= 80 for line in captured.out.splitlines())
    assert "nothing is applied" in captured.err
    assert main([*asked, "--at", "2026-12-01T00:00:00Z", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rates = [step["rates"] for step in told["steps"]]
    assert {round(rates[2][name] / rates[1][name], 3) for name in rates[0]} >= {3.0}
    total = sum(step["running"] + step["moving"] for step in told["steps"])
    assert total == pytest.approx(told["schedule"]["running"] + told["schedule"]["moving"], abs=1e-4)
    for more in (["--what-if", "rate.m*=2"], ["-o", "plan.json"], ["--solver", "cp"], ["--max-moves", "3"]):
        assert main([*asked, *more]) == 64
        assert "--horizon makes no plan" in capsys.readouterr().err
    assert main([*asked, "--pareto", "cost,energy"]) == 64
    assert main([*asked, "--at", "soon"]) == 64
    assert main(["plan", "-b", str(fabric), "--step", "1h"]) == 64
    capsys.readouterr()
    assert main([*asked[:-2], "--step", "16m"]) == 64
    assert "FT2032" in capsys.readouterr().err
