"""A model in this process's memory, with a cache whose size can be changed while requests are in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fabrictool.engines.reference.kv import BlockAllocator, KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fabrictool.engines.reference.weights import Weights


class CacheMove(NamedTuple):
    """A cache of another size. To be filled by `copy`, which may run beside iterations of other models."""

    before: KvPool
    after: KvPool
    blocks: tuple[int, ...]
    """In use before; afterwards they are the first ones, in this order."""

    def copy(self) -> None:
        self.after.take_over(self.before, self.blocks)


def in_memory(weights: Weights) -> Weights:
    """A copy of them: what is loaded and unloaded."""
    flat = np.array(weights.flat)
    flat.flags.writeable = False
    return weights._replace(flat=flat, shared=False)


class ResidentModel:
    """Weights in memory of their own, unlike the mapped file that they come from, and the blocks of its requests."""

    def __init__(self, weights: Weights, blocks: int, block_size: int) -> None:
        self._config = weights.config
        self._transformer = Transformer(in_memory(weights))
        self._block_size = block_size
        self._pool = KvPool(weights.config, blocks, block_size)
        self._allocator = BlockAllocator(blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks that no request has."""
        return self._allocator.free

    @property
    def blocks(self) -> int:
        return self._allocator.total

    def step(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> NDArray[np.float32]:
        """One iteration over (request, tokens, position of the first of them): logits [requests, vocab].

        Raises AssertionError where the cache has no room: who schedules counts blocks.
        """
        batch = []
        for request, tokens, position in rows:
            table = self._tables.setdefault(request, [])
            lacks = -(-(position + len(tokens)) // self._block_size) - len(table)
            more = self._allocator.take(max(0, lacks))
            if more is None:
                message = f"request {request} wants {lacks} blocks, {self._allocator.free} are free"
                raise AssertionError(message)
            table += more
            batch.append(SequenceRows(tokens, position, tuple(table), True))
        return self._transformer.step(batch, self._pool)

    def forget(self, request: int) -> None:
        """Free its blocks, if it has any."""
        self._allocator.give_back(self._tables.pop(request, []))

    def unload(self) -> None:
        """Give its memory back; nothing can be asked of it afterwards."""
        del self._transformer, self._pool

    def move(self, blocks: int) -> CacheMove:
        """Begin to have a cache of so many blocks, which holds at least what is in use."""
        used = tuple(block for table in self._tables.values() for block in table)
        if len(used) > blocks:
            message = f"{len(used)} blocks in use do not fit into {blocks}"
            raise AssertionError(message)
        return CacheMove(self._pool, KvPool(self._config, blocks, self._block_size), used)

    def moved(self, move: CacheMove) -> None:
        """Its copy is done. Requests that have left since have left their blocks."""
        place = {block: number for number, block in enumerate(move.blocks)}
        allocator = BlockAllocator(move.after.blocks)
        allocator.take(len(place))
        for table in self._tables.values():
            table[:] = [place.pop(block) for block in table]
        allocator.give_back(list(place.values()))
        self._pool, self._allocator = move.after, allocator
