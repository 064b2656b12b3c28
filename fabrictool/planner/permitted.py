"""Where a model may stand, whatever its size; how much of its time it serves there, and how welcome it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.catalog import accelerators
from fabrictool.engines.adapter import adapter

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.engines.protocol import Capabilities
    from fabrictool.planner.problem import Pool

LOAD_OCTETS_PER_S = 0.37e9
LOAD_S = 106.0
"""From start to serving: 106 + 379/tp s of a 70B model at 16 bits in published measurements of vLLM."""
WORTH_STARTING = 0.5
"""A partition whose walltime goes by half in starting is not used."""


def start_time(place: Partition, weights: float, measured_s: float | None = None) -> float:
    """Seconds from a replica's start until it serves.

    `weights`: octets on each device; `measured_s`: what starts of the model took there, which is believed more.
    """
    if measured_s is not None:
        return measured_s
    begins = 0.0 if accelerators()[place.device].kind == "cpu" else LOAD_S
    return begins + weights / LOAD_OCTETS_PER_S


def promised(place: Partition, start_s: float) -> float:
    """The share of its time in which a replica of a partition with a walltime serves; 0 where it hardly does.

    Its successor gets other devices only where some are free, so a start counts as lost whenever the walltime ends.
    """
    if place.walltime is None:
        return 1.0
    share = 1.0 - start_s / float(place.walltime)
    return share if share >= WORTH_STARTING else 0.0


def forbidden(wanted: Model, pool: Pool, inventory: Inventory) -> list[str]:
    """What speaks against the model's standing in a pool, whatever its size; nothing where it may."""
    installed = inventory.clusters[pool.cluster].software.engines
    reasons = []
    if wanted.trust is not None and pool.provider not in wanted.trust:
        reasons.append(f"`trust` does not name {pool.provider}")
    if not pool.stable and wanted.tier != "scavenger":
        reasons.append("it is scavenger capacity, and `tier` is owned")
    if installed and wanted.engine not in installed:
        reasons.append(f"{wanted.engine} is not installed")
    described = inventory.clusters[pool.cluster]
    if wanted.stages and described.weights is None:
        reasons.append("the inventory names no `weights` folder there")
    elif wanted.stages and not (described.here or described.login):
        reasons.append("no weights can be staged there: it has no login node")
    if wanted.adapters and described.joined:
        reasons.append("its nodes joined by themselves, and are told of no adapters")
    if wanted.companions and described.joined:
        reasons.append("its nodes joined by themselves, and are told of no companions")
    can = adapter(wanted.engine).capabilities
    if (wanted.parallelism.tp or 1) > 1 and not can.tensor_parallel:
        reasons.append(f"{wanted.engine} does not cut layers over devices, as `parallelism.tp` wants")
    if (wanted.parallelism.pp or 1) > 1 and not can.pipeline_parallel:
        reasons.append(f"{wanted.engine} has no pipeline, as `parallelism.pp` wants")
    if (wanted.parallelism.dp or 1) > 1:
        reasons += _not_merging(wanted, pool, can)
    if wanted.options and pool.joined:
        reasons.append("its nodes joined by themselves, and are told no engine `options`")
    return reasons


def _not_merging(wanted: Model, pool: Pool, can: Capabilities) -> list[str]:
    """What speaks against base engines that merge, as `parallelism.dp` wants them."""
    reasons = []
    if wanted.parallelism.dp not in can.live_tp_switch:
        numbers = sorted(number for number in can.live_tp_switch if number > 1)
        able = (
            f"of {wanted.engine} {' or '.join(map(str, numbers))} can"
            if numbers
            else f"those of {wanted.engine} cannot"
        )
        reasons.append(f"`parallelism.dp: {wanted.parallelism.dp}` wants engines that merge: {able}")
    if (wanted.parallelism.pp or 1) > 1:
        reasons.append("`parallelism.dp` and `parallelism.pp` are both above 1, and pipelines do not merge")
    if wanted.phases == "split":
        reasons.append("`phases: split` and `parallelism.dp` do not go together")
    if pool.joined:
        reasons.append("its nodes joined by themselves, and are told of no engines that merge")
    return reasons


def permitted(wanted: Model, pool: Pool, inventory: Inventory) -> bool:
    return not forbidden(wanted, pool, inventory)


def preference(wanted: Model, pool: Pool) -> float:
    """0 where `place` has the model, more where it does not."""
    names = {pool.device, pool.provider, pool.site, pool.cluster}
    unwished = bool(wanted.place.prefer) and not names & set(wanted.place.prefer)
    return float(unwished) + 2.0 * bool(names & set(wanted.place.avoid))
