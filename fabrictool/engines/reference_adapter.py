"""The embedded default engine, `fabrictool.engines.reference`, seen from outside."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError
from fabrictool.engines.checks import check_launch, flags, variables
from fabrictool.engines.installs import command_of_package, interpreter
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness

if TYPE_CHECKING:
    from fabrictool.engines.protocol import EngineLaunch

_FIELDS = {
    "cache-dir": "cache_dir",
    "context": "context",
    "host": "host",
    "max-num-seqs": "max_num_seqs",
    "memory": "memory",
    "model": "model",
    "port": "port",
    "replicas": "dp",
    "socket": "socket",
    "served-name": "served_name",
    "tpot": "tpot_s",
    "ttft": "ttft_s",
}
_OPTIONS = frozenset({"block-size", "keep-alive", "kv-blocks", "kv-memory", "max-waiting", "threads", "token-budget"})


class Reference:
    """NumPy on CPU: a process for each base engine, `threads` BLAS threads each (an option, default 1)."""

    name = "reference"
    capabilities = Capabilities(
        live_tp_switch=frozenset({1, 2, 4, 8}),
        sockets=True,
        gguf=True,
        precisions=frozenset({"bf16", "f16", "f32", "fp16", "fp32"}),
        kv_precisions=frozenset({"fp32"}),
        shares_memory=True,
        elastic_state="/fabric/state",
        count_path="/tokenize",
        extra="reference",
    )
    readiness = Readiness(path="/health", timeout_s=600.0, interval_s=0.2)
    metrics = MetricNames(
        running="vllm:num_requests_running", waiting="vllm:num_requests_waiting", kv_use="vllm:kv_cache_usage_perc"
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        check_launch(launch, self.capabilities, fields=_FIELDS, refused={}, known=_OPTIONS)
        argv = [interpreter(launch), "-m", "fabrictool.engines.reference", "--model", launch.model]
        argv += ["--served-name", launch.served_name]
        for name, path in sorted(launch.companions.items()):
            argv += ["--model", path, "--served-name", name]
        argv += _sharing(launch) if launch.companions else []
        argv += ["--socket", launch.socket] if launch.socket else ["--host", launch.host, "--port", str(launch.port)]
        if launch.context is not None:
            argv += ["--context", str(launch.context)]
        if launch.max_num_seqs is not None:
            argv += ["--max-num-seqs", str(launch.max_num_seqs)]
        if launch.dp > 1:
            argv += ["--replicas", str(launch.dp)]
        if launch.cache_dir:
            argv += ["--cache-dir", launch.cache_dir]
        options = dict(launch.options)
        threads = options.pop("threads", "1")
        if not re.fullmatch(r"[1-9][0-9]{0,2}", threads):
            raise InvalidInputError.of(
                "FT7007", f"option threads is {threads!r}, not a number from 1 to 999", thing="engine/reference"
            )
        # NumPy's BLAS reads its thread count once, when it is loaded: it cannot be an argument of the program.
        # One thread each, because several replicas share a node and spinning threads of one slow down the others.
        env = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        argv += flags(options)
        elsewhere = "fabrictool" if interpreter(launch) != launch.python else ""
        return command_of_package(launch, elsewhere, argv, {**env, **variables(options)})


def _sharing(launch: EngineLaunch) -> list[str]:
    """What all models have together."""
    argv = ["--memory", f"{launch.memory >> 20}MiB"] if launch.memory else []
    for flag, seconds in (("--ttft", launch.ttft_s), ("--tpot", launch.tpot_s)):
        if seconds is not None:
            argv += [flag, f"{seconds:g}s"]
    return argv
