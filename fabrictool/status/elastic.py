"""What an elastic engine says of itself at ``/fabric/state``: replicas that merge, or models that share its memory.

Figures are read while the engine computes, so each is true by itself.
"""

from __future__ import annotations

import msgspec


class MergingState(msgspec.Struct, frozen=True, kw_only=True, tag="merging", tag_field="kind"):
    """Of one model, whose replicas are groups for a while."""

    replicas: int
    lost: tuple[int, ...] = ()
    """Replicas whose processes have ended."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Those of more than one replica; the others answer by themselves."""
    in_flight: int = 0
    """Requests."""
    waiting: int = 0
    """Requests."""
    free_blocks: tuple[int, ...] = ()
    """Of each replica."""
    formed: int = 0
    """Groups since the start."""
    recomputed_tokens: int = 0
    paused: int = 0
    """Requests that waited, with their caches, for a more urgent one."""
    switches: int = 0
    """Of which times are kept."""
    switch_p99_s: float | None = None


class SharingReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is in the node's memory, or on its way there or out."""

    model: str
    weights: int
    """Octets."""
    cache: int
    """Octets, as decided."""
    physical: int
    """Octets of both, as they are."""
    running: int = 0
    """Requests."""
    waiting: int = 0
    """Requests whose prompts were not read yet."""
    headroom_s: float | None = None
    """Until its most urgent token is due; None: nothing is due that is not late."""
    memory: str = "ready"
    """``ready``, ``changing``, ``held`` (it waits for others to give some back) or ``leaving``."""


class SharingState(msgspec.Struct, frozen=True, kw_only=True, tag="sharing", tag_field="kind"):
    """Several models, one iteration at a time."""

    capacity: int
    """Octets, of weights and caches together."""
    budget: int
    """Octets, as decided."""
    tracked: int
    """Octets, of each replica the larger of its old and new size while that changes; never above the capacity. A cache
    that is copied into one of another size is there in both meanwhile."""
    models: tuple[str, ...] = ()
    """That may be asked for, in memory or not."""
    replicas: tuple[SharingReplica, ...] = ()
    queued: int = 0
    """Requests without a place."""
    in_time: int = 0
    """Requests that were answered with no token late."""
    late: int = 0
    dropped: int = 0
    """Requests that nobody could begin in time."""
    loads: int = 0
    unloads: int = 0
    resizes: int = 0
    evicted: int = 0
    """Times that a request gave its cache to others."""
    load_s: float | None = None
    """The last load took so long."""
    resize_s: float | None = None


ElasticState = MergingState | SharingState


def in_words(state: ElasticState) -> str:
    """In a table's cell."""
    if isinstance(state, MergingState):
        left = state.replicas - len(state.lost)
        if not state.groups:
            return f"{left} replicas apart"
        sizes = " + ".join(str(len(group)) for group in state.groups)
        return f"{sizes} of {left} replicas merged"
    there = len({replica.model for replica in state.replicas if replica.memory != "leaving"})
    return f"{there} of {len(state.models)} models in {state.tracked / 2**30:.1f} of {state.capacity / 2**30:.1f} GiB"


def figures(state: ElasticState) -> list[tuple[str, str, dict[str, float]]]:
    """(kind, name, value by model, or by "" of the whole engine), as Prometheus has them."""
    if isinstance(state, MergingState):
        return [
            ("gauge", "fabrictool:replicas", {"": state.replicas - len(state.lost)}),
            ("gauge", "fabrictool:replicas_merged", {"": sum(len(group) for group in state.groups)}),
            ("counter", "fabrictool:groups_formed_total", {"": state.formed}),
            ("counter", "fabrictool:recomputed_tokens_total", {"": state.recomputed_tokens}),
        ]
    headroom = {r.model: r.headroom_s for r in state.replicas if r.headroom_s is not None}
    cache = {r.model: float(r.cache) for r in state.replicas}
    whole = [
        ("gauge", "memory_capacity_bytes", state.capacity),
        ("gauge", "memory_budget_bytes", state.budget),
        ("gauge", "memory_tracked_bytes", state.tracked),
        ("gauge", "requests_queued", state.queued),
        ("counter", "requests_in_time_total", state.in_time),
        ("counter", "requests_late_total", state.late),
        ("counter", "requests_dropped_total", state.dropped),
        ("counter", "loads_total", state.loads),
        ("counter", "unloads_total", state.unloads),
        ("counter", "resizes_total", state.resizes),
        ("counter", "evictions_total", state.evicted),
    ]
    named: list[tuple[str, str, dict[str, float]]] = [
        (kind, f"fabrictool:{name}", {"": float(value)}) for kind, name, value in whole
    ]
    return [
        *named,
        ("gauge", "fabrictool:headroom_seconds", headroom),
        ("gauge", "fabrictool:cache_bytes", cache),
    ]
