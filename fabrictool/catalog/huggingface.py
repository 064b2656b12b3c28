"""A Hugging Face ``config.json`` as one of our architectures. What we do not know is an error, never a default."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.catalog.tables import ModelArchitecture

if TYPE_CHECKING:
    from collections.abc import Mapping

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("apertus", "smollm3", "phi3", "granite"),
)
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "olmoe"),
    *("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "minimax_m2"),
)


MOST_LAYERS = 10_000
"""The deepest released models have a few hundred."""
UNSTATED_CONTEXT = 10_000_000
"""Tokens; a configuration that does not limit the context leaves that to its family's code."""


# Long: one call with a line for each field of an architecture.
def architecture(config: Any, name: str) -> ModelArchitecture:
    """The architecture that a parsed ``config.json`` describes; multimodal ones by their ``text_config``.

    Raises
    ------
    InvalidInputError
        FT1420 a family or FT1421 a field that we do not know, FT1422 a field that is missing or wrong.
    """
    if not isinstance(config, dict):
        raise InvalidInputError.of("FT1422", f"{name} holds a {type(config).__name__}, not an object with fields")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**text, "model_type": text.get("model_type", config.get("model_type"))}
    family = str(config.get("model_type", ""))
    if family not in (*DENSE, *MIXTURES):
        raise InvalidInputError.of(
            "FT1420",
            f"{name}: unknown model family {family!r}",
            hint=f"known: {', '.join((*DENSE, *MIXTURES))}",
        )
    unknown = sorted(set(config) - _known_fields())
    if unknown:
        raise InvalidInputError.of(
            "FT1421",
            f"{name}: unknown fields, which may change memory and time: {', '.join(unknown)}",
            hint="remove them if they do not matter, or add the architecture to the catalogue",
        )
    read = _Reader(config, name)
    mixture = family in MIXTURES
    latent = "kv_lora_rank" in config
    heads, hidden = read.positive("num_attention_heads"), read.positive("hidden_size")
    kv_heads = read.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", f"{kv_heads}, which does not divide {heads} attention heads")
    if hidden < heads and not latent and config.get("head_dim") is None:
        raise read.wrong("head_dim", f"missing, and {heads} heads do not fit in a hidden_size of {hidden}")
    head_dim = read.positive("qk_nope_head_dim") if latent else read.positive("head_dim", hidden // heads)
    layers = read.positive("num_hidden_layers", most=MOST_LAYERS)
    dense = _dense_layers(config, read, layers) if mixture else layers
    linear = "linear_num_value_heads" in config
    return ModelArchitecture(
        id=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.positive("intermediate_size") if dense else 0,
        vocab=read.positive("vocab_size"),
        max_context=read.positive("max_position_embeddings", read.positive("initial_context_length", UNSTATED_CONTEXT)),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
        gated_ffn=family != "apertus",
        qkv_bias=bool(config.get("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss"))),
        output_bias=bool(config.get("attention_bias", False)) and family == "gpt_oss",
        qk_norm=family
        in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gemma3_text", "minimax_m2", "olmoe", "apertus"),
        dense_layers=dense if mixture else 0,
        **(_mixture(config, read, family) if mixture else {}),
        **(_latent(config, read) if latent else {}),
        **(_linear(read) if linear else _windows(config, read, family, layers)),
        gated_query=bool(config.get("attn_output_gate", family == "qwen3_next")),
        published_parameters=0,
        licence="",
        source=f"config.json of {name}",
    )


@cache
def _known_fields() -> frozenset[str]:
    text = files("fabrictool.catalog").joinpath("data", "config_fields.txt").read_text("utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


class _Reader:
    """Whole numbers out of a config, with complaints that name the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def whole(self, field: str, default: int | None = None) -> int:
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value > 1 << 40:
            raise self.wrong(field, f"{value!r}, not a whole number")
        return value

    def positive(self, field: str, default: int | None = None, most: int = 1 << 40) -> int:
        """A whole number from 1 to `most`."""
        value = self.whole(field, default)
        if not 1 <= value <= most:
            raise self.wrong(field, f"{value}, not a number from 1 to {most}")
        return value

    def wrong(self, field: str, what: str) -> FabrictoolError:
        """The complaint that a field is `what`."""
        return InvalidInputError.of("FT1422", f"{self._name}: {field} is {what}"[:300])


def _dense_layers(config: Mapping[str, Any], read: _Reader, layers: int) -> int:
    """Layers of a mixture without experts, wherever they are: memory and time depend on their number alone.

    As the models' published code has it: the first of DeepSeek's and those off its stride, those off Qwen's
    (counted from 1) and those it names, and those that GLM calls dense.
    """
    first = read.whole("first_k_dense_replace", 0)
    if first > layers:
        raise read.wrong("first_k_dense_replace", f"{first} of {layers} layers")
    stride, step = read.positive("moe_layer_freq", 1), read.positive("decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < layers for layer in named):
        raise read.wrong("mlp_only_layers", f"{named!r}, not a list of layers below {layers}")
    kinds = _kinds(config, read, "mlp_layer_types", layers) or ["sparse"] * layers
    if not set(kinds) <= {"dense", "sparse"}:
        raise read.wrong("mlp_layer_types", f"{kinds!r}, not a list of dense and sparse")
    return sum(
        i < first or i % stride != 0 or (i + 1) % step != 0 or i in named or kinds[i] == "dense" for i in range(layers)
    )


def _kinds(config: Mapping[str, Any], read: _Reader, field: str, layers: int) -> list[str] | None:
    """One word for each layer; None without the field."""
    kinds = config.get(field)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise read.wrong(field, f"{kinds!r}, not a list of {layers} words")
    return kinds


def _mixture(config: Mapping[str, Any], read: _Reader, family: str) -> dict[str, Any]:
    experts = next(
        (read.whole(f) for f in ("n_routed_experts", "num_experts", "num_local_experts") if f in config), None
    )
    chosen = next((read.whole(f) for f in ("num_experts_per_tok", "experts_per_token") if f in config), None)
    if not experts or not chosen or chosen > experts:
        raise InvalidInputError.of(
            "FT1422", f"{config.get('model_type')}: {chosen} of {experts} experts are impossible"
        )
    width = read.positive("moe_intermediate_size", read.whole("intermediate_size", 0))
    shared = read.whole("shared_expert_intermediate_size", read.whole("n_shared_experts", 0) * width)
    return {
        "experts": experts,
        "active_experts": chosen,
        "expert_ffn": width,
        "expert_bias": family == "gpt_oss",
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and family.startswith("qwen"),
    }


def _latent(config: Mapping[str, Any], read: _Reader) -> dict[str, Any]:
    fields = {
        "kv_rank": read.positive("kv_lora_rank"),
        "query_rank": read.whole("q_lora_rank", 0),
        "rope_dim": read.positive("qk_rope_head_dim"),
        "value_dim": read.positive("v_head_dim"),
    }
    if "index_topk" in config:
        fields |= {
            "index_heads": read.positive("index_n_heads"),
            "index_dim": read.positive("index_head_dim"),
            "index_topk": read.positive("index_topk"),
        }
    return fields


def _linear(read: _Reader) -> dict[str, Any]:
    return {
        "full_attention_interval": read.positive("full_attention_interval", 4),
        "linear_key_heads": read.positive("linear_num_key_heads"),
        "linear_value_heads": read.positive("linear_num_value_heads"),
        "linear_head_dim": read.positive("linear_value_head_dim"),
        "linear_conv": read.positive("linear_conv_kernel_dim"),
    }


def _windows(config: Mapping[str, Any], read: _Reader, family: str, layers: int) -> dict[str, Any]:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return {}
    kinds = _kinds(config, read, "layer_types", layers)
    if kinds is not None:
        full = sum(kind == "full_attention" for kind in kinds)
        interval = len(kinds) // full if full else 1 << 20
    else:
        default = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6}.get(family, 1 << 20)
        interval = read.positive("sliding_window_pattern", default)
    return {"sliding_window": read.positive("sliding_window"), "full_attention_interval": interval}
