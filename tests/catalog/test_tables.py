from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from fabrictool.base.units import Memory
from fabrictool.catalog import accelerators, engines, links, model, models, startable

ACCELERATORS = [
    "a100-40g", "a100-80g", "h100-sxm", "h100-pcie", "h200", "gh200", "b200", "b300", "gb200", "gb300", "t4", "l4",
    "l40s", "a40", "a5000", "a6000", "rtx3090", "rtx3090ti", "rtx4090", "mi250", "mi250x", "mi300x", "gaudi2",
    "xeon-6462c", "epyc-7543", "cpu", "max1550", "rtxpro6000",
]  # fmt: skip
MODELS = [
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-70b-hf",
    "codellama/CodeLlama-34b-hf",
    "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-70B", "huggyllama/llama-30b", "meta-llama/Llama-3.2-3B",
    "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2-7B", "Qwen/Qwen2-72B", "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-32B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking", "openai/gpt-oss-120b",
    "swiss-ai/Apertus-8B-2509", "swiss-ai/Apertus-70B-2509", "HuggingFaceTB/SmolLM2-135M-Instruct",
    "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5",
]  # fmt: skip
ROUNDED = 0.015
"""A published count with few digits, such as 1.7B, is a name rather than a count."""
EXACT = 1e-4


def raw(name):
    return tomllib.loads(files("fabrictool.catalog").joinpath("data", f"{name}.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", ["accelerators", "links", "models", "engines"])
def test_every_entry_says_where_its_numbers_come_from(name):
    for id_, row in raw(name).items():
        assert len(row["source"]) > 10, id_
        fields = set(row) | {f"flops_{precision}" for precision in row.get("flops", {})}
        fields |= set(row.get("weight_bytes", {})) | {"k_m"}
        for field, source in row.get("sources", {}).items():
            assert field in fields, f"{id_}.{field}"
            assert len(source) > 10


def test_all_ids_are_there():
    assert sorted(accelerators()) == sorted(ACCELERATORS)
    assert set(MODELS) <= set(models())
    assert set(engines()) == {"reference", "llama.cpp", "vllm", "sglang", "tensorrt-llm", "deepspeed"}
    assert set(startable()) == set(engines()) - {"tensorrt-llm", "deepspeed"}


@pytest.mark.parametrize("id_", MODELS)
def test_parameters_follow_from_the_architecture(id_):
    entry = models()[id_]
    rounded = entry.published_parameters % 100_000_000 == 0
    assert entry.parameters == pytest.approx(entry.published_parameters, rel=ROUNDED if rounded else EXACT)
    assert entry.active_parameters <= entry.parameters
    assert entry.heads % entry.kv_heads == 0
    assert entry.layers % entry.full_attention_interval == 0


def test_most_counts_are_exact():
    exact = [entry.id for entry in models().values() if entry.parameters == entry.published_parameters]
    assert len(exact) >= 15


@pytest.mark.parametrize(
    ("id_", "active"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", 12.9e9),
        ("openai/gpt-oss-120b", 5.13e9),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 3.6e9),
    ],
)
def test_active_parameters_of_mixtures(id_, active):
    """Mixtral paper: 13B; gpt-oss model card: 5.13B; Qwen3-Next's name rounds to 3B."""
    assert models()[id_].active_parameters == pytest.approx(active, rel=0.02)


def test_kv_cache_of_a_hybrid_counts_full_layers_only():
    assert models()["Qwen/Qwen3-Next-80B-A3B-Instruct"].kv_layers == 12
    assert models()["meta-llama/Llama-3.1-8B-Instruct"].kv_layers == 32


def test_aliases_lead_to_one_entry_and_clash_with_none():
    names = [alias for entry in models().values() for alias in entry.aliases]
    assert len(names) == len(set(names))
    assert not set(names) & set(models())
    assert model("HuggingFaceTB/SmolLM2-135M") is model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert model("nobody/knows") is None


def test_accelerators_are_plausible():
    for entry in accelerators().values():
        assert Memory.parse("1GiB") < entry.memory < Memory.parse("1TB")
        assert 10e9 < entry.memory_bandwidth < 20e12
        assert entry.flops
        assert 10 < entry.tdp_w < 2000
        assert (entry.link_bandwidth > 0) == bool(entry.link)
        if "bf16" in entry.flops and "fp8" in entry.flops:
            assert 1.9 < entry.flops["fp8"] / entry.flops["bf16"] < 2.1


def test_figures_as_the_datasheets_print_them():
    assert accelerators()["h100-sxm"].memory_bandwidth == 3.35e12
    assert accelerators()["h100-sxm"].flops["bf16"] == pytest.approx(989.4e12)
    assert links()["nvlink4"].bandwidth == 450e9
    assert links()["infiniband-ndr"].bandwidth == 50e9


def test_block_formats_follow_from_their_layout():
    octets = engines()["llama.cpp"].weight_bytes
    assert octets["q4_0"] == (2 + 16) / 32
    assert octets["q4_1"] == (2 + 2 + 16) / 32
    assert octets["q8_0"] == (2 + 32) / 32
    assert octets["q6_k"] == pytest.approx(210 / 256, abs=1e-4)


def test_reading_is_pure():
    assert accelerators() is accelerators()
    with pytest.raises(TypeError):
        accelerators()["x"] = None


@pytest.mark.parametrize("id_", sorted(engines()))
def test_an_engine_reserves_some_of_a_small_device_and_no_more_than_enough_of_a_large_one(id_):
    engine = engines()[id_]
    assert engine.reserved(4e9) == pytest.approx(0.3e9)
    assert engine.reserved(40e9) == engine.reserved(192e9) == 3e9


@pytest.mark.parametrize(
    ("engine", "name", "tp", "ep", "precision", "why"),
    [
        ("vllm", "Qwen/Qwen3-235B-A22B", 4, 1, "fp8", ""),
        ("vllm", "Qwen/Qwen3-235B-A22B", 8, 1, "fp8", "experts' width 1536"),
        ("sglang", "Qwen/Qwen3-235B-A22B", 8, 1, "fp8", "into whole blocks of 128"),
        ("vllm", "Qwen/Qwen3-235B-A22B", 8, 8, "fp8", ""),
        ("vllm", "Qwen/Qwen3-235B-A22B", 8, 1, "bf16", ""),
        ("vllm", "Qwen/Qwen2-7B", 8, 1, "bf16", "28 attention heads"),
        ("vllm", "openai/gpt-oss-120b", 128, 1, "bf16", "64 attention heads"),
        ("vllm", "meta-llama/Llama-3.1-8B-Instruct", 16, 1, "bf16", ""),
        ("vllm", "deepseek-ai/DeepSeek-R1", 64, 64, "fp8", ""),
        ("llama.cpp", "Qwen/Qwen2-7B", 8, 1, "q8_0", ""),
    ],
)
def test_what_an_engine_does_not_split(engine, name, tp, ep, precision, why):
    said = engines()[engine].unsplittable(models()[name], tp, ep, precision)
    assert why in said
    assert bool(said) is bool(why)
