"""What a blueprint says of a model's requests, as the simulator and the engines take it: lengths, and the context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.canonical import tidy
from fabrictool.simulator.capacity import MeanWorkload
from fabrictool.workload.lengths import Lengths

if TYPE_CHECKING:
    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Length, Model

DEFAULT_CONTEXT = 4096
"""Of a variant that names none, where the demand needs no more: no replica is made larger for contexts that nobody
asked for, and no engine is started with one that its memory cannot hold."""
CONTEXT_STEP = 1024
LONGEST_SHARE = 0.999
"""Of requests that have to fit the context of a variant that names none."""
DEFAULT_INPUT, DEFAULT_OUTPUT = 512.0, 128.0
"""Lengths of a model without a declared demand: they only size its memory."""


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """A consumer group's part of a model's demand."""

    group: str
    """"": of all for whom the blueprint names no part."""
    share: float
    allowed: frozenset[str] | None = None
    """Providers that may serve it; None: any of those that may serve the model."""


def lengths_of(declared: Length) -> Lengths:
    """What a blueprint declares, as a distribution to draw from."""
    mean, sd = float(declared.mean), float(declared.sd)
    most = int(declared.max) if declared.max is not None else 10_000_000
    return Lengths(declared.shape if sd else "fixed", mean, sd, 1, most)


def context_of(wanted: Model, architecture: ModelArchitecture) -> int:
    """Tokens that one request of a model may hold: what is planned with, and what its engines are told."""
    if wanted.variant.context is not None:
        return int(wanted.variant.context)
    demand, longest = wanted.demand, 0.0
    if demand is not None and demand.input is not None and demand.output is not None:
        longest = sum(lengths_of(length).quantile(LONGEST_SHARE) for length in (demand.input, demand.output))
    needed = CONTEXT_STEP * math.ceil(longest / CONTEXT_STEP)
    return min(max(DEFAULT_CONTEXT, needed), architecture.max_context)


def demand_of(wanted: Model, architecture: ModelArchitecture) -> MeanWorkload:
    """Mean lengths and rate, with the context that a replica must hold."""
    context = context_of(wanted, architecture)
    declared = wanted.demand
    if declared is None or declared.rate is None or declared.input is None or declared.output is None:
        longest = float(context)
        return MeanWorkload(0.0, min(DEFAULT_INPUT, longest * 0.8), min(DEFAULT_OUTPUT, longest * 0.2), context)
    given, answer = lengths_of(declared.input), lengths_of(declared.output)
    return MeanWorkload(
        float(declared.rate),
        given.clipped_mean,
        answer.clipped_mean,
        context,
        input_p95=given.quantile(0.95) if declared.input.sd else 0.0,
        output_p95=answer.quantile(0.95) if declared.output.sd else 0.0,
        input_variation=float(declared.input.sd) / float(declared.input.mean),
        output_variation=float(declared.output.sd) / float(declared.output.mean),
    )


def parts_of(blueprint: Blueprint, wanted: Model) -> tuple[GroupDemand, ...]:
    """The demand by group, with a last part for what is left of it; none where the blueprint does not divide it."""
    shares = {} if wanted.demand is None or wanted.demand.groups is None else wanted.demand.groups
    named = [
        GroupDemand(name, float(share), frozenset(blueprint.trust.groups[name].allow))
        for name, share in sorted(shares.items())
    ]
    rest = tidy(1.0 - sum(part.share for part in named))
    return (*named, GroupDemand("", rest)) if named and rest > 0.0 else tuple(named)
