"""Where a request goes: a replica that has room, room that another replica makes, or a new replica.

Source: LLM-Mesh, sections 6.4 and 7. The search decides nothing by itself: it returns what would have to be done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.sharing.replicas import SharedReplica
from fabrictool.sharing.validation import Tentative, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedRequest


@dataclass(frozen=True, slots=True)
class MemoryTimes:
    """What changing memory takes; seconds, octets/s.

    The paper's figure 8, an A100: a cache from 32 to 64 GB takes 1.9 s, from 32 to 16 GB 0.3 s. Loading: from the
    host's memory over PCIe 4, or within it. An H200 takes 0.26 and 0.03 s, and loads 55 GB/s from pinned memory, 6 from
    other memory (`tests/bench/memory_times.py`).
    """

    grow_s_per_octet: float = 0.03e-9
    """Of the new size."""
    shrink_s_per_octet: float = 0.02e-9
    begin_s: float = 0.3
    """Before a model is loaded."""
    load_rate: Mapping[str, float] = field(default_factory=lambda: {"gpu": 20e9, "cpu": 10e9})
    """By kind of node."""
    unload_s: float = 0.1

    def resize(self, before: int, after: int) -> float:
        """Seconds for a cache to go from one size in octets to another."""
        if before == after:
            return 0.0
        return after * (self.grow_s_per_octet if after > before else self.shrink_s_per_octet)

    def load(self, model: SharedModel, kind: str) -> float:
        return self.begin_s + model.weights / self.load_rate[kind]


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """What an operator, or an experiment, may choose."""

    watermark: float = 0.2
    """More of the cache than is needed, so that sizes change seldom. The paper names no value;
    `examples/llm-mesh` has what others bring."""
    keep_alive_s: float = 1.0
    """A replica without requests leaves after so long."""
    idle_yield: bool = False
    """Whether a replica without requests leaves at once where another needs its room. The paper's stay for their
    keep-alive, which is short."""
    victims: int = 2
    """Smaller replicas that are asked to leave for a request."""
    most_replicas: int | None = None
    """On one node; None: as many as its memory holds."""
    kinds: tuple[str, ...] = ("cpu", "gpu")
    """Of nodes, the first ones first."""
    times: MemoryTimes = MemoryTimes()


@dataclass(frozen=True, slots=True)
class Joining:
    """A request to a replica that is there, whose cache is then of `cache` octets."""

    replica: SharedReplica
    request: SharedRequest
    cache: int


@dataclass(frozen=True, slots=True)
class Loading:
    """A request to a replica that is loaded for it, with a cache of so many octets."""

    replica: SharedReplica
    request: SharedRequest
    cache: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A replica makes room; where its requests go is said beside it."""

    replica: SharedReplica


Action = Joining | Loading | Leaving


class PlaceSearch:
    """For a place, at one time."""

    def __init__(
        self,
        nodes: Sequence[SharedNode],
        models: Mapping[str, SharedModel],
        options: SharingOptions,
        now: float,
        new_id: Callable[[], int],
    ) -> None:
        self._nodes = nodes
        self._models = models
        self._options = options
        self._now = now
        self._new_id = new_id

    def place(self, request: SharedRequest) -> list[Action] | None:
        """What to do, in order; None: nowhere at present. Nobody leaves where a new replica would do as well, but
        before one is loaded (section 7.1).
        """
        nothing = Tentative()
        there = self._there(request, None)
        return (
            self._admit(request, there, nothing)
            or self._make_room(request, there)
            or self._load(request, None, nothing)
        )

    def _there(self, request: SharedRequest, without: SharedNode | None) -> list[SharedReplica]:
        """The model's replicas: processors first, then those with most requests, so that others fall idle (7.2)."""
        kinds = self._options.kinds
        mine = [
            replica
            for node in self._nodes
            if node is not without
            for replica in node.replicas.values()
            if replica.model.name == request.model and not replica.leaving
        ]
        return sorted(mine, key=lambda replica: (kinds.index(replica.node.kind), -replica.batch))

    def _admit(
        self, request: SharedRequest, there: Sequence[SharedReplica], tentative: Tentative
    ) -> list[Action] | None:
        for replica in there:
            cache = self._cache(replica, request, tentative)
            if cache is not None and self._is_in_time(replica, request, cache, tentative):
                tentative.add(replica, request, max(0, cache - replica.cache))
                return [Joining(replica, request, cache)]
        return None

    def _cache(
        self, replica: SharedReplica, request: SharedRequest, tentative: Tentative, freed: int = 0
    ) -> int | None:
        """Octets of its cache with the request in it: as it is, with the watermark, or without; None: no room."""
        need = replica.model.need(self._with(replica, request, tentative))
        present = replica.cache
        if need <= present:
            return present
        taken = tentative.octets.get(replica.node.id, 0) - freed
        for size in (self._recommended(need), need):
            if replica.node.ledger.fits(size - present + taken):
                return size
        return None

    def _recommended(self, need: int) -> int:
        return int(need * (1.0 + self._options.watermark))

    @staticmethod
    def _with(replica: SharedReplica, request: SharedRequest, tentative: Tentative) -> Iterator[SharedRequest]:
        yield from replica.running
        yield from replica.waiting
        yield from tentative.requests.get(replica.id, ())
        yield request

    def _is_in_time(
        self,
        replica: SharedReplica,
        request: SharedRequest,
        cache: int,
        tentative: Tentative,
        without: SharedReplica | None = None,
    ) -> bool:
        resize = self._options.times.resize(replica.cache, cache) if replica.cache else 0.0
        return refusal(replica, request, self._now, tentative=tentative, resize_s=resize, without=without) is None

    def _make_room(self, request: SharedRequest, there: Sequence[SharedReplica]) -> list[Action] | None:
        """A smaller neighbour leaves, and all its requests are in time elsewhere, one after the other."""
        for replica in there:
            batch = replica.batch
            smaller = [v for v in replica.node.replicas.values() if v.batch < batch and not v.leaving]
            for victim in sorted(smaller, key=lambda v: v.batch)[: self._options.victims]:
                tentative = Tentative()
                freed = victim.node.ledger.granted(victim.id)
                cache = self._cache(replica, request, tentative, freed)
                if cache is None or not self._is_in_time(replica, request, cache, tentative, victim):
                    continue
                moves = self._move_all(victim, tentative)
                if moves is not None:
                    return [Leaving(victim), *moves, Joining(replica, request, cache)]
        return None

    def _move_all(self, victim: SharedReplica, tentative: Tentative) -> list[Action] | None:
        moves: list[Action] = []
        for request in (*victim.running, *victim.waiting):
            elsewhere = self._there(request, victim.node)
            actions = self._admit(request, elsewhere, tentative) or self._load(request, victim.node, tentative)
            if actions is None:
                return None
            moves += actions
        return moves

    def _load(self, request: SharedRequest, without: SharedNode | None, tentative: Tentative) -> list[Action] | None:
        model = self._models[request.model]
        need = model.need((request,))
        for kind in self._options.kinds:
            mine = [node for node in self._nodes if node.kind == kind and node is not without]
            for node in sorted(mine, key=lambda node: -len(node.replicas)):
                cache = self._room(node, model, need, tentative)
                if cache is None:
                    continue
                replica = SharedReplica(self._new_id(), model, node)
                replica.ready_at = self._now + self._options.times.load(model, kind)
                tentative.replicas.setdefault(node.id, []).append(replica)
                if refusal(replica, request, self._now, tentative=tentative) is None:
                    tentative.add(replica, request, model.weights + cache)
                    return [Loading(replica, request, cache)]
                tentative.replicas[node.id].pop()
        return None

    def _room(self, node: SharedNode, model: SharedModel, need: int, tentative: Tentative) -> int | None:
        """Octets for the cache of a new replica; None: not here."""
        planned = tentative.replicas.get(node.id, ())
        present = (*node.replicas.values(), *planned)
        if any(replica.model is model for replica in present):
            return None
        most = self._options.most_replicas
        if most is not None and len(present) >= most:
            return None
        taken = tentative.octets.get(node.id, 0)
        for cache in (self._recommended(need), need):
            if node.ledger.fits(model.weights + cache + taken):
                return cache
        return None
