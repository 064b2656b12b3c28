"""The examples on elastic serving, with little to do: what they print, and the orderings that the papers claim."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def switching():
    spec = importlib.util.spec_from_file_location("flying_switching", EXAMPLES / "flying-serving" / "switching.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # Three bursts of the nine: what the tests say of them is as true, and each run takes a third of the time.
    for name, requests in (("bursts", 1300), ("priority", 500)):
        module.LOADS[name] = dataclasses.replace(module.LOADS[name], requests=requests)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def bursts(switching):
    """System → figures, of one seed."""
    return {system: switching.figures((system, "bursts", 7)) for system in ("DP", "TP", "shift", "flying")}


def test_bursts_are_met_as_by_replicas_apart(bursts):
    assert bursts["flying"].ttft_burst < 0.4 * bursts["TP"].ttft_burst
    assert bursts["flying"].ttft_burst < 0.5 * bursts["shift"].ttft_burst
    assert bursts["flying"].ttft_burst < 2.0 * bursts["DP"].ttft_burst
    assert bursts["flying"].peak > 0.95 * bursts["DP"].peak > 1.2 * bursts["TP"].peak


def test_calm_is_used_as_by_one_group(bursts):
    # One seed; the mean of five is 0.55 times that of replicas apart.
    assert bursts["flying"].tpot_calm < 0.9 * bursts["DP"].tpot_calm
    assert bursts["flying"].ttft_calm < 0.8 * bursts["DP"].ttft_calm


def test_priority_is_served_as_by_a_group_and_others_as_by_replicas(switching):
    runs = {system: switching.figures((system, "priority", 7)) for system in ("DP", "TP", "flying")}
    assert runs["TP"].tpot_urgent < runs["flying"].tpot_urgent < 0.7 * runs["DP"].tpot_urgent
    assert runs["flying"].ttft_urgent < 0.75 * runs["DP"].ttft_urgent
    assert runs["flying"].ttft < 1.2 * runs["DP"].ttft
    assert runs["flying"].tpot < 1.2 * runs["DP"].tpot


def test_longest_contexts_are_the_papers(switching):
    for base, degree, tokens in ((2, 1, 264e3), (4, 1, 959e3), (8, 1, 2.3e6), (4, 2, 1.9e6)):
        assert switching.pool(base).longest(degree) == pytest.approx(tokens, rel=0.03)


def test_the_tables_say_where_the_paper_differs(switching, capsys):
    figures = switching.Figures(4.2, 0.2, 0.02, 0.07, 0.15, 0.022, 0.03, 3000.0, 20000.0)
    slower = dataclasses.replace(figures, ttft_burst=42.0)
    runs = {(load, system): [figures] for load, systems in switching.ASKED.items() for system in systems}
    runs["bursts", "shift"] = [slower]
    switching.print_runs(runs)
    switching.print_comparison(runs)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(runs) + 2 + len(list(switching.compare(runs)))
    told = {line[:36].strip(): line.endswith("differs") for line in lines[3 + len(runs) :]}
    assert told["TTFT in bursts, shift : flying"]
    assert not told["TTFT in bursts, flying : DP"]


@pytest.mark.parametrize("arguments", [["--seconds", "30"], ["--seconds", "3000"], ["--seeds", "0"]])
def test_what_cannot_be_run_is_refused(arguments):
    script = EXAMPLES / "llm-mesh" / "sharing.py"
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
