"""What a blueprint says of a model's requests, as the simulator and the engines take it: lengths, and the context."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.workload.lengths import Lengths

if TYPE_CHECKING:
    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Length, Model

DEFAULT_CONTEXT = 4096
"""Of a variant that names none, where the demand needs no more: no replica is made larger for contexts that nobody
asked for, and no engine is started with one that its memory cannot hold."""
CONTEXT_STEP = 1024
LONGEST_SHARE = 0.999
"""Of requests that have to fit the context of a variant that names none."""


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
