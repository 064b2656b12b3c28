"""llama.cpp's `llama-server`, found on PATH. Flags as of its HTTP server's README, sources of 2026 (b-series)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.engines.checks import check_launch, flags, variables
from fabrictool.engines.installs import command_of_program, program
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness

if TYPE_CHECKING:
    from fabrictool.engines.protocol import EngineLaunch

_FIELDS = {
    "alias": "served_name",
    "cache-type-k": "kv_precision",
    "cache-type-v": "kv_precision",
    "ctx-size": "context",
    "hf-repo": "model",
    "host": "host",
    "model": "model",
    "parallel": "max_num_seqs",
    "port": "port",
    "split-mode": "tp",
    "tensor-split": "tp",
}
_ADMIN = "it opens an administrative route"
_REFUSED = {
    "media-path": "it lets requests read files",
    "models-dir": "one engine process serves one model",
    "props": _ADMIN,
    "slot-save-path": _ADMIN,
    "slots": _ADMIN,
    "tools": "it lets requests run commands",
    "ui": "it serves pages beside the API",
    "webui": "it serves pages beside the API",
}
_KV = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"} | {n: n for n in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")}


class LlamaCpp:
    """CPU and GPU, GGUF files; the file carries the precision of the weights."""

    name = "llama.cpp"
    capabilities = Capabilities(
        tensor_parallel=True,
        hub_models=True,
        sockets=True,
        gguf=True,
        precisions=frozenset({"bf16", "f16", "f32", "fp16", "fp32"}),
        kv_precisions=frozenset(_KV),
    )
    readiness = Readiness(path="/health", timeout_s=600.0, interval_s=0.5)
    metrics = MetricNames(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        kv_use="",
        advances=("llamacpp:n_decode_total",),
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        check_launch(launch, self.capabilities, fields=_FIELDS, refused=_REFUSED)
        # A path is absolute (or has a .gguf name); everything else is a repository of the hub.
        is_file = launch.model.startswith("/") or launch.model.endswith(".gguf")
        argv = [program(launch, "llama-server"), "--model" if is_file else "--hf-repo", launch.model]
        argv += ["--alias", launch.served_name, "--host", launch.socket or launch.host]
        if not launch.socket:  # an address that ends with .sock is one
            argv += ["--port", str(launch.port)]
        if launch.context is not None:
            # The server divides this number among its slots; ours is for each request.
            argv += ["--ctx-size", str(launch.context * (launch.max_num_seqs or 1))]
        if launch.max_num_seqs is not None or launch.context is not None:
            argv += ["--parallel", str(launch.max_num_seqs or 1)]
        if launch.tp > 1:
            argv += ["--split-mode", "row", "--tensor-split", ",".join(["1"] * launch.tp)]
        if launch.kv_precision is not None:
            argv += ["--cache-type-k", _KV[launch.kv_precision], "--cache-type-v", _KV[launch.kv_precision]]
        argv += ["--metrics", "--no-slots", "--no-webui"]
        argv += flags(launch.options)
        return command_of_program(launch, argv, variables(launch.options))
