"""Our command lines for SGLang, read by its own parser: of its newest release and of the one before.

No server runs here: its kernels are built for GPUs alone.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from fabrictool.engines.adapter import adapter
from tests.engines.test_adapters import GOLDEN

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SGLANG = Path(os.environ.get("FT_TEST_SGLANG", Path(__file__).parents[2] / "build" / "sglang"))
PARSE = """
import json, sys, sglang
from sglang.srt.server_args import prepare_server_args
names = ("model_path", "served_model_name", "host", "port", "nccl_port", "tp_size", "pp_size", "context_length",
         "max_running_requests", "kv_cache_dtype", "dtype", "quantization", "dist_init_addr", "nnodes", "node_rank",
         "enable_metrics", "log_level_http", "disaggregation_mode", "disaggregation_bootstrap_port",
         "disaggregation_transfer_backend")
print("release", sglang.__version__)
for line in sys.stdin:
    read = prepare_server_args(json.loads(line))
    print("read", json.dumps({name: getattr(read, name) for name in names}))
"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def cases():
    every = [json.loads(path.read_text()) for path in GOLDEN]
    mine = [case for case in every if case["launch"]["engine"] == "sglang" and "argv" in case]
    return [(case["launch"], case["argv"][case["argv"].index("sglang.launch_server") + 1 :]) for case in mine]


def read_by(release, lines):
    return subprocess.run(
        [SGLANG / "bin" / "python", "-c", PARSE],
        input="".join(json.dumps(words) + "\n" for words in lines),
        capture_output=True, text=True, check=False, cwd="/",
        env=os.environ | {"PYTHONPATH": str(SGLANG / "releases" / release), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("release", ["0.5.23", "0.5.22"])
def test_a_release_reads_every_command_line_as_it_is_meant(release):
    launches = cases()
    assert len(launches) >= 13
    done = read_by(release, [words for _, words in launches])
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"release {release}" in done.stdout
    read = [json.loads(line.removeprefix("read ")) for line in done.stdout.splitlines() if line.startswith("read ")]
    for (launch, _), seen in zip(launches, read, strict=True):
        assert (seen["model_path"], seen["served_model_name"]) == (launch["model"], launch["served_name"])
        assert (seen["host"], seen["port"], seen["nccl_port"]) == (
            launch["host"],
            launch["port"],
            launch.get("inner_port"),
        )
        assert (seen["tp_size"], seen["pp_size"]) == (launch.get("tp", 1), launch.get("pp", 1))
        assert (seen["context_length"], seen["max_running_requests"]) == (
            launch.get("context"),
            launch.get("max_num_seqs"),
        )
        assert seen["kv_cache_dtype"] == {None: "auto", "fp8": "fp8_e4m3"}[launch.get("kv_precision")]
        precision = launch.get("precision")
        assert seen["dtype"] == DTYPES.get(precision, "auto")
        assert seen["quantization"] == (precision if precision == "fp8" else None)
        assert (seen["enable_metrics"], seen["log_level_http"]) == (True, "warning")
        node = launch.get("node") or {"nodes": 1, "rank": 0}
        assert (seen["nnodes"], seen["node_rank"]) == (node["nodes"], node["rank"])
        assert seen["dist_init_addr"] == ("{}:{}".format(*node["leader"]) if "leader" in node else None)
        part = launch.get("handover")
        mode = {None: "null", True: "prefill", False: "decode"}[part and part["prefill"]]
        assert seen["disaggregation_mode"] == mode
        if part:
            chosen = launch.get("options", {}).get("disaggregation-transfer-backend", "nixl")
            assert seen["disaggregation_transfer_backend"] == chosen
            assert not part["prefill"] or seen["disaggregation_bootstrap_port"] == part["port"]


@pytest.mark.parametrize("release", ["0.5.23", "0.5.22"])
def test_what_a_decode_replica_asks_is_passed_on(release):
    source = (SGLANG / "releases" / release / "sglang/srt/disaggregation/common/conn.py").read_text()
    asked = set(re.findall(r"http://\{(?:self\.)?bootstrap_addr\}(/\w+)", source))
    assert asked == {path for _, path in adapter("sglang").capabilities.meeting_routes}


def test_the_parser_does_refuse():
    done = read_by("0.5.23", [["--model-path", "m", "--disaggregation-mode", "both"]])
    assert done.returncode == 2
    assert "invalid choice: 'both'" in done.stderr
