"""The forward pass of a Llama-family model: one step over a batch that mixes prompts and single tokens.

RMSNorm, rotary positions (halves of a head, base and optional frequency factors), grouped-query attention over the
paged pool, SwiGLU, tied or separate output projection. All rows of the batch go through each matrix together: the
weights are read once per step, which is what a step costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from fabrictool.engines.reference.kv import KvPool
    from fabrictool.engines.reference.weights import Weights

_FEW = 6
"""Rows up to which matrix times vector, one by one, beats the product; measured, see the page on this engine."""
_FEW_BY_INPUT = 3
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


class Shard(NamedTuple):
    """The part of each matrix that one of `degree` processes computes: some heads, some of the hidden rows."""

    rank: int
    degree: int
    reduce: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    """All members' partial sums, added up in the same order for each of them."""


WHOLE = Shard(0, 1, lambda partial: partial)


class _Layer(NamedTuple):
    attn_norm: NDArray[np.float32]
    qkv: tuple[NDArray[np.float32], ...]
    attn_output: NDArray[np.float32]
    ffn_norm: NDArray[np.float32]
    gate_up: tuple[NDArray[np.float32], ...]
    ffn_down: NDArray[np.float32]


class Transformer:
    """Weights with the arithmetic. Holds no state of requests: that is in the pool and in the plan.

    Of a `shard` all matrices are views of the whole ones, and each is one piece of memory (Flying Serving, equation 1):
    rows, of outputs or of inputs (`weights.BY_INPUT`).
    """

    def __init__(self, weights: Weights, shard: Shard = WHOLE) -> None:
        self.config = c = weights.config
        self.shard = shard
        if shard.degree > 1 and not weights.by_input:
            raise AssertionError("these weights are not laid out to be cut")
        self._project_in = _project_by_input if weights.by_input else _project
        self._heads, self._kv_heads = c.heads // shard.degree, c.kv_heads // shard.degree
        self._hidden = c.hidden // shard.degree
        named = weights.tensors()
        self._embedding = named["token_embd"]
        self._output = named["token_embd" if c.tied else "output"][self.vocabulary(shard.rank)]
        self._output_norm = named["output_norm"]
        self._layers = [self._layer(named, f"blk.{i}.") for i in range(c.layers)]
        exponents = np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim
        self._frequencies = c.rope_base**-exponents
        if c.rope_factors:
            self._frequencies = self._frequencies / named["rope_freqs"].astype(np.float64)
        self._scale = np.float32(c.head_dim**-0.5)

    def vocabulary(self, rank: int) -> slice:
        """Tokens whose logits a member computes."""
        vocab, degree = self.config.vocab, self.shard.degree
        return slice(vocab * rank // degree, vocab * (rank + 1) // degree)

    def _layer(self, named: Mapping[str, NDArray[np.float32]], prefix: str) -> _Layer:
        qkv: tuple[NDArray[np.float32], ...] = (named[prefix + "qkv"],)
        gate_up: tuple[NDArray[np.float32], ...] = (named[prefix + "gate_up"],)
        if self.shard.degree > 1:
            qkv = tuple(self._share(named[prefix + name]) for name in ("attn_q", "attn_k", "attn_v"))
            gate_up = tuple(self._share(named[prefix + name]) for name in ("ffn_gate", "ffn_up"))
        return _Layer(
            named[prefix + "attn_norm"],
            qkv,
            self._share(named[prefix + "attn_output"]),
            named[prefix + "ffn_norm"],
            gate_up,
            self._share(named[prefix + "ffn_down"]),
        )

    def _share(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """This member's rows, a view."""
        rows = len(matrix) // self.shard.degree
        return matrix[self.shard.rank * rows : (self.shard.rank + 1) * rows]

    def step(self, batch: Sequence[SequenceRows], pool: KvPool) -> NDArray[np.float32]:
        """Compute one step, storing keys and values in `pool`, which has as many heads as the shard.

        Returns logits [requests that want them, vocab] in the order of `batch`, of a shard those of its part of the
        vocabulary. Rows of one batch may not share blocks.
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
        reduce = self.shard.reduce
        q_rows, kv_rows = self._heads * c.head_dim, self._kv_heads * c.head_dim
        for index, layer in enumerate(self._layers):
            joined = _project_all(_rms_norm(x, layer.attn_norm, c.norm_eps), layer.qkv)
            queries = _rotate(joined[:, :q_rows].reshape(-1, self._heads, c.head_dim), cos, sin)
            keys = _rotate(joined[:, q_rows : q_rows + kv_rows].reshape(-1, self._kv_heads, c.head_dim), cos, sin)
            values = joined[:, q_rows + kv_rows :].reshape(-1, self._kv_heads, c.head_dim)
            pool.write(index, slots, keys, values)
            mixed = np.empty((len(x), q_rows), dtype=np.float32)
            for rows, table, span in zip(batch, tables, spans, strict=True):
                past_keys, past_values = pool.read(index, table, rows.position + len(rows.tokens))
                mixed[span] = self._attend(queries[span], past_keys, past_values, rows.position)
            x = x + reduce(self._project_in(mixed, layer.attn_output))
            hidden = _project_all(_rms_norm(x, layer.ffn_norm, c.norm_eps), layer.gate_up)
            gated = _silu(hidden[:, : self._hidden]) * hidden[:, self._hidden :]
            x = x + reduce(self._project_in(gated, layer.ffn_down))

        last = [int(end) - 1 for end, rows in zip(ends, batch, strict=True) if rows.wants_logits]
        if not last:
            return np.empty((0, len(self._output)), dtype=np.float32)
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
        c, kv_heads = self.config, self._kv_heads
        m, n, group = len(queries), len(keys), c.heads // c.kv_heads
        # [kv_heads, group * m, head_dim]: all queries that share a key head are one product.
        q = queries.reshape(m, kv_heads, group, c.head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * m, -1)
        scores = np.matmul(q, keys.transpose(1, 2, 0))
        scores *= self._scale
        if m > 1:
            hidden = np.arange(n)[None, :] > np.arange(position, position + m)[:, None]
            scores.reshape(kv_heads, group, m, n)[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: NDArray[np.float32] = np.matmul(scores, values.transpose(1, 0, 2))
        mixed = mixed.reshape(kv_heads, group, m, c.head_dim).transpose(2, 0, 1, 3)
        return mixed.reshape(m, -1)


def _project_all(x: NDArray[np.float32], weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The products with several matrices, one beside the other."""
    if len(weights) == 1:
        return _project(x, weights[0])
    return np.concatenate([_project(x, weight) for weight in weights], axis=1)


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


def _project_by_input(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x @ weight`` for weight [inputs, outputs]."""
    if not 1 < len(x) <= _FEW_BY_INPUT:
        product: NDArray[np.float32] = x @ weight
        return product
    out = np.zeros((len(x), weight.shape[1]), dtype=np.float32)  # as in `_project`
    part = max(1, _CACHED // weight.shape[1])
    for start in range(0, len(weight), part):
        rows = weight[start : start + part]
        for vector, result in zip(x, out, strict=True):
            np.add(result, vector[start : start + part] @ rows, out=result)
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
