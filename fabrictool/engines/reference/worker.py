"""One replica of an engine whose replicas merge: a process that computes the steps it is sent, alone or with others.

Weights are mapped once and seen through a view for each group that may form; so is the cache. A step names the group,
and that is all that changes when replicas merge or split: nothing is allocated, moved or loaded.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import shared_memory
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.model import SequenceRows, Shard, Transformer
from fabrictool.engines.reference.shared_sum import GroupBrokenError, SharedSum

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from fabrictool.engines.reference.weights import Weights


class WorkerPart(msgspec.Struct, frozen=True, array_like=True):
    """What a step computes for one request."""

    tokens: list[int]
    position: int
    blocks: list[int]
    """This worker's; each holds `degree` times the tokens of a block of one replica."""
    wants_logits: bool


class WorkerStep(msgspec.Struct, frozen=True, array_like=True):
    """For all members of a group, with blocks of each one's own."""

    epoch: int
    """Of this worker: one more each time."""
    first: int
    degree: int
    parts: list[WorkerPart]


class WorkerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The step is over; logits are in shared memory."""

    epoch: int
    seconds: float
    switched: bool
    """The group is another one than before."""
    broken: bool = False
    """A member was lost on the way."""


class WorkerSizes(msgspec.Struct, frozen=True):
    """What is agreed on before a worker starts."""

    replica: int
    degree: int
    """Of the largest group: weights are such that they can be cut so."""
    blocks: int
    block_size: int
    places: int
    """Requests of a step at most, each with a row of logits."""
    values: int
    """Of a partial sum at most."""
    logits: str
    """Name of this worker's shared memory for logits."""
    groups: dict[str, tuple[int, int]]
    """Names of the groups' shared memories → (first, degree); those that this worker is in."""


def run(link: Connection, model: Path, cache: Path | None, sizes: WorkerSizes) -> None:
    """The process: until the other end of `link` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    from fabrictool.engines.reference.weights import load_weights  # noqa: PLC0415 - a parent does not need it twice

    worker = Worker(load_weights(model, cache, lambda _: None, sizes.degree), sizes)
    link.send_bytes(b"ready")
    while True:
        try:
            answer = worker.compute(msgspec.msgpack.decode(link.recv_bytes(), type=WorkerStep))
            link.send_bytes(msgspec.msgpack.encode(answer))
        except (EOFError, OSError):
            break
    os._exit(0)  # views of shared memory are still there, and its destructor would complain of them


class Worker:
    """Its views, and the step that it is at."""

    def __init__(self, weights: Weights, sizes: WorkerSizes) -> None:
        self._sizes = sizes
        self._epoch = 0
        self._group = (sizes.replica, 1)
        self._memories = [shared_memory.SharedMemory(name) for name in sizes.groups]
        pool = KvPool(weights.config, sizes.blocks, sizes.block_size)
        self.views: dict[tuple[int, int], tuple[Transformer, KvPool]] = {self._group: (Transformer(weights), pool)}
        for memory, (first, degree) in zip(self._memories, sizes.groups.values(), strict=True):
            rank = sizes.replica - first
            shard = Shard(rank, degree, SharedSum(memory, rank, degree, sizes.values))
            self.views[first, degree] = Transformer(weights, shard), pool.merged(degree)
        self._logits_memory = shared_memory.SharedMemory(sizes.logits)
        self._logits = np.ndarray((sizes.places, weights.config.vocab), np.float32, self._logits_memory.buf)

    def compute(self, step: WorkerStep) -> WorkerAnswer:
        """One step; its logits are this member's part of the vocabulary, from the first column on."""
        began = time.monotonic()
        if step.epoch != self._epoch + 1:
            message = f"step {step.epoch} came after step {self._epoch}"
            raise AssertionError(message)
        self._epoch = step.epoch
        group = (step.first, step.degree)
        model, pool = self.views[group]
        switched, self._group = group != self._group, group
        batch = [SequenceRows(part.tokens, part.position, part.blocks, part.wants_logits) for part in step.parts]
        try:
            logits = model.step(batch, pool)
        except GroupBrokenError:
            return WorkerAnswer(step.epoch, time.monotonic() - began, switched, broken=True)
        self._logits[: len(logits), : logits.shape[1]] = logits
        return WorkerAnswer(step.epoch, time.monotonic() - began, switched)
