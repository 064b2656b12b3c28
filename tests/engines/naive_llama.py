"""An independent Llama forward pass, to check the engine against: float64, one token after another, plain loops.

Shares nothing with the engine: its own reading of GGUF (the format's published description), its own dequantisation by
the block layouts of ggml, rotary pairs as the file orders them, no cache tricks, no batching.

    python tests/engines/naive_llama.py MODEL.gguf tests/cases/engines/smollm2_logits.json
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
PROMPTS = {
    "text": [504, 3575, 282, 4649, 314],  # "The capital of France is"
    "mixed": [1, 4093, 198, 1780, 314, 216, 34, 1232, 33, 47, 2, 198],
}


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, form):
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.scalar("<Q")
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def read_gguf(path):
    data = np.memmap(path, dtype=np.uint8, mode="r")
    at = Cursor(data)
    assert at.scalar("<I") == 0x46554747
    assert at.scalar("<I") == 3
    tensor_count, pair_count = at.scalar("<Q"), at.scalar("<Q")
    meta = {}
    for _ in range(pair_count):
        key = at.text().decode()
        meta[key] = at.value(at.scalar("<I"))
    directory = {}
    for _ in range(tensor_count):
        name = at.text().decode()
        dims = [at.scalar("<Q") for _ in range(at.scalar("<I"))]
        directory[name] = (dims, at.scalar("<I"), at.scalar("<Q"))
    alignment = meta.get("general.alignment", 32)
    start = -(-at.at // alignment) * alignment
    tensors = {}
    for name, (dims, kind, offset) in directory.items():
        count = int(np.prod(dims))
        octets = {F32: 4 * count, Q4_1: count // 32 * 20, Q8_0: count // 32 * 34}[kind]
        raw = np.asarray(data[start + offset : start + offset + octets])
        tensors[name] = dequantise(raw, kind).reshape(dims[::-1])
    return meta, tensors


def dequantise(raw, kind):
    if kind == F32:
        return raw.view(np.float32).astype(np.float64)
    if kind == Q8_0:  # half d, 32 signed bytes
        blocks = raw.reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        return scale * blocks[:, 2:].copy().view(np.int8)
    blocks = raw.reshape(-1, 20)  # half d, half m, 16 bytes: low nibbles are values 0..15, high nibbles 16..31
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float64)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float64)
    out = np.empty((len(blocks), 32))
    for j in range(16):
        out[:, j] = blocks[:, 4 + j] & 15
        out[:, j + 16] = blocks[:, 4 + j] >> 4
    return out * scale + least


def all_logits(path, prompt):
    """Logits [positions, vocab] in float64."""
    meta, w = read_gguf(path)
    return forward(meta, w, prompt)


def forward(meta, w, prompt):
    layers, heads = meta["llama.block_count"], meta["llama.attention.head_count"]
    kv_heads, width = meta["llama.attention.head_count_kv"], meta["llama.embedding_length"]
    eps, base = meta["llama.attention.layer_norm_rms_epsilon"], meta["llama.rope.freq_base"]
    dim = width // heads

    def norm(x, name):
        return x / np.sqrt((x * x).sum() / len(x) + eps) * w[name]

    factors = w.get("rope_freqs.weight", np.ones(dim // 2))

    def rotate(x, position):
        out = np.empty_like(x)
        for start in range(0, len(x), dim):
            for pair in range(dim // 2):
                angle = position * base ** (-2.0 * pair / dim) / factors[pair]
                a, b = x[start + 2 * pair], x[start + 2 * pair + 1]
                out[start + 2 * pair] = a * np.cos(angle) - b * np.sin(angle)
                out[start + 2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    keys = [[] for _ in range(layers)]
    values = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(prompt):
        x = w["token_embd.weight"][token]
        for i in range(layers):
            h = norm(x, f"blk.{i}.attn_norm.weight")
            q = rotate(w[f"blk.{i}.attn_q.weight"] @ h, position)
            keys[i].append(rotate(w[f"blk.{i}.attn_k.weight"] @ h, position))
            values[i].append(w[f"blk.{i}.attn_v.weight"] @ h)
            mixed = np.zeros(heads * dim)
            for head in range(heads):
                mine = slice(head * dim, (head + 1) * dim)
                theirs = slice(head // (heads // kv_heads) * dim, (head // (heads // kv_heads) + 1) * dim)
                scores = np.array([q[mine] @ key[theirs] for key in keys[i]]) / np.sqrt(dim)
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                for share, value in zip(shares, values[i], strict=True):
                    mixed[mine] += share * value[theirs]
            x = x + w[f"blk.{i}.attn_output.weight"] @ mixed
            h = norm(x, f"blk.{i}.ffn_norm.weight")
            gate = w[f"blk.{i}.ffn_gate.weight"] @ h
            x = x + w[f"blk.{i}.ffn_down.weight"] @ (gate / (1.0 + np.exp(-gate)) * (w[f"blk.{i}.ffn_up.weight"] @ h))
        head = w["output.weight"] if "output.weight" in w else w["token_embd.weight"]
        logits.append(head @ norm(x, "output_norm.weight"))
    return np.array(logits)


def main(model, out):
    meta, w = read_gguf(model)
    vocab = w["token_embd.weight"].shape[0]
    chosen = [int(i) for i in np.linspace(0, vocab - 1, 64)]
    document = {"model_sha256": hashlib.sha256(Path(model).read_bytes()).hexdigest(), "vocab": chosen, "prompts": {}}
    for name, prompt in PROMPTS.items():
        logits = forward(meta, w, prompt)
        document["prompts"][name] = {
            "tokens": prompt,
            "argmax": [int(row.argmax()) for row in logits],
            "logits": [[round(float(row[i]), 6) for i in chosen] for row in logits],
        }
    Path(out).write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
