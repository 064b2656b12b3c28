"""Where nothing has changed since a plan was applied, what runs stays as it is.

A search that ended before its proof would find something better when it begins again from what it found, and so would
one that learns other lessons from the replay. Nobody who plans twice expects moves from that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.canonical import digest
from fabrictool.base.errors import InfeasibleError
from fabrictool.domain.address import Address
from fabrictool.domain.plan import inputs_digest
from fabrictool.planner.chosen import best
from fabrictool.planner.moving import changed

if TYPE_CHECKING:
    from fabrictool.domain.evidence import Evidence
    from fabrictool.planner.build import Tables
    from fabrictool.planner.chosen import Chosen, SearchOptions
    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.situation import Situation


def situation_digest(situation: Situation, problem: PlacementProblem) -> str:
    """Of what a placement is searched from, but for what runs: the files, which clusters and nodes are there, and what
    this release and this hour make of them.
    """
    files = inputs_digest(situation.blueprint, situation.inventory)
    outages = sorted(sorted(outage) for outage in problem.outages)
    return digest([files, sorted(situation.usable), problem.tables_sha256, outages])


def is_as_applied(situation: Situation, problem: PlacementProblem, evidence: Evidence) -> bool:
    """Whether just what was applied runs, and it was planned from what is there now."""
    started = {Address.parse(address): placed.cluster for address, placed in evidence.state.units.items()}
    there = {address.name for address, cluster in started.items()
             if address.kind == "replica" and cluster in situation.usable}  # fmt: skip
    running = {replica for replica, spec in evidence.running_agents().items() if not spec.is_extra}
    applied = evidence.state.applied_situation
    return bool(running) and running == there and applied == situation_digest(situation, problem)


def as_applied(situation: Situation, options: SearchOptions, built: tuple[PlacementProblem, Tables]) -> Chosen | None:
    """The placement that runs, with bounds of the problem in which all might move; None where it breaks a rule."""
    problem, tables = built
    try:
        kept = best(replace(situation, max_moves=0), options, (replace(problem, max_moves=0), tables))
    except InfeasibleError:  # such as for a model that may not run there any more
        return None
    if any(changed(kept.problem, kept.solution.counts)):  # not every solver keeps that limit
        return None
    free = replace(kept.situation, max_moves=situation.max_moves), replace(kept.problem, max_moves=problem.max_moves)
    unproved = replace(kept.solution, stages=())
    return replace(kept, situation=free[0], problem=free[1], asked=(problem, unproved), again="kept")
