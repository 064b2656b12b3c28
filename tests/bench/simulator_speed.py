"""How fast and how big the simulator is. Each figure comes from a process of its own, beside a floor.

The job is Llama-3-8B on one H100, 512 tokens in, 128 out, Poisson arrivals: the one on which peers were measured on a
two-core machine (10,000 requests at 30 req/s: Vidur 1,000, BLIS 754, AISimulate 9,900 requests a second).
"""

import csv
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FABRICTOOL = ("-m", "fabrictool.cli.main")
INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {lab: {}}
sites: {here: {provider: lab}}
clusters:
  one:
    site: here
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 1, nodes: 1}}
"""
NEW_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: speed
inventory: inventory.yaml
models:
  llama:
    source: hf://meta-llama/Meta-Llama-3-8B
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand:
      rate: 30 req/s
      input: {mean: 512 tok}
      output: {mean: 128 tok}
    replicas: {min: 1, max: 1}
"""

PLAY = """
import random, sys, time
import numpy as np
from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel
count, rate = int(sys.argv[1]), float(sys.argv[2])
factors = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online").factors
machine = Machine.of(accelerators()["h100-sxm"])
model = StepModel.of(models()["meta-llama/Meta-Llama-3-8B"], machine, Parallelism(), factors)
spec = ReplicaSpec(model.times(256, 2048), 256, 2048, 400_000)
rng = np.random.default_rng(0)
def play(n):
    stream = Stream(np.cumsum(rng.exponential(1 / rate, n)), np.full(n, 512), np.full(n, 128))
    began = time.perf_counter()
    found = simulate([spec], stream, routing_policy("random", random.Random(0)))
    return time.perf_counter() - began, found
play(10)
took, found = play(count)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(took, float(found.ttft.mean()), float(found.tpot.mean()), float(found.e2e.mean()), int(peak) / 1024)
"""
ROUTED = """
import random, time
import numpy as np
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.steptimes import StepTimes
class Installed:
    name, learns = "installed", False
    def __init__(self, policy):
        self.pick = policy.pick
times = StepTimes(0.004 + 2e-5 * np.arange(257), 0.005 + 1e-5 * np.arange(2305), np.zeros(257))
specs = [ReplicaSpec(times, 256, 2048, 400_000) for _ in range(64)]
def play(count, form):
    rng = np.random.default_rng(0)
    stream = Stream(np.cumsum(rng.exponential(1 / 1920, count)), np.full(count, 512), np.full(count, 128))
    policy = form(routing_policy("least-loaded", random.Random(0)))
    began = time.process_time()
    simulate(specs, stream, policy)
    return count / (time.process_time() - began)
play(10, lambda policy: policy), play(10, Installed)
print(play(50_000, lambda policy: policy), play(10_000, Installed))
"""
TABLES = """
import time
from fabrictool.catalog import accelerators, models
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.capacity import MeanWorkload, replica
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel
CALIBRATIONS = shipped()
def table(device, model, tp, batch, demand):
    calibration = choose(CALIBRATIONS, device.id, device.vendor, "vllm", "online")
    cut = Parallelism(tp)
    step = StepModel.of(model, Machine.of(device), cut, calibration.factors)
    space = room(model, cut, reported_memory(device), weights="bf16", kv="bf16")
    return replica(step, space, demand, batch, calibration)
batches = range(64, 576, 64)
devices = [d for d in accelerators().values() if "bf16" in d.flops][:12]
assert len(models()) * len(devices) * 4 * len(batches) >= 5000
everything = [(d, m, tp, batch) for m in models().values() for d in devices for tp in (1, 2, 4, 8) for batch in batches]
demand = MeanWorkload(1.0, 512.0, 128.0, 4096)
table(*everything[0], demand)
began = time.perf_counter()
for one in everything[:5000]:
    table(*one, demand)
print(time.perf_counter() - began)
"""


def main(_):
    """Prints the table."""
    for line in rows():
        print(line)
    return 0


def rows():
    """Lines of a Markdown table: what, found, must, aim, verdict."""
    yield "| what | found | must | aim | |"
    yield "|---|---|---|---|---|"
    yield _row("floor: a process that imports NumPy, seconds", _run(["-c", "import numpy"])[1])
    _run(["-c", PLAY, "10", "6"])  # the first run may compile
    for count, rate in ((10_000, 6), (10_000, 30), (100_000, 30), (1_000_000, 30)):
        out, wall = _run(["-c", PLAY, str(count), str(rate)])
        took, ttft, tpot, e2e, memory = map(float, out.split())
        limits = (1e5, 1e6) if (count, rate) == (10_000, 30) else None
        yield _row(f"event loop, {count:,} requests at {rate} req/s, requests a second", count / took, limits)
        if count == 100_000:
            yield _row("memory at 100,000 requests, MB", memory, (250, 100))
    yield _row("a million requests, whole process, seconds", wall, (10, 2))
    in_loop, in_python = map(float, _run(["-c", ROUTED])[0].split())
    yield _row("64 replicas, least-loaded, requests a second of CPU", in_loop)
    yield _row("the same by a policy that is asked in Python, as plug-ins are", in_python)
    with tempfile.TemporaryDirectory() as folder:
        whole = min(_simulate(Path(folder)) for _ in range(3))
        yield _row("`fabrictool simulate`, 10,000 requests, whole process, best of three, seconds", whole, (1.5, 0.5))
        cases = _cases(Path(folder))
        yield _row("`fabrictool simulate --cases`, 5,000 configurations played, whole process, seconds", cases)
        new = min(_new_model(Path(folder)) for _ in range(3))
        yield _row("a model never seen before: `config.json` to the first forecast, whole process", new, (1, 0.1))
    yield _row("planner's tables, 5,000 configurations, seconds", float(_run(["-c", TABLES])[0]), (5, 1))
    yield ""
    yield f"At 30 req/s: TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms, E2E {1e3 * e2e:.0f} ms."


def _row(what, value, limits=None):
    """`limits`: (must, aim); descending ones are upper bounds, ascending ones lower bounds."""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"
    if limits is None:
        return f"| {what} | {text} | | | |"
    must, aim = limits
    sign = 1 if aim < must else -1
    verdict = (
        "aim reached" if sign * value <= sign * aim else "reached" if sign * value <= sign * must else "**missed**"
    )
    return f"| {what} | {text} | {must:,g} | {aim:,g} | {verdict} |"


def _run(arguments):
    """(stdout, seconds) of a Python process."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=600)
    return done.stdout, time.perf_counter() - began


def _simulate(folder):
    """Seconds of `fabrictool simulate` on the job, from a plan that is made beforehand."""
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(BLUEPRINT)
    return _run([*FABRICTOOL, "simulate", "-b", str(folder / "blueprint.yaml"), "-o", str(folder / "out.json")])[1]


def _cases(folder):
    """Seconds of one sheet of 5,000 configurations."""
    models = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-30B-A3B")
    every = itertools.product(
        ("h100-sxm", "h200", "b200"),
        models,
        ("vllm", "sglang", "tensorrt-llm"),
        (2, 4, 8),
        (256, 512, 1024, 2048),
        (64, 128, 256),
        (1, 8, 32, 64),
    )
    sheet = folder / "cases.csv"
    with sheet.open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["device", "model", "engine", "tp", "input_len", "output_len", "concurrency"])
        rows.writerows(itertools.islice(every, 5000))
    return _run([*FABRICTOOL, "simulate", "--cases", str(sheet), "-o", str(folder / "out.csv")])[1]


def _new_model(folder):
    """Seconds from a `config.json` that the catalogue does not know to one forecast."""
    (folder / "config.json").write_text(json.dumps(NEW_MODEL))
    sheet = folder / "new.csv"
    names = "device,model,engine,tp,input_len,output_len,concurrency"
    sheet.write_text(f"{names}\nh100-sxm,{folder / 'config.json'},vllm,1,512,128,8\n")
    return _run([*FABRICTOOL, "simulate", "--cases", str(sheet), "-o", str(folder / "new.out.csv")])[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
