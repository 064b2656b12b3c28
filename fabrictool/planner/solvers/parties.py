"""Which models are placed anew together, in a sweep over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import ModelNeed

TOGETHER, TOGETHER_BY_CAPACITY = 200, 600
"""Options that the models of a party have, about; and where loads are not looked at."""
MEDIATORS, MEDIATING = 6, 2
"""Each party has so many of so many models with the largest demand."""


def parties(
    needs: Sequence[ModelNeed], options: Mapping[str, Sequence[int]], rng: random.Random, *, by_capacity: bool
) -> list[list[str]]:
    """Every model that has options is in one of them, in an order of chance; mediators are in more."""
    together = TOGETHER_BY_CAPACITY if by_capacity else TOGETHER
    order = [need.model for need in needs if options[need.model]]
    rng.shuffle(order)
    groups: list[list[str]] = [[]]
    size = 0
    for model in order:
        if size and size + len(options[model]) > together:
            groups.append([])
            size = 0
        groups[-1].append(model)
        size += len(options[model])
    return [group + _mediators(needs, options, group, rng) for group in groups]


def _mediators(
    needs: Sequence[ModelNeed], options: Mapping[str, Sequence[int]], party: Sequence[str], rng: random.Random
) -> list[str]:
    """Some of the models with the largest demand: they stand on many pools and can give way in each."""
    largest = sorted(needs, key=lambda need: (-need.rate, need.model))[:MEDIATORS]
    names = [need.model for need in largest if options[need.model]]
    chosen = rng.sample(names, min(len(names), MEDIATING))
    return [name for name in chosen if name not in party]
