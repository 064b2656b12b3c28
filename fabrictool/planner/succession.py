"""When a unit needs a successor though nothing about it changed: its allocation or certificate ends, or it is mute.

A successor is asked for early enough that it serves before the unit drains: the queue's wait, as the inventory states
it, else the 95th percentile of what was measured; plus loading, draining, and twice the 90 s by which a scheduler's
warning may come early (measured on Slurm 22.05).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fabrictool.base.clock import duration_text
from fabrictool.domain.following import LONGEST_LEAD
from fabrictool.domain.observed import generation
from fabrictool.domain.specs import AgentSpec
from fabrictool.planner.loads import known_loads
from fabrictool.planner.queue_waits import CAUTIOUS, percentile, queue_wait_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.observed import Away, ClusterFacts, ObservedUnit
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.domain.state import State

Cause = Literal["certificate", "silence", "requeued", "maintenance", "walltime", "gateways", "successors", "nodes"]

SIGNAL_SLACK_S = 180.0
MUTE_S = 300.0
"""A unit whose job runs and that gave no sign of life for so long gets a successor."""
UNKNOWN_WAIT_S = 1800.0
"""Of a queue that we have not waited in yet and in which no node is idle."""
IDLE_WAIT_S = 60.0
UNKNOWN_LOAD_S = 300.0
RENEW_BEFORE_S = 4 * 3600.0
RENEW_SHARE = 1 / 6
"""A unit is replaced when less than this is left of its certificate: four hours, or a sixth of its life when that is
shorter. One that outlives the unit's own walltime is never renewed."""
KEY_LIFE_S = 7 * 86400.0
"""A key that was stolen is good for as long as its certificates are renewed."""
WORTH_IT_S = 300.0
"""What another certificate must last longer than the one that it follows."""
KEPT = 20
"""Measured waits and loads that are remembered."""


@dataclass(frozen=True, slots=True)
class Succession:
    """Why a unit needs a successor although nothing about it changed."""

    cause: Cause
    reason: str
    """The same for people."""
    stop_first: bool = False
    """It must be gone by then, and its successor can only start later: its nodes are taken away."""
    in_place: bool = False
    """It needs none if it can be told what it lacks while it runs."""


def successions(evidence: Evidence, now: float) -> dict[str, Succession]:
    """Operation → why it needs a successor, of the youngest living unit of every address; `now` in wall seconds."""
    expiring = {}
    for units in evidence.observed.living().values():
        cluster, unit = units[0]
        facts = evidence.clusters[cluster]
        spec = evidence.specs.get(unit.operation)
        succession = _succession(unit, spec, facts, evidence.state, now)
        if succession is not None and succession.cause == "certificate":
            succession = _renewed(succession, unit, spec, evidence, now)
        if succession is None and len(units) == 1:  # while one follows another, nobody is told anything
            succession = _unprepared(unit, spec, evidence, now)
        if succession is not None:
            expiring[unit.operation] = succession
    return expiring


def successors(expiring: Mapping[str, Succession]) -> set[str]:
    """Operations that another unit follows."""
    return {operation for operation, succession in expiring.items() if not succession.in_place}


def _unprepared(unit: ObservedUnit, spec: UnitSpec | None, evidence: Evidence, now: float) -> Succession | None:
    """Where its provider's key is here, jobs that may follow it from inside are prepared again once some were used."""
    provider_ends = None if spec is None else evidence.signs.get(spec.provider)
    if provider_ends is None or not isinstance(spec, AgentSpec) or unit.state != "running" or not unit.in_force:
        return None
    wanted, used = preparable(spec, provider_ends - now), evidence.state.generations.get(unit.address, 0)
    prepared = sum(generation(operation) > used for operation in unit.followers)
    if prepared >= wanted:
        return None
    reason = f"{prepared} of {wanted} jobs that may follow it are prepared"
    return Succession("successors", reason, in_place=True)


def preparable(spec: AgentSpec, provider_s: float) -> int:
    """How many jobs can be prepared to follow one that starts now: the last one's certificate must last until its end,
    and no key lies on a site for longer than any other; `provider_s` is what is left of their provider's own.
    """
    if spec.walltime_s is None:
        return 0
    longest = min(provider_s, KEY_LIFE_S) / spec.walltime_s
    return max(0, min(spec.may_follow, int(longest) - 1))


def _renewed(
    succession: Succession, unit: ObservedUnit, spec: UnitSpec | None, evidence: Evidence, now: float
) -> Succession | None:
    """Where its provider's key is here, a unit gets another certificate for its key, until the key is too old. None:
    its provider's own certificate ends by then, and no other session would last longer.
    """
    provider_ends = None if spec is None else evidence.signs.get(spec.provider)
    if provider_ends is None:
        return succession
    if unit.certificate_ends_at is not None and provider_ends < unit.certificate_ends_at + WORTH_IT_S:
        return None
    over = unit.certificate_ends_at is not None and unit.certificate_ends_at <= now
    if over or unit.state != "running" or not unit.in_force or not unit.renewable:
        return succession
    if now - unit.certificate_begins_at > KEY_LIFE_S:
        return replace(succession, reason=f"its key is {duration_text(now - unit.certificate_begins_at)} old")
    return replace(succession, reason="its certificate ends soon: it gets another one for its key", in_place=True)


def _succession(
    unit: ObservedUnit, spec: UnitSpec | None, facts: ClusterFacts, state: State, now: float
) -> Succession | None:
    """Times of the scheduler are compared with its clock, and those of certificates, which are made here, with ours."""
    there = now if facts.now is None else facts.now
    if unit.requeued:
        return Succession("requeued", "the scheduler put its job back into the queue, and a session never runs twice")
    if unit.state != "running":
        late = "its certificate would end before it serves"
        return Succession("certificate", late) if expires_soon(unit, now) else None
    if unit.silent_s > MUTE_S:
        return Succession("silence", f"it gave no sign of life for {unit.silent_s:.0f} s")
    if isinstance(spec, AgentSpec) and facts.scheduler:
        window = _taken_away(unit, spec, facts, there)
        if window is not None:
            text = f"{window.name} takes its nodes away at {_clock(window.begin)}"
            # Where it takes some nodes only, others are there for a successor.
            return Succession("maintenance", text, stop_first=not window.nodes)
        lead = _lead_of(unit, spec, facts, state)
        if unit.ends_at is not None and unit.ends_at - there < lead:
            at = _clock(unit.ends_at)
            return Succession("walltime", f"its allocation ends at {at}, and a successor needs up to {lead:.0f} s")
    return Succession("certificate", "its certificate ends soon") if expires_soon(unit, now) else None


def _taken_away(unit: ObservedUnit, spec: AgentSpec, facts: ClusterFacts, now: float) -> Away | None:
    """The reservation before which the unit must leave now, if its allocation does not end before that."""
    for away in facts.away:
        there = not set(away.nodes).isdisjoint(unit.node.split(","))
        here = there if away.nodes else not away.partitions or spec.partition in away.partitions
        outlasts = unit.ends_at is None or unit.ends_at > away.begin
        if here and outlasts and now < away.end and away.begin - now < spec.drain_s + SIGNAL_SLACK_S:
            return away
    return None


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))


def lead_s(spec: AgentSpec, facts: ClusterFacts, state: State) -> float:
    """Seconds before a unit's end at which its successor is asked for, of an allocation that is long enough."""
    queue = facts.queues.get(spec.partition)
    usual = IDLE_WAIT_S if queue is not None and queue.idle else UNKNOWN_WAIT_S
    measured = state.waits.get(f"{facts.cluster}/{spec.partition}", ())
    wait = queue_wait_s(facts.stated_waits.get(spec.partition), measured, usual)
    load = percentile(known_loads(state.loads, spec), CAUTIOUS, UNKNOWN_LOAD_S)
    return wait + load + spec.drain_s + SIGNAL_SLACK_S


def _lead_of(unit: ObservedUnit, spec: AgentSpec, facts: ClusterFacts, state: State) -> float:
    """At most a part of its allocation."""
    lead = lead_s(spec, facts, state)
    if unit.begins_at is not None and unit.ends_at is not None:
        lead = min(lead, (unit.ends_at - unit.begins_at) * LONGEST_LEAD)
    return lead


def expires_soon(unit: ObservedUnit, now: float) -> bool:
    """Whether a new session must follow this one, for the sake of its certificate."""
    end = unit.certificate_ends_at
    if end is None or (unit.ends_at is not None and unit.ends_at <= end):
        return False
    return end - now < min(RENEW_BEFORE_S, RENEW_SHARE * (end - unit.certificate_begins_at))
