"""What a runner knows of requests, when they come from another runner or go to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def forget(runner: GPUModelRunner, request_ids: Sequence[str]) -> None:
    """Remove all that the runner keeps of these requests; others answer them now."""
    for request_id in request_ids:
        runner.requests.pop(request_id, None)
        runner.num_prompt_logprobs.pop(request_id, None)
        runner.input_batch.remove_request(request_id)


def introduce(runner: GPUModelRunner, scheduled: SchedulerOutput) -> None:
    """Prepare the runner for requests that have answers already.

    The scheduler tells all tokens of a request that it begins or begins anew. This runner takes the prompt alone of a
    new request, and knows the rest of one that it has computed before itself. So a request with answers becomes one of
    those, whoever has computed them.
    """
    begun = list(scheduled.scheduled_new_reqs)
    forget(runner, [new.req_id for new in begun])
    scheduled.scheduled_new_reqs = []
    known = scheduled.scheduled_cached_reqs
    for new in begun:
        answers = _answers(new)
        if not answers:
            scheduled.scheduled_new_reqs.append(new)
            continue
        runner.requests[new.req_id] = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            mm_features=new.mm_features,
            sampling_params=new.sampling_params,
            generator=_generator(new.sampling_params, len(answers)),
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=answers,
        )
        known.req_ids.append(new.req_id)
        known.resumed_req_ids.add(new.req_id)
        known.new_block_ids.append(new.block_ids)
        known.num_computed_tokens.append(new.num_computed_tokens)
        known.num_output_tokens.append(len(answers))


def _answers(new: NewRequestData) -> list[int]:
    if new.prompt_token_ids is None or new.prefill_token_ids is None:
        message = f"request {new.req_id} has no tokens, and cannot be begun anew elsewhere"
        raise ValueError(message)
    return list(new.prefill_token_ids[len(new.prompt_token_ids) :])


def _generator(params: SamplingParams | None, drawn: int) -> torch.Generator | None:
    """Where a seeded request's generator is after that many tokens; the CPU sampler draws one number for each."""
    if params is None or params.sampling_type != SamplingType.RANDOM_SEED:
        return None
    generator = torch.Generator()
    generator.manual_seed(params.seed)
    for _ in range(drawn):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return generator
