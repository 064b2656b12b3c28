"""Prefix chains, as the simulator plays them, from what records say: which earlier request shares how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.workload.trace import Ints


def chains(ids: Sequence[str], earlier: Sequence[str], shared: Sequence[int], most: Sequence[int]) -> tuple[Ints, Ints]:
    """Ids of blocks (requests + 1,) and (blocks,), as `Trace.chain_start` and `Trace.chain`.

    In the order of arrival: each request's id, that of the earlier one, how many blocks they share, and how many its
    prompt has. An earlier request that is not among them stands for what its followers share. Blocks that no later
    request has get no id.
    """
    at = {name: i for i, name in enumerate(ids)}
    absent: dict[str, int] = {}
    parent = np.full(len(ids), -1, dtype=np.int64)
    for i, name in enumerate(earlier):
        if name and shared[i]:
            where = at.get(name, -1)
            # Records of one moment may be in any order; nobody follows a later request, or itself.
            parent[i] = where if 0 <= where < i else len(ids) + absent.setdefault(name, len(absent))
    length = np.minimum(np.asarray(shared, dtype=np.int64), np.asarray(most, dtype=np.int64))
    length[parent < 0] = 0
    common = length.copy()
    length = np.concatenate([length, np.zeros(len(absent), dtype=np.int64)])
    room = np.concatenate([np.asarray(most, dtype=np.int64), np.full(len(absent), np.iinfo(np.int64).max)])
    for i in range(len(ids) - 1, -1, -1):
        if parent[i] >= 0:
            common[i] = min(common[i], room[parent[i]])
            length[parent[i]] = max(length[parent[i]], common[i])
    blocks: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(length)
    fresh = 0
    for i in (*range(len(ids), len(length)), *range(len(ids))):
        taken = blocks[parent[i]][: common[i]] if i < len(ids) and parent[i] >= 0 else blocks[i][:0]
        own = int(length[i]) - len(taken)
        blocks[i] = np.concatenate([taken, np.arange(fresh, fresh + own)])
        fresh += own
    mine = blocks[: len(ids)]
    start = np.concatenate([[0], np.cumsum([len(chain) for chain in mine])]).astype(np.int64)
    flat = np.concatenate(mine) if mine else np.zeros(0, dtype=np.int64)
    return start, np.unique(flat, return_inverse=True)[1].astype(np.int64)
