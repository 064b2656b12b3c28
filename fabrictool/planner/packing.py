"""Blocks of devices into nodes, when some of them must not be together: which node each is on.

Largest first, each onto the emptiest node that may have it: that leaves the smaller ones as many nodes to choose from
as there can be. Where that fails, other ways are tried up to a limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST_STEPS = 5_000
"""Blocks that are put somewhere before the search for another way ends."""


@dataclass(frozen=True, slots=True)
class Block:
    """Devices of one node that a replica takes."""

    model: str
    size: int
    apart: bool = False
    """Whether no other block of its model that is apart may be on its node."""
    stands_on: int | None = None
    """The node where it is now and stays if it can; None: it is nowhere."""


def packed(blocks: Sequence[Block], nodes: int, per_node: int) -> list[int] | None:
    """The node of each block, from 0 on; None where no way was seen."""
    number = Counter(block.model for block in blocks if block.apart)
    # Of the same size those first that can choose least: of models with few nodes to spare.
    order = sorted(
        range(len(blocks)),
        key=lambda at: (
            -blocks[at].size, not blocks[at].apart, -number[blocks[at].model], blocks[at].model, at,
        ),
    )  # fmt: skip
    search = _Search([blocks[at] for at in order], nodes, per_node)
    return [where for _, where in sorted(zip(order, search.where, strict=True))] if search.ends_well() else None


def as_far_apart(
    wanted: Mapping[str, int], spare: dict[str, int], fits: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """Nodes by model, `wanted` or as many fewer as it takes until it `fits`, and `spare` has so many fewer; None where
    no model can spare one.
    """
    fewer = dict(wanted)
    while fewer and not fits(fewer):
        model = max(fewer, key=lambda its: (spare[its] if fewer[its] else 0, its))
        if spare[model] < 1 or not fewer[model]:
            return None
        fewer[model] -= 1
        spare[model] -= 1
    return fewer


class _Search:
    """Depth first, nodes that are alike once."""

    def __init__(self, blocks: Sequence[Block], nodes: int, per_node: int) -> None:
        self._blocks, self._left = blocks, MOST_STEPS + len(blocks)
        self._free = [per_node] * nodes
        self._apart: list[set[str]] = [set() for _ in range(nodes)]
        """By node: models of which it has a block that is apart."""
        self.where = [0] * len(blocks)

    def ends_well(self) -> bool:
        """Puts all blocks somewhere; a loop and no recursion, as there may be thousands."""
        choices: list[list[int]] = []
        at = 0
        while 0 <= at < len(self._blocks):
            if len(choices) == at:
                choices.append(self._nodes_for(self._blocks[at]))
            if choices[-1] and self._left > 0:
                self._put(at, choices[-1].pop(0))
                at += 1
                continue
            choices.pop()
            at -= 1
            if at >= 0:
                self._take_back(at)
        return at >= 0

    def _nodes_for(self, block: Block) -> list[int]:
        able: dict[object, int] = {}
        for node, free in enumerate(self._free):
            if free >= block.size and not (block.apart and block.model in self._apart[node]):
                alike = (free, frozenset(self._apart[node]), node == block.stands_on)
                able.setdefault(alike, node)
        return sorted(able.values(), key=lambda node: (node != block.stands_on, -self._free[node], node))

    def _put(self, at: int, node: int) -> None:
        block = self._blocks[at]
        self._left -= 1
        self._free[node] -= block.size
        if block.apart:
            self._apart[node].add(block.model)
        self.where[at] = node

    def _take_back(self, at: int) -> None:
        block, node = self._blocks[at], self.where[at]
        self._free[node] += block.size
        if block.apart:
            self._apart[node].remove(block.model)
