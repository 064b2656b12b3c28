"""A worker that computes a step together with the others, or its own requests by itself.

It has two of vLLM's runners. One is of a tensor-parallel group, as usual. The other believes itself to be alone, with
the whole model. Both see the same weights and the same memory of the cache, and which of them computes is said with
each step: nothing is loaded, allocated or agreed upon when that changes.
"""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_switching.memory import ReplicaRunner, alone, octets_of
from vllm_switching.requests import forget, introduce
from vllm_switching.weights import Shared, share, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class SwitchingWorker(CPUWorker):
    """For ``--worker-cls``, with the scheduler and the executor of this package."""

    replica_runner: ReplicaRunner
    shared: Shared

    def init_device(self) -> None:
        """Set up both runners and the group of one."""
        config = self.vllm_config
        if config.compilation_config.mode != CompilationMode.NONE:
            message = "the model is compiled for one of both modes: start with --enforce-eager"
            raise ValueError(message)
        # Whatever is remembered of layers and memory is remembered in the configuration.
        self.replica_config = copy.deepcopy(config)
        self.replica_config.parallel_config.tensor_parallel_size = 1
        self.replica_config.parallel_config.world_size = 1
        self.replica_config.parallel_config.rank = 0
        super().init_device()
        ranks = range(config.parallel_config.tensor_parallel_size)
        self._group_of_one = parallel_state.init_model_parallel_group(
            [[rank] for rank in ranks], self.local_rank, "gloo", group_name="replica"
        )
        with self._as_replica():
            self.replica_runner = ReplicaRunner(self.replica_config, self.device)
        self._computing: CPUModelRunner = self.model_runner
        self._switches: list[float] = []

    @contextmanager
    def _as_replica(self) -> Iterator[None]:
        """Whatever asks for the tensor-parallel group sees this worker alone."""
        group = parallel_state._TP  # noqa: SLF001 - vLLM offers no other way
        parallel_state._TP = self._group_of_one  # noqa: SLF001
        try:
            with set_current_vllm_config(self.replica_config):
                yield
        finally:
            parallel_state._TP = group  # noqa: SLF001

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the whole model and this worker's part of it, and keep the weights of both once."""
        with unpacked():
            with self._as_replica():
                self.replica_runner.load_model(load_dummy_weights)
            super().load_model(load_dummy_weights=load_dummy_weights)
        degree = self.parallel_config.tensor_parallel_size
        self.shared = share(self.replica_runner.model, self.model_runner.model, self.rank, degree)

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """Set it in both runners' configurations."""
        super().set_kv_cache_layout(kv_cache_layout)
        self.replica_config.cache_config.kv_cache_layout = self.cache_config.kv_cache_layout

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache's memory once, and bind both runners to it."""
        super().initialize_from_config(kv_cache_config)
        own = alone(kv_cache_config, self.parallel_config.tensor_parallel_size)
        for name in ("hash_block_size", "cache_hit_alignment_tokens", "kv_cache_layout"):
            setattr(self.replica_config.cache_config, name, getattr(self.cache_config, name))
        self.replica_config.cache_config.num_gpu_blocks = own.num_blocks
        self.replica_runner.memory = octets_of(self.model_runner.kv_caches[0])
        with self._as_replica():
            self.replica_runner.initialize_kv_cache(own)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute this worker's part of a step of all."""
        self._enter(self.model_runner)
        introduce(self.model_runner, scheduler_output)
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def execute_own(self, steps: list[tuple[SchedulerOutput, GrammarOutput | None]]) -> ModelRunnerOutput:
        """Compute this worker's own step, of those of all workers."""
        self._enter(self.replica_runner)
        scheduled, grammar = steps[self.rank]
        introduce(self.replica_runner, scheduled)
        with self._as_replica():
            output = self.replica_runner.execute_model(scheduled)
            if output is None:
                output = self.replica_runner.sample_tokens(grammar)
        return output

    def _enter(self, runner: CPUModelRunner) -> None:
        if runner is self._computing:
            return
        began = time.perf_counter()
        forget(self._computing, list(self._computing.requests))
        self._computing = runner
        self._switches.append(time.perf_counter() - began)

    def switching(self) -> dict[str, object]:
        """What a test wants to know: octets that are shared, where the cache is, and how long switches took here."""
        caches = [(runner, runner.kv_caches) for runner in (self.model_runner, self.replica_runner)]
        return {
            "rank": self.rank,
            "weights": self.shared._asdict(),
            "caches": [
                {"blocks": runner.kv_cache_config.num_blocks, "at": [cache.data_ptr() for cache in layers]}
                for runner, layers in caches
            ],
            "heads": [layers[0].shape[1] for _, layers in caches],
            "switch_s": self._switches,
        }
