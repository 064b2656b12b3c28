"""``plan``: its certificate, its explanation, its pictures."""

import json
import math
import re
import signal
import subprocess

import pytest
import yaml

from fabrictool.cli import simulation_output
from fabrictool.cli.main import main
from fabrictool.cli.plan_plots import OTHERS, Bar, bars_of, long_stages, text_chart
from fabrictool.cli.solve_watch import Moment, SearchClock
from fabrictool.domain.inventory import Inventory
from fabrictool.domain.plan import Placement, ReplicaPlacement, StagePlacement
from fabrictool.planner.certificate import certificate
from fabrictool.planner.instances import synthetic
from fabrictool.planner.problem import Solution, StageResult
from fabrictool.state.planfile import read_plan
from tests.planner.fabrics import write_fabric
from tests.planner.test_exact import problem


@pytest.fixture
def fabric(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    return write_fabric(tmp_path, "trust: [alpha]")


def plan(fabric, *arguments):
    return main(["plan", "-b", str(fabric), *arguments])


def certified(*stages):
    results = tuple(StageResult(name, objective, bound) for name, objective, bound in stages)
    return certificate(problem([], [], []), Solution({}, {}, results, "exact", optimal=False), seed=3)


@pytest.mark.parametrize(
    ("stages", "stage", "gap"),
    [
        ([("served", 0, 0), ("slo", 0, 0), ("cost", 10, 9), ("latency", 4, 3)], "latency", 0.25),
        ([("served", 0, 0), ("slo", 0, 0), ("cost", 10, 10)], "slo", 0.0),
        ([("served", 8, 4), ("cost", 10, 9), ("replicas", 100, 1)], "served", 0.5),
        ([("served", 8, 4), ("cost", 10, 5)], "cost", 0.5),
        ([("served", 0, 0)], "served", 0.0),
    ],
)
def test_the_certificate_is_of_the_stage_that_is_farthest_from_proved(stages, stage, gap):
    found = certified(*stages)
    assert (found.stage, found.gap) == (stage, gap)
    assert (found.objective, found.bound) == next((o, b) for name, o, b in stages if name == stage)
    assert found.seed == 3
    assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", found.version)


def test_json_has_the_seconds_that_no_plan_has(fabric, tmp_path, capsys):
    saved, printed, again = (tmp_path / name for name in ("saved.json", "printed.json", "again.json"))
    assert plan(fabric, "--json", "-o", str(saved)) == 0
    printed.write_text(capsys.readouterr().out)
    assert plan(fabric, "-o", str(again)) == 0
    shown = json.loads(printed.read_text())["certificate"]
    assert shown["seconds"] > 0
    assert set(shown) - set(json.loads(saved.read_text())["certificate"]) == {"seconds"}
    assert {"objective", "bound", "gap", "stage", "solver", "version", "seed", "optimal", "stages"} <= set(shown)
    assert saved.read_bytes() == again.read_bytes()
    assert read_plan(printed) == read_plan(saved)
    assert read_plan(printed).id == read_plan(saved).id


@pytest.mark.parametrize("budget", ["0.1s", "2s"])
def test_the_work_of_a_plan_that_a_clock_ended_finds_it_again(budget, tmp_path, monkeypatch, capsys):
    """However far it came: on a busy machine that is another plan, and it is found again as well."""
    for file, document in synthetic.documents(synthetic.parse("6x3x60"), 5, 0.9).items():
        (tmp_path / file).write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    saved, again, more = (tmp_path / name for name in ("saved.json", "again.json", "more.json"))
    made = tmp_path / "blueprint.yaml"
    assert plan(made, "--assume-empty", "--budget", budget, "-o", str(saved)) == 0
    shown = capsys.readouterr().out
    work = read_plan(saved).certificate.work
    assert f"work {work}" in shown
    assert plan(made, "--assume-empty", "--work", str(work), "-o", str(again)) == 0
    assert saved.read_bytes() == again.read_bytes()
    assert plan(made, "--assume-empty", "--work", "1", "-o", str(more)) == 0
    assert read_plan(more).certificate.ended
    assert any("ended at work 1 with more to try" in warning for warning in read_plan(more).warnings)


def test_ctrl_c_ends_the_search_first_and_the_command_the_second_time():
    clock = SearchClock(keeps=True, budget_s=1e5, models=3)
    with clock.hearing():
        assert clock.left_s() > 900.0
        signal.raise_signal(signal.SIGINT)
        assert clock.left_s() == 0.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SearchClock(keeps=False).hearing():
        signal.raise_signal(signal.SIGINT)


def test_what_comes_after_a_search_is_kept_back_of_its_budget():
    assert SearchClock(keeps=False).left_s() == math.inf
    few, many = (SearchClock(keeps=False, budget_s=1e5, models=models) for models in (10, 10**7))
    assert 0.9e5 < few.left_s() <= 1e5 - 1.4  # this process is not that old
    assert 0.5e5 < many.left_s() <= 0.6e5


def test_what_explains_has_a_share_of_the_budget_that_no_search_takes():
    for budget_s, share_s in ((1e5, 2e4), (5.5, 2.0), (1.0, 0.4)):
        alone, explained = (SearchClock(keeps=False, budget_s=budget_s, explains=e) for e in (False, True))
        assert alone.left_s() - explained.left_s() == pytest.approx(share_s, abs=0.1)
    assert SearchClock(keeps=False, explains=True).left_s() == math.inf
    assert SearchClock(keeps=False, explains=True).explaining_left_s() == math.inf


def test_what_explains_is_the_same_again_and_ends_in_time(fabric, tmp_path, capsys):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    for file in (first, again):
        assert plan(fabric, "--work", "30", "--explain", "--why-not", "m@cheap", "-o", str(file)) == 0
    assert first.read_bytes() == again.read_bytes()
    capsys.readouterr()
    assert plan(fabric, "--budget", "0.1s", "--explain") == 0
    assert "was not found out in time" in capsys.readouterr().out


def test_a_search_ends_by_one_thing(fabric):
    assert plan(fabric, "--budget", "1s", "--work", "3") == 64


def test_explain_says_what_rules_cost_and_what_was_not_chosen(fabric, tmp_path, capsys):
    assert plan(fabric, "--explain", "-o", str(tmp_path / "plan.json")) == 0
    said = capsys.readouterr().out
    reasons = read_plan(tmp_path / "plan.json").reasons
    for words in ("m: without its trust allowlist cost would fall by", "as good within 1%: ", "not on "):
        assert any(words in reason for reason in reasons)
        assert words in said
    assert plan(fabric, "--json") == 0
    assert not any("without" in reason for reason in json.loads(capsys.readouterr().out)["reasons"])


def test_what_conflicts_is_said_with_the_ways_out(fabric, capsys):
    fabric.write_text(fabric.read_text().replace("min: 1, max: 40", "min: 17, max: 40", 1))
    assert plan(fabric) == 3
    said = capsys.readouterr().err
    assert "models.m.trust: error[FT2006]: these cannot hold together: m on alpha alone; at least 17" in said
    assert "dear/gpu: warning[FT2007]: enough would be: 8 more h100-sxm in dear/gpu" in said
    assert "hint: nodes: 3" in said
    assert plan(fabric, "--json") == 3
    codes = [one["code"] for one in json.loads(capsys.readouterr().out)["problems"]]
    assert codes == ["FT2003", "FT2006", "FT2007", "FT2007", "FT2007"]


# -- pictures ---------------------------------------------------------------------------------------------------------


def inventory(**clusters):
    return Inventory.model_validate(
        {
            "apiVersion": "fabrictool/v1", "kind": "Inventory",
            "providers": {"p": {}}, "sites": {"s": {"provider": "p"}},
            "clusters": {
                name: {"site": "s", "kind": "local", "enabled": nodes > 0, "partitions": {
                    "gpu": {"device": "h100-sxm", "devices_per_node": 8, "nodes": max(1, nodes)}}}
                for name, nodes in clusters.items()
            },
        }
    )  # fmt: skip


def placed(*replicas):
    return Placement(replicas=tuple(
        ReplicaPlacement(replica=f"{model}/{i}", model=model, provider="p", site="s", cluster=cluster, partition="gpu",
                         device="h100-sxm", tp=tp, **more)
        for i, (model, cluster, tp, more) in enumerate(replicas)
    ))  # fmt: skip


def test_bars_hold_every_device_once():
    mixed = tuple(
        StagePlacement(cluster=name, partition="gpu", device="h100-sxm", tp=tp) for name, tp in (("a", 4), ("b", 2))
    )
    placement = placed(("m", "a", 2, {}), ("m", "a", 2, {}), ("n", "a", 4, {"stages": mixed, "pp": 2}))
    bars, legend = bars_of(placement, inventory(a=2, b=1, off=0))
    assert legend == ["n", "m"], "most devices first"
    assert bars == [Bar("a/gpu (h100-sxm)", 16, {"n": 4, "m": 4}), Bar("b/gpu (h100-sxm)", 8, {"n": 2})]
    assert [bar.free for bar in bars] == [8, 6]


def test_many_models_share_a_colour():
    placement = placed(*((f"m{i:02}", "a", 1, {}) for i in range(20)))
    (bar,), legend = bars_of(placement, inventory(a=4))
    assert len(legend) == 12
    assert legend[-1] == OTHERS
    assert bar.taken[OTHERS] == 9
    assert sum(bar.taken.values()) == 20


def test_the_chart_fits_a_terminal_and_shows_who_has_what():
    bars = [Bar("a/gpu (h100-sxm)", 16, {"m": 8, "n": 4}), Bar("a-long-name-of-a-cluster/partition (x)", 4, {"n": 1}),
            Bar("huge/gpu (x)", 100_000, {"m": 1})]  # fmt: skip
    lines = text_chart(bars, ["m", "n"]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-3:] == ["  A m", "  B n", "  · free"]
    drawn = {line.split()[0]: line.rpartition(" ")[2] for line in lines[:3]}
    assert drawn["huge/gpu"].startswith("A·"), "one device is seen, however large the rest is"
    (first, *_) = text_chart(bars[:1], ["m", "n"]).splitlines()
    bar = first.rpartition(" ")[2]
    assert (bar.count("A"), bar.count("B"), bar.count("·")) == (28, 15, 14), "in their shares"


def test_long_stages_have_a_picture():
    moments = [
        Moment(0.1, StageResult("served", 0, 0)),
        Moment(2.0, StageResult("cost", 9, 5)),
        Moment(4.0, StageResult("cost", 7, 6)),
        Moment(4.2, StageResult("moves", 0, 0)),
    ]
    (stage,) = long_stages(moments)
    assert (stage.name, stage.began, stage.points) == ("cost", 0.1, [(2.0, 9, 5), (4.0, 7, 6)])


def test_plots_are_written(fabric, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fabrictool.cli.plan_plots.LONG_S", 0.0)
    assert plan(fabric, "--plot", str(tmp_path / "plan.png"), "--chart") == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "  A m\n" in capsys.readouterr().out
    assert plan(fabric, "--plot", str(tmp_path / "plan.svg")) == 0
    drawing = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawing


@pytest.mark.parametrize(("file", "code"), [("plan.pdf", 65), ("", 65), ("no/such/folder/plan.png", 1)])
def test_plots_that_cannot_be(fabric, tmp_path, capsys, monkeypatch, file, code):
    monkeypatch.chdir(tmp_path)
    assert plan(fabric, "--plot", file) == code
    assert ("FT2145" if code == 65 else "FT4302") in capsys.readouterr().err


def test_plots_without_the_extra(fabric, capsys, monkeypatch):
    monkeypatch.setattr(simulation_output, "find_spec", lambda name: None)
    assert plan(fabric, "--plot", "plan.png") == 65
    assert "fabrictool[simulator]" in capsys.readouterr().err


def test_a_plan_of_clusters_that_nobody_asked_says_so_and_is_not_applied(fabric, tmp_path, capsys):
    """Its inventory names a host that does not exist: nothing of it is reached."""
    saved = tmp_path / "plan.json"
    assert plan(fabric, "--assume-empty", "-o", str(saved)) == 0
    said = capsys.readouterr()
    assert "no cluster was asked" in said.out
    assert "it cannot be applied" in said.err
    assert "next: fabrictool apply" not in said.err
    assert read_plan(saved).assumed
    assert main(["apply", "-b", str(fabric), str(saved), "--yes"]) == 65
    assert "FT4023" in capsys.readouterr().err
    assert main(["show", str(saved)]) == 0
    assert "no cluster was asked" in capsys.readouterr().out


def test_an_edited_plan_is_refused_before_anything_is_shown_or_asked(fabric, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert plan(fabric, "-o", str(saved)) == 0
    capsys.readouterr()
    saved.write_text(saved.read_text().replace('"fabric": "', '"fabric": "another-', 1))
    for command in (
        ["apply", "-b", str(fabric), str(saved)],
        ["show", str(saved)],
        ["apply", "--reviewed", str(saved)],
    ):
        assert main(command) == 65
        said = capsys.readouterr()
        assert (said.out, "FT4021" in said.err) == ("", True)


def test_offline_needs_evidence_and_looks_beside_the_blueprint(fabric, capsys):
    assert plan(fabric, "--offline") == 64
    assert "FT9008" in capsys.readouterr().err
    assert plan(fabric, "--max-age", "1h") == 64
    assert plan(fabric, "--offline", "--assume-empty") == 64


def test_an_output_that_cannot_be_written_is_refused_before_the_search(fabric, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fabrictool.cli.plan_output._planned", lambda *_, **__: pytest.fail("it was planned first"))
    assert plan(fabric, "-o", str(tmp_path / "no/such/plan.json")) == 1
    said = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'no/such'}" in said
    assert "FABRICTOOL_STATE_DIR" not in said


REMOTE = """\
  {name}:
    site: s
    kind: ssh
    login: [{{host: 127.0.0.1, port: 1, user: me, identity: {key}, host_keys: [{pin}]}}]
    partitions: {{gpu: {{device: h100-sxm, nodes: 1}}}}
"""
HERE = """\
  here:
    site: s
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 1GiB}}
    software: {engines: {reference: {}}}
"""
PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPZ3Ji9n8TxA+0hSHSy7gP0mVYQp9mP5pm1VF3DuIyfS"


@pytest.mark.parametrize(("more", "code"), [("", 69), (HERE, 3)])
def test_what_does_not_answer_is_said_before_what_follows_from_it(tmp_path, monkeypatch, capsys, more, code):
    """With nothing else than that cluster, nothing else is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    clusters = REMOTE.format(name="away", key=key, pin=PIN) + more
    head = "apiVersion: fabrictool/v1\nkind: {}\n"
    (tmp_path / "inventory.yaml").write_text(
        head.format("Inventory") + f"providers: {{p: {{}}}}\nsites: {{s: {{provider: p}}}}\nclusters:\n{clusters}"
    )
    (tmp_path / "blueprint.yaml").write_text(
        head.format("Blueprint") + "fabric: f\ninventory: inventory.yaml\n"
        "models: {m: {source: hf://meta-llama/Llama-3.1-8B-Instruct}}\n"
    )
    assert main(["plan", "--json"]) == code
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems[0]["code"] == "FT2005"
    assert problems[0]["message"].endswith("127.0.0.1:1 cannot be reached: connection refused")
    assert (len(problems) == 1) == (not more)
    if not more:
        assert "--assume-empty" in problems[0]["hint"]
