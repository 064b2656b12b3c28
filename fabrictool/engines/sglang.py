"""SGLang's OpenAI server. Flags as of SGLang 0.5.23."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.engines.checks import (
    SAID_BY_AGENTS,
    check_launch,
    compile_folders,
    flags,
    offline,
    socket_interfaces,
    variables,
)
from fabrictool.engines.installs import command_of_package, interpreter
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.engines.protocol import CacheHandover, EngineLaunch

_FIELDS = {
    "context-length": "context",
    "dtype": "precision",
    "host": "host",
    "kv-cache-dtype": "kv_precision",
    "max-running-requests": "max_num_seqs",
    "model": "model",
    "model-path": "model",
    "pipeline-parallel-size": "pp",
    "port": "port",
    "nccl-port": "inner_port",
    "pp-size": "pp",
    "served-model-name": "served_name",
    "tensor-parallel-size": "tp",
    "tp": "tp",
    "tp-size": "tp",
}
_REFUSED = dict.fromkeys(("dist-init-addr", "nccl-init-addr", "nnodes", "node-rank"), SAID_BY_AGENTS) | dict.fromkeys(
    ("disaggregation-mode", "disaggregation-bootstrap-port", "enable-pd-role-switch"),
    "the model's `phases` and the agent say this",
)
_TRANSFER = "disaggregation-transfer-backend"
"""Its default, mooncake, looks for InfiniBand; nixl takes what there is."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_IN_CHECKPOINT = ("awq", "gptq", "int4", "int8", "mxfp4", "nvfp4", "w4a16", "w8a8")
"""Made when the checkpoint was; the engine reads them from its configuration and needs no flag."""
_HTTP_LOG = "log-level-http"
"""The agent looks at its health and its figures every second."""
_KV = {"bf16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


class SGLang:
    """GPU serving of Hugging Face checkpoints. Its administrative routes are always open: loopback only."""

    name = "sglang"
    capabilities = Capabilities(
        tensor_parallel=True,
        pipeline_parallel=True,
        several_nodes=True,
        hands_over=True,
        pairing="together",
        meeting_routes=frozenset({("GET", "/route"), ("POST", "/query_dp_ranks"), ("GET", "/health")}),
        hub_models=True,
        precisions=frozenset({*_DTYPES, "fp8", *_IN_CHECKPOINT}),
        kv_precisions=frozenset(_KV),
    )
    readiness = Readiness(path="/health", timeout_s=1200.0, interval_s=1.0)
    metrics = MetricNames(
        running="sglang:num_running_reqs", waiting="sglang:num_queue_reqs", kv_use="sglang:token_usage"
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        check_launch(launch, self.capabilities, fields=_FIELDS, refused=_REFUSED)
        argv = [interpreter(launch), "-m", "sglang.launch_server", "--model-path", launch.model]
        argv += ["--served-model-name", launch.served_name, "--host", launch.host, "--port", str(launch.port)]
        if launch.inner_port and launch.node is None:
            argv += ["--nccl-port", str(launch.inner_port)]
        argv += ["--tp-size", str(launch.tp)]
        if launch.pp > 1:
            argv += ["--pp-size", str(launch.pp)]
        if launch.context is not None:
            argv += ["--context-length", str(launch.context)]
        if launch.max_num_seqs is not None:
            argv += ["--max-running-requests", str(launch.max_num_seqs)]
        if launch.precision in _DTYPES:
            argv += ["--dtype", _DTYPES[launch.precision]]
        elif launch.precision == "fp8" and "quantization" not in launch.options:
            argv += ["--quantization", "fp8"]
        if launch.kv_precision is not None:
            argv += ["--kv-cache-dtype", _KV[launch.kv_precision]]
        env, unless_set = variables(launch.options), {**offline(launch), **compile_folders(launch)}
        if launch.handover is not None:
            argv += _pair(launch.handover, launch.options)
            env["SGLANG_HOST_IP"] = launch.handover.host
        if launch.node is not None:
            node = launch.node
            argv += ["--dist-init-addr", str(node.leader), "--nnodes", str(node.nodes), "--node-rank", str(node.rank)]
            env["SGLANG_HOST_IP"] = node.host
            unless_set |= socket_interfaces(node)
        argv.append("--enable-metrics")
        if _HTTP_LOG not in launch.options:
            argv += [f"--{_HTTP_LOG}", "warning"]
        argv += flags(launch.options)
        return command_of_package(launch, "sglang", argv, env, unless_set)


def _pair(handover: CacheHandover, options: Mapping[str, str]) -> list[str]:
    """The server for prompts has one more, of rendezvous, that listens where its API does: at loopback."""
    argv = ["--disaggregation-mode", "prefill" if handover.prefill else "decode"]
    argv += [] if _TRANSFER in options else [f"--{_TRANSFER}", "nixl"]
    return [*argv, "--disaggregation-bootstrap-port", str(handover.port)] if handover.prefill else argv
