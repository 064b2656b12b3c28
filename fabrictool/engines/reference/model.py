"""The forward pass of a Llama-family model: one step over a batch that mixes prompts and single tokens.

RMSNorm, rotary positions (halves of a head, base and optional frequency factors), grouped-query attention over the
paged pool, SwiGLU, tied or separate output projection. All rows of the batch go through each matrix together: the
weights are read once per step, which is what a step costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fabrictool.engines.reference.kv import KvPool
    from fabrictool.engines.reference.weights import Weights

_FEW = 6
"""Rows up to which matrix times vector, one by one, beats the product; measured, see the page on this engine."""
_CACHED = 147_456
"""Values of a matrix part that stays in a core's second-level cache (576 KiB)."""


class SequenceRows(NamedTuple):
    """The part of a step that belongs to one request: consecutive tokens of its sequence."""

    tokens: Sequence[int]
    position: int
    """Of the first token; what came before is in the pool already."""
    blocks: Sequence[int]
    """Block table; covers position + len(tokens)."""
    wants_logits: bool
    """For the last token."""


class Transformer:
    """Weights with the arithmetic. Holds no state of requests: that is in the pool and in the plan."""

    def __init__(self, weights: Weights) -> None:
        self.config = c = weights.config
        named = weights.tensors()
        self._embedding = named["token_embd"]
        self._output = named["token_embd" if c.tied else "output"]
        self._output_norm = named["output_norm"]
        parts = ("attn_norm", "qkv", "attn_output", "ffn_norm", "gate_up", "ffn_down")
        self._layers = [tuple(named[f"blk.{i}.{part}"] for part in parts) for i in range(c.layers)]
        exponents = np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim
        self._frequencies = c.rope_base**-exponents
        if c.rope_factors:
            self._frequencies = self._frequencies / named["rope_freqs"].astype(np.float64)
        self._scale = np.float32(c.head_dim**-0.5)

    def step(self, batch: Sequence[SequenceRows], pool: KvPool) -> NDArray[np.float32]:
        """Compute one step, storing keys and values in `pool`.

        Returns logits [requests that want them, vocab] in the order of `batch`. Rows of one batch may not share
        blocks.
        """
        c = self.config
        lengths = [len(rows.tokens) for rows in batch]
        ends = np.cumsum(lengths)
        spans = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
        positions = np.concatenate([np.arange(r.position, r.position + len(r.tokens)) for r in batch])
        tables = [np.asarray(rows.blocks, dtype=np.intp) for rows in batch]
        slots = np.concatenate(
            [
                table[positions[span] // pool.block_size] * pool.block_size + positions[span] % pool.block_size
                for table, span in zip(tables, spans, strict=True)
            ]
        )
        angles = positions[:, None] * self._frequencies
        cos = np.cos(angles).astype(np.float32)[:, None, :]
        sin = np.sin(angles).astype(np.float32)[:, None, :]

        x = self._embedding[np.concatenate([np.asarray(rows.tokens, dtype=np.intp) for rows in batch])]
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        for index, (attn_norm, qkv, attn_output, ffn_norm, gate_up, ffn_down) in enumerate(self._layers):
            joined = _project(_rms_norm(x, attn_norm, c.norm_eps), qkv)
            queries = _rotate(joined[:, :q_rows].reshape(-1, c.heads, c.head_dim), cos, sin)
            keys = _rotate(joined[:, q_rows : q_rows + kv_rows].reshape(-1, c.kv_heads, c.head_dim), cos, sin)
            values = joined[:, q_rows + kv_rows :].reshape(-1, c.kv_heads, c.head_dim)
            pool.write(index, slots, keys, values)
            mixed = np.empty((len(x), q_rows), dtype=np.float32)
            for rows, table, span in zip(batch, tables, spans, strict=True):
                past_keys, past_values = pool.read(index, table, rows.position + len(rows.tokens))
                mixed[span] = self._attend(queries[span], past_keys, past_values, rows.position)
            x = x + _project(mixed, attn_output)
            hidden = _project(_rms_norm(x, ffn_norm, c.norm_eps), gate_up)
            x = x + _project(_silu(hidden[:, : c.hidden]) * hidden[:, c.hidden :], ffn_down)

        last = [int(end) - 1 for end, rows in zip(ends, batch, strict=True) if rows.wants_logits]
        if not last:
            return np.empty((0, c.vocab), dtype=np.float32)
        return _project(_rms_norm(x[last], self._output_norm, c.norm_eps), self._output)

    def _attend(
        self,
        queries: NDArray[np.float32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        position: int,
    ) -> NDArray[np.float32]:
        """Causal attention of tokens [m, heads, head_dim] at `position` over keys and values [n, kv_heads, head_dim].

        Returns [m, heads * head_dim].
        """
        c = self.config
        m, n, group = len(queries), len(keys), c.heads // c.kv_heads
        # [kv_heads, group * m, head_dim]: all queries that share a key head are one product.
        q = queries.reshape(m, c.kv_heads, group, c.head_dim).transpose(1, 2, 0, 3).reshape(c.kv_heads, group * m, -1)
        scores = np.matmul(q, keys.transpose(1, 2, 0))
        scores *= self._scale
        if m > 1:
            hidden = np.arange(n)[None, :] > np.arange(position, position + m)[:, None]
            scores.reshape(c.kv_heads, group, m, n)[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: NDArray[np.float32] = np.matmul(scores, values.transpose(1, 0, 2))
        mixed = mixed.reshape(c.kv_heads, group, m, c.head_dim).transpose(2, 0, 1, 3)
        return mixed.reshape(m, -1)


def _project(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x @ weight.T`` for weight [outputs, inputs]."""
    if len(x) == 1:
        single: NDArray[np.float32] = (weight @ x[0])[None, :]  # as fast as memory delivers the matrix
        return single
    if len(x) > _FEW:
        # The tall matrix first: OpenBLAS is up to 1.4 times as fast this way round on the batches of a decode step.
        product: NDArray[np.float32] = (weight @ x.T).T
        return product
    # For a few rows the BLAS spends longer packing the matrix than computing. Vector by vector over a part of the
    # matrix that stays in the cache reads memory once as well, without packing.
    out = np.empty((len(x), len(weight)), dtype=np.float32)
    part = max(1, _CACHED // weight.shape[1])
    for start in range(0, len(weight), part):
        rows = weight[start : start + part]
        for vector, result in zip(x, out, strict=True):
            np.dot(rows, vector, out=result[start : start + part])
    return out


def _rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    mean = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
    scaled: NDArray[np.float32] = x * (np.float32(1.0) / np.sqrt(mean + np.float32(eps))) * weight
    return scaled


def _rotate(x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotate the pairs (i, i + head_dim/2) of each head [tokens, heads, head_dim]."""
    half = x.shape[2] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    # tanh saturates where exp would overflow: x * sigmoid(x) for any x.
    gated: NDArray[np.float32] = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))
    return gated
