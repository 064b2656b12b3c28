"""``plan --horizon``: what it prints of loads, queues and limits of a month; and Ctrl-C, pressed on a real process."""

import json
import re
from datetime import datetime
from types import SimpleNamespace

import msgspec
import pytest

from fabrictool.cli import horizon
from fabrictool.cli.main import main
from fabrictool.cli.planning import assumed_evidence
from fabrictool.cli.source import Source
from fabrictool.planner.loading import Lead
from fabrictool.planner.plan import PlanOptions, plan
from tests.planner.fabrics import applied, situation, write_fabric

HOURS = "hours: [" + ", ".join(["1"] * 12 + ["3"] * 12) + "]"
DAY = ("--horizon", "24h", "--step", "6h", "--at", "2020-12-01T00:00:00Z")
"""In the past: it is looked at as if it were now."""


@pytest.fixture
def fabric(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    file = write_fabric(tmp_path)
    limits = "limits: {grant: {device_hours_per_month: 2500}, money: {cost: 20000 CHF/month}}\n"
    text = file.read_text().replace("rate: 200 req/s", f"rate: 80 req/s, {HOURS}")
    file.write_text(text + limits)
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("price: 8 CHF/h}", "price: 8 CHF/h, queue_wait: 45m}"))
    return file


def test_it_says_when_to_submit_what_is_late_and_what_is_used(fabric, capsys):
    asked = ["plan", "-b", str(fabric), "--assume-empty", *DAY]
    assert main(asked) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert re.search(r"^Tue 01 Dec 00:00 .* \d+ now ", captured.out, re.MULTILINE)
    assert re.search(r"^Tue 01 Dec 12:00 .* \d+ by 1[01]:\d\d ", captured.out, re.MULTILINE)
    assert re.search(r"^late: \d+ of \d+ starts serve after the beginning of their step,$", captured.out, re.MULTILINE)
    assert re.search(r"^limit grant: [\d.]+ of 82.2 device hours for these 24 h 00 m$", captured.out, re.MULTILINE)
    assert re.search(r"^limit money: [\d.]+ of 657.5 CHF for these 24 h 00 m$", captured.out, re.MULTILINE)
    assert "jobs are taken to wait in the queue: cheap/gpu 45 m 00 s" in captured.err


def test_the_document_has_when_each_job_is_to_be_submitted(fabric, capsys):
    assert main(["plan", "-b", str(fabric), "--assume-empty", *DAY, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first, *_ = told["steps"]
    assert first["starts"] == sum(start["replicas"] for start in first["starting"])
    for step in told["steps"]:
        for start in step["starting"]:
            submit, loads, serves = (
                datetime.fromisoformat(start[name]) for name in ("submit_by", "loads_from", "serves_from")
            )
            assert submit >= datetime.fromisoformat(first["begin"])
            assert (loads - submit).total_seconds() == (2700.0 if start["cluster"] == "cheap" else 0.0)
            assert serves >= loads
    lost = sum(step["lost_to_loading_rate"] for step in told["steps"]) * told["step_s"]
    assert lost == pytest.approx(told["schedule"]["lost_to_loading"], abs=1.0)
    assert 0.0 < lost <= told["schedule"]["unserved"] + 1.0
    assert [quota["limit"] for quota in told["quotas"]] == ["grant", "money"]
    assert all(0.0 < quota["used"] <= quota["share"] for quota in told["quotas"])
    assert told["interrupted"] is False


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
LOGIN = f"kind: slurm\n    login: [{{host: login.example.org, user: me, host_keys: [{KEY}]}}]"


@pytest.mark.parametrize("scheduler", [True, False])
def test_it_says_which_jobs_end_and_from_when_on_the_next_ones_serve(fabric, capsys, scheduler):
    """Jobs of eight hours: with a scheduler the next one is asked for early, and loads where devices are free."""
    inventory = fabric.parent / "inventory.yaml"
    text = inventory.read_text().replace("queue_wait: 45m", "queue_wait: 45m, walltime: 8h")
    inventory.write_text(text.replace("kind: local", LOGIN) if scheduler else text)
    asked = ["plan", "-b", str(fabric), "--assume-empty", *DAY]
    assert main(asked) == 0
    captured = capsys.readouterr()
    out = captured.out
    assert ("no scheduler is asked for the next job before one ends: cheap/gpu" in captured.err) != scheduler
    assert all(len(line) <= 80 for line in out.splitlines())
    assert re.search(r"^renewed: \d+ jobs end within this time[;,] ", out, re.MULTILINE)
    assert re.search(r"^lost to loading: [\d,]+ requests$", out, re.MULTILINE)
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    every = [its | {"step": step["begin"]} for step in told["steps"] for its in step["renewals"]]
    assert sum(its["replicas"] for its in every) == int(re.search(r"^renewed: (\d+)", out, re.MULTILINE)[1])
    for its in every:
        step, ends, submit, loads, serves = (
            datetime.fromisoformat(its[name]).timestamp()
            for name in ("step", "ends", "submit_by", "loads_from", "serves_from")
        )
        assert its["cluster"] == "cheap"
        assert step <= ends < step + 6 * 3600.0
        assert loads >= submit + 2699.0
        assert (submit < ends) == scheduler
        assert serves > loads
    assert any(its["serves_from"] <= its["ends"] for its in every) == scheduler


def test_what_runs_is_renewed_when_the_scheduler_says_that_it_ends(fabric, capsys, monkeypatch):
    """At two in the night, while most devices are idle: the next jobs serve before that."""
    inventory = fabric.parent / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("kind: local", LOGIN))
    source, at = Source(fabric), datetime.fromisoformat(DAY[-1]).timestamp()
    whole = plan(source.blueprint, source.inventory, assumed_evidence(source, at), PlanOptions(work_s=5.0), now=at)
    evidence = applied(source, whole)
    ending = {
        name: msgspec.structs.replace(
            facts, units=tuple(msgspec.structs.replace(unit, ends_at=at + 7200.0) for unit in facts.units)
        )
        for name, facts in evidence.clusters.items()
    }
    evidence = msgspec.structs.replace(evidence, at=at, clusters=ending)
    monkeypatch.setattr("fabrictool.cli.planning.evidence_of", lambda *_, **__: evidence)
    assert main(["plan", "-b", str(fabric), "--json", *DAY]) == 0
    first, *others = json.loads(capsys.readouterr().out)["steps"]
    kept = sum(first["replicas"].values()) - first["starts"]
    assert sum(its["replicas"] for its in first["renewals"]) == kept > 0
    assert {its["ends"] for its in first["renewals"]} == {"2020-12-01T02:00:00Z"}
    assert any(its["serves_from"] < its["ends"] for its in first["renewals"])
    assert not any(step["renewals"] for step in others), "nothing says that the next ones end"


def test_where_no_wait_is_known_that_is_said(tmp_path):
    inventory = situation(tmp_path).inventory
    queued = {name: its.model_copy(update={"kind": "slurm"}) for name, its in inventory.clusters.items()}
    stated = queued["dear"].partitions["gpu"].model_copy(update={"queue_wait": 0.0})
    queued["dear"] = queued["dear"].model_copy(update={"partitions": {"gpu": stated}})
    source = SimpleNamespace(inventory=inventory.model_copy(update={"clusters": queued}))
    notes = horizon._queue_notes(source, Lead(0.0, {("cheap", "gpu"): 90.0}))
    assert notes == [
        "jobs are taken to wait in the queue: cheap/gpu 1 m 30 s",
        "no wait in the queue is known, and none is counted (`queue_wait`): spot/gpu",
    ]


def test_what_is_known_early_enough_is_not_late(fabric, capsys):
    asked = ["plan", "-b", str(fabric), "--assume-empty", "--json", *DAY[:-1], "2099-12-01T00:00:00Z"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schedule"]["lost_to_loading"] == 0.0
    assert all(start["serves_from"] <= step["begin"] for step in told["steps"] for start in step["starting"])


def test_ctrl_c_keeps_the_best_so_far_and_says_what_was_not_searched(interrupted, folder):
    assert main(["init", "--synthetic", "6x3x96", str(folder / "many")]) == 0
    file = folder / "many" / "blueprint.yaml"
    hours = "hours: [" + ", ".join(str(1 + at % 12) for at in range(24)) + "]"
    file.write_text(re.sub(r"(      rate: [\d.]+ req/s)", rf"\1\n      {hours}", file.read_text()))
    given = ("plan", "-b", file, "--assume-empty", "--horizon", "72h", "--at", "2020-12-01T00:00:00Z")
    code, out, shown = interrupted("Ctrl-C takes those so far", *given, "--budget", "300s")
    assert (code, out.count(" Dec ")) == (0, 72 + out.count("first "))
    ours, greedy = (re.search(rf"^{way}.* ([\d,]+) +[\d,]+$", out, re.MULTILINE)[1] for way in ("this", "step by"))
    assert int(ours.replace(",", "")) <= int(greedy.replace(",", ""))
    copied = re.search(r"Ctrl-C: this is the best so far: (\d+) of 72 steps were not searched, and have that of", shown)
    assert 0 < int(copied[1]) < 72
