"""What a GGUF file says about itself: metadata as plain values, tensors by name. Read through the `gguf` package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import msgspec
import numpy as np

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from fabrictool.base.errors import FabrictoolError

# Only what the forward pass and the tokenizer use: the rest of the metadata is prose.
_KEPT = ("general.architecture", "general.name", "llama.", "tokenizer.")
_TENSOR_NAMES = frozenset(
    ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
)


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a Llama-family model. Counts unless said otherwise."""

    layers: int
    width: int
    """Of the residual stream."""
    hidden: int
    """Of the feed-forward network."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """Tokens that the model was trained for."""
    rope_base: float
    norm_eps: float
    tied: bool
    """The output projection is the embedding."""
    rope_factors: bool
    """Frequencies are divided by the factors in ``rope_freqs.weight``."""


class GgufModel:
    """One open file. Tensors stay on disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises
        ------
        InvalidInputError
            FT7020 not a GGUF file, FT7021 not a model that this engine computes.
        """
        self._path = path
        try:
            reader = gguf.GGUFReader(str(path))
            self.metadata: dict[str, Any] = {
                key: _plain(field) for key, field in reader.fields.items() if key.startswith(_KEPT)
            }
        except (ValueError, KeyError, IndexError, TypeError, OSError, UnicodeDecodeError) as error:
            raise InvalidInputError.of("FT7020", f"cannot be read as GGUF: {error}", file=str(path)) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._config()
        self._check_tensors()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The values as fp32, rows = outputs, as the file orders them.

        Raises
        ------
        InvalidInputError
            FT7020 missing, FT7021 a tensor type without a conversion.
        """
        try:
            tensor = self._tensors[name]
        except KeyError as error:
            raise InvalidInputError.of("FT7020", f"tensor {name} is missing", file=str(self._path)) from error
        try:
            # gguf.quants is vectorised: the whole of SmolLM2 takes about a second, so there is no converter of ours.
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InvalidInputError.of(
                "FT7021", f"tensor {name} has the unsupported type {tensor.tensor_type.name}", file=str(self._path)
            ) from error
        return np.asarray(values, dtype=np.float32)

    def _config(self) -> LlamaConfig:
        meta = self.metadata
        architecture = meta.get("general.architecture")
        if architecture != "llama":
            raise self._unsupported(f"architecture {architecture}")
        if (scaling := meta.get("llama.rope.scaling.type", "none")) != "none":
            raise self._unsupported(f"RoPE scaling {scaling}")
        if meta.get("llama.expert_count", 0):
            raise self._unsupported("a mixture of experts")
        try:
            heads = int(meta["llama.attention.head_count"])
            width = int(meta["llama.embedding_length"])
            config = LlamaConfig(
                layers=int(meta["llama.block_count"]),
                width=width,
                hidden=int(meta["llama.feed_forward_length"]),
                heads=heads,
                kv_heads=int(meta.get("llama.attention.head_count_kv", heads)),
                head_dim=int(meta.get("llama.attention.key_length", width // heads)),
                vocab=len(meta["tokenizer.ggml.tokens"]),
                context=int(meta["llama.context_length"]),
                rope_base=float(meta.get("llama.rope.freq_base", 10000.0)),
                norm_eps=float(meta["llama.attention.layer_norm_rms_epsilon"]),
                tied="output.weight" not in self._tensors,
                rope_factors="rope_freqs.weight" in self._tensors,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InvalidInputError.of("FT7020", f"metadata is incomplete: {error}", file=str(self._path)) from error
        if meta.get("llama.rope.dimension_count", config.head_dim) != config.head_dim:
            raise self._unsupported("RoPE over part of the head")
        return config

    def _check_tensors(self) -> None:
        known = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
        known |= {f"blk.{i}.{name}.weight" for i in range(self.config.layers) for name in _TENSOR_NAMES}
        if unknown := sorted(set(self._tensors) - known):
            # Computing on without them (biases, query norms …) would give text that is subtly wrong.
            raise self._unsupported(f"tensor {unknown[0]}")

    def _unsupported(self, what: str) -> FabrictoolError:
        return InvalidInputError.of(
            "FT7021",
            f"the reference engine does not support {what}",
            file=str(self._path),
            hint="serve it with llama.cpp, vLLM or SGLang",
        )


def tensor_shapes(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of the flat file, in its order, with its shape; rows are outputs.

    Query, key and value follow each other, and so do gate and up: each group is one matrix for one product, and still
    each part is a view of its own.
    """
    width, hidden = config.width, config.hidden
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab, width)}
    for i in range(config.layers):
        shapes |= {
            f"blk.{i}.attn_norm": (width,),
            f"blk.{i}.attn_q": (q, width),
            f"blk.{i}.attn_k": (kv, width),
            f"blk.{i}.attn_v": (kv, width),
            f"blk.{i}.attn_output": (width, q),
            f"blk.{i}.ffn_norm": (width,),
            f"blk.{i}.ffn_gate": (hidden, width),
            f"blk.{i}.ffn_up": (hidden, width),
            f"blk.{i}.ffn_down": (width, hidden),
        }
    shapes["output_norm"] = (width,)
    if not config.tied:
        shapes["output"] = (config.vocab, width)
    if config.rope_factors:
        shapes["rope_freqs"] = (config.head_dim // 2,)
    return shapes


def _plain(field: Any) -> Any:
    value = field.contents()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [item.item() if isinstance(item, np.generic) else item for item in value]
    return value
