"""Events in, effects out: requests that come, iterations that end, memory that has changed.

A driver, of virtual time or of real engines, begins the memory changes that it is given, runs the iterations that it
is given, and reports the end of both. No request is lost: it is answered, in a replica, in the queue, or dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.sharing.placement import Leaving, Loading, PlaceSearch, SharingOptions
from fabrictool.sharing.turns import iteration, next_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.sharing.ledger import MemoryChange
    from fabrictool.sharing.placement import Action
    from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedReplica, SharedRequest
    from fabrictool.sharing.turns import Iteration


@dataclass(frozen=True, slots=True)
class BeginChange:
    """To be begun on a node; it should take `seconds`. Its end is reported by `NodeSharing.changed`."""

    node: SharedNode
    replica: SharedReplica
    change: MemoryChange
    seconds: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody could answer it in time."""

    request: SharedRequest


@dataclass(frozen=True, slots=True)
class Vacated:
    """A request has left a replica, and its cache there is free: it is computed anew wherever it goes."""

    replica: SharedReplica
    request: SharedRequest


Effect = BeginChange | Dropped | Vacated


@dataclass(slots=True)
class SharingCounts:
    """Since the start, for status documents and comparisons."""

    loads: int = 0
    unloads: int = 0
    resizes: int = 0
    moved: int = 0
    evicted: int = 0


class NodeSharing:
    """Nodes that share models: LLM-Mesh."""

    def __init__(
        self,
        nodes: Sequence[SharedNode],
        models: Iterable[SharedModel],
        options: SharingOptions | None = None,
        turns: Callable[[Iterable[SharedReplica], float], SharedReplica | None] = next_turn,
    ) -> None:
        """`turns` chooses whose iteration is next."""
        self.nodes = nodes
        self.models: Mapping[str, SharedModel] = {model.name: model for model in models}
        self.options = options or SharingOptions()
        self.queue: list[SharedRequest] = []
        self.counts = SharingCounts()
        self._ids = itertools.count()
        self._turns = turns
        self._effects: list[Effect] = []

    def arrive(self, request: SharedRequest, now: float) -> list[Effect]:
        """A request comes; it is in the queue afterwards if it has no place."""
        if not self._place(request, now):
            self.queue.append(request)
        return self._taken()

    def next_iteration(self, node: SharedNode, now: float) -> tuple[Iteration | None, list[Effect]]:
        """What an idle node does next. A replica that has outgrown its cache grows first, or gives up requests."""
        while (replica := self._turns(node.replicas.values(), now)) is not None:
            turn = iteration(replica)
            if self._has_room(replica, turn, now):
                node.busy_until, node.computing = now + turn.expected_s, replica
                return turn, self._taken()
        return None, self._taken()

    def ended(
        self, turn: Iteration, now: float, is_answered: Callable[[SharedRequest], bool]
    ) -> tuple[list[SharedRequest], list[Effect]]:
        """An iteration is over: (requests that have one token more, effects). Those that are answered leave."""
        replica = turn.replica
        replica.node.computing, replica.node.busy_until = None, now
        if replica.leaving:
            return [], self._taken()
        if turn.prompt is not None:
            replica.waiting.remove(turn.prompt)
            replica.running.append(turn.prompt)
            emitted = [turn.prompt]
        else:
            emitted = list(replica.running)
        for request in emitted:
            request.emitted += 1
        answered = [request for request in emitted if is_answered(request)]
        if answered:
            for request in answered:
                replica.running.remove(request)
                replica.model.learn(request.emitted)
            if replica.batch:
                self._shrink(replica, now)
            else:
                replica.idle_since = now
            self._retry(now)
        return emitted, self._taken()

    def changed(self, node: SharedNode, replica: SharedReplica, now: float) -> list[Effect]:
        """A memory change is done."""
        self._begin(node, node.ledger.changed(replica.id, now), now)
        if not node.ledger.is_changing(replica.id):
            replica.ready_at = now
        if replica.leaving and replica.id not in node.ledger.holdings:
            node.replicas.pop(replica.id, None)
        self._retry(now)
        return self._taken()

    def give_up(self, request: SharedRequest, now: float) -> list[Effect]:
        """Nobody waits for its answer any more."""
        if request in self.queue:
            self.queue.remove(request)
            return []
        for replica in (replica for node in self.nodes for replica in node.replicas.values()):
            for requests in (replica.running, replica.waiting):
                if request in requests:
                    requests.remove(request)
                    self._effects.append(Vacated(replica, request))
                    if replica.batch:
                        self._shrink(replica, now)
                    else:
                        replica.idle_since = now
        self._retry(now)
        return self._taken()

    def expire(self, now: float) -> list[Effect]:
        """Requests that waited in vain are dropped, replicas that were idle for long leave."""
        for request in [r for r in self.queue if not r.emitted and now > r.began + r.ttft_s]:
            self.queue.remove(request)
            self._effects.append(Dropped(request))
        for node in self.nodes:
            for replica in list(node.replicas.values()):
                idle = replica.idle_since
                if idle is not None and now - idle >= self.options.keep_alive_s and not replica.leaving:
                    self._leave(replica, now)
        self._retry(now)
        return self._taken()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _place(self, request: SharedRequest, now: float) -> bool:
        search = PlaceSearch(self.nodes, self.models, self.options, now, lambda: next(self._ids))
        actions = search.place(request)
        while actions is None and self._idle_leaves(request, now):
            actions = search.place(request)
        for action in actions or ():
            self._carry_out(action, now)
        return actions is not None

    def _idle_leaves(self, request: SharedRequest, now: float) -> bool:
        """Whether a replica without requests left a node whose memory is too short for this one."""
        model = self.models[request.model]
        for node in self.nodes:
            there = [r for r in node.replicas.values() if r.model is model and not r.leaving]
            present = [other for replica in there for other in (*replica.running, *replica.waiting)]
            need = model.need((*present, request)) - sum(replica.cache for replica in there)
            need += 0 if there else model.weights
            if not node.ledger.fits(need) and self._yield(node, model, now):
                return True
        return False

    def _yield(self, node: SharedNode, model: SharedModel, now: float) -> bool:
        """The replica of another model that has been idle for longest leaves; whether there was one."""
        if not self.options.idle_yield:
            return False
        idle = [
            (replica.idle_since, replica.id, replica)
            for replica in node.replicas.values()
            if replica.idle_since is not None and not replica.leaving and replica.model is not model
        ]
        for _, _, replica in sorted(idle, key=lambda entry: entry[:2])[:1]:
            self._leave(replica, now)
        return bool(idle)

    def _carry_out(self, action: Action, now: float) -> None:
        replica = action.replica
        node = replica.node
        if isinstance(action, Leaving):
            self.counts.moved += replica.batch
            self._effects += [Vacated(replica, request) for request in (*replica.running, *replica.waiting)]
            replica.running.clear()
            replica.waiting.clear()
            self._leave(replica, now)
            return
        replica.waiting.append(action.request)
        replica.idle_since = None
        if isinstance(action, Loading):
            node.replicas[replica.id] = replica
        if action.cache != replica.cache:
            self._grant(replica, replica.model.weights + action.cache, now)

    def _leave(self, replica: SharedReplica, now: float) -> None:
        replica.leaving = True
        node = replica.node
        self._begin(node, node.ledger.grant(replica.id, 0, now), now)
        if replica.id not in node.ledger.holdings:  # nothing of it had been loaded
            node.replicas.pop(replica.id, None)

    def _grant(self, replica: SharedReplica, size: int, now: float) -> None:
        ledger = replica.node.ledger
        changes = ledger.grant(replica.id, size, now)
        if ledger.is_waiting(replica.id):
            replica.ready_at = math.inf
        self._begin(replica.node, changes, now)

    def _begin(self, node: SharedNode, changes: Iterable[MemoryChange], now: float) -> None:
        times = self.options.times
        for change in changes:
            replica = node.replicas[change.replica]
            weights = replica.model.weights
            if not change.before:
                seconds = times.load(replica.model, node.kind)
                self.counts.loads += 1
            elif not change.after:
                seconds = times.unload_s
                self.counts.unloads += 1
            else:
                seconds = times.resize(change.before - weights, change.after - weights)
                self.counts.resizes += 1
            if node.computing is replica:  # its memory changes between iterations
                seconds += max(0.0, node.busy_until - now)
            replica.ready_at = now + seconds
            self._effects.append(BeginChange(node, replica, change, seconds))

    def _shrink(self, replica: SharedReplica, now: float) -> None:
        """Lazily: only if even the watermark of what is recommended leaves room (section 6.2)."""
        more = 1.0 + self.options.watermark
        wanted = int(replica.model.need((*replica.running, *replica.waiting)) * more)
        if wanted * more < replica.cache:
            self._grant(replica, replica.model.weights + wanted, now)

    def _has_room(self, replica: SharedReplica, turn: Iteration, now: float) -> bool:
        """Whether the iteration's tokens fit; if not, the cache grows, or who has most time starts anew elsewhere."""
        model = replica.model
        while True:
            longer = 0 if turn.prompt else 1  # by the token that each of them gets
            tokens = sum(model.held(request.context + longer) for request in replica.running)
            tokens += model.held(turn.prompt.context + 1) if turn.prompt else 0
            octets = int(tokens * model.token)
            if octets <= replica.cache:
                return True
            need = model.need((*replica.running, *replica.waiting))
            least = max(need, octets)
            for size in (int(least * (1.0 + self.options.watermark)), least, octets):
                if replica.node.ledger.fits(size - replica.cache):
                    self._grant(replica, model.weights + size, now)
                    return False
            if self._yield(replica.node, model, now):
                continue
            evicted = max((*replica.running, *replica.waiting), key=lambda request: request.deadline)
            self.counts.evicted += 1
            self._effects.append(Vacated(replica, evicted))
            self.queue.append(evicted)
            if evicted in replica.running:
                replica.running.remove(evicted)
            else:
                replica.waiting.remove(evicted)
            if not replica.batch:
                replica.idle_since = now
            if turn.prompt is evicted or not replica.running:
                return False

    def _retry(self, now: float) -> None:
        """The queue, the most urgent first; of a model no further one after one that found no place."""
        full: set[str] = set()
        for request in sorted(self.queue, key=lambda request: request.deadline):
            if request.model not in full:
                if self._place(request, now):
                    self.queue.remove(request)
                else:
                    full.add(request.model)
