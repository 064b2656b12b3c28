"""Which devices a replica gets, and who must leave before."""

import msgspec
import pytest

from fabrictool.agent.unit import visible_devices
from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.inventory import Inventory
from fabrictool.planner.devices import visibility_variable, with_devices
from tests.planner.test_diff import agent, observed, plan, unit, want

INVENTORY = Inventory.model_validate(
    {
        "apiVersion": "fabrictool/v1",
        "kind": "Inventory",
        "providers": {"p": {}},
        "sites": {"s": {"provider": "p"}},
        "clusters": {
            "a": {
                "site": "s",
                "kind": "local",
                "partitions": {
                    "cpus": {"device": "cpu", "nodes": 1},
                    "n": {"device": "h100-sxm", "devices_per_node": 4, "nodes": 1},
                    "more": {"device": "t4", "devices_per_node": 2, "nodes": 1},
                },
            },
        },
    }
)


def gpu(replica, tp=1, indices=(), partition="n", **changes):
    return agent(replica, device="h100-sxm", tp=tp, partition=partition, device_indices=indices, **changes)


def given(wanted, running=(), renewed=()):
    now = {spec.replica: spec for spec in running}
    found = with_devices(wanted, INVENTORY, now, list(running), renewed)
    return {spec.replica: spec.device_indices for spec in found}


def test_devices_are_given_once_and_aligned():
    found = given([gpu("m/0"), gpu("m/1", 2), gpu("m/2")])
    assert found == {"m/1": (0, 1), "m/0": (2,), "m/2": (3,)}


def test_a_second_partition_goes_on_where_the_first_ends_and_cpus_are_shared():
    assert given([gpu("m/0"), gpu("x/0", partition="more"), agent("c/0", partition="cpus")]) == {
        "m/0": (0,), "x/0": (4,), "c/0": (),
    }  # fmt: skip


def test_what_runs_unchanged_keeps_its_devices():
    assert given([gpu("m/0"), gpu("m/1")], [gpu("m/1", indices=(0,))]) == {"m/1": (0,), "m/0": (1,)}


def test_what_changes_gets_spare_devices_first_and_its_own_when_there_are_none():
    old = [gpu("m/0", 2, (0, 1))]
    assert given([gpu("m/0", 2, context=9)], old) == {"m/0": (2, 3)}
    old.append(gpu("m/1", 2, (2, 3)))
    assert given([gpu("m/0", 2, context=9), gpu("m/1", 2)], old) == {"m/0": (0, 1), "m/1": (2, 3)}
    assert given([gpu("m/0", 2), gpu("m/1", 2)], old, {"m/0"}) == {"m/0": (0, 1), "m/1": (2, 3)}


def test_scattered_replicas_make_way():
    old = [gpu("m/0", indices=(0,)), gpu("m/1", indices=(2,))]
    found = given([gpu("m/0"), gpu("m/1"), gpu("big/0", 2)], old)
    assert set(found["big/0"]) == {1, 3}, "any free devices of a node will do"
    found = given([gpu("m/0"), gpu("big/0", 4)], old)
    assert "big/0" in found


def test_a_replacement_on_the_same_devices_stops_the_old_one_first():
    old, new = gpu("m/0", indices=(0,)), gpu("m/0", indices=(0,), context=9)
    (action,) = plan(want(new), observed(a=[unit(old, "o")]), {"o": old})[1]
    assert (action.kind, action.stop_first) == ("replace", True)
    assert "no device is spare" in action.reason
    spare = msgspec.structs.replace(new, device_indices=(1,))
    (action,) = plan(want(spare), observed(a=[unit(old, "o")]), {"o": old})[1]
    assert not action.stop_first


def test_who_holds_anothers_devices_leaves_before_anything_starts():
    gone, new = gpu("m/0", indices=(0,)), gpu("x/0", indices=(0,))
    assert plan(want(new), observed(a=[unit(gone, "o")]), {"o": gone})[0] == [
        ("delete", "replica/m/0", "o"),
        ("create", "replica/x/0", ""),
    ]
    moved = gpu("m/0", indices=(1,))
    kinds, found = plan(want(new, moved), observed(a=[unit(gone, "o")]), {"o": gone})
    assert kinds == [("delete", "replica/m/0", "o"), ("create", "replica/m/0", ""), ("create", "replica/x/0", "")]
    assert found[0].reason == "another one needs its devices"


@pytest.mark.parametrize(
    ("device", "environment", "shown"),
    [
        ("h100-sxm", {}, {"CUDA_VISIBLE_DEVICES": "1,3"}),
        ("h100-sxm", {"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-7"}, {"CUDA_VISIBLE_DEVICES": "5,GPU-7"}),
        ("mi300x", {"CUDA_VISIBLE_DEVICES": "9"}, {"ROCR_VISIBLE_DEVICES": "1,3"}),
        ("cpu", {}, {}),
    ],
)
def test_the_engine_is_shown_its_devices_and_no_others(device, environment, shown):
    spec = gpu("m/0", 2, (1, 3), visibility_variable=visibility_variable(device))
    assert visible_devices(spec, environment) == shown


def test_fewer_devices_than_planned():
    spec = gpu("m/0", 2, (1, 3), visibility_variable="CUDA_VISIBLE_DEVICES")
    with pytest.raises(InvalidInputError, match="FT7104"):
        visible_devices(spec, {"CUDA_VISIBLE_DEVICES": "0,1"})
