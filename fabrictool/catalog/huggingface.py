"""A Hugging Face ``config.json`` as one of our architectures. What we do not know is an error, never a default."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.catalog.architecture import MOST_LAYERS, MOST_TOKENS, MOST_WIDE, ModelArchitecture
from fabrictool.catalog.families import FAMILIES, NO_LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.catalog.families import Family

UNSTATED_CONTEXT = 10_000_000
"""Tokens; a configuration that does not limit the context leaves that to its family's code."""
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_k")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_STRIDES = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""Layers that it divides, counted from 1, have experts: as Qwen, Llama and Ernie call it."""
_FULL = "full_attention"


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
    whole = config
    config = _text_part(config)
    model_type = str(config.get("model_type", ""))
    family = _family(model_type, name)
    config = {**family.unstated, **config}
    unknown = sorted(set(config) - _known_fields())
    if unknown:
        raise InvalidInputError.of(
            "FT1421",
            f"{name}: unknown fields, which may change memory and time: {', '.join(map(str, unknown))}"[:500],
            hint="take out of the file those that do not matter, or write the model's fields by hand: " + BY_HAND,
        )
    read = _Reader(config, name)
    latent = "kv_lora_rank" in config
    heads, hidden = read.positive("num_attention_heads"), read.positive("hidden_size")
    kv_heads = read.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", f"{kv_heads}, which does not divide {heads} attention heads")
    if hidden < heads and not latent and config.get("head_dim") is None:
        raise read.wrong("head_dim", f"missing, and {heads} heads do not fit in a hidden_size of {hidden}")
    head_dim = read.positive("qk_nope_head_dim") if latent else read.positive("head_dim", hidden // heads)
    layers = read.positive("num_hidden_layers", most=MOST_LAYERS)
    context = read.positive("initial_context_length", UNSTATED_CONTEXT, MOST_TOKENS)
    context = read.positive("max_position_embeddings", context, MOST_TOKENS)
    dense = _dense_layers(config, read, layers) if family.mixture else layers
    linear = "linear_num_value_heads" in config
    bias = bool(config.get("attention_bias", config.get("use_bias", family.qkv_bias)))
    described = ModelArchitecture(
        id=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.positive("intermediate_size_mlp", read.positive("intermediate_size")) if dense else 0,
        vocab=read.positive("vocab_size"),
        max_context=context,
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        gated_ffn=family.gated_ffn,
        qkv_bias=bias,
        output_bias=bool(config.get("attention_out_bias", bias and model_type == "gpt_oss")),
        qk_norm=bool(config.get("use_qk_norm", family.qk_norm))
        and model_type != "llama4_text",  # without weights there
        dense_layers=dense if family.mixture else 0,
        **(_mixture(read, model_type) if family.mixture else {}),
        **(_latent(config, read) if latent else {}),
        **(_linear(config, read, layers) if linear else _windows(config, read, family, layers, context)),
        gated_query=bool(config.get("attn_output_gate", model_type in _GATED_QUERY)),
        published_parameters=0,
        released=_released(whole, read),
        licence="",
        source=f"config.json of {name}",
    )
    for field, what in described.contradictions():
        raise InvalidInputError.of("FT1422", f"{name}: its {field} is {what}")
    return described


_GATED_QUERY = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
BY_HAND = "docs/how-to/extend-the-catalogue.md, “By hand”"


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model that sees or hears, too, what reads and writes; the others as they are."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}
    return {**outer, **text}


def _family(model_type: str, name: str) -> Family:
    family = FAMILIES.get(model_type)
    if family is None:
        what = (
            f"unknown model family {model_type!r}" if model_type else "it has no `model_type`, which names the family"
        )
        hint = f"write the model's fields by hand: {BY_HAND}; families that can be read: {', '.join(FAMILIES)}"
        raise InvalidInputError.of("FT1420", f"{name}: {what}"[:300], hint=hint)
    return family


@cache
def _known_fields() -> frozenset[str]:
    text = files("fabrictool.catalog").joinpath("data", "config_fields.txt").read_text("utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


class _Reader:
    """Whole numbers out of a config, with complaints that name the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def whole(self, field: str, default: int | None = None, most: int = MOST_WIDE) -> int:
        value = self._config.get(field)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(field, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(field, f"{value!r}, not a whole number")
        if value > most:
            raise self.wrong(field, f"more than {most}")
        return value

    def positive(self, field: str, default: int | None = None, most: int = MOST_WIDE) -> int:
        """A whole number from 1 to `most`."""
        value = self.whole(field, default, most)
        if value < 1:
            raise self.wrong(field, f"{value}, not a number from 1 to {most}")
        return value

    def first(self, fields: tuple[str, ...], default: int) -> int:
        """That of the first of `fields` that is there: families call the same thing by other names."""
        return next((self.whole(field, default) for field in fields if field in self._config), default)

    def wrong(self, field: str, what: str) -> FabrictoolError:
        """The complaint that a field is `what`."""
        return InvalidInputError.of("FT1422", f"{self._name}: {field} is {what}"[:300])


def _released(whole: Mapping[str, Any], read: _Reader) -> str:
    """Precision of quantised weights, by what made them; "": 16 bits, or one that has no word here."""
    given = whole.get("quantization_config")
    if given is None:
        return ""
    if not isinstance(given, dict):
        raise read.wrong("quantization_config", f"{given!r}, not an object with fields")
    method, bits = given.get("quant_method"), given.get("bits")
    if method in ("fp8", "mxfp4"):
        return str(method)
    if method in ("awq", "gptq") and bits in (4, 8):
        return f"int{bits}"
    if method == "modelopt" and given.get("quant_algo") in _MODELOPT:
        return _MODELOPT[given["quant_algo"]]
    groups = given.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, dict):
        kinds = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        names = {f"{kind.get('type')}{kind.get('num_bits')}" for kind in kinds if isinstance(kind, dict)}
        return _COMPRESSED.get(names.pop(), "") if len(names) == 1 else ""
    return ""


_MODELOPT = {"FP8": "fp8", "NVFP4": "fp4"}
_COMPRESSED = {"float8": "fp8", "int8": "int8", "int4": "int4", "float4": "fp4"}


def _dense_layers(config: Mapping[str, Any], read: _Reader, layers: int) -> int:
    """Layers of a mixture without experts, wherever they are: memory and time depend on their number alone.

    As the models' published code has it: the first of DeepSeek's and those off its stride, those off Qwen's,
    Llama's and Ernie's (counted from 1), before Ernie's first and after its last, those that Qwen names and that
    Llama does not, and those that GLM calls dense.
    """
    first = read.whole("first_k_dense_replace", read.whole("moe_layer_start_index", 0))
    if first > layers:
        raise read.wrong("first_k_dense_replace", f"{first} of {layers} layers")
    end = config.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else read.whole("moe_layer_end_index")
    stride, steps = read.positive("moe_layer_freq", 1), [read.positive(field, 1) for field in _STRIDES]
    named = _layer_numbers(config, read, "mlp_only_layers", layers) or []
    mixed = _layer_numbers(config, read, "moe_layers", layers)
    kinds = _kinds(config, read, "mlp_layer_types", layers) or ["sparse"] * layers
    if not set(kinds) <= {"dense", "sparse"}:
        raise read.wrong("mlp_layer_types", f"{kinds!r}, not a list of dense and sparse")
    return sum(
        not first <= i <= last
        or i % stride != 0
        or any((i + 1) % step != 0 for step in steps)
        or i in named
        or (mixed is not None and i not in mixed)
        or kinds[i] == "dense"
        for i in range(layers)
    )


def _layer_numbers(config: Mapping[str, Any], read: _Reader, field: str, layers: int) -> list[int] | None:
    """Layers counted from 0; None without the field."""
    named = config.get(field)
    if named is None:
        return None
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < layers for layer in named):
        raise read.wrong(field, f"{named!r}, not a list of layers below {layers}")
    return named


def _kinds(config: Mapping[str, Any], read: _Reader, field: str, layers: int) -> list[str] | None:
    """One word for each layer; None without the field."""
    kinds = config.get(field)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise read.wrong(field, f"{kinds!r}, not a list of {layers} words")
    return kinds


def _mixture(read: _Reader, model_type: str) -> dict[str, Any]:
    experts, chosen = read.first(_EXPERTS, 0), read.first(_CHOSEN, 0)
    if not experts or not chosen or chosen > experts:
        raise InvalidInputError.of("FT1422", f"{model_type}: {chosen} of {experts} experts are impossible")
    width = read.positive("moe_intermediate_size", read.whole("intermediate_size", 0))
    shared = read.first(_SHARED_WIDTH, read.first(_SHARED, int(model_type == "llama4_text")) * width)
    return {
        "experts": experts,
        "active_experts": chosen,
        "expert_ffn": width,
        "expert_bias": model_type == "gpt_oss",
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and model_type.startswith("qwen"),
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


def _linear(config: Mapping[str, Any], read: _Reader, layers: int) -> dict[str, Any]:
    kinds = _kinds(config, read, "layer_types", layers)
    value, key = read.positive("linear_value_head_dim"), read.positive("linear_key_head_dim")
    if key != value:
        raise read.wrong("linear_key_head_dim", f"{key}, and not linear_value_head_dim, {value}: we count one width")
    stated = read.positive("full_attention_interval", 4)
    return {
        "full_attention_interval": stated if kinds is None else _interval(kinds, read),
        "linear_key_heads": read.positive("linear_num_key_heads"),
        "linear_value_heads": read.positive("linear_num_value_heads"),
        "linear_head_dim": value,
        "linear_conv": read.positive("linear_conv_kernel_dim"),
    }


def _windows(config: Mapping[str, Any], read: _Reader, family: Family, layers: int, context: int) -> dict[str, Any]:
    """Layers that look back a window; a chunk, as Llama 4 has it, is counted as a window of its width.

    A window as wide as the context is none.
    """
    field = "attention_chunk_size" if "attention_chunk_size" in config else "sliding_window"
    optional = config.get("use_sliding_window")  # of families that name a window and need not use it
    if config.get(field) is None or optional is False:
        return {}
    window = read.positive(field, most=MOST_TOKENS)
    if window >= context:
        return {}
    kinds = _kinds(config, read, "layer_types", layers)
    rotated = config.get("no_rope_layers") if field == "attention_chunk_size" else None
    if rotated:
        if not isinstance(rotated, list) or len(rotated) != layers:
            raise read.wrong("no_rope_layers", f"{rotated!r}, not a list of {layers} numbers")
        kinds = [_FULL if not layer else "chunked_attention" for layer in rotated]
    if kinds is None and optional:
        first = min(layers, read.whole("max_window_layers", _WINDOWS_FROM))
        kinds = [_FULL] * first + ["sliding_attention"] * (layers - first)
    if kinds is not None:
        interval = _interval(kinds, read)
    else:
        pattern = "no_rope_layer_interval" if field == "attention_chunk_size" else "sliding_window_pattern"
        interval = read.positive(pattern, family.full_every)
    return {} if interval == 1 else {"sliding_window": window, "full_attention_interval": interval}


_WINDOWS_FROM = 28
"""The layer from which ``Qwen2Config`` has windows where it has them and does not say from where."""


def _interval(kinds: Sequence[str], read: _Reader) -> int:
    """Every which layer sees everything, wherever they are: memory and time depend on their number alone."""
    full = kinds.count(_FULL)
    interval = len(kinds) // full if full else NO_LAYER
    if len(kinds) // interval != full:
        raise read.wrong("layer_types", f"{full} of {len(kinds)} layers that see the whole context: not every n-th one")
    return interval
