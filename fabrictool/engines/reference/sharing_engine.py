"""An engine that answers for several models out of one memory, an iteration of one of them at a time.

`fabrictool.sharing` decides, unchanged from the simulator: whose iteration is next, what is loaded, how large caches
are, and which requests can be answered in time. Here its iterations are computed and its memory changes carried out.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fabrictool.engines.reference.answering import ComputeThread
from fabrictool.engines.reference.answers import LatencyTargets
from fabrictool.engines.reference.kv import block_bytes
from fabrictool.engines.reference.resident import CacheMove, ResidentModel
from fabrictool.engines.reference.stats import Stats
from fabrictool.sharing.core import BeginChange, Dropped, NodeSharing, Vacated
from fabrictool.sharing.defaults import ASSUMED_ANSWER, KEEP_ALIVE_S, TPOT_S, usual_ttft_s
from fabrictool.sharing.ledger import MemoryLedger
from fabrictool.sharing.placement import MemoryTimes, SharingOptions
from fabrictool.sharing.quantified import RefinedTable
from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedRequest
from fabrictool.sharing.turns import next_turn
from fabrictool.status.elastic import SharingReplica, SharingState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import (
        EngineLimits,
        FinishReason,
        GenerationEvent,
        GenerationRequest,
        OpenAnswer,
    )
    from fabrictool.engines.reference.quantify import Quantified
    from fabrictool.engines.reference.tokenizer import Tokenizer
    from fabrictool.engines.reference.weights import Weights
    from fabrictool.sharing.core import Effect
    from fabrictool.sharing.replicas import SharedReplica
    from fabrictool.sharing.turns import Iteration

_log = logging.getLogger("fabrictool.engine")

KIND = "cpu"
"""Of the one node that there is."""
_WAKE = -1
"""In the inbox: a change of memory is done."""
_GRACE_S = 1e-3
"""After a time is over, so that it is."""
_LOOK_S = 0.5
"""Between two looks for a place while requests have none and nothing else happens."""
_LONGEST_WAIT_S = 3600.0
"""For a message: whoever waits for a day looks once an hour, since longer times may be more than a lock can be told."""
_GIVEN_UP_S = 60.0
"""A request that had begun and found no place again is given up when its next token is late by so much."""
LEARNED = 0.3
"""Weight of the newest load in what loading is thought to take."""


class SharingModel(NamedTuple):
    """One of the models, and what is known of it here."""

    name: str
    weights: Weights
    tokenizer: Tokenizer
    limits: EngineLimits
    quantified: Quantified

    @property
    def block_octets(self) -> int:
        """That one block of its cache takes."""
        return block_bytes(self.weights.config, self.limits.block_size)

    def shared(self, times: RefinedTable) -> SharedModel:
        """As the scheduler sees it."""
        return SharedModel(
            self.name,
            self.weights.flat.nbytes,
            self.block_octets // self.limits.block_size,
            self.limits.context,
            {KIND: times},
            min(ASSUMED_ANSWER, self.limits.context / 2),
            block=self.limits.block_size,
        )


class SharedService:
    """A model of the engine, as its server sees it."""

    def __init__(self, engine: SharingEngine, model: SharingModel) -> None:
        self.model = model
        self.tokenizer, self.limits = model.tokenizer, model.limits
        self.context = model.limits.context
        self.stats = Stats()
        self._engine = engine

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationEvent], None]) -> int:
        """Queue a request; returns its number for `cancel`."""
        return self._engine.submit(self, request, emit)

    def cancel(self, number: int) -> None:
        """Stop a request and free its blocks; nothing when it has ended."""
        self._engine.cancel(number)


@dataclass(slots=True, eq=False)
class _Open:
    """A request in progress."""

    service: SharedService
    request: SharedRequest
    tokens: list[int]
    """Prompt, and answer so far."""
    late: bool = False
    over: bool = False


class _Done(NamedTuple):
    """A change of memory, and what came of it."""

    effect: BeginChange
    began: float
    move: CacheMove | None
    """Of a cache that changes its size."""
    loaded: ResidentModel | None
    error: BaseException | None
    """Why it could not be done."""


class SharingEngine(ComputeThread):
    """Computes in its own thread; memory is changed in others meanwhile."""

    # Wide: what an engine is made of, and what sharing adds.
    def __init__(
        self,
        models: Sequence[SharingModel],
        memory: int,
        clock: Clock,
        on_failure: Callable[[str], None] = _log.error,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        ttft_s: float | None = None,
        tpot_s: float = TPOT_S,
        turns: Callable[[Iterable[SharedReplica], float], SharedReplica | None] = next_turn,
    ) -> None:
        """`memory`: octets of weights and caches together. Targets are of requests that bring none; without `ttft_s`
        the first token comes after two seconds, or a second for 512 tokens of prompt (LLM-Mesh, section 8.1).
        """
        super().__init__(clock, on_failure)
        self.services = {model.name: SharedService(self, model) for model in models}
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._node = SharedNode(0, KIND, MemoryLedger(memory))
        times = measured_times(models)
        self._load_rates = dict(times.load_rate)
        times = replace(times, load_rate=self._load_rates)
        options = SharingOptions(keep_alive_s=keep_alive_s, idle_yield=True, times=times)
        self._tables = {model.name: RefinedTable(model.quantified.iterations) for model in models}
        shared = [model.shared(self._tables[model.name]) for model in models]
        self.core = NodeSharing([self._node], shared, options, turns)
        self._open: dict[int, _Open] = {}
        self._resident: dict[int, ResidentModel] = {}
        self._changes: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._spawn: Callable[[Callable[[], None]], None] = _in_thread
        self._idle = True
        self._in_time = self._late = self._dropped = 0
        self._seconds: dict[str, float] = {}
        """What the last change of each kind took."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the current iteration; requests in progress end as cancelled."""
        self._tell(0, None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def submit(
        self, service: SharedService, request: GenerationRequest, emit: Callable[[GenerationEvent], None]
    ) -> int:
        """Queue a request for a model; returns its number for `cancel`."""
        return self._submit(service, request, emit)

    def cancel(self, number: int) -> None:
        """Stop a request and free its blocks; nothing when it has ended."""
        self._tell(number, None)

    def state(self) -> SharingState:
        """What the memory holds now."""
        node, ledger, counts = self._node, self._node.ledger, self.core.counts
        now = self._clock.monotonic()
        return SharingState(
            capacity=ledger.capacity,
            budget=ledger.budget,
            tracked=ledger.tracked,
            models=tuple(self.services),
            replicas=tuple(_described(replica, now) for replica in list(node.replicas.values())),
            queued=len(self.core.queue),
            in_time=self._in_time,
            late=self._late,
            dropped=self._dropped,
            loads=counts.loads,
            unloads=counts.unloads,
            resizes=counts.resizes,
            evicted=counts.evicted,
            load_s=self._seconds.get("load"),
            resize_s=self._seconds.get("resize"),
        )

    # -- the compute thread -----------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take all messages, waiting for one, or for a time to be over, when there is nothing to compute."""
        idle = self._idle
        while True:
            try:
                number, answer = self._inbox.get(block=idle, timeout=self._patience() if idle else None)
            except queue.Empty:
                return True
            idle = False
            if answer is not None:
                self._arrive(number, answer)
            elif number == 0:
                return False
            elif number == _WAKE:
                self._changed(self._changes.get())
            elif number in self._open:
                self._end(number, self._answers.given_up(number, "cancelled"), "cancelled")
                request = self._open.pop(number).request
                self._apply(self.core.give_up(request, self._clock.monotonic()))

    def _patience(self) -> float | None:
        """Seconds until something is over by itself; None: nothing."""
        first = [r.began + r.ttft_s for r in self.core.queue if not r.emitted]
        keep = self.core.options.keep_alive_s
        first += [
            replica.idle_since + keep
            for replica in self._node.replicas.values()
            if replica.idle_since is not None and not replica.leaving
        ]
        now = self._clock.monotonic()
        first += [now + _LOOK_S] * bool(self.core.queue)  # what was learned of times may have been forgotten
        return min(_LONGEST_WAIT_S, max(0.0, min(first) - now) + _GRACE_S) if first else None

    def _compute(self) -> None:
        now = self._clock.monotonic()
        for table in self._tables.values():
            table.rest(now)
        self._give_up_late(now)
        self._apply(self.core.expire(now))
        turn, effects = self.core.next_iteration(self._node, self._clock.monotonic())
        self._apply(effects)
        self._idle = turn is None
        if turn is not None:
            self._carry_out(turn)
        self._measure()

    def _give_up_late(self, now: float) -> None:
        for request in [r for r in self.core.queue if r.emitted and now > r.deadline + _GIVEN_UP_S]:
            self._apply([*self.core.give_up(request, now), Dropped(request)])

    def _arrive(self, number: int, answer: OpenAnswer) -> None:
        service = answer.model
        if not isinstance(service, SharedService):
            raise TypeError(service)
        prompt = answer.request.prompt
        targets = answer.request.targets
        if targets is None:
            targets = LatencyTargets(self._ttft_s or usual_ttft_s(len(prompt)), self._tpot_s)
        request = SharedRequest(number, service.model.name, len(prompt), answer.arrived, *targets)
        self._answers.add(number, answer)
        self._open[number] = _Open(service, request, list(prompt))
        self._apply(self.core.arrive(request, self._clock.monotonic()))

    def _carry_out(self, turn: Iteration) -> None:
        replica, began = turn.replica, self._clock.monotonic()
        resident, table = self._resident[replica.id], self._tables[replica.model.name]
        requests = [turn.prompt] if turn.prompt else list(replica.running)
        rows = []
        for request in requests:
            tokens = self._open[request.id].tokens
            rows.append((request.id, tokens, 0) if turn.prompt else (request.id, tokens[-1:], len(tokens) - 1))
        logits = resident.step(rows)
        now = self._clock.monotonic()
        if turn.prompt:
            table.learn_prefill(turn.prompt.context, now - began, now)
        else:
            contexts = sum(request.context for request in requests)
            table.learn_decode(len(requests), contexts / len(requests), now - began, now)
        events = []
        for request, row in zip(requests, logits, strict=True):
            open_request = self._open[request.id]
            token = self._answers[request.id].sampler.draw(row)
            event = self._answers.advance(request.id, token)
            open_request.tokens.append(token)
            open_request.late |= now > request.deadline
            open_request.over = event.finish is not None
            if open_request.over:
                resident.forget(request.id)
            events.append((request.id, event))
        _, effects = self.core.ended(turn, now, lambda request: self._open[request.id].over)
        self._apply(effects)
        for number, event in events:
            if event.finish is None:
                self._answers[number].emit(event)
                continue
            late = self._open.pop(number).late
            self._late += late
            self._in_time += not late
            self._end(number, event, event.finish)

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, BeginChange):
                self._begin(effect)
            elif isinstance(effect, Vacated):
                resident = self._resident.get(effect.replica.id)
                if resident is not None:
                    resident.forget(effect.request.id)
                if effect.request.id in self._open:  # its client has not left
                    self.services[effect.request.model].stats.preemptions += 1
            else:
                self._dropped += 1
                del self._open[effect.request.id]
                self._end(effect.request.id, self._answers.given_up(effect.request.id, "dropped"), "dropped")

    def _begin(self, effect: BeginChange) -> None:
        replica, change = effect.replica, effect.change
        model = self.services[replica.model.name].model
        blocks = (change.after - replica.model.weights) // model.block_octets
        move: CacheMove | None = None
        work: Callable[[], ResidentModel | None]
        if not change.before:
            work = partial(ResidentModel, model.weights, blocks, model.limits.block_size)
        elif not change.after:
            work = self._resident.pop(replica.id).unload
        else:
            move = self._resident[replica.id].move(blocks)
            work = move.copy
        began = self._clock.monotonic()

        def carry_out() -> None:
            loaded, problem = None, None
            try:
                loaded = work()
            except BaseException as error:  # noqa: BLE001 - the compute thread stops for it
                problem = error
            self._changes.put(_Done(effect, began, move, loaded, problem))
            self._tell(_WAKE, None)

        self._spawn(carry_out)

    def _changed(self, done: _Done) -> None:
        effect, now = done.effect, self._clock.monotonic()
        if done.error is not None:
            raise done.error
        if done.loaded is not None:
            self._resident[effect.replica.id] = done.loaded
            self._learn_load(effect, now - done.began)
        elif done.move is not None:
            self._resident[effect.replica.id].moved(done.move)
            self._seconds["resize"] = now - done.began
        self._apply(self.core.changed(self._node, effect.replica, now))

    def _learn_load(self, effect: BeginChange, seconds: float) -> None:
        self._seconds["load"] = seconds
        rate = effect.replica.model.weights / max(1e-9, seconds)
        self._load_rates[KIND] += LEARNED * (rate - self._load_rates[KIND])

    def _end(self, number: int, event: GenerationEvent, finish: FinishReason) -> None:
        answer = self._answers.close(number, finish)
        self._measure()
        answer.emit(event)

    def _measure(self) -> None:
        there = {replica.model.name: replica for replica in self._node.replicas.values()}
        for name, service in self.services.items():
            replica = there.get(name)
            resident = self._resident.get(replica.id) if replica else None
            queued = sum(request.model == name for request in self.core.queue)
            service.stats.running = len(replica.running) if replica else 0
            service.stats.waiting = queued + (len(replica.waiting) if replica else 0)
            service.stats.kv_use = 1.0 - resident.free / resident.blocks if resident and resident.blocks else 0.0


def _in_thread(work: Callable[[], None]) -> None:
    """In one that nobody waits for: TERM ends a load at once."""
    threading.Thread(target=work, name="memory", daemon=True).start()


def measured_times(models: Sequence[SharingModel]) -> MemoryTimes:
    """As fast as weights were copied into memory: a cache that changes its size is copied as well."""
    octets = sum(model.weights.flat.nbytes for model in models)
    rate = octets / max(1e-9, sum(model.quantified.load_s for model in models))
    return MemoryTimes(1 / rate, 1 / rate, 0.0, {KIND: rate}, 0.0)


def _described(replica: SharedReplica, now: float) -> SharingReplica:
    ledger = replica.node.ledger
    due = replica.due(now)
    holding = ledger.holdings.get(replica.id)
    memory = "ready"
    if replica.leaving:
        memory = "leaving"
    elif ledger.is_waiting(replica.id):
        memory = "held"
    elif ledger.is_changing(replica.id):
        memory = "changing"
    return SharingReplica(
        model=replica.model.name,
        weights=replica.model.weights,
        cache=replica.cache,
        physical=holding.physical if holding else 0,
        running=len(replica.running),
        waiting=len(replica.waiting),
        headroom_s=None if math.isinf(due) else due - now,
        memory=memory,
    )
