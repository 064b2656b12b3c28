"""SmolLM2-135M-Instruct as a folder that vLLM loads, from the GGUF file that the reference engine is tested with."""

import json
import struct

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_SPECIAL = (3, 4)
"""Control and user-defined, of GGUF's kinds of tokens."""


def write_smollm2(source, folder, kv_heads=None):
    """All of it, weights in float32; `source` is the GGUF file.

    With as many `kv_heads` as are asked for: further ones, and the heads that go with them, are zero and add nothing.
    """
    reader = gguf.GGUFReader(source)
    about = {key: field.contents() for key, field in reader.fields.items()}
    head = about["llama.embedding_length"] // about["llama.attention.head_count"]
    queries = about["llama.attention.head_count"] // about["llama.attention.head_count_kv"]
    kv_heads = kv_heads or about["llama.attention.head_count_kv"]
    rows = {"attn_q": kv_heads * queries * head, "attn_k": kv_heads * head, "attn_v": kv_heads * head}
    folder.mkdir(parents=True)
    _write_weights(reader, head, rows, folder / "model.safetensors")
    _write_tokenizer(about, folder)
    end, begin = about["tokenizer.ggml.eos_token_id"], about["tokenizer.ggml.bos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": about["llama.embedding_length"], "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"], "num_attention_heads": kv_heads * queries,
        "num_key_value_heads": kv_heads, "head_dim": head,
        "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"], "rope_theta": about["llama.rope.freq_base"],
        "vocab_size": len(about["tokenizer.ggml.tokens"]), "max_position_embeddings": about["llama.context_length"],
        "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": begin, "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, default=float))


def _write_weights(reader, head, rows, path):
    """In the safetensors format: the length of a JSON table, the table, and what it points to."""
    tensors = {}
    for tensor in reader.tensors:
        data = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype="<f4")
        if tensor.name in _WHOLE:
            tensors[_WHOLE[tensor.name]] = data
        elif tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if part in (
                "attn_q",
                "attn_k",
            ):  # llama.cpp has the pairs of a rotation beside each other, others in halves
                data = data.reshape(-1, head // 2, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
            if part in rows:
                data = np.pad(data, ((0, rows[part] - len(data)), (0, 0)))
            elif part == "attn_output":
                data = np.pad(data, ((0, 0), (0, rows["attn_q"] - data.shape[1])))
            tensors[f"model.layers.{layer}.{_PARTS[part]}.weight"] = np.ascontiguousarray(data)
    table, end = {}, 0
    for name, data in tensors.items():
        table[name] = {"dtype": "F32", "shape": data.shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors.values():
            file.write(data.tobytes())


def _write_tokenizer(about, folder):
    tokens, kinds = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.token_type"]
    merges = [tuple(line.split(" ", 1)) for line in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), octets])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[about["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[about["tokenizer.ggml.eos_token_id"]],
        "model_max_length": int(about["llama.context_length"]),
        "chat_template": about["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
