"""Any architecture that is admitted can be computed; what is impossible is told by its field."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from fabrictool.catalog import ModelArchitecture, model, models
from fabrictool.catalog.architecture import ABOUT
from fabrictool.simulator.memory import room, weight_octets
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token, work

KIMI, QWEN = model("moonshotai/Kimi-K2.5"), model("Qwen/Qwen3-Next-80B-A3B-Instruct")
LLAMA, MIXTRAL = model("meta-llama/Llama-3.1-8B-Instruct"), model("mistralai/Mixtral-8x7B-v0.1")


@pytest.mark.parametrize(
    ("entry", "change", "field"),
    [
        (LLAMA, {"kv_heads": 3}, "kv_heads"),
        (LLAMA, {"ffn": 0}, "ffn"),
        (LLAMA, {"dense_layers": 1}, "dense_layers"),
        (LLAMA, {"shared_expert_ffn": 1}, "shared_expert_ffn"),
        (LLAMA, {"active_experts": 1}, "active_experts"),
        (LLAMA, {"query_rank": 1}, "query_rank"),
        (LLAMA, {"value_dim": 1}, "value_dim"),
        (LLAMA, {"linear_conv": 4}, "linear_conv"),
        (LLAMA, {"full_attention_interval": 4}, "full_attention_interval"),
        (MIXTRAL, {"active_experts": 9}, "active_experts"),
        (MIXTRAL, {"expert_ffn": 0}, "expert_ffn"),
        (MIXTRAL, {"dense_layers": 33}, "dense_layers"),
        (MIXTRAL, {"dense_layers": 3}, "ffn"),
        (KIMI, {"rope_dim": 0}, "rope_dim"),
        (KIMI, {"index_topk": 64, "index_heads": 4}, "index_dim"),
        (KIMI, {"index_topk": 64, "index_heads": 4, "index_dim": 8, "query_rank": 0}, "index_topk"),
        (QWEN, {"linear_head_dim": 0}, "linear_head_dim"),
        (LLAMA, {"published_parameters": 7_000_000_000}, "published_parameters"),
    ],
)
def test_a_contradiction_names_its_field(entry, change, field):
    changed = msgspec.structs.replace(entry, **change)
    assert field in [name for name, _ in changed.contradictions()]
    assert list(entry.contradictions()) == []


@pytest.mark.parametrize("entry", models().values(), ids=lambda entry: entry.id)
def test_nothing_in_the_catalogue_is_impossible(entry):
    assert list(entry.contradictions()) == []


def test_a_difference_says_both_numbers():
    changed = msgspec.structs.replace(LLAMA, layers=33, qk_norm=True, source="elsewhere", licence="")
    assert changed.differences(LLAMA) == ["layers 32, not 33", "qk_norm false, not true"]


@pytest.mark.parametrize("field", [name for name in ModelArchitecture.__struct_fields__ if name not in ABOUT])
def test_every_number_has_bounds_or_is_true_or_false(field):
    row = {**msgspec.to_builtins(LLAMA), field: -1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(row, ModelArchitecture)
    if not isinstance(getattr(LLAMA, field), bool):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**row, field: 10**18}, ModelArchitecture)


WIDTHS = st.integers(1, 1 << 24) | st.integers(1, 300)
ZEROS = st.just(0) | WIDTHS


@st.composite
def admitted(draw):
    """Any entry of the catalogue with some numbers drawn anew, if it is not refused then."""
    entry = draw(st.sampled_from(list(models().values())))
    names = st.sampled_from([name for name in entry.numbers if not isinstance(entry.numbers[name], bool)])
    changes = draw(st.dictionaries(names, ZEROS, max_size=6)) | {"published_parameters": 0}
    try:
        changed = msgspec.convert({**msgspec.to_builtins(entry), **changes}, ModelArchitecture)
    except msgspec.ValidationError:
        return entry
    return entry if list(changed.contradictions()) else changed


@settings(max_examples=300)
@given(admitted(), st.sampled_from([1, 2, 8]))
def test_whatever_is_admitted_can_be_computed(entry, tp):
    cut = Parallelism(tp=tp)
    assert entry.parameters >= entry.active_parameters > 0
    operators = work(entry, cut)
    tokens = np.array([1.0, 512.0])
    for matmul in (*operators.matmuls, operators.head):
        assert np.isfinite(matmul.flops(tokens)).all()
        assert (matmul.touched(tokens) <= matmul.weights * (1 + 1e-9)).all()
    assert math.isfinite(weight_octets(entry, cut, "bf16"))
    assert kv_elements_per_token(entry, cut) >= 0
    assert room(entry, cut, 80e9, weights="bf16", kv="bf16").kv_tokens >= 0
