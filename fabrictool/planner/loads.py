"""How long replicas took from their start until they served: what is known of a model on a cluster, and by which loader
the next one should load.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import number_of
from fabrictool.domain.plan import StartTime
from fabrictool.domain.specs import DEFAULT_LOADER, AgentSpec
from fabrictool.domain.state import load_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.plan import Action
    from fabrictool.domain.state import State

    Loads = Mapping[str, Sequence[float]]
    """As the state keeps them, by `load_key`."""

MEASURED = "measured"


def loads_of(loads: Loads, model: str, cluster: str) -> dict[str, Sequence[float]]:
    """Loader → seconds of the last starts there."""
    begin = load_key(model, cluster, "")
    return {key.removeprefix(begin): seconds for key, seconds in sorted(loads.items()) if key.startswith(begin)}


def known_loads(loads: Loads, spec: AgentSpec) -> Sequence[float]:
    """Seconds of starts like the one of this spec: there and by its loader, else there, else of its model anywhere."""
    there = loads_of(loads, spec.model, spec.cluster)
    if spec.loads_by in there:
        return there[spec.loads_by]
    if there:
        return [start for starts in there.values() for start in starts]
    # Earlier releases knew the model alone.
    mine = (starts for key, starts in loads.items() if key.partition("@")[0] == spec.model)
    return [start for starts in mine for start in starts]


def start_s(loads: Loads, wanted: Model, model: str, cluster: str) -> float | None:
    """Median seconds of a start there; None where none was measured. Rounded, so that plans seldom change."""
    there = loads_of(loads, model, cluster)
    if not there:
        return None
    mine = there.get(wanted.loader)
    seconds = min(map(median, there.values())) if mine is None else median(mine)
    return float(f"{seconds:.2g}")


def with_loader(spec: AgentSpec, state: State) -> AgentSpec:
    """For a start that comes now: where loaders are compared, the one whose turn it is.

    Each is tried once, several replicas that start together try several; then the one with the quickest
    median is taken. One with which a replica ended before it served is tried no more.
    """
    if isinstance(spec.loaders, msgspec.UnsetType):
        return spec
    there = loads_of(state.loads, spec.model, spec.cluster)
    failed = {name for name in spec.loaders if load_key(spec.model, spec.cluster, name) in state.failed_loaders}
    usable = [name for name in spec.loaders if name not in failed] or [DEFAULT_LOADER]
    untried = [name for name in usable if not there.get(name)]
    chosen = (
        untried[number_of(spec.replica) % len(untried)]
        if untried
        else min(usable, key=lambda name: median(there[name]))
    )
    return msgspec.structs.replace(spec, loader=chosen)


def start_times(actions: Iterable[Action], loads: Loads) -> tuple[StartTime, ...]:
    """Of what would start: how long that took the last times, where it is known."""
    times = []
    for action in actions:
        if action.kind in ("create", "replace") and isinstance(action.spec, AgentSpec):
            spec, seconds = action.spec, known_loads(loads, action.spec)
            here = spec.loads_by in loads_of(loads, spec.model, spec.cluster)
            if seconds:
                times.append(
                    StartTime(
                        address=action.address,
                        loader=spec.loads_by,
                        median_s=median(seconds),
                        starts=len(seconds),
                        alike=here,
                    )
                )
    return tuple(times)
