"""Our command lines, read by the parsers of the newest vLLM and of the two releases before it."""

import json
import os
import subprocess

import pytest

from tests.engines.test_adapters import GOLDEN
from tests.vllm.conftest import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

INSTALLED = "0.32.0"
RELEASES = VLLM.parent / "vllm-releases"
"""The others' packages alone, beside what the installed one needs: enough to read a command line."""
PARSE = """
import json, sys, vllm
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
(serve,) = cmd_init()
serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
names = ("model_tag", "served_model_name", "host", "port", "tensor_parallel_size", "pipeline_parallel_size", "headless",
         "nnodes", "node_rank", "master_addr", "master_port", "max_model_len", "max_num_seqs",
         "disable_uvicorn_access_log", "kv_transfer_config", "enable_lora", "max_loras", "max_lora_rank", "uds",
         "load_format", "safetensors_load_strategy")
print("release", vllm.__version__)
for line in sys.stdin:
    read = parser.parse_args(json.loads(line))
    serve.validate(read)
    seen = {name: getattr(read, name) for name in names}
    seen["adapters"] = {module.name: module.path for module in read.lora_modules or ()}
    print("read", json.dumps(seen, default=lambda value: value.kv_role))
"""


def cases():
    every = [json.loads(path.read_text()) for path in GOLDEN]
    mine = [case for case in every if case["launch"]["engine"] == "vllm" and "argv" in case]
    return [(case["launch"], case["argv"][case["argv"].index("serve") :]) for case in mine]


@pytest.mark.parametrize("release", ["0.33.0", INSTALLED, "0.31.0"])
def test_a_release_reads_every_command_line_as_it_is_meant(release):
    launches = cases()
    assert len(launches) >= 15
    path = {} if release == INSTALLED else {"PYTHONPATH": str(RELEASES / release)}
    done = subprocess.run(
        [VLLM / "bin" / "python", "-c", PARSE],
        input="".join(json.dumps(words) + "\n" for _, words in launches),
        capture_output=True, text=True, check=False, cwd="/",
        env=os.environ | path | {"HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"release {release}" in done.stdout
    read = [json.loads(line.removeprefix("read ")) for line in done.stdout.splitlines() if line.startswith("read ")]
    for (launch, _), seen in zip(launches, read, strict=True):
        node = launch.get("node")
        first = node is None or node["rank"] == 0
        assert (seen["model_tag"], seen["served_model_name"]) == (launch["model"], [launch["served_name"]])
        at_port = first and "socket" not in launch
        assert (seen["host"], seen["port"]) == ((launch["host"], launch["port"]) if at_port else (None, 8000))
        cut = (launch.get("tp", 1), launch.get("pp", 1))
        assert (seen["tensor_parallel_size"], seen["pipeline_parallel_size"]) == cut
        assert seen["headless"] is not first
        if node is not None:
            assert (seen["nnodes"], seen["node_rank"]) == (node["nodes"], node["rank"])
            assert [seen["master_addr"], seen["master_port"]] == node["leader"]
        assert (seen["max_model_len"], seen["max_num_seqs"]) == (launch.get("context"), launch.get("max_num_seqs"))
        wanted = launch.get("options", {}).get("disable-uvicorn-access-log", "true")
        assert seen["disable_uvicorn_access_log"] is (wanted != "false")
        role = {True: "kv_producer", False: "kv_consumer", None: None}[launch.get("handover", {}).get("prefill")]
        assert seen["kv_transfer_config"] == role
        assert seen["uds"] == launch.get("socket")
        loader = launch.get("loader")
        assert seen["load_format"] == ("runai_streamer" if loader == "streamer" else "auto")
        assert seen["safetensors_load_strategy"] == ("eager" if loader == "eager" else None)
        adapters = launch.get("adapters", {})
        assert (bool(seen["enable_lora"]), seen["adapters"]) == (bool(adapters), adapters)
        if adapters:
            assert seen["max_loras"] == len(adapters)
            assert seen["max_lora_rank"] >= launch["adapter_rank"]
