"""``simulate`` over seeds, traces and scenarios: whoever plays them, every play is as it is alone."""

import json
import pickle
import statistics

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.cli import sweeping

ASKED = ("simulate", "-b", "blueprint.yaml", "--requests", 200)


def answer(command, *given):
    code, out, err = command(*ASKED, "--json", *given)
    assert code == 0, err
    return json.loads(out)


def test_each_seed_is_played_as_it_is_alone(command):
    document = answer(command, "--seeds", 3, "--seed", 4)
    assert [play["seed"] for play in document["models"]] == [4, 5, 6]
    alone = [answer(command, "--seed", seed)["models"][0] for seed in (4, 5, 6)]
    assert document["models"] == alone
    (spread,) = document["spreads"]
    assert (spread["model"], spread["scenario"], spread["trace"], spread["seeds"]) == ("tiny", None, None, 3)
    for name, values in (
        ("ttft_p95_s", [play["latency"]["ttft"]["p95"] for play in alone]),
        ("attainment", [play["attainment"] for play in alone]),
        ("utilisation", [max(play["utilisation"]) for play in alone]),
    ):
        figure = spread["figures"][name]
        assert figure["mean"] == pytest.approx(statistics.fmean(values))
        assert figure["deviation"] == pytest.approx(statistics.stdev(values))
        assert (figure["least"], figure["most"]) == (min(values), max(values))
    assert spread["figures"]["ttft_p95_s"]["deviation"] > 0


def test_the_table_has_a_line_a_figure(command):
    code, out, err = command(*ASKED, "--seeds", 2)
    headings, *lines = out.splitlines()
    assert (code, headings.split()) == (0, ["model", "figure", "mean", "std", "dev", "least", "most"])
    assert [line.split()[1] for line in lines][:2] == ["TTFT", "TTFT"]
    assert not any("refused" in line for line in lines)
    assert err.count("tiny: 2 seeds from 0 on; 90 % of measurements lie within TTFT") == 1


def test_traces_are_compared(command, folder):
    for name, gap in (("slow.csv", 4), ("quick.csv", 1)):
        rows = "\n".join(f"{i * gap},30,5" for i in range(40))
        (folder / name).write_text(f"t,in,out\n{rows}\nbroken,1,1\n")
    given = ("--trace", "slow.csv", "--trace", "quick.csv", "--requests", 30)
    document = answer(command, *given, "--workers", 2)
    assert [play["trace"] for play in document["models"]] == ["slow.csv", "quick.csv"]
    assert document["spreads"] == []
    slow, quick = (
        answer(command, "--trace", name, "--requests", 30)["models"][0] for name in ("slow.csv", "quick.csv")
    )
    assert document["models"] == [slow | {"trace": "slow.csv"}, quick | {"trace": "quick.csv"}]
    code, out, err = command(*ASKED, *given)
    assert (code, [line.split("  ")[0] for line in out.splitlines()[1:]]) == (
        0,
        ["slow.csv · tiny", "quick.csv · tiny"],
    )
    assert err.count("dropped 1 no time") == 2
    assert err.count("10 of 40 requests are not played") == 1


def test_scenarios_are_compared_elsewhere(command):
    given = ("--scenario", "calm", "--scenario", "rush")
    assert answer(command, *given, "--workers", 2) == answer(command, *given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--executor", "here"], "--executor and --workers are for"),
        (["--workers", "2"], "--executor and --workers are for"),
        (["--seeds", "1"], "--seeds"),
        (["--seeds", "2", "--plot", "plot.svg"], "--plot"),
        (["--seeds", "2", "--chart"], "--chart"),
        (["--trace", "a.csv", "--trace", "b.csv", "--chrome-trace", "out.json"], "--chrome-trace"),
        (["--trace", "a.csv", "--workload", "poisson"], "either --trace or --workload"),
    ],
)
def test_what_does_not_apply_is_refused(command, given, said):
    code, _, err = command(*ASKED, *given)
    assert (code, "FT9001" in err, said in err) == (64, True, True)


@pytest.mark.parametrize("executor", [["--executor", "here"], ["--workers", "2"]])
def test_what_cannot_be_played_is_said_as_it_is_alone(command, executor):
    given = ("--workload", "poisson,models=3")
    _, _, alone = command(*ASKED, *given)
    code, out, err = command(*ASKED, *given, "--seeds", 3, *executor)
    assert (code, out, "FT2153" in err) == (65, "", True)
    assert err == alone


def test_an_error_is_the_same_on_its_way_from_another_process():
    error = InvalidInputError.of("FT2144", "nothing", hint="give more", thing="replica/x/0")
    sent = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    assert (type(sent), sent.problems, str(sent)) == (InvalidInputError, error.problems, str(error))


def test_few_requests_are_played_here(command, monkeypatch):
    chosen = []
    named = sweeping.executor_named
    monkeypatch.setattr(
        sweeping, "executor_named", lambda name, *rest: chosen.append(name) or named("here", rest[0], None)
    )
    answer(command, "--seeds", 2)
    monkeypatch.setattr(sweeping, "FEW_REQUESTS", 400)
    answer(command, "--seeds", 2)
    assert chosen == ["here", "processes"]


@pytest.mark.parametrize("executor", [["--executor", "here"], ["--workers", "2"]])
def test_interrupting_a_sweep_shows_nothing(interrupted, executor):
    given = ("simulate", "-b", "blueprint.yaml", "--requests", 30_000, "--seeds", 5000, "--json", *executor)
    code, out, _ = interrupted("plays: ", *given)
    assert (code, out) == (130, "")
