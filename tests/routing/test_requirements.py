"""What a request may ask of its replica."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.routing.requirements import ANYTHING, Requirements, bits_of, requirements_of


@dataclass(frozen=True)
class FakeReplica:
    precision: str = "bf16"
    device: str = "a100-80g"
    context: int = 8192
    engine: str = "vllm"
    site: str = "zurich"
    labels: frozenset = frozenset({"owned", "eu"})


@pytest.mark.parametrize(
    ("precision", "bits"), [("fp32", 32), ("bf16", 16), ("fp8", 8), ("mxfp4", 4), ("q4_k_m", 4), ("q6_k", 6), ("", 0)]
)
def test_bits_by_name(precision, bits):
    assert bits_of(precision) == bits


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x-fabric-min-bits": "17"}, "of 17 bits or more"),
        ({"x-fabric-devices": "h100-80g, h200"}, "on h100-80g or h200"),
        ({"x-fabric-min-context": "9000"}, "with a context of 9000 tokens"),
        ({"x-fabric-engines": "sglang"}, "with the engine sglang"),
        ({"x-fabric-sites": "lausanne"}, "at lausanne"),
        ({"x-fabric-labels": "eu, scavenger"}, "labelled eu and scavenger"),
        ({"x-fabric-min-bits": "16", "x-fabric-sites": "x", "x-fabric-engines": "vllm"}, "at x"),
    ],
)
def test_what_nobody_meets_is_named(headers, words):
    assert requirements_of(headers).narrow([FakeReplica()]) == words


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "٣", "9" * 40])
def test_what_is_no_number_is_said(value):
    assert "min-bits is a whole number" in requirements_of({"x-fabric-min-bits": value})


def test_who_asks_for_nothing_gets_anybody():
    assert requirements_of({"x-fabric-providers": "a"}) is ANYTHING
    assert ANYTHING.narrow([FakeReplica(precision="", context=0, engine="", site="", device="")])


@given(
    replicas=st.lists(
        st.builds(
            FakeReplica, st.sampled_from(["", "q4_0", "bf16"]), st.sampled_from(["a", "b", ""]), st.integers(0, 9)
        ),
        min_size=1,
    ),
    bits=st.integers(0, 20),
    devices=st.frozensets(st.sampled_from("ab")),
    context=st.integers(0, 9),
)
def test_whoever_is_left_meets_all_of_it_and_nobody_else_does(replicas, bits, devices, context):
    left = Requirements(bits, devices, context).narrow(replicas)
    meeting = [
        r
        for r in replicas
        if bits_of(r.precision) >= bits and (not devices or r.device in devices) and r.context >= context
    ]
    assert (list(left) if not isinstance(left, str) else []) == meeting
