"""A model that the blueprint describes is planned as the catalogue's are: by its numbers, whatever it is called."""

import json

import pytest

from fabrictool.blueprint import load
from fabrictool.blueprint.described import written_fields
from fabrictool.catalog import model
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.state import State
from fabrictool.planner.placements import empty_placement
from fabrictool.planner.units import wanted_units
from fabrictool.planner.verify import violations
from tests.simulator.fabrics import ACCELERATED

BIG = "meta-llama/Llama-3.3-70B-Instruct"
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: two
inventory: inventory.yaml
gateway: {cluster: one, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}
trust: {groups: {all: {allow: [alpha, beta]}}}
models:
  big:
    source: file:///weights/big
    architecture: NAME
    demand: {rate: 1 req/s, input: 9000 tok, output: 128 tok}
    replicas: {min: 2, max: 2}
    place: {spread: site}
    phases: any
"""


@pytest.fixture
def fabric(tmp_path):
    """Loads the blueprint with a model of the catalogue, or with another id and its numbers, some of them changed."""
    (tmp_path / "inventory.yaml").write_text(ACCELERATED)

    def run(name=BIG, **changes):
        text = BLUEPRINT.replace("NAME", name)
        if name != BIG:
            known = model(BIG)
            fields = written_fields(known) | {"published_parameters": known.published_parameters} | changes
            text += f"architectures: {{{name}: {json.dumps(fields)}}}\n"
        (tmp_path / "blueprint.yaml").write_text(text)
        return load(tmp_path / "blueprint.yaml", environment={})

    return run


def placed(loaded):
    return empty_placement(loaded.blueprint, loaded.inventory, seed=3)


def units(loaded, placement):
    state = State(lineage="0123456789abcdef")
    evidence = Evidence(fabric="two", lineage=state.lineage, at=0.0, clusters={}, specs={}, state=state)
    return wanted_units(loaded.blueprint, loaded.inventory, placement, evidence, ())


def test_the_same_numbers_under_another_name_are_the_same_plan(fabric):
    catalogued, described = fabric(), fabric("acme/Same")
    placement = placed(catalogued)
    assert len(placement.replicas) >= 2
    assert placed(described) == placement
    assert violations(described.blueprint, described.inventory, placement) == []
    known, own = units(catalogued, placement), units(described, placement)
    assert own.keys() == known.keys()
    assert {address: unit.spec for address, unit in own.items()} == {a: unit.spec for a, unit in known.items()}
    contexts = {unit.spec.context for unit in own.values() if hasattr(unit.spec, "context")}
    assert contexts == {9216}, "the demand's, which only a known architecture can be asked for"


def test_other_numbers_are_another_plan(fabric):
    small = placed(fabric())
    large = placed(fabric("acme/Deeper", layers=240, published_parameters=0))
    assert sum(r.devices for r in large.replicas) > sum(r.devices for r in small.replicas)


def test_the_check_of_a_placement_reads_the_blueprints_numbers(fabric):
    placement = placed(fabric())
    deeper = fabric("acme/Deeper", layers=2400, published_parameters=0)
    broken = violations(deeper.blueprint, deeper.inventory, placement)
    assert any("of weights do not fit" in complaint for complaint in broken)


def test_replicas_hand_over_as_much_cache_as_the_blueprints_numbers_say(fabric):
    from fabrictool.planner.gateways import _cache_octets

    once, twice = fabric("acme/Same"), fabric("acme/Wide", kv_heads=16, published_parameters=0)
    assert _cache_octets(fabric().blueprint) == _cache_octets(once.blueprint) == {"big": 80 * 2 * 8 * 128 * 2.0}
    assert _cache_octets(twice.blueprint) == {"big": 80 * 2 * 16 * 128 * 2.0}
