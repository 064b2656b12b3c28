"""A seeded random Llama of two layers, as a real GGUF file.

It says nothing sensible, but at once: for tests of everything around a model. Its vocabulary is the 256 bytes, a few
merges and the control tokens of a chat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from fabrictool.engines.reference.tokenizer import byte_letters

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
_MERGES = ("t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a")
_NORMAL, _CONTROL = 1, 3


# Wide: a test chooses any part of the shape. Long: a line for each field of the file.
def write_tiny_model(
    path: Path,
    *,
    seed: int = 7,
    context: int = 512,
    layers: int = 2,
    width: int = 64,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    quantised: bool = False,
    rope_factors: bool = False,
) -> None:
    """Write a random model; same arguments, same bytes.

    `quantised` stores the matrices as Q4_1, else F32; `rope_factors` adds frequency factors as Llama 3 has them.
    """
    letters = byte_letters()
    tokens = ["<|begin|>", "<|end|>", *(letters[octet] for octet in range(256))]
    tokens += [merge.replace(" ", "") for merge in _MERGES]
    kinds = [_CONTROL, _CONTROL] + [_NORMAL] * (len(tokens) - 2)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"tiny-{seed}")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(_TEMPLATE)

    random = np.random.Generator(np.random.PCG64(seed))
    kv = width // heads * kv_heads
    matrices = {"token_embd": (len(tokens), width)} | ({} if tied else {"output": (len(tokens), width)})
    for i in range(layers):
        matrices |= {
            f"blk.{i}.attn_q": (width, width),
            f"blk.{i}.attn_k": (kv, width),
            f"blk.{i}.attn_v": (kv, width),
            f"blk.{i}.attn_output": (width, width),
            f"blk.{i}.ffn_gate": (hidden, width),
            f"blk.{i}.ffn_up": (hidden, width),
            f"blk.{i}.ffn_down": (width, hidden),
        }
    kind = gguf.GGMLQuantizationType.Q4_1 if quantised else gguf.GGMLQuantizationType.F32
    for name, shape in matrices.items():
        # Large enough that attention and the gates are far from uniform: a mistake in them moves the logits.
        values = random.normal(0.0, 2.0 * shape[1] ** -0.5, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(layers) for part in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, width).astype(np.float32))
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", random.uniform(1.0, 8.0, width // heads // 2).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
