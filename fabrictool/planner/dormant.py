"""Replicas that ended because nobody asked for them: they stay away until somebody does.

What is asked for stands in the health of the gateways: how many replicas of a model there should be. Those that are on
their way count, so that a look that comes before they serve starts none a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.domain.address import Address, number_of
from fabrictool.domain.specs import AgentSpec, Phase
from fabrictool.planner.loads import known_loads
from fabrictool.planner.queue_waits import percentile, queue_wait_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.observed import ObservedUnit
    from fabrictool.domain.specs import UnitSpec

_Part = tuple[str, Phase]
"""Of a model: a replica for prompts does not help where one for answers is missing."""
UNKNOWN_WAIT_S = 60.0
UNKNOWN_LOAD_S = 120.0
"""A client is told to come again too early rather than too late."""


def dormant(evidence: Evidence, address: str, cluster: str) -> ObservedUnit | None:
    """The unit that was there and ended for want of requests; None where that is not how things stand."""
    facts = evidence.clusters.get(cluster)
    if facts is None or not facts.known or address in evidence.observed.living():
        return None
    last = facts.unit(address)
    return last if last is not None and last.dormant else None


def asked_for(wanted: Mapping[str, tuple[str, UnitSpec]], evidence: Evidence) -> frozenset[str]:
    """Of the dormant ones the addresses that should start now, and of extra ones, of these where nodes are idle;
    `wanted` is address → (cluster, spec).
    """
    names: dict[str, tuple[str, ...]] = {}
    there: dict[_Part, int] = {}
    away: dict[_Part, list[str]] = {}
    extra: dict[_Part, list[tuple[str, AgentSpec]]] = {}
    living = evidence.observed.living()
    for address, (cluster, spec) in wanted.items():
        if not isinstance(spec, AgentSpec):
            continue
        part = (spec.model, spec.phase)
        names[spec.model] = spec.served_names
        if any(unit.waits_for != "leaving" for _, unit in living.get(address, ())):
            there[part] = there.get(part, 0) + 1
        elif spec.is_extra:
            extra.setdefault(part, []).append((address, spec))
        elif dormant(evidence, address, cluster) is not None:
            away.setdefault(part, []).append(address)
    counts = _wanted_counts(evidence)
    idle = {
        (name, partition): queue.idle
        for name, facts in evidence.clusters.items()
        for partition, queue in facts.queues.items()
    }
    asked: set[str] = set()
    for which in {**away, **extra}:
        most = max(counts.get(name, 0) for name in names[which[0]])
        more = max(0, most - there.get(which, 0))
        planned = sorted(away.get(which, ()), key=_number)[:more]
        asked.update(planned)
        more -= len(planned)
        for address, spec in sorted(extra.get(which, ()), key=lambda pair: _number(pair[0])):
            place = (spec.cluster, spec.partition)
            if more and idle.get(place, 0) >= spec.on_nodes:
                idle[place] -= spec.on_nodes
                more -= 1
                asked.add(address)
    return frozenset(asked)


def _number(address: str) -> int:
    return number_of(Address.parse(address).name)


def expected_at(evidence: Evidence, now: float) -> dict[str, float]:
    """Model that requests wait for → wall seconds at which a replica of it is to serve.

    By the scheduler's word for a job that is in its queue, else by what the inventory states, or our last jobs
    waited there, and what these took to load.
    """
    state, counts = evidence.state, _wanted_counts(evidence)
    running = evidence.observed.running()
    expected: dict[str, float] = {}
    for address, applied in state.applied_units.items():
        spec = applied.spec
        if not isinstance(spec, AgentSpec) or not (asked := [name for name in spec.served_names if name in counts]):
            continue
        _, unit = running.get(address, (applied.cluster, None))
        if (unit is not None and unit.ready) or (unit is None and spec.is_extra):
            continue
        load = percentile(known_loads(state.loads, spec), 0.5, UNKNOWN_LOAD_S)
        facts = evidence.clusters.get(applied.cluster)
        stated = None if facts is None else facts.stated_waits.get(spec.partition)
        measured = state.waits.get(f"{applied.cluster}/{spec.partition}", ())
        wait = queue_wait_s(stated, measured, UNKNOWN_WAIT_S, share=0.5)
        begins = now + wait if unit is None or unit.begins_at is None else unit.begins_at
        at = max(now, begins) + load
        expected |= {name: min(at, expected.get(name, at)) for name in asked}
    return expected


def _wanted_counts(evidence: Evidence) -> dict[str, int]:
    """Model → replicas that there should be, by the gateway that wants most."""
    counts: dict[str, int] = {}
    for _, unit in evidence.observed.running().values():
        for model, count in unit.wanted.items():
            counts[model] = max(count, counts.get(model, 0))
    return counts
