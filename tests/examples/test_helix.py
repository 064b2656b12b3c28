"""Helix's instance as shipped, and the script that made it."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from tests.examples.test_helix_instance import CLUSTER, LAYOUT, PROFILES

EXAMPLE = Path(__file__).parents[2] / "examples" / "helix"


@pytest.fixture
def convert(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    spec = importlib.util.spec_from_file_location("convert", EXAMPLE / "convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def files(tmp_path):
    for name, text in (("cluster.ini", CLUSTER), ("machines.ini", PROFILES), ("layout.ini", LAYOUT)):
        (tmp_path / name).write_text(text)
    return [str(tmp_path / name) for name in ("cluster.ini", "machines.ini", "layout.ini")]


def test_what_is_converted_can_be_loaded(convert, files, tmp_path):
    assert convert(files, tmp_path) == 0
    loaded = load(tmp_path / "blueprint.yaml", environment={})
    layers = yaml.safe_load((tmp_path / "layers.yaml").read_text())
    assert set(layers) == set(loaded.inventory.clusters)
    assert layers["region-0-a100"] == [[0, 2]]


def test_mistakes_are_said_and_nothing_is_written(convert, files, tmp_path, capsys):
    (tmp_path / "layout.ini").write_text(LAYOUT.replace("[3]", "[3, 5]"))
    assert convert(files, tmp_path) == 65
    assert "layout.ini:5: error[FT2025]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.yaml"))
    assert convert(files[:1], tmp_path) == 64


def test_the_shipped_instance_has_all_nodes_and_a_way_through_all_layers():
    loaded = load(EXAMPLE / "blueprint.yaml", environment={})
    layers = yaml.safe_load((EXAMPLE / "layers.yaml").read_text())
    nodes = {name: cluster.partitions["gpu"].nodes for name, cluster in loaded.inventory.clusters.items()}
    assert sum(nodes.values()) == 24
    assert {name: len(held) for name, held in layers.items()} == nodes
    reached, held = 0, sorted(interval for of_cluster in layers.values() for interval in of_cluster)
    for first, last in held:
        assert first <= reached, "no gap"
        reached = max(reached, last + 1)
    assert reached == 80


def test_the_a100_alone_hold_the_model():
    loaded = load(EXAMPLE / "blueprint.yaml", environment={})
    problem, _ = build_problem(
        loaded.blueprint, loaded.inventory, usable=list(loaded.inventory.clusters), unseen=(), current={}
    )
    assert [(option.pool.cluster, option.pp) for option in problem.options] == [("region-0-a100", 4)]
