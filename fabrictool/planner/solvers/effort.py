"""How hard a stage is searched: which tries with all that take part there are, and when it is good enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.stages import TIDYING

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = ((30, 1_000), (20_000,))
"""Of the tries in each pass over the stages, where all options take part. Each begins anew, so each is so much larger
than the one before; and the largest come when every stage had the others. Where something runs there is one pass: a
second would spare moves a second time."""
NODES_BY_CAPACITY = ((1_000,), (20_000,))
"""The same, of stages without loads: all these nodes take less than to begin does."""
NODES_BY_TANGENTS = ((2_000,), (8_000, 30_000))
FIRST_BY_TANGENTS = {"slo": (1_000, 4_000), "latency": (3_500,), "excess": (800, 3_000)}
"""The same, of stages whose programs are told what loads cost: nodes are quick there. What misses the SLO comes first,
and what it is off makes all that was searched after it worthless; but a try that the clock ends is lost, so it is not
the first. The bound of latency is weak at the root.
"""
TOLD_UP_TO = 200
"""Options up to which there are as many; of twice the options a quarter, as a node takes about four times as long."""
QUICK, QUICK_UP_TO = 2, 150
"""Nodes of a try before all others that does not begin again at its root, and up to how many options there is one: for
who wants a plan in two seconds."""
CORE_NODES = (1,)
"""Where only the core does: at the root most is found, and nothing is proved for the whole."""
FAIR_NODES = (1, 50)
"""Of fairness, which is of all models at once: no sweep over some of them takes its place."""
TIDYING_NODES = (20,)
MOVING_NODES = (20, 500)
"""A move that is spared is felt, and its bound is weak."""
AT_ONCE, AT_ONCE_BY_CAPACITY = 700, 1_800
"""The most options of all models together that are placed anew at once; and where loads are not looked at."""
PROVABLE = 6_000
"""The most options that take part in a proof for the whole of a stage without loads, in the second pass."""
ENOUGH = {"served": 2e-3, "latency": 2.5e-3, "replicas": 0.02}
"""Relative gap at which a stage ends, `CLOSE` for all others. Half of latency's tolerance is for finding it."""
CLOSE = 1e-3
AGAIN = 0.008
"""Relative gap beyond which another try is worth its time."""


EXACTLY, NEARLY = 1e-5, 0.01
"""The gap at which a search by tangents ends: of stages that are kept to the last digit, as what one of them is off
makes the bounds of later ones loose; and of what misses the SLO, where the last digits take longest."""
TINY_NODES = 20_000
FIRST_NODES = 2000
"""Of the search for any placement, where the rounded relaxation breaks a rule."""
PARTY_NODES, PARTY_GAP = 1, 2e-3
"""Limits of a program of some models."""
GAIN, FIRST_GAIN = 5e-4, 5e-3
"""A sweep that gains less, of the value, is the last one of its stage; or of those before all are placed at once."""
MOST_SWEEPS, TIDYING_SWEEPS = 20, 1
ROUNDS = 4
"""Of one try, where its program is told between them what loads cost."""


Part = Literal["first", "second", "all"]
"""Of the tries: those of the first pass or of the second; or all of them, where there is one pass."""


# Wide: a stage, and what there is of it to be searched.
def tries(name: str, *, options: int, whole: bool, by_capacity: bool, by_tangents: bool, part: Part) -> Sequence[int]:
    """Nodes of one try after another. `options` take part, which is the `whole` problem or not."""
    if name in TIDYING:
        return () if not whole else MOVING_NODES if name == "moves" else TIDYING_NODES
    if name == FAIRNESS and not whole:
        return FAIR_NODES
    if whole:
        first: Sequence[int]
        second: Sequence[int]
        first, second = NODES_BY_CAPACITY if by_capacity else NODES_BY_TANGENTS if by_tangents else NODES
        if by_tangents and not by_capacity:
            times = min(1.0, TOLD_UP_TO / options) ** 2
            first = tuple(round(times * nodes) for nodes in FIRST_BY_TANGENTS.get(name, first))
            second = tuple(round(times * nodes) for nodes in second)
        quick = (QUICK,) if options <= QUICK_UP_TO and not (by_capacity or by_tangents) else ()
        return {"first": (*quick, *first), "second": second, "all": (*quick, *first, *second)}[part]
    most = AT_ONCE if not by_capacity else PROVABLE if part == "second" else AT_ONCE_BY_CAPACITY
    return CORE_NODES if options <= most else ()


def enough(name: str, *, by_tangents: bool) -> float:
    """Relative gap at which a stage ends."""
    exact = NEARLY if name in ("slo", "excess") else EXACTLY
    return ENOUGH.get(name, exact if by_tangents else CLOSE)
