"""Sends workers one step for all of them, or each its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_switching.scheduler import OwnSteps, SwitchingScheduler

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class _AllOutputs:
    """Takes the outputs of all workers for the one output of a step."""

    def aggregate(self, outputs: list[ModelRunnerOutput], output_rank: int) -> list[ModelRunnerOutput]:
        return outputs


class SwitchingExecutor(MultiprocExecutor):
    """For ``--distributed-executor-backend``."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Have one step computed by all workers, or each worker's own."""
        if not isinstance(scheduler_output, OwnSteps):
            return super().execute_model(scheduler_output, non_block)
        return self.collective_rpc(
            "execute_own",
            args=(scheduler_output.steps,),
            non_block=non_block,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            kv_output_aggregator=_AllOutputs(),  # type: ignore[arg-type]
        )

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Ask the workers, or, for ``set_mode``, the scheduler, which is in the same process."""
        if method == "set_mode":
            return [SwitchingScheduler.of_this_process().set_mode(*args, **(kwargs or {}))]
        return super().collective_rpc(method, timeout, args, kwargs, **more)
