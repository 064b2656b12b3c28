"""config.json → architecture: parameter counts are the check that nothing was misread."""

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import models
from fabrictool.catalog.families import NO_LAYER
from fabrictool.catalog.huggingface import architecture

CONFIGS = {
    "meta-llama/Llama-3.1-70B-Instruct": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen2-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 131072,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "Qwen/Qwen3-235B-A22B": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "openai/gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_counted_parameters_are_the_published_ones(name):
    found = architecture(CONFIGS[name], name)
    known = models()[name]
    assert found.parameters == pytest.approx(known.published_parameters, rel=2e-4)
    assert found.kv_layers == known.kv_layers
    assert found.active_parameters == pytest.approx(known.active_parameters, rel=2e-4)


def test_the_text_part_of_a_multimodal_config_is_read():
    inner = CONFIGS["meta-llama/Llama-3.1-70B-Instruct"]
    found = architecture({"model_type": "some_vision_thing", "text_config": inner}, "x")
    assert found.layers == 80


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "mamba"}, "FT1420"),
        ({"secret_new_attention": 3}, "FT1421"),
        ({"hidden_size": "big"}, "FT1422"),
        ({"num_hidden_layers": None}, "FT1422"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}, "FT1422"),
    ],
)
def test_what_is_not_known_is_an_error_and_never_a_default(change, code):
    config = CONFIGS["meta-llama/Llama-3.1-70B-Instruct"] | change
    with pytest.raises(InvalidInputError) as caught:
        architecture(config, "x")
    assert caught.value.problems[0].code == code


LLAMA = CONFIGS["meta-llama/Llama-3.1-70B-Instruct"]
QWEN = CONFIGS["Qwen/Qwen3-235B-A22B"]
DEEPSEEK = CONFIGS["deepseek-ai/DeepSeek-V3"]
NEXT = QWEN | {
    "model_type": "qwen3_next", "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_value_head_dim": 128, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
WINDOWED = LLAMA | {"model_type": "mistral", "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([1], "list"),
        ("text", "str"),
        *((LLAMA | {field: 0}, field) for field in (
            "num_attention_heads", "hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size",
            "vocab_size", "head_dim", "max_position_embeddings",
        )),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA | {"num_attention_heads": 16384}, "head_dim"),
        (LLAMA | {"num_key_value_heads": 128}, "num_key_value_heads"),
        (LLAMA | {"num_key_value_heads": 7}, "num_key_value_heads"),
        (NEXT | {"full_attention_interval": 0}, "full_attention_interval"),
        (WINDOWED | {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window"),
        (WINDOWED | {"layer_types": "full_attention"}, "layer_types"),
        (WINDOWED | {"layer_types": ["full_attention"]}, "layer_types"),
        (WINDOWED | {"layer_types": ["full_attention"] * 50 + ["sliding_attention"] * 30}, "layer_types"),
        (LLAMA | {"quantization_config": "fp8"}, "quantization_config"),
        (NEXT | {"linear_key_head_dim": 64}, "linear_key_head_dim"),
        (NEXT | {"layer_types": ["linear_attention"] * 34 + ["full_attention"] * 60}, "layer_types"),
        (QWEN | {"num_experts": 0}, "experts"),
        (QWEN | {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (QWEN | {"mlp_only_layers": [94]}, "mlp_only_layers"),
        (QWEN | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (QWEN | {"mlp_only_layers": [0], "intermediate_size": 0}, "intermediate_size"),
        (DEEPSEEK | {"first_k_dense_replace": 62}, "first_k_dense_replace"),
        (DEEPSEEK | {"moe_layer_freq": 0}, "moe_layer_freq"),
        (DEEPSEEK | {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        (DEEPSEEK | {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (DEEPSEEK | {"mlp_layer_types": ["odd"] * 61}, "mlp_layer_types"),
        (DEEPSEEK | {"kv_lora_rank": 0}, "kv_lora_rank"),
    ],
)  # fmt: skip
def test_what_is_impossible_names_its_field(config, named):
    with pytest.raises(InvalidInputError, match=named) as caught:
        architecture(config, "x")
    assert caught.value.problems[0].code == "FT1422"


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (QWEN | {"decoder_sparse_step": 1, "mlp_only_layers": []}, 0),
        (QWEN | {"decoder_sparse_step": 2}, 47),
        # The first and the third have none anyway.
        (QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 2]}, 48),
        (DEEPSEEK | {"moe_layer_freq": 1}, 3),
        (DEEPSEEK | {"moe_layer_freq": 2}, 3 + 29),
        (DEEPSEEK | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}, 3),
        (DEEPSEEK | {"first_k_dense_replace": 0, "mlp_layer_types": ["dense"] * 5 + ["sparse"] * 56}, 5),
    ],
)
def test_layers_without_experts_are_counted_wherever_they_are(config, dense):
    found = architecture(config, "x")
    assert found.dense_layers == dense
    assert found.ffn == (config["intermediate_size"] if dense else 0)


@pytest.mark.parametrize(
    ("given", "released"),
    [
        (None, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}},
            "int4",
        ),
        ({"quant_method": "new"}, ""),
    ],
)
def test_the_precision_of_released_weights(given, released):
    assert architecture(LLAMA | {"quantization_config": given}, "x").released == released
    outer = {"model_type": "kimi_k25", "text_config": LLAMA, "quantization_config": given}
    assert architecture(outer, "x").released == released


QWEN2 = CONFIGS["Qwen/Qwen2-7B"] | {"sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "window", "interval"),
    [
        ({key: value for key, value in QWEN2.items() if key != "use_sliding_window"}, 0, 1),
        (QWEN2 | {"use_sliding_window": True}, 0, 1),  # windows from layer 28 on, and there are 28
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 14}, 4096, 2),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 4096, NO_LAYER),
        (WINDOWED, 4096, NO_LAYER),
        (NEXT | {"layer_types": ["linear_attention"] * 83 + ["full_attention"] * 11}, 0, 8),
    ],
)
def test_which_layers_have_windows(config, window, interval):
    described = architecture(config, "x")
    assert (described.sliding_window, described.full_attention_interval) == (window, interval)


def test_without_a_stated_context_there_is_no_limit():
    unstated = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert architecture(unstated, "x").max_context > 1_000_000
