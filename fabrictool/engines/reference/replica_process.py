"""A worker's process as the engine sees it: its link, its logits, its end."""

from __future__ import annotations

import multiprocessing
from multiprocessing import shared_memory
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.engines.reference import worker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnContext, SpawnProcess
    from pathlib import Path

    from numpy.typing import NDArray


class ReplicaProcess:
    """A worker process, and what it shares with us."""

    def __init__(self, number: int, rows: int, vocab: int) -> None:
        self.number = number
        self.memory = shared_memory.SharedMemory(create=True, size=4 * rows * vocab)
        self.logits: NDArray[np.float32] = np.ndarray((rows, vocab), np.float32, self.memory.buf)
        self.link: Connection | None = None
        self.process: SpawnProcess | None = None
        self.epoch = 0

    def start(self, model: Path, cache: Path | None, sizes: worker.WorkerSizes) -> None:
        context: SpawnContext = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(
            target=worker.run, args=(other, model, cache, sizes), name=f"replica-{self.number}", daemon=True
        )
        self.process.start()
        other.close()

    def end(self, patience_s: float) -> None:
        """The link is closed already, which ends the process after the step that it is at."""
        if self.process is not None:
            self.process.join(patience_s)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        del self.logits
        self.memory.close()
        self.memory.unlink()
