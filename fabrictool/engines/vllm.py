"""vLLM's OpenAI server. Flags as of vLLM 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

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
from fabrictool.engines.protocol import CacheHandover, Capabilities, EngineCommand, MetricNames, Readiness

if TYPE_CHECKING:
    from fabrictool.engines.protocol import EngineLaunch, NodeOfSeveral

_FIELDS = {
    "enable-lora": "adapters",
    "lora-modules": "adapters",
    "max-lora-rank": "adapters",
    "max-loras": "adapters",
    "dtype": "precision",
    "host": "host",
    "kv-cache-dtype": "kv_precision",
    "max-model-len": "context",
    "max-num-seqs": "max_num_seqs",
    "model": "model",
    "pipeline-parallel-size": "pp",
    "port": "port",
    "uds": "socket",
    "VLLM_PORT": "inner_port",
    "served-model-name": "served_name",
    "tensor-parallel-size": "tp",
}
_REFUSED = {"VLLM_SERVER_DEV_MODE": "it opens administrative routes"} | dict.fromkeys(
    ("headless", "master-addr", "master-port", "nnodes", "node-rank"), SAID_BY_AGENTS
)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_IN_CHECKPOINT = ("awq", "gptq", "int4", "int8", "mxfp4", "nvfp4", "w4a16", "w8a8")
"""Made when the checkpoint was; the engine reads them from its configuration and needs no flag."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ACCESS_LOG = "disable-uvicorn-access-log"
"""The agent looks at its health and its figures every second."""
_SCHEDULING = "scheduling-policy"
_LOADERS = {"eager": ["--safetensors-load-strategy", "eager"], "streamer": ["--load-format", "runai_streamer"]}
_LOADER_FIELDS = {"load-format": "loader", "safetensors-load-strategy": "loader"}
_KV = {"bf16": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


class Vllm:
    """GPU serving of Hugging Face checkpoints."""

    name = "vllm"
    capabilities = Capabilities(
        tensor_parallel=True,
        pipeline_parallel=True,
        several_nodes=True,
        hands_over=True,
        serves_adapters=True,
        loaders=frozenset(_LOADERS),
        sockets=True,
        priority_option=_SCHEDULING,
        version_path="/version",
        count_path="/tokenize",
        hub_models=True,
        precisions=frozenset({*_DTYPES, "fp8", *_IN_CHECKPOINT}),
        kv_precisions=frozenset(_KV),
    )
    # Loading and compiling a 70B model takes minutes: 106 + 379/tp seconds in published measurements.
    readiness = Readiness(path="/health", timeout_s=1200.0, interval_s=1.0)
    metrics = MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_use="vllm:kv_cache_usage_perc",
        advances=("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        # Without a loader an option may say more than we know of, such as another format.
        fields = _FIELDS | (_LOADER_FIELDS if launch.loader else {})
        check_launch(launch, self.capabilities, fields=fields, refused=_REFUSED)
        argv = [*_program(launch), "--served-model-name", launch.served_name]
        if launch.node is None or not launch.node.rank:
            argv += ["--uds", launch.socket] if launch.socket else ["--host", launch.host, "--port", str(launch.port)]
        argv += ["--tensor-parallel-size", str(launch.tp)]
        if launch.pp > 1:
            argv += ["--pipeline-parallel-size", str(launch.pp)]
        if launch.context is not None:
            argv += ["--max-model-len", str(launch.context)]
        if launch.max_num_seqs is not None:
            argv += ["--max-num-seqs", str(launch.max_num_seqs)]
        argv += _precision(launch)
        argv += _LOADERS.get(launch.loader, ())
        argv += _adapters(launch)
        argv += _scheduling(launch)
        if launch.kv_precision is not None:
            argv += ["--kv-cache-dtype", _KV[launch.kv_precision]]
        # An inherited variable must not open the administrative routes, nor send usage data to strangers.
        env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "0"}
        if launch.inner_port:
            env["VLLM_PORT"] = str(launch.inner_port)
        if launch.handover is not None:
            if "kv-transfer-config" not in launch.options:
                argv += ["--kv-transfer-config", _transfer(launch.handover)]
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = launch.handover.host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(launch.handover.port)
        unless_set = {**offline(launch), **compile_folders(launch)}
        if launch.compile_dir:
            unless_set["VLLM_CACHE_ROOT"] = f"{launch.compile_dir}/vllm"
        if launch.node is not None:
            argv += _nodes(launch.node)
            env["VLLM_HOST_IP"] = launch.node.host
            unless_set |= socket_interfaces(launch.node)
        if _ACCESS_LOG not in launch.options:
            argv.append(f"--{_ACCESS_LOG}")
        argv += flags(launch.options)
        return command_of_package(launch, "vllm", argv, {**env, **variables(launch.options)}, unless_set)


def _program(launch: EngineLaunch) -> list[str]:
    if launch.install.path:
        return [launch.install.path, "serve", launch.model]
    return [interpreter(launch), "-m", "vllm.entrypoints.cli.main", "serve", launch.model]


def _precision(launch: EngineLaunch) -> list[str]:
    if launch.precision in _DTYPES:
        return ["--dtype", _DTYPES[launch.precision]]
    if launch.precision == "fp8" and "quantization" not in launch.options:
        # For a checkpoint that is quantised already, the option names its method (such as compressed-tensors).
        return ["--quantization", "fp8"]
    return []


def _adapters(launch: EngineLaunch) -> list[str]:
    """All of them are in the batch's memory at once; its size goes by the rank, of which vLLM knows these."""
    if not launch.adapters:
        return []
    rank = next(known for known in _RANKS if known >= launch.adapter_rank)
    modules = [f"{name}={path}" for name, path in sorted(launch.adapters.items())]
    sizes = ["--max-loras", str(len(modules)), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *sizes, "--lora-modules", *modules]


def _scheduling(launch: EngineLaunch) -> list[str]:
    """An option that says another one is the blueprint's own wish."""
    return [f"--{_SCHEDULING}", "priority"] if launch.by_priority and _SCHEDULING not in launch.options else []


def _nodes(node: NodeOfSeveral) -> list[str]:
    """Without Ray (vLLM's documentation, "Parallelism and Scaling")."""
    argv = ["--nnodes", str(node.nodes), "--node-rank", str(node.rank)]
    argv += ["--master-addr", node.leader.host, "--master-port", str(node.leader.port)]
    return [*argv, "--headless"] if node.rank else argv


def _transfer(handover: CacheHandover) -> str:
    """A cache that cannot be fetched is computed anew: the request is slower, and does not fail."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if handover.prefill else "kv_consumer",
        "kv_load_failure_policy": "recompute",
    }
    if handover.device == "cpu":
        config["kv_buffer_device"] = "cpu"
    return msgspec.json.encode(config).decode()
