"""Placements without a plan: of what a status says that runs, and of a fabric where nothing does."""

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.planner.placements import empty_placement, running_replicas
from tests.simulator.fabrics import ACCELERATED, INVENTORY, TWO_MODELS, loaded, replica


@pytest.fixture
def tiny(tmp_path):
    """One model, two clusters of one CPU node."""
    return loaded(tmp_path)


@pytest.fixture
def two_models(tmp_path):
    """Two models, two clusters of nodes with eight H100s."""
    return loaded(tmp_path, TWO_MODELS, ACCELERATED)


def status_of(units, services=None, device="h100-sxm"):
    """`units` are (address, cluster, state), `services` replica → tp as the gateway knows them; None: no gateway."""
    document = {"units": [dict(zip(("address", "cluster", "state"), unit, strict=True)) for unit in units]}
    known = [{"replica": f"replica/{name}", "tp": tp} for name, tp in (services or {}).items()]
    gateway = None if services is None else {"nodes": [{"device": device, "services": known}]}
    return document | {"gateway": gateway}


BIG = [("replica/big/0", "one", "running")]


def test_what_runs_is_placed_and_nothing_else(tiny):
    gateway, dead = ("gateway/main", "one", "running"), ("replica/tiny/1", "one", "dead")
    units = [gateway, ("replica/tiny/0", "two", "running"), dead]
    expected = [replica("tiny/0", tiny.inventory, "two")]
    assert running_replicas(status_of(units), tiny.inventory) == expected
    assert running_replicas(status_of(units, {"tiny/0": 1}, "cpu"), tiny.inventory) == expected
    assert running_replicas(status_of([gateway, dead]), tiny.inventory) == []


def test_devices_are_those_that_the_gateway_knows(two_models):
    placed = running_replicas(status_of(BIG, {"big/0": 4}), two_models.inventory)
    assert placed == [replica("big/0", two_models.inventory, "one", 4)]


def test_the_partition_is_the_one_with_the_device(tmp_path):
    """A replica on a cluster with several partitions stands where its device is."""
    more = ACCELERATED.replace("partitions: {gpu:", "partitions: {old: {device: a100-80g, nodes: 1}, gpu:")
    inventory = loaded(tmp_path, TWO_MODELS, more).inventory
    (new,) = running_replicas(status_of(BIG, {"big/0": 4}), inventory)
    (old,) = running_replicas(status_of(BIG, {"big/0": 1}, "a100-80g"), inventory)
    assert [(placed.partition, placed.device) for placed in (new, old)] == [("gpu", "h100-sxm"), ("old", "a100-80g")]


@pytest.mark.parametrize(
    ("services", "device", "says"),
    [({}, "h100-sxm", "how many devices"), (None, "h100-sxm", "how many"), ({"big/0": 4}, "a100-80gb", "a100-80gb")],
)
def test_what_would_have_to_be_guessed_is_refused(two_models, services, device, says):
    with pytest.raises(InvalidInputError) as caught:
        running_replicas(status_of(BIG, services, device), two_models.inventory)
    (problem,) = caught.value.problems
    assert (problem.code, says in problem.message) == ("FT2151", True)


def test_one_partition_of_several_is_not_guessed_either(tmp_path):
    more = INVENTORY.replace("partitions: {", "partitions: {more: {device: cpu, nodes: 1, memory_per_node: 4GiB}, ")
    inventory = loaded(tmp_path, inventory=more).inventory
    with pytest.raises(InvalidInputError) as caught:
        running_replicas(status_of([("replica/tiny/0", "one", "running")]), inventory)
    assert caught.value.problems[0].code == "FT2151"


@pytest.mark.parametrize("document", [[], {}, {"units": [1]}, {"units": [{"address": "replica/x/0"}]}])
def test_what_is_no_status(tiny, document):
    with pytest.raises((AttributeError, KeyError, TypeError)):
        running_replicas(document, tiny.inventory)


def test_an_empty_fabric_gets_what_its_blueprint_asks_for(tiny):
    placement = empty_placement(tiny.blueprint, tiny.inventory, seed=0)
    assert sorted((placed.replica, placed.tp) for placed in placement.replicas) == [("tiny/0", 1), ("tiny/1", 1)]
    assert {placed.cluster for placed in placement.replicas} == {"one", "two"}


def test_nothing_is_placed_on_a_disabled_cluster(tmp_path):
    for name in ("one", "two"):
        files = loaded(tmp_path, TWO_MODELS, ACCELERATED.replace(f"  {name}:\n", f"  {name}:\n    enabled: false\n"))
        placement = empty_placement(files.blueprint, files.inventory, seed=0)
        assert sorted(placed.replica for placed in placement.replicas) == ["big/0", "llama/0"]
        assert {placed.cluster for placed in placement.replicas} == {"one", "two"} - {name}
