"""Released configurations, family by family: the count of their weights is the one that is published.

``transformers`` in a case is the number of parameters that transformers 5.19 makes of the configuration's text part
(``from_config`` on the meta device), to the last one: a check of our arithmetic that no rounded number can be.

The configurations are from public copies and the families' own defaults, cut to what matters, and proved by that count
and the published one. What no count depends on, such as a context, is as the model's page says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fabrictool.catalog import model
from fabrictool.catalog.families import FAMILIES
from fabrictool.catalog.huggingface import architecture

CASES = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parents[1].glob("cases/configs/*"))}
PUBLISHED = 0.01
COUNTED = 1e-4
"""Norms' weights that we leave out, and those of layers that have one norm instead of two."""


def family_of(config):
    text = config.get("text_config", {})
    return text.get("model_type", config["model_type"])


def read(name):
    return architecture(CASES[name]["config"], CASES[name]["model"])


def test_every_family_that_is_read_has_a_released_configuration():
    assert {family_of(case["config"]) for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_the_counted_weights_are_the_published_ones(name):
    case, entry = CASES[name], read(name)
    assert len(case["source"]) > 10
    assert entry.parameters == pytest.approx(case["published"], rel=PUBLISHED)
    if "transformers" in case:
        assert entry.parameters == pytest.approx(case["transformers"], rel=COUNTED)
    assert entry.active_parameters <= entry.parameters
    assert list(entry.contradictions()) == []


@pytest.mark.parametrize("name", [name for name in CASES if model(CASES[name]["model"]) is not None])
def test_the_catalogue_has_the_numbers_of_the_configuration(name):
    known, entry = model(CASES[name]["model"]).numbers, read(name).numbers
    if name == "mistralai--Mistral-7B-v0.1":  # its windows are not used: engines keep everything
        entry |= {"full_attention_interval": 1}
    assert entry == known


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("moonshotai--Kimi-K2.5", 32.86e9),
        ("openai--gpt-oss-20b", 3.61e9),
        ("deepseek-ai--DeepSeek-V3.1", 37e9),
        ("baidu--ERNIE-4.5-300B-A47B-PT", 47e9),
        ("microsoft--Phi-3.5-MoE-instruct", 6.6e9),
        ("meta-llama--Llama-4-Maverick-17B-128E-Instruct", 17.17e9),
    ],
)
def test_so_many_weights_work_on_a_token_as_is_published(name, active):
    """Authors count the input embedding, which is only looked up, or do not."""
    entry = read(name)
    embedding = 0 if entry.tied_embeddings else entry.vocab * entry.hidden
    assert any(
        count == pytest.approx(active, rel=0.015)
        for count in (entry.active_parameters, entry.active_parameters + embedding)
    )


@pytest.mark.parametrize(
    ("name", "window", "interval"),
    [
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", 8192, 4),
        ("google--gemma-3-27b-it", 1024, 6),
        ("google--gemma-2-9b-it", 4096, 2),
        ("CohereForAI--c4ai-command-r7b-12-2024", 4096, 4),
        ("CohereForAI--c4ai-command-a-03-2025", 4096, 4),
        ("allenai--Olmo-3-1025-7B", 4096, 4),
        ("LGAI-EXAONE--EXAONE-4.0-32B", 4096, 4),
        ("openai--gpt-oss-20b", 128, 2),
        ("microsoft--Phi-4-mini-instruct", 0, 1),  # a window as wide as the context
        ("Qwen--Qwen2.5-7B-Instruct", 0, 1),  # use_sliding_window: false
    ],
)
def test_windows_are_read_from_what_the_family_calls_them(name, window, interval):
    entry = read(name)
    assert (entry.sliding_window, entry.full_attention_interval) == (window, interval)


MAVERICK = CASES["meta-llama--Llama-4-Maverick-17B-128E-Instruct"]["config"]["text_config"]
ERNIE = CASES["baidu--ERNIE-4.5-300B-A47B-PT"]["config"]


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (MAVERICK, 24),
        (MAVERICK | {"interleave_moe_layer_step": 1}, 0),
        (MAVERICK | {"moe_layers": [1, 3]}, 46),
        (ERNIE, 3),
        (ERNIE | {"moe_layer_end_index": -1}, 3),
        (ERNIE | {"moe_layer_end_index": 50}, 6),
        (ERNIE | {"moe_layer_interval": 2}, 3 + 25),
    ],
)
def test_layers_without_experts_are_told_as_each_family_tells_them(config, dense):
    entry = architecture(config, "x")
    assert entry.dense_layers == dense
    assert entry.ffn == (0 if not dense else 16384 if config["model_type"] == "llama4_text" else 28672)


def test_chunks_are_told_from_the_layers_without_rotation():
    scout = CASES["meta-llama--Llama-4-Scout-17B-16E-Instruct"]["config"]["text_config"]
    assert architecture(scout | {"no_rope_layers": [1, 0] * 24}, "x").full_attention_interval == 2
    assert architecture(scout | {"no_rope_layers": []}, "x").full_attention_interval == 4
    assert architecture(scout | {"max_position_embeddings": 8192}, "x").sliding_window == 0


def test_the_embedding_beside_the_text_part_may_be_tied():
    tied = CASES["Qwen--Qwen3-VL-2B-Instruct"]["config"]
    assert architecture(tied, "x").tied_embeddings
    assert not architecture(tied | {"tie_word_embeddings": False}, "x").tied_embeddings
    inner = tied["text_config"] | {"tie_word_embeddings": False}
    assert not architecture(tied | {"text_config": inner}, "x").tied_embeddings
