"""What a replica and a gateway are told of a model's adapters, and where they cannot be served."""

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.domain.specs import AdapterSpec, GatewaySpec
from fabrictool.domain.state import State
from fabrictool.planner.build import build_problem
from fabrictool.planner.units import wanted_units
from tests.planner.fabrics import INVENTORY, write_fabric

ADAPTERS = "adapters: {law: {source: file:///law, rank: 8}, sql: {source: weights://tuned/sql}}"
PINNED = f"weights: {{tuned: {{source: here, sha256: {'a' * 64}}}}}\nmodels:"
MORE = """
gateway: {cluster: dear, listen: 127.0.0.1:1, mesh: 127.0.0.1:2}
trust: {groups: {all: {allow: [alpha, beta]}}}
tenants: {anna: {group: all, key: 'secret://env/KEY'}}
"""


@pytest.fixture
def units(tmp_path):
    folder = "kind: local\n    weights: /depot"
    rules = f"{ADAPTERS}\ntrust: [alpha]\ngroups: [all]\n"
    file = write_fabric(tmp_path, rules, inventory=INVENTORY.replace("kind: local", folder))
    file.write_text(file.read_text().replace("models:", PINNED, 1) + MORE)
    loaded = load(file, environment={})
    replica = ReplicaPlacement(
        replica="m/0", model="m", provider="alpha", site="a", cluster="dear", partition="gpu", device="h100-sxm", tp=1
    )
    state = State(lineage="0123456789abcdef")
    evidence = Evidence(fabric="f", lineage=state.lineage, at=0.0, clusters={}, specs={}, state=state)
    return wanted_units(loaded.blueprint, loaded.inventory, Placement(replicas=(replica,)), evidence, ())


def test_a_replica_is_told_where_its_adapters_are(units):
    spec = units["replica/m/0"].spec
    staged = f"/depot/sha256-{'a' * 64}"
    assert spec.adapters == {
        "law": AdapterSpec(source="file:///law", rank=8),
        "sql": AdapterSpec(source=f"file://{staged}/sql", rank=16, weights=staged),
    }
    assert spec.staged_sets == (staged,)
    assert spec.served_names == ("m", "law", "sql")


def test_a_gateway_has_the_bases_rules_for_its_adapters(units):
    (spec,) = (unit.spec for unit in units.values() if isinstance(unit.spec, GatewaySpec))
    assert spec.bases == {"law": "m", "sql": "m"}
    assert spec.model_providers == dict.fromkeys(("law", "m", "sql"), ("alpha",))
    assert spec.model_groups == dict.fromkeys(("law", "m", "sql"), ("all",))


@pytest.mark.parametrize(("folder", "fits"), [("", set()), ("/depot", {"dear"})])
def test_it_goes_where_the_sets_of_its_adapters_can_lie(tmp_path, folder, fits):
    inventory = INVENTORY.replace("site: a", f"site: a\n    weights: {folder}") if folder else INVENTORY
    file = write_fabric(tmp_path, ADAPTERS, inventory=inventory)
    file.write_text(file.read_text().replace("models:", PINNED, 1))
    loaded = load(file, environment={})
    usable = ("dear", "cheap", "spot")
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    assert {option.pool.cluster for option in problem.options if option.model == "m"} == fits
