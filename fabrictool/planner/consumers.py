r"""Consumer groups' parts of a model's demand: who may be served where, as rows of the program.

Flows run from each group to each set of providers that a request may see, not to each option: for model m, group g
with the part :math:`\lambda_g` of its demand, and every set P of providers that some of its replicas stand with,
:math:`f_{gP} \ge 0`, there only where g allows all of P:

* groups      :math:`\sum_P f_{gP} + u_g = \lambda_g`
* providers   :math:`\sum_g f_{gP}` is the load on replicas, or pairs of prefill and decode, that stand with just P
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.planner.problem import ModelNeed, Option
    from fabrictool.planner.program import Program, Terms
    from fabrictool.simulator.demanded import GroupDemand

Providers = frozenset[str]


def providers_of(option: Option) -> Providers:
    """Who sees a request that a replica of it serves."""
    return frozenset(pool.provider for pool in option.pools)


def may_use(group: GroupDemand, providers: Providers) -> bool:
    return group.allowed is None or providers <= group.allowed


def flow_rows(
    program: Program, need: ModelNeed, loads: Mapping[Providers, Terms], column: Callable[[float], int]
) -> Terms:
    """Adds the rows of a model's groups; (column of what is unserved, requests/s that are asked for) of each that may
    go anywhere.

    `loads`: by set of providers, what is served there; `column` makes a column up to that much. Groups that may use the
    same are one.
    """
    asked: dict[frozenset[Providers], float] = defaultdict(float)
    for group in need.parts:
        asked[frozenset(place for place in loads if may_use(group, place))] += group.share * need.rate
    into: dict[Providers, Terms] = {place: [] for place in loads}
    unserved: Terms = []
    for places, rate in sorted(asked.items(), key=lambda item: sorted(map(sorted, item[0]))):
        flows = {place: column(rate) for place in sorted(places, key=sorted)}
        lack = column(rate)
        program.row(rate, rate, [*((flow, 1.0) for flow in flows.values()), (lack, 1.0)])
        if flows:
            unserved.append((lack, rate))
        for place, flow in flows.items():
            into[place].append((flow, -1.0))
    for place, load in loads.items():
        program.row(0, 0, [*load, *into[place]])
    return unserved
