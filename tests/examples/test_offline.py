"""What a user copies: valid as it stands, and planned in one command without a cluster, a key or a state folder."""

import json
from pathlib import Path

import pytest

from fabrictool.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/observation.json"))
WARNED = {"kubernetes-namespace": ["FT1240"]}


@pytest.fixture(autouse=True)
def nothing_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))


def blueprint(name):
    return ["-b", str(EXAMPLES / name / "blueprint.yaml")]


def test_all_kinds_are_there():
    assert NAMES == ["kubernetes-namespace", "slurm-cluster", "slurm-federation", "ssh-hosts"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_valid_and_planned_offline(name, tmp_path, capsys):
    assert main(["validate", *blueprint(name), "--json"]) == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["code"] for problem in problems] == WARNED.get(name, [])
    assert main(["plan", "--offline", *blueprint(name), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    kinds = {action["kind"] for action in plan["actions"]}
    assert kinds == {"create"}
    assert plan["warnings"] == ([] if name not in WARNED else plan["warnings"][:1])
    assert all(model["served"] > 0.999 and not model["misses"] for model in plan["forecast"]["models"])
    assert not (tmp_path / "state").exists()


def test_the_federation_uses_both_sites_and_keeps_its_rules(capsys):
    for scenario, clusters in (([], {"alps", "juno"}), (["--scenario", "beta-away"], {"alps"})):
        assert main(["plan", "--offline", *blueprint("slurm-federation"), "--json", *scenario]) == 0
        replicas = json.loads(capsys.readouterr().out)["placement"]["replicas"]
        assert {replica["cluster"] for replica in replicas} == clusters
        assert {r["provider"] for r in replicas if r["model"] == "gpt-oss-120b"} == {"alpha"}
        assert len({replica["model"] for replica in replicas}) == 4


def test_a_changed_observation_is_refused(tmp_path, capsys):
    for file in ("blueprint.yaml", "inventory.yaml", "root.crt", "observation.json"):
        text = (EXAMPLES / "ssh-hosts" / file).read_text()
        (tmp_path / file).write_text(text.replace('"known": true', '"known": false', 1))
    assert main(["plan", "--offline", "-b", str(tmp_path / "blueprint.yaml")]) == 65
    assert "FT4402" in capsys.readouterr().err


def test_a_plan_fits_eighty_columns_and_its_figures_are_aligned(capsys, monkeypatch):
    monkeypatch.setattr("fabrictool.cli.plan_text.terminal_columns", lambda: 80)
    assert main(["plan", "--offline", *blueprint("slurm-federation")]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("forecast "))
    table = lines[begin : begin + 5]
    assert max(map(len, lines)) <= 80
    ends = {line.index(")", line.index("(")) for line in table[1:]}
    assert len(ends) == 1
    assert len({line.index("%") for line in table[1:]}) == 1
