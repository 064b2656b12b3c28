"""The placement played event by event: a second opinion on the closed forms that chose it.

A few hundred requests a model, with the blueprint's lengths, rates and routing policy; the same seed plays the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.plan import Replay
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.deployment import declared_stream, of_model
from fabrictool.simulator.fleet import simulate
from fabrictool.simulator.report import report

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement

MOST, LEAST, TOGETHER = 400, 60, 4000
"""Requests: of one model at most and at least, and of all models about."""


def replay(blueprint: Blueprint, inventory: Inventory, placement: Placement, seed: int) -> dict[str, Replay]:
    """By model; without those that have no demand or no replica that may serve it."""
    there = [
        replica
        for replica in placement.replicas
        if all(s.partition in inventory.clusters[s.cluster].partitions for s in replica.every_stage)
    ]
    models = sorted({replica.model for replica in there} & blueprint.models.keys())
    count = max(LEAST, min(MOST, TOGETHER // max(1, len(models))))
    replays = {}
    for name in models:
        try:
            simulation = of_model(name, blueprint, inventory, there, [])
            stream = declared_stream(simulation, count, seed)
        except InvalidInputError:  # nothing to play: no demand, or nobody whom trust lets serve it
            continue
        pick = routing_policy(blueprint.routing.policy, random.Random(seed))
        outcome = simulate(simulation.specs, stream, pick)
        seen_as = simulation.specs[0].model
        result = report(
            outcome, simulation.specs, simulation.hardware, simulation.target, simulation.calibrations, seen_as
        )
        stays = np.nan_to_num(outcome.e2e)
        replays[name] = Replay(
            requests=count,
            attainment=tidy(result.attainment),
            in_system=tidy(float(stays.sum()) / max(outcome.end - float(outcome.arrival[0]), 1e-9)),
            ttft_p95_s=tidy(result.latency["ttft"]["p95"]),
            tpot_p95_s=tidy(result.latency["tpot"]["p95"]),
            e2e_p95_s=tidy(result.latency["e2e"]["p95"]),
        )
    return replays
