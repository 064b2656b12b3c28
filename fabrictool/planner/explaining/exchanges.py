"""Placements that are one exchange away from the plan: some replicas of a model for some others of it.

They are soon judged, easily told, and what a search over everything begins with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.planner.judged import free_devices
from fabrictool.planner.stages import user_stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fabrictool.planner.explaining.resolving import Resolver
    from fabrictool.planner.problem import Option

MOST_AT_ONCE = 4
"""Replicas that come, or go."""
MEANT = 0.05
"""Of a replica: what is over is hardly worth another."""
PRICES = {"cost": "cost", "energy": "power", "carbon": "carbon"}
"""Stages that are sums over replicas, and the option's figure."""


def exchanges(resolver: Resolver, wanted: Iterable[int], most_dearer: float) -> Iterator[dict[int, int]]:
    """Counts with one of the options `wanted` more, the least dear first; none that takes more devices than there are,
    or adds more than this share to a value that is a sum over replicas.
    """
    problem, counts = resolver.problem, resolver.counts
    free = free_devices(problem, counts)
    rated: list[tuple[float, tuple[tuple[int, int], ...]]] = []
    for come in wanted:
        option = problem.options[come]
        if option.phase != "unified" or option.key in problem.fixed:
            continue
        movable = (i for i in problem.of(option.model) if problem.options[i].key not in problem.fixed)
        for go in (None, *(i for i in movable if counts.get(i) and i != come)):
            for gone in range(1, 3) if go is not None else (0,):
                former = None if go is None else problem.options[go]
                change = {come: _needed(option, former, gone)} | ({} if go is None else {go: -gone})
                if gone > counts.get(-1 if go is None else go, 0) or change[come] > MOST_AT_ONCE:
                    continue
                dearer = _dearer(resolver, change)
                if dearer <= most_dearer and _has_room(resolver, change, free):
                    rated.append((dearer, tuple(sorted(change.items()))))
    for _, changes in sorted(rated):
        after = dict(counts)
        for i, difference in changes:
            after[i] = after.get(i, 0) + difference
        yield {i: count for i, count in sorted(after.items()) if count}


def _needed(option: Option, former: Option | None, gone: int) -> int:
    """So many replicas take what those that go took; one where none goes."""
    if former is None:
        return 1
    return max(1, math.ceil(gone * former.levels[-1].rate / option.levels[-1].rate - MEANT))


def _dearer(resolver: Resolver, change: Mapping[int, int]) -> float:
    """The largest share by which a sum over replicas grows."""
    shares = [0.0]
    for name in user_stages(resolver.problem):
        was = resolver.values.get(name, 0.0)
        if name in PRICES and was:
            options = resolver.problem.options
            shares.append(sum(count * getattr(options[i], PRICES[name]) for i, count in change.items()) / was)
    return max(shares)


def _has_room(resolver: Resolver, change: Mapping[int, int], free: Mapping[tuple[str, str], int]) -> bool:
    taken: dict[tuple[str, str], int] = {}
    for i, count in change.items():
        for (key, size), number in resolver.problem.options[i].blocks.items():
            taken[key] = taken.get(key, 0) + size * number * count
    return all(devices <= free.get(key, 0) for key, devices in taken.items())
