"""Nodes that several models share, in virtual time; and, to compare, nodes of which each has one model at a time.

Source: LLM-Mesh, section 8. Who decides is `fabrictool.sharing`, unchanged; here iterations and changes of memory take
as long as the tables say.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fabrictool.sharing.core import BeginChange, Dropped, SharingCounts
from fabrictool.sharing.replicas import SharedReplica
from fabrictool.sharing.turns import iteration, next_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.sharing.core import Effect
    from fabrictool.sharing.placement import SharingOptions
    from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedRequest
    from fabrictool.sharing.turns import Iteration


class NodeScheduler(Protocol):
    """What decides: `NodeSharing`, or a system to compare it with."""

    nodes: Sequence[SharedNode]
    counts: SharingCounts
    options: SharingOptions

    def arrive(self, request: SharedRequest, now: float) -> list[Effect]: ...

    def next_iteration(self, node: SharedNode, now: float) -> tuple[Iteration | None, list[Effect]]: ...

    def ended(
        self, turn: Iteration, now: float, is_answered: Callable[[SharedRequest], bool]
    ) -> tuple[list[SharedRequest], list[Effect]]: ...

    def changed(self, node: SharedNode, replica: SharedReplica, now: float) -> list[Effect]: ...

    def expire(self, now: float) -> list[Effect]: ...


@dataclass(slots=True)
class SharedRun:
    """What came of it."""

    requests: int
    in_time: int = 0
    """Requests none of whose tokens came after its deadline."""
    answered: int = 0
    dropped: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Decoded, by kind of node."""
    used: dict[str, float] = field(default_factory=dict)
    """Nodes with a replica, the mean over time, by kind."""
    until: float = 0.0
    """Seconds until the last of them had left."""
    counts: SharingCounts = field(default_factory=SharingCounts)

    @property
    def attainment(self) -> float:
        """Share of the requests that were in time."""
        return self.in_time / self.requests if self.requests else math.nan


_ARRIVAL, _ENDED, _CHANGED, _EXPIRY = range(4)


class SharedNodeLoop:
    """Virtual time around a scheduler."""

    def __init__(self, scheduler: NodeScheduler, answers: Mapping[int, int]) -> None:
        """`answers`: request → tokens of its answer, which the scheduler does not see."""
        self._scheduler = scheduler
        self._answers = answers
        self._events: list[tuple[float, int, int, tuple[object, ...]]] = []
        self._order = itertools.count()
        self._late: set[int] = set()
        self._busy: dict[int, Iteration] = {}
        self._at = 0.0

    def run(self, requests: Sequence[SharedRequest]) -> SharedRun:
        """Until nothing is left to do."""
        outcome = SharedRun(len(requests))
        for request in requests:
            self._push(request.began, _ARRIVAL, request)
        while self._events:
            now, _, event, what = heapq.heappop(self._events)
            self._count_nodes(outcome, now)
            self._at = now
            self._handle(event, what, now, outcome)
            self._begin_iterations(now, outcome)
        outcome.until = self._at
        for kind in outcome.used:
            outcome.used[kind] /= max(self._at, 1e-9)
        outcome.counts = self._scheduler.counts
        if outcome.answered + outcome.dropped < outcome.requests:
            message = (
                f"{outcome.requests - outcome.answered - outcome.dropped} requests were neither answered nor dropped"
            )
            raise AssertionError(message)
        return outcome

    def _push(self, at: float, kind: int, *what: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, what))

    def _handle(self, kind: int, what: tuple[object, ...], now: float, outcome: SharedRun) -> None:
        scheduler = self._scheduler
        if kind == _ARRIVAL:
            request: SharedRequest = what[0]  # type: ignore[assignment] # each kind of event has its own
            self._push(now + request.ttft_s + 1e-9, _EXPIRY)
            self._apply(scheduler.arrive(request, now), outcome)
        elif kind == _CHANGED:
            node, replica = what
            self._apply(scheduler.changed(node, replica, now), outcome)  # type: ignore[arg-type]
        elif kind == _EXPIRY:
            self._apply(scheduler.expire(now), outcome)
        else:
            turn: Iteration = what[0]  # type: ignore[assignment]
            self._end(turn, now, outcome)

    def _end(self, turn: Iteration, now: float, outcome: SharedRun) -> None:
        replica = turn.replica
        del self._busy[replica.node.id]
        emitted, effects = self._scheduler.ended(turn, now, self._is_answered)
        for request in emitted:
            if now > request.deadline - request.tpot_s + 1e-9:  # of the token that it has just got
                self._late.add(request.id)
            if self._is_answered(request):
                outcome.answered += 1
                outcome.in_time += request.id not in self._late
        if turn.prompt is None:
            kind = replica.node.kind
            outcome.tokens[kind] = outcome.tokens.get(kind, 0) + len(emitted)
        if replica.idle_since == now:
            self._push(now + self._scheduler.options.keep_alive_s + 1e-9, _EXPIRY)
        self._apply(effects, outcome)

    def _is_answered(self, request: SharedRequest) -> bool:
        return request.emitted >= self._answers[request.id]

    def _apply(self, effects: Iterable[Effect], outcome: SharedRun) -> None:
        for effect in effects:
            if isinstance(effect, BeginChange):
                self._push(self._at + effect.seconds, _CHANGED, effect.node, effect.replica)
            elif isinstance(effect, Dropped):
                outcome.dropped += 1

    def _begin_iterations(self, now: float, outcome: SharedRun) -> None:
        for node in self._scheduler.nodes:
            if node.id not in self._busy and node.replicas:
                turn, effects = self._scheduler.next_iteration(node, now)
                self._apply(effects, outcome)
                if turn is not None:
                    self._busy[node.id] = turn
                    self._push(now + turn.expected_s, _ENDED, turn)

    def _count_nodes(self, outcome: SharedRun, now: float) -> None:
        for node in self._scheduler.nodes:
            if node.replicas:
                outcome.used[node.kind] = outcome.used.get(node.kind, 0.0) + now - self._at


class ExclusiveNodes:
    """Each node has one model at a time, and each replica a number of requests at most (ServerlessLLM, as the paper
    compares it): `sllm` with processors as well, or without.
    """

    def __init__(
        self,
        nodes: Sequence[SharedNode],
        models: Iterable[SharedModel],
        places: Mapping[tuple[str, str], int],
        options: SharingOptions,
    ) -> None:
        """`places`: (kind of node, model) → requests at most."""
        self.nodes = [node for node in nodes if node.kind in options.kinds]
        self.models = {model.name: model for model in models}
        self.options = options
        self.counts = SharingCounts()
        self._places = places
        self._queue: deque[SharedRequest] = deque()
        self._ids = itertools.count()

    def arrive(self, request: SharedRequest, now: float) -> list[Effect]:
        self._queue.append(request)
        return self._serve(now)

    def next_iteration(self, node: SharedNode, now: float) -> tuple[Iteration | None, list[Effect]]:
        replica = next_turn(node.replicas.values(), now)
        return (iteration(replica) if replica else None), []

    def ended(
        self, turn: Iteration, now: float, is_answered: Callable[[SharedRequest], bool]
    ) -> tuple[list[SharedRequest], list[Effect]]:
        replica = turn.replica
        if turn.prompt is not None:
            replica.running.append(replica.waiting.pop(0))
            emitted = [turn.prompt]
        else:
            emitted = list(replica.running)
        for request in emitted:
            request.emitted += 1
        replica.running = [request for request in replica.running if not is_answered(request)]
        if not replica.batch:
            replica.idle_since = now
        return emitted, self._serve(now)

    def changed(self, node: SharedNode, replica: SharedReplica, now: float) -> list[Effect]:
        node.ledger.changed(replica.id, now)
        replica.ready_at = now
        if replica.leaving:
            del node.replicas[replica.id]
        return self._serve(now)

    def expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request in [r for r in self._queue if now > r.began + r.ttft_s]:
            self._queue.remove(request)
            effects.append(Dropped(request))
        for node in self.nodes:
            for replica in node.replicas.values():
                idle = replica.idle_since
                if idle is not None and now - idle >= self.options.keep_alive_s and not replica.leaving:
                    replica.leaving = True
                    effects += self._change(replica, 0, self.options.times.unload_s, now)
        return effects

    def _serve(self, now: float) -> list[Effect]:
        """First come, first served, of each model."""
        effects: list[Effect] = []
        full: set[str] = set()
        for request in list(self._queue):
            if request.model in full:
                continue
            replica = self._replica(request) or self._new(request, now, effects)
            if replica is None:
                full.add(request.model)
                continue
            self._queue.remove(request)
            replica.waiting.append(request)
            replica.idle_since = None
        return effects

    def _replica(self, request: SharedRequest) -> SharedReplica | None:
        """Processors first, then the one with the fewest requests."""
        kinds = self.options.kinds
        free = [
            replica
            for node in self.nodes
            for replica in node.replicas.values()
            if replica.model.name == request.model
            and not replica.leaving
            and replica.batch < self._places[node.kind, request.model]
        ]
        return min(free, key=lambda i: (kinds.index(i.node.kind), i.batch), default=None)

    def _new(self, request: SharedRequest, now: float, effects: list[Effect]) -> SharedReplica | None:
        model = self.models[request.model]
        for kind in self.options.kinds:
            for node in self.nodes:
                if node.kind == kind and not node.replicas:
                    replica = SharedReplica(next(self._ids), model, node)
                    node.replicas[replica.id] = replica
                    effects += self._change(replica, node.ledger.capacity, self.options.times.load(model, kind), now)
                    return replica
        return None

    def _change(self, replica: SharedReplica, size: int, seconds: float, now: float) -> list[Effect]:
        changes = replica.node.ledger.grant(replica.id, size, now)
        self.counts.loads += bool(size)
        self.counts.unloads += not size
        return [BeginChange(replica.node, replica, change, seconds) for change in changes]
