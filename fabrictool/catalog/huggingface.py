"""A Hugging Face ``config.json`` as one of our architectures. What we do not know is an error, never a default."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import InvalidInputError
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


def architecture(config: Mapping[str, Any], name: str) -> ModelArchitecture:
    """The architecture that a ``config.json`` describes; multimodal ones by their ``text_config``.

    Raises
    ------
    InvalidInputError
        FT1420 a family or FT1421 a field that we do not know, FT1422 a field that is missing or wrong.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**text, "model_type": text.get("model_type", config.get("model_type"))}
    family = str(config.get("model_type", ""))
    if family not in (*DENSE, *MIXTURES):
        raise InvalidInputError.of(
            "FT1420",
            f"{name}: the model family {family!r} is not known",
            hint=f"known: {', '.join((*DENSE, *MIXTURES))}",
        )
    unknown = sorted(set(config) - _known_fields())
    if unknown:
        raise InvalidInputError.of(
            "FT1421",
            f"{name}: nobody has said what {', '.join(unknown)} mean for memory and time",
            hint="remove them if they are of no importance, or write the architecture into the catalogue",
        )
    read = _Reader(config, name)
    mixture = family in MIXTURES
    latent = "kv_lora_rank" in config
    heads = read.whole("num_attention_heads")
    hidden = read.whole("hidden_size")
    head_dim = read.whole("qk_nope_head_dim") if latent else read.whole("head_dim", hidden // heads)
    linear = "linear_num_value_heads" in config
    return ModelArchitecture(
        id=name,
        layers=read.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=read.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=_dense_width(config, read, mixture=mixture),
        vocab=read.whole("vocab_size"),
        max_context=read.whole("max_position_embeddings", read.whole("initial_context_length", 4096)),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
        gated_ffn=family != "apertus",
        qkv_bias=bool(config.get("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss"))),
        output_bias=bool(config.get("attention_bias", False)) and family == "gpt_oss",
        qk_norm=family
        in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gemma3_text", "minimax_m2", "olmoe", "apertus"),
        **(_mixture(config, read, family) if mixture else {}),
        **(_latent(config, read) if latent else {}),
        **(_linear(read) if linear else _windows(config, read, family)),
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
            raise InvalidInputError.of("FT1422", f"{self._name}: {field} is {value!r}, not a whole number")
        return value


def _dense_width(config: Mapping[str, Any], read: _Reader, *, mixture: bool) -> int:
    if not mixture:
        return read.whole("intermediate_size")
    return read.whole("intermediate_size", 0) if config.get("first_k_dense_replace") else 0


def _mixture(config: Mapping[str, Any], read: _Reader, family: str) -> dict[str, Any]:
    experts = next(
        (read.whole(f) for f in ("n_routed_experts", "num_experts", "num_local_experts") if f in config), None
    )
    chosen = next((read.whole(f) for f in ("num_experts_per_tok", "experts_per_token") if f in config), None)
    if not experts or not chosen or chosen > experts:
        raise InvalidInputError.of("FT1422", f"{config.get('model_type')}: {chosen} of {experts} experts make no sense")
    width = read.whole("moe_intermediate_size", read.whole("intermediate_size", 0))
    shared = read.whole("shared_expert_intermediate_size", read.whole("n_shared_experts", 0) * width)
    return {
        "experts": experts,
        "active_experts": chosen,
        "expert_ffn": width,
        "expert_bias": family == "gpt_oss",
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and family.startswith("qwen"),
        "dense_layers": read.whole("first_k_dense_replace", 0),
    }


def _latent(config: Mapping[str, Any], read: _Reader) -> dict[str, Any]:
    found = {
        "kv_rank": read.whole("kv_lora_rank"),
        "query_rank": read.whole("q_lora_rank", 0),
        "rope_dim": read.whole("qk_rope_head_dim"),
        "value_dim": read.whole("v_head_dim"),
    }
    if "index_topk" in config:
        found |= {
            "index_heads": read.whole("index_n_heads"),
            "index_dim": read.whole("index_head_dim"),
            "index_topk": read.whole("index_topk"),
        }
    return found


def _linear(read: _Reader) -> dict[str, Any]:
    return {
        "full_attention_interval": read.whole("full_attention_interval", 4),
        "linear_key_heads": read.whole("linear_num_key_heads"),
        "linear_value_heads": read.whole("linear_num_value_heads"),
        "linear_head_dim": read.whole("linear_value_head_dim"),
        "linear_conv": read.whole("linear_conv_kernel_dim"),
    }


def _windows(config: Mapping[str, Any], read: _Reader, family: str) -> dict[str, Any]:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        full = sum(kind == "full_attention" for kind in kinds)
        interval = len(kinds) // full if full else 1 << 20
    else:
        default = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6}.get(family, 1 << 20)
        interval = read.whole("sliding_window_pattern", default)
    return {"sliding_window": read.whole("sliding_window"), "full_attention_interval": interval}
