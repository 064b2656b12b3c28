"""An engine of several replicas that merge and split while they answer: a process for each, and one that decides.

`fabrictool.merging` decides, unchanged from the simulator; here its steps are sent to workers, and their logits become
tokens.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection, shared_memory
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fabrictool.base.errors import FabrictoolError
from fabrictool.engines.reference import worker
from fabrictool.engines.reference.answering import AnsweringEngine
from fabrictool.engines.reference.kv import BlockAllocator
from fabrictool.engines.reference.replica_process import ReplicaProcess
from fabrictool.engines.reference.shared_sum import SharedSum, shared_bytes
from fabrictool.merging.core import MergingReplicas
from fabrictool.merging.groups import BlockPool, ReplicaGroup, groups
from fabrictool.merging.requests import MergingRequest
from fabrictool.status.elastic import MergingState

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from numpy.typing import NDArray

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import EngineLimits, FinishReason, GenerationEvent, OpenAnswer
    from fabrictool.engines.reference.tokenizer import Tokenizer
    from fabrictool.engines.reference.weights import Weights
    from fabrictool.merging.requests import MergedStep, MergingOptions
    from fabrictool.merging.triggers import LoadTrigger

_log = logging.getLogger("fabrictool.engine")

START_S = 120.0
"""That a worker may take to map the weights."""
END_S = 2.0
"""For all workers together, to finish the steps that they are at."""
SWITCHES = 1000
"""Of which times are kept."""


@dataclass(slots=True)
class _Tables:
    """A request's blocks, on each member of the group that it is in."""

    layouts: int
    group: ReplicaGroup
    blocks: list[list[int]]


@dataclass(slots=True)
class _Sent:
    """A step under way."""

    step: MergedStep
    missing: set[int]
    """Members that have not answered."""
    began: float
    broken: bool = False
    switched: bool = False
    seconds: float = 0.0
    """That the slowest member computed."""


class MergingEngine(AnsweringEngine):
    """Answers requests for one model, with `replicas` processes that compute alone or together."""

    # Wide: what an engine is made of, and what merging adds.
    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        clock: Clock,
        on_failure: Callable[[str], None] = _log.error,
        *,
        model: Path,
        cache: Path | None,
        replicas: int,
        options: MergingOptions,
        trigger: LoadTrigger | None = None,
    ) -> None:
        """`limits.blocks` and `limits.max_seqs` are of each replica; a request may be as long as all together hold.

        `weights`: with the largest group's `degree`.
        """
        super().__init__(tokenizer, limits, clock, on_failure)
        self._stopped = False
        self.switches: deque[float] = deque(maxlen=SWITCHES)
        """Seconds that steps of another group than before took beside what members computed."""
        self.trigger = trigger
        self.core = MergingReplicas(replicas, BlockPool(limits.blocks, limits.block_size), options, trigger)
        self._model, self._cache = model, cache
        self._vocab = weights.config.vocab
        self._allocators = [BlockAllocator(limits.blocks) for _ in range(replicas)]
        self._replicas = [ReplicaProcess(i, limits.max_seqs, self._vocab) for i in range(replicas)]
        self._sums: dict[ReplicaGroup, tuple[shared_memory.SharedMemory, SharedSum]] = {}
        rows = max(limits.token_budget, limits.max_seqs) * weights.config.width
        for group in groups(replicas):
            if group.degree > 1:
                memory = shared_memory.SharedMemory(create=True, size=shared_bytes(group.degree, rows))
                self._sums[group] = memory, SharedSum(memory, 0, group.degree, rows)
        self._sizes = [self._agreed(replica, rows) for replica in self._replicas]
        self._requests: dict[int, MergingRequest] = {}
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, _Tables] = {}
        self._over: set[int] = set()
        """Requests whose last token has come, or whose clients have gone, while a step with them is under way."""
        self._sent: dict[int, _Sent] = {}
        """By the first member of its group."""
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def _agreed(self, replica: ReplicaProcess, rows: int) -> worker.WorkerSizes:
        mine = {
            memory.name: (g.first, g.degree) for g, (memory, _) in self._sums.items() if replica.number in g.members
        }
        sizes = self.limits
        return worker.WorkerSizes(
            replica=replica.number,
            degree=self.core.widest,
            blocks=sizes.blocks,
            block_size=sizes.block_size,
            places=sizes.max_seqs,
            values=rows,
            logits=replica.memory.name,
            groups=mine,
        )

    def start(self) -> None:
        """Returns when all replicas have the weights.

        Raises
        ------
        FabrictoolError
            FT7025 one of them has not; what was started is ended.
        """
        try:
            for replica, sizes in zip(self._replicas, self._sizes, strict=True):
                replica.start(self._model, self._cache, sizes)
            for replica in self._replicas:
                self._await_weights(replica.number)
        except (EOFError, OSError) as error:
            self.stop()
            reason = str(error) or "its process ended"
            raise FabrictoolError.of("FT7025", f"a replica of this engine did not start: {reason}") from error
        except BaseException:
            self.stop()
            raise
        self._thread.start()

    def _await_weights(self, member: int) -> None:
        link = self._link(member)
        if not link.poll(START_S):
            raise TimeoutError(f"it had no weights after {START_S:.0f} s")
        link.recv_bytes()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End; requests in progress end as cancelled. May be called at any time, and again."""
        if self._stopped:
            return
        self._stopped = True
        self._tell(0, None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for replica in self._replicas:
            if replica.link is not None:
                replica.link.close()
        until = self._clock.monotonic() + END_S
        for replica in self._replicas:
            replica.end(max(0.0, until - self._clock.monotonic()))
        self._bell.close()
        self._ring.close()
        for memory, _ in self._sums.values():
            with contextlib.suppress(BufferError):  # our view of it lives as long as we do
                memory.close()
            memory.unlink()

    @property
    def context(self) -> int:
        """Tokens that one request may hold, with the replicas that are left."""
        return min(self.limits.context, self.core.pool.longest(self.core.widest))

    def merge(self, merged: bool | None) -> bool:
        if self.trigger is None:
            return False
        self.trigger.forced = merged
        self._wake()
        return True

    def state(self) -> MergingState:
        """What replicas do now; read from another thread."""
        core, counts, switches = self.core, self.core.counts, sorted(self.switches)
        return MergingState(
            replicas=core.replicas,
            lost=tuple(sorted(core.closed)),
            groups=tuple(tuple(group.members) for group in core.formed),
            in_flight=core.in_flight,
            waiting=len(core.waiting),
            free_blocks=tuple(core.free),
            formed=counts.formed,
            recomputed_tokens=counts.recomputed,
            paused=counts.paused,
            switches=len(switches),
            switch_p99_s=switches[math.ceil(0.99 * len(switches)) - 1] if switches else None,
        )

    def _tell(self, number: int, answer: OpenAnswer | None) -> None:
        super()._tell(number, answer)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is rung already, or nobody is there any more
            self._ring.send(b"!")

    # -- the compute thread -----------------------------------------------------------------------------------

    def _compute(self) -> None:
        self._begin()
        self._measure()
        self._wait()

    def _receive(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while True:
            try:
                number, answer = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if answer is not None:
                self._open(number, answer)
            elif number == 0:
                return False
            elif number in self._answers:
                self._close(number, self._answers.given_up(number, "cancelled"), "cancelled")

    def _open(self, number: int, answer: OpenAnswer) -> None:
        asked = answer.request
        request = MergingRequest(
            number, len(asked.prompt), asked.max_tokens, self._clock.monotonic(), max(0, asked.priority)
        )
        self._answers.add(number, answer)
        if self.core.arrive(request, request.began) is not None:
            answer.emit(self._answers.given_up(number, "error"))
            self._answers.close(number, "error")
            return
        self._requests[number] = request
        self._tokens[number] = list(asked.prompt)

    def _begin(self) -> None:
        """Send all steps that can begin; again where a worker turns out to be gone, for its requests go elsewhere."""
        sent = False
        while not sent:
            steps = self.core.next_steps(self._clock.monotonic())
            self._give_up()
            self._give_back()
            sent = True
            for step in steps:
                sent &= self._send(step)

    def _give_up(self) -> None:
        """Requests that have outgrown the replicas that are left."""
        for request in self.core.given_up:
            if request.id in self._answers:
                event = self._answers.given_up(request.id, "error")
                self._answers.close(request.id, "error").emit(event)
            self._forget(request.id)
        self.core.given_up.clear()

    def _give_back(self) -> None:
        """Blocks of requests that have lost theirs, or have left."""
        for number, tables in list(self._tables.items()):
            request = self._requests.get(number)
            if request is None or request.layouts != tables.layouts:
                for member, blocks in zip(tables.group.members, tables.blocks, strict=True):
                    self._allocators[member].give_back(blocks)
                del self._tables[number]

    def _table(self, request: MergingRequest, group: ReplicaGroup) -> _Tables:
        tables = self._tables.get(request.id)
        if tables is None:
            tables = _Tables(request.layouts, group, [[] for _ in group.members])
            self._tables[request.id] = tables
        for member, blocks in zip(group.members, tables.blocks, strict=True):
            more = self._allocators[member].take(request.blocks - len(blocks))
            if more is None:
                raise AssertionError("the core counts blocks that are not there")
            blocks.extend(more)
        return tables

    def _send(self, step: MergedStep) -> bool:
        """False: a member is gone."""
        group = step.group
        self._sent[group.first] = _Sent(step, set(group.members), self._clock.monotonic())
        pieces = []
        for request, count in step.parts:
            tokens = self._tokens[request.id][request.cached : request.cached + count]
            pieces.append((self._table(request, group), tokens, request.cached, count == request.left))
        gone = False
        for rank, member in enumerate(group.members):
            replica = self._replicas[member]
            replica.epoch += 1
            parts = [worker.WorkerPart(tokens, at, t.blocks[rank], wants) for t, tokens, at, wants in pieces]
            message = worker.WorkerStep(replica.epoch, group.first, group.degree, parts)
            try:
                self._link(member).send_bytes(msgspec.msgpack.encode(message))
            except OSError:
                gone = True
                self._lost(member)
        return not gone

    def _link(self, member: int) -> Connection:
        link = self._replicas[member].link
        if link is None:
            raise OSError("it is gone")
        return link

    def _wait(self) -> None:
        """Until a member answers or somebody rings."""
        links = {replica.link: replica.number for replica in self._replicas if replica.link is not None}
        for ready in connection.wait([*links, self._bell]):
            member = links.get(ready)  # type: ignore[call-overload] # the bell is no link
            if member is None:
                continue
            try:
                answer = msgspec.msgpack.decode(self._link(member).recv_bytes(), type=worker.WorkerAnswer)
            except (EOFError, OSError):
                self._lost(member)
                continue
            self._answered(member, answer)

    def _sent_to(self, member: int) -> _Sent | None:
        return next((sent for sent in self._sent.values() if member in sent.missing), None)

    def _answered(self, member: int, answer: worker.WorkerAnswer) -> None:
        sent = self._sent_to(member)
        if sent is None:
            raise AssertionError(f"replica {member} answered a step that it was not sent")
        sent.missing.discard(member)
        sent.broken |= answer.broken
        sent.switched |= answer.switched
        sent.seconds = max(sent.seconds, answer.seconds)
        if not sent.missing:
            self._ended(sent)

    def _ended(self, sent: _Sent) -> None:
        """All members are done."""
        step = sent.step
        del self._sent[step.group.first]
        if sent.switched:
            self.switches.append(max(0.0, self._clock.monotonic() - sent.began - sent.seconds))
        if sent.broken:
            self.core.failed(step)
            self._close_lost()
            return
        wanted = [request for request, count in step.parts if count == request.left]
        for row, request in enumerate(wanted):
            if request.id not in self._over:
                self._sample(request, self._gathered(step.group, row))
        self.core.ended(step, lambda request: request.id in self._over)
        for request, _ in step.parts:
            if request.id in self._over:
                self._forget(request.id)
        self._close_lost()

    def _gathered(self, group: ReplicaGroup, row: int) -> NDArray[np.float32]:
        """Logits of the whole vocabulary, of which each member has a part."""
        degree = group.degree
        bounds = [self._vocab * rank // degree for rank in range(degree + 1)]
        parts = [
            self._replicas[member].logits[row, : bounds[rank + 1] - bounds[rank]]
            for rank, member in enumerate(group.members)
        ]
        return np.concatenate(parts)

    def _sample(self, request: MergingRequest, logits: NDArray[np.float32]) -> None:
        number = request.id
        token = self._answers[number].sampler.draw(logits)
        self._tokens[number].append(token)
        event = self._answers.advance(number, token)
        if event.finish is None:
            self._answers[number].emit(event)
        else:
            self._over.add(number)
            self._answers.close(number, event.finish).emit(event)

    def _close(self, number: int, event: GenerationEvent, finish: FinishReason) -> None:
        """A request ends that is not answered."""
        request = self._requests[number]
        if self.core.cancel(request):
            self._forget(number)
        else:
            self._over.add(number)
        self._answers.close(number, finish).emit(event)

    def _lost(self, member: int) -> None:
        """A worker is gone: groups with it are dissolved as soon as their other members have noticed."""
        _log.error("replica %d is gone", member)
        replica = self._replicas[member]
        if replica.link is not None:
            replica.link.close()
            replica.link = None
        for group, (_, summed) in self._sums.items():
            if member in group.members:
                summed.break_up()
        sent = self._sent_to(member)
        if sent is not None:
            sent.broken = True
            sent.missing.discard(member)
            if not sent.missing:
                self._ended(sent)
        else:
            self._close_lost()
        if not self.core.widest:
            raise RuntimeError("no replica is left")

    def _close_lost(self) -> None:
        """Tell the core of replicas that are gone, once no step of their groups is under way."""
        for replica in self._replicas:
            number = replica.number
            if replica.link is None and number not in self.core.closed:
                if any(number in sent.step.group.members for sent in self._sent.values()):
                    continue
                self.core.lost(number)
        for number in list(self._over):
            if self.core.cancel(self._requests[number]):
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._over.discard(number)
        self._requests.pop(number, None)
        self._tokens.pop(number, None)

    def _measure(self) -> None:
        self.stats.running = self.core.in_flight
        self.stats.waiting = len(self._requests) - self.stats.running
        total = self.limits.blocks * len(self._replicas)
        self.stats.kv_use = 1.0 - sum(self.core.free) / total
        self.stats.preemptions = self.core.counts.evicted
