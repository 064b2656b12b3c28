"""Paged key-value memory: one pool of equal blocks, handed out in whole blocks."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fabrictool.engines.reference.gguf_file import LlamaConfig


def block_bytes(config: LlamaConfig, block_size: int) -> int:
    """Bytes of one block over all layers, keys and values, fp32."""
    return 2 * 4 * config.layers * block_size * config.kv_heads * config.head_dim


class BlockAllocator:
    """Which blocks are free. Numbers only: it is also what a scheduler in a simulation can use."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks))  # a heap: the lowest first, so that a request's blocks tend to be neighbours
        self._taken = bytearray(blocks)

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """That many blocks, or None and nothing taken."""
        if count > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free them; a block that is free already is a broken caller."""
        for block in blocks:
            if not self._taken[block]:
                raise AssertionError(f"block {block} was given back twice")
            self._taken[block] = 0
            heapq.heappush(self._free, block)


class KvPool:
    """Keys and values of all layers: arrays [layers, blocks, block_size, kv_heads, head_dim], fp32.

    The memory is reserved, not touched: pages that no request has reached cost nothing.
    """

    def __init__(self, config: LlamaConfig, blocks: int, block_size: int) -> None:
        shape = (config.layers, blocks, block_size, config.kv_heads, config.head_dim)
        self._over(np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32))

    def _over(self, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        self._keys, self._values = keys, values
        _, self.blocks, self.block_size, _, _ = keys.shape

    def merged(self, degree: int) -> KvPool:
        """The same memory as a member of a group sees it: blocks of `degree` times the tokens, and a part of the heads
        (Flying Serving, equations 2 and 3).
        """
        layers, blocks, size, heads, dim = self._keys.shape
        shape = (layers, blocks, size * degree, heads // degree, dim)
        view = KvPool.__new__(KvPool)
        view._over(self._keys.reshape(shape), self._values.reshape(shape))  # noqa: SLF001 - of its own class
        return view

    def take_over(self, other: KvPool, blocks: Sequence[int]) -> None:
        """Copy those blocks of another pool, which become the first ones of this."""
        chosen = np.asarray(blocks, dtype=np.intp)
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for layer in range(len(mine)):  # a layer at a time: what is gathered meanwhile stays small
                mine[layer, : len(chosen)] = theirs[layer, chosen]

    @property
    def addresses(self) -> tuple[int, int]:
        """Where keys and values are; a view has the same ones."""
        return self._keys.ctypes.data, self._values.ctypes.data

    def write(
        self,
        layer: int,
        slots: NDArray[np.intp],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Store rows [tokens, kv_heads, head_dim] at `slots` (block * block_size + offset)."""
        heads, dim = keys.shape[1:]
        self._keys[layer].reshape(-1, heads, dim)[slots] = keys
        self._values[layer].reshape(-1, heads, dim)[slots] = values

    def read(
        self, layer: int, blocks: NDArray[np.intp], length: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The first `length` rows of a block table, keys and values [length, kv_heads, head_dim].

        Neighbouring blocks are a view; scattered ones are gathered into a copy.
        """
        keys, values = self._keys[layer], self._values[layer]
        first = int(blocks[0])
        if int(blocks[-1]) - first == len(blocks) - 1 and bool((np.diff(blocks) == 1).all()):
            span = slice(first, first + len(blocks))
            chosen_keys, chosen_values = keys[span], values[span]
        else:
            chosen_keys, chosen_values = keys[blocks], values[blocks]
        shape = (-1, *keys.shape[2:])
        return chosen_keys.reshape(shape)[:length], chosen_values.reshape(shape)[:length]
