"""Which requests are computed by all workers together, and which by each of them.

For each mode there are vLLM's own schedulers: one for the workers together, and one for each worker, with its own
queue and its own blocks. A switch takes requests from the ones to the others. One that has blocks gives them up, and
its tokens are computed again, or it is finished first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_switching.memory import alone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

MERGED, SPLIT = "merged", "split"
RECOMPUTE, FINISH = "recompute", "finish"


@dataclass
class OwnSteps(SchedulerOutput):
    """A step of each worker's own; the fields of `SchedulerOutput` say what they are together."""

    steps: list[tuple[SchedulerOutput, GrammarOutput | None]] = field(default_factory=list)
    """By rank."""


class _PartScheduler(Scheduler):
    """One of vLLM's schedulers, whose requests may come from another one and go to one."""

    def __init__(self, **of_vllm: Any) -> None:
        super().__init__(**of_vllm)
        # It then tells the worker all tokens of a request that it begins anew: another runner may have computed them.
        self.use_v2_model_runner = True

    def preempt_all(self) -> None:
        """All blocks are free afterwards; requests wait in their order."""
        now = time.monotonic()
        while self.running:
            self._preempt_request(self.running.pop(), now)

    def take_waiting(self) -> list[Request]:
        """All that wait without blocks; they are not of this scheduler any more."""
        taken = []
        while self.waiting:
            taken.append(self.waiting.pop_request())
        for request in taken:
            del self.requests[request.request_id]
            self.deferred_waiting.discard(request)
        return taken

    def accept(self, request: Request) -> None:
        """Take a request that another scheduler had."""
        self.requests[request.request_id] = request
        self._enqueue_waiting_request(request)

    def leave(self) -> None:
        """The memory is another scheduler's now, and workers forget all requests of this one."""
        if not self.reset_prefix_cache():
            message = "requests still have blocks"
            raise AssertionError(message)
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()

    def holds(self, request: Request) -> bool:
        """Whether its longest answer has room in all blocks; vLLM keeps one of them to itself."""
        room = (self.kv_cache_config.num_blocks - 1) * self.block_size
        return request.num_prompt_tokens + request.max_tokens <= room


class SwitchingScheduler(SchedulerInterface):
    """For ``--scheduler-cls``: the schedulers of both modes, of which those of one mode schedule."""

    connector = ec_connector = None
    _of_this_process: ClassVar[SwitchingScheduler | None] = None

    @classmethod
    def of_this_process(cls) -> SwitchingScheduler:
        """The engine has one; the executor, made before it, finds it here."""
        if cls._of_this_process is None:
            message = "there is no scheduler yet"
            raise RuntimeError(message)
        return cls._of_this_process

    def __init__(self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **more: Any) -> None:
        _refuse(vllm_config)
        degree = vllm_config.parallel_config.tensor_parallel_size
        own = alone(kv_cache_config, degree)
        self._modes = {
            MERGED: [_PartScheduler(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)],
            SPLIT: [_PartScheduler(vllm_config=vllm_config, kv_cache_config=own, **more) for _ in range(degree)],
        }
        self._mode = self._next = MERGED
        self._switches = 0
        self.kv_cache_manager = self._modes[MERGED][0].kv_cache_manager  # the engine reads sizes from it
        SwitchingScheduler._of_this_process = self

    # -- the switch ---------------------------------------------------------------------------------------------------

    def set_mode(self, mode: str, policy: str = RECOMPUTE) -> dict[str, Any]:
        """Begin to go to a mode, between two steps; what waits goes there at once."""
        if mode not in self._modes or policy not in (RECOMPUTE, FINISH):
            message = f"a mode is {MERGED} or {SPLIT}, a policy {RECOMPUTE} or {FINISH}"
            raise ValueError(message)
        leaving = [part for name, parts in self._modes.items() if name != mode for part in parts]
        too_long = [
            request.request_id
            for part in leaving
            for request in part.requests.values()
            if not self._modes[mode][0].holds(request)
        ]
        if too_long:
            message = f"only all workers together hold {', '.join(too_long)}"
            raise ValueError(message)
        began = time.perf_counter()
        self._next = mode
        moved: list[Request] = []
        for part in leaving:
            if policy == RECOMPUTE:
                part.preempt_all()
            moved += part.take_waiting()
        self._place(moved)
        self._settle()
        return self.state() | {"seconds": time.perf_counter() - began, "moved": len(moved)}

    def _place(self, requests: list[Request]) -> None:
        """In their order, each where there are fewest."""
        for request in sorted(requests, key=lambda request: (request.priority, request.arrival_time)):
            self._least().accept(request)

    def _least(self) -> _PartScheduler:
        return min(self._modes[self._next], key=lambda part: len(part.requests))

    def _settle(self) -> None:
        """The next mode begins when no request of the last one has blocks any more."""
        if self._mode == self._next or any(part.running for part in self._modes[self._mode]):
            return
        for part in self._modes[self._mode]:
            self._place(part.take_waiting())
            part.leave()
        self._mode = self._next
        self._switches += 1

    def state(self) -> dict[str, Any]:
        """Where all requests are."""
        return {
            "mode": self._mode,
            "next": self._next,
            "switches": self._switches,
            "running": {name: [len(part.running) for part in parts] for name, parts in self._modes.items()},
            "waiting": {name: [len(part.waiting) for part in parts] for name, parts in self._modes.items()},
        }

    # -- what the engine asks of a scheduler --------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """A request that no worker alone can hold has them merge."""
        if not self._modes[self._next][0].holds(request):
            self.set_mode(MERGED)
        self._least().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of all workers, or one of each."""
        self._settle()
        parts = self._modes[self._mode]
        steps = [part.schedule(throttle_prefills) for part in parts]
        if self._mode == MERGED:
            return steps[0]
        grammars = [part.get_grammar_bitmask(step) for part, step in zip(parts, steps, strict=True)]
        tokens = {name: count for step in steps for name, count in step.num_scheduled_tokens.items()}
        return OwnSteps(
            scheduled_new_reqs=[new for step in steps for new in step.scheduled_new_reqs],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            steps=list(zip(steps, grammars, strict=True)),
        )

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Of steps of their own, workers have got theirs with the steps."""
        if isinstance(scheduler_output, OwnSteps):
            return None
        return self._modes[MERGED][0].get_grammar_bitmask(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput | list[ModelRunnerOutput]
    ) -> dict[int, EngineCoreOutputs]:
        """Take in what was computed; of steps of their own, the outputs by rank."""
        if isinstance(scheduler_output, OwnSteps):
            parts, steps, outputs = (
                self._modes[SPLIT],
                [step for step, _ in scheduler_output.steps],
                model_runner_output,
            )
        else:
            parts, steps, outputs = self._modes[MERGED], [scheduler_output], [model_runner_output]
        together: dict[int, EngineCoreOutputs] = {}
        stats = []
        for part, step, output in zip(parts, steps, outputs, strict=True):
            for client, answers in part.update_from_output(step, output).items():
                stats.append(answers.scheduler_stats)
                answers.scheduler_stats = None
                if client in together:
                    together[client].outputs = [*together[client].outputs, *answers.outputs]
                else:
                    together[client] = answers
        for answers in list(together.values())[:1]:
            answers.scheduler_stats = self._joined(stats)
        return together

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """All schedulers are asked: those that do not know a request do nothing."""
        names = request_ids if request_ids is None or isinstance(request_ids, str) else list(request_ids)
        return [request for part in self._parts() for request in part.finish_requests(names, finished_status)]

    def _parts(self) -> list[_PartScheduler]:
        return [part for parts in self._modes.values() for part in parts]

    def get_num_unfinished_requests(self) -> int:
        """Of both modes: some may be finished first, while others wait for the next mode."""
        return sum(part.get_num_unfinished_requests() for part in self._parts())

    def has_finished_requests(self) -> bool:
        """Whether workers have to be told of any, in the mode that they are in."""
        return any(part.has_finished_requests() for part in self._modes[self._mode])

    def get_request_counts(self) -> tuple[int, int]:
        """Those that run and those that wait."""
        counts = [part.get_request_counts() for part in self._parts()]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    def get_kv_cache_usage(self) -> float:
        """Of the mode that workers are in, a part."""
        parts = self._modes[self._mode]
        return sum(part.get_kv_cache_usage() for part in parts) / len(parts)

    def make_stats(self) -> SchedulerStats | None:
        """Of all schedulers together."""
        return self._joined([part.make_stats() for part in self._modes[self._mode]])

    def _joined(self, of_parts: list[SchedulerStats | None]) -> SchedulerStats | None:
        several = [stats for stats in of_parts if stats is not None]
        if not several:
            return None
        joined = several[0]
        running, waiting = self.get_request_counts()
        deferred = sum(len(part.deferred_waiting) for part in self._parts())
        joined.num_running_reqs, joined.num_skipped_waiting_reqs = running, deferred
        joined.num_waiting_reqs = waiting - deferred
        joined.kv_cache_usage = self.get_kv_cache_usage()
        prefixes = joined.prefix_cache_stats
        for other in several[1:]:
            prefixes.requests += other.prefix_cache_stats.requests
            prefixes.queries += other.prefix_cache_stats.queries
            prefixes.hits += other.prefix_cache_stats.hits
        return joined

    @property
    def pause_state(self) -> PauseState:
        """The same in both modes."""
        return self._modes[MERGED][0].pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on, in both modes."""
        for part in self._parts():
            part.set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all prefixes, of both modes."""
        resets = [part.reset_prefix_cache(reset_running_requests, reset_connector) for part in self._parts()]
        return all(resets)

    def reset_encoder_cache(self) -> None:
        """There is none: models that need it are refused."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """There are none: draft models are refused."""

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """There are none: draft models are refused."""

    def shutdown(self) -> None:
        """End what all schedulers have begun."""
        for part in self._parts():
            part.shutdown()


def _refuse(config: VllmConfig) -> None:
    """What has not been thought through for requests that change their runner."""
    model, parallel = config.model_config, config.parallel_config
    reasons = {
        "a draft model": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "images or sound": model.supports_multimodal_inputs,
        "a pooling model": model.runner_type != "generate",
        "asynchronous scheduling": config.scheduler_config.async_scheduling,
        "pipeline or data parallelism": parallel.pipeline_parallel_size * parallel.data_parallel_size > 1,
        "heads that the workers share": model.get_total_num_kv_heads() % parallel.tensor_parallel_size != 0,
    }
    present = [reason for reason, is_there in reasons.items() if is_there]
    if present:
        message = f"workers cannot be switched with {', '.join(present)}"
        raise ValueError(message)
