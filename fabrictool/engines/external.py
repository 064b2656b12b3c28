"""Any OpenAI-compatible server that a job brings along: its own command, or nothing to start at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness

if TYPE_CHECKING:
    from fabrictool.engines.protocol import EngineLaunch


class External:
    """Known by its API alone; it is ready when it lists its models."""

    name = "external"
    capabilities = Capabilities(
        precisions=frozenset(),
        kv_precisions=frozenset(),
        brought=True,
    )
    readiness = Readiness(path="/v1/models", timeout_s=600.0, interval_s=0.5)
    metrics = MetricNames(  # of the servers that have such figures, most use vLLM's names; others report none
        running="vllm:num_requests_running", waiting="vllm:num_requests_waiting", kv_use="vllm:kv_cache_usage_perc"
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The job's own words, with the port in them; its environment is the job's."""
        argv = tuple(word.replace("{port}", str(launch.port)) for word in launch.command)
        return EngineCommand(argv=argv, env={})
