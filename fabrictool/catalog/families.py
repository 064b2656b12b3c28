"""Families of language models whose ``config.json`` we can read: what their configurations leave unsaid.

A family is here when the parameters that we count from a released configuration are those that its authors publish;
``tests/cases/configs`` holds one such configuration for each, with the source of its count.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_LAYER = 1 << 20
"""As in `Family.full_every`: no layer keeps the whole context."""


class Family(NamedTuple):
    """Defaults of a ``model_type`` that memory and time depend on."""

    mixture: bool = False
    """Its layers have experts."""
    tied: bool = False
    """One matrix is embedding and output, unless the configuration says otherwise."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, unless ``attention_bias`` says otherwise."""
    qk_norm: bool = False
    """Queries and keys are normalised with weights, unless ``use_qk_norm`` says otherwise."""
    gated_ffn: bool = True
    full_every: int = NO_LAYER
    """Where layers have windows and the configuration does not say which: every n-th sees everything."""
    unstated: Mapping[str, int] = MappingProxyType({})
    """Numbers that released configurations leave out, by their field."""


_LLAMA = Family()
_DEEPSEEK = Family(mixture=True)
_GEMMA = Family(tied=True)
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
"""Google's files say of Gemma 3 only what is not as in ``Gemma3TextConfig`` of transformers."""
_WINDOWLESS = MappingProxyType({"use_sliding_window": False})
"""``Qwen2Config`` and those made after it name a window and do not use it unless told to."""
_QWEN2 = Family(qkv_bias=True, unstated=_WINDOWLESS)
_QWEN3 = Family(qk_norm=True, unstated=_WINDOWLESS)
_QWEN3_MOE = Family(mixture=True, qk_norm=True, unstated=_WINDOWLESS)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "apertus": Family(qk_norm=True, gated_ffn=False),
        "cohere": Family(tied=True),
        "cohere2": Family(tied=True, full_every=4),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v32": _DEEPSEEK,
        "ernie4_5": Family(tied=True),
        "ernie4_5_moe": Family(mixture=True, tied=True),
        "exaone4": Family(qk_norm=True, full_every=4),
        "gemma": _GEMMA,
        "gemma2": Family(tied=True, full_every=2),
        "gemma3_text": Family(tied=True, qk_norm=True, full_every=6, unstated=MappingProxyType(_GEMMA3)),
        "glm4": Family(qkv_bias=True),
        "glm4_moe": Family(mixture=True),
        "glm4_moe_lite": _DEEPSEEK,
        "glm4v_moe_text": Family(mixture=True, qkv_bias=True),
        "glm4v_text": Family(qkv_bias=True),
        "glm_moe_dsa": _DEEPSEEK,
        "gpt_oss": Family(mixture=True, qkv_bias=True, full_every=2),
        "granite": _LLAMA,
        "granitemoe": Family(mixture=True),
        "kimi_k2": _DEEPSEEK,
        "kimi_k25": _DEEPSEEK,
        "llama": _LLAMA,
        "llama4_text": Family(mixture=True, full_every=4),
        "minimax_m2": Family(mixture=True, qk_norm=True),
        "ministral3": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": Family(mixture=True),
        "nemotron": Family(gated_ffn=False),
        "olmo2": Family(qk_norm=True),
        "olmo3": Family(qk_norm=True, full_every=4),
        "olmoe": Family(mixture=True, qk_norm=True),
        "phi3": _LLAMA,
        "phimoe": Family(mixture=True),
        "qwen2": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen2_5_vl_text": _QWEN2,
        "qwen2_moe": Family(mixture=True, qkv_bias=True, unstated=_WINDOWLESS),
        "qwen2_vl": _QWEN2,
        "qwen2_vl_text": _QWEN2,
        "qwen3": _QWEN3,
        "qwen3_5_moe_text": _QWEN3_MOE,
        "qwen3_5_text": _QWEN3,
        "qwen3_moe": _QWEN3_MOE,
        "qwen3_next": _QWEN3_MOE,
        "qwen3_vl_moe_text": _QWEN3_MOE,
        "qwen3_vl_text": _QWEN3,
        "seed_oss": Family(qkv_bias=True),
        "smollm3": Family(tied=True, unstated=_WINDOWLESS),
    }
)
"""``model_type`` → its defaults; of models that see or hear, that of their ``text_config``."""
