"""Hierarchical clustering of nodes by the bandwidth between them: where the tabu search may start from.

Average linkage over bandwidths: the two clusters with the fastest link between them become one, as long as one of them
cannot hold the model alone (ThunderServe, paper 002, section 3.2).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.solvers.groups import Blocks


def clusters(problem: PlacementProblem, holds: Callable[[Blocks], bool], most: int) -> Counter[Blocks]:
    """Blocks of whole nodes, each set of which `holds` a replica; of at most `most` nodes. What holds none is left out.

    Nodes of one partition are alike: those that hold a replica alone are counted, not compared.
    """
    ready: Counter[Blocks] = Counter()
    small: list[Blocks] = []
    for number, pool in enumerate(problem.pools):
        block = ((number, pool.devices_per_node),)
        if holds(block):
            ready[block] += pool.nodes
        else:
            small += [block] * pool.nodes
    while len(small) > 1:
        pairs = [(_linkage(problem, a, b), -i, -j) for i, a in enumerate(small) for j, b in enumerate(small[:i])]
        bandwidth, i, j = max(pairs)
        if bandwidth <= 0:
            break
        joined = tuple(sorted(small[-i] + small[-j]))
        small = [cluster for k, cluster in enumerate(small) if k not in (-i, -j)]
        if len(joined) > most:
            continue
        if holds(joined):
            ready[joined] += 1
        else:
            small.append(joined)
    return ready


def _linkage(problem: PlacementProblem, these: Blocks, those: Blocks) -> float:
    """Mean bandwidth between the nodes of two clusters, octets/s."""
    pools = problem.pools
    bandwidths = [problem.ways.get((pools[a].key, pools[b].key), (0.0, 0.0))[1] for a, _ in these for b, _ in those]
    return sum(bandwidths) / len(bandwidths)
