"""What is shared by commands that place a fabric several times."""

from dataclasses import replace

from msgspec import to_builtins

from fabrictool.cli.searches import placement_row
from tests.planner.test_exact import option, pool


def test_a_row_tells_variants_and_unlike_stages():
    near, far = pool("near"), pool("far")
    plain = to_builtins(placement_row(option("m", near), 3))
    assert plain == {
        "model": "m", "cluster": "near", "partition": "p", "tp": 1, "pp": 1, "dp": 1, "phase": "unified", "replicas": 3,
    }  # fmt: skip
    named = placement_row(replace(option("m", near), variant="vllm fp8"), 3)
    assert to_builtins(named) == plain | {"variant": "vllm fp8"}
    mixed = placement_row(replace(option("m", near, tp=2), pp=2, others=((far, 1),)), 1)
    assert to_builtins(mixed)["stages"] == [
        {"cluster": "near", "partition": "p", "device": "x", "tp": 2},
        {"cluster": "far", "partition": "p", "device": "x", "tp": 1},
    ]
