"""Open-loop runs of vLLM 0.15.1 on H100 (the `blis-vllm0151` measurements) against the event loop.

The source has no licence, so nothing of it is kept here: give the folder that holds its `run__*` files. Runs in which
clients gave up are left out: of those only the survivors' latencies are known.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import yaml

from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator import fitting
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Factors, Machine, StepModel

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
METRICS = ("e2e", "ttft")


def table(folder: Path, factors: Factors):
    """Markdown lines: each stage as the shipped calibration forecasts it, and after a fit to the other models' runs."""
    every = list(runs(folder))
    fitted = {model: _fit([r for r in every if r[1]["model"] != model], factors) for model in _models(every)}
    yield "| run | E2E measured | shipped | fitted to other models | TTFT measured | shipped | fitted to other models |"
    yield "|---|---|---|---|---|---|---|"
    errors = {(how, metric): [] for how in range(2) for metric in METRICS}
    for name, described, profile, stages in every:
        ways = [list(play(described, profile, stages, f)) for f in (factors, fitted[described["model"]])]
        for i in range(len(stages)):
            cells = []
            for metric in METRICS:
                cells.append(f"{ways[0][i][metric][1]:.3g} s")
                for how in range(2):
                    found, real = ways[how][i][metric]
                    errors[how, metric].append(abs(found / real - 1))
                    cells.append(f"{100 * (found / real - 1):+.0f} %")
            yield f"| {name}, stage {i} | " + " | ".join(cells) + " |"
    yield ""
    for how, title in enumerate(("shipped calibration (other models, older vLLM)", "fitted to the other models' runs")):
        e2e, ttft = (errors[how, metric] for metric in METRICS)
        yield f"{title}: E2E mean {_percent(np.mean(e2e))}, median {_percent(np.median(e2e))} (must 12 %, aim 6 %);"
        yield f"TTFT mean {_percent(np.mean(ttft))}, median {_percent(np.median(ttft))} (must 25 %, aim 15 %)."
        yield ""


def _models(every):
    return sorted({described["model"] for _, described, _, _ in every})


def _fit(every, prior):
    def residuals(vector):
        factors = Factors.of(vector)
        return np.array(
            [
                fitting.WEIGHT[metric] * np.clip(np.log(real / found), -fitting.WORST, fitting.WORST) / fitting.NOISE
                for _, described, profile, stages in every
                for stage in play(described, profile, stages, factors)
                for metric, (found, real) in stage.items()
            ]
        )

    return fitting.explain(residuals, prior, rounds=8)


def _percent(value):
    return f"{100 * value:.1f} %"


def runs(folder: Path):
    """(name, engine's config, load, measured stages) of every run that lost nothing."""
    for config in sorted(folder.glob("run__*__exp-config.yaml")):
        name = config.name.split("__")[1]
        described = yaml.safe_load(config.read_text())
        profile = yaml.safe_load((folder / f"run__{name}__profile.yaml").read_text())
        stages = [
            json.loads((folder / f"run__{name}__stage_{i}_lifecycle_metrics.json").read_text())
            for i in range(len(profile["load"]["stages"]))
        ]
        if not any(stage["failures"]["count"] for stage in stages):
            yield name.split("-", 2)[2], described, profile, stages


def play(described, profile, stages, factors):
    """Per stage: metric → (forecast mean, measured mean) in seconds."""
    device, model = accelerators()["h100-sxm"], models()[described["model"]]
    layout = Parallelism(tp=described["tensor_parallelism"])
    slots, budget = described["max_num_seqs"], described["max_num_batched_tokens"]
    step = StepModel.of(model, Machine.of(device), layout, factors)
    space = room(model, layout, reported_memory(device), weights="bf16", kv="bf16")
    shared = profile["data"]["shared_prefix"]
    counts = [stage["successes"]["count"] for stage in stages]
    arrival, begun = [], 0.0
    for count, stage in zip(counts, profile["load"]["stages"], strict=True):
        arrival.append(begun + np.arange(count) / stage["rate"])
        begun += stage["duration"]
    arrival = np.concatenate(arrival)
    prompt = np.full(len(arrival), round(stages[0]["successes"]["prompt_len"]["mean"]))
    stream = Stream(
        arrival, prompt, np.full(len(arrival), shared["output_len"]), **_prefixes(shared, len(arrival), int(prompt[0]))
    )
    spec = ReplicaSpec(
        step.times(slots, budget),
        slots,
        budget,
        space.kv_tokens,
        prefix_tokens=BLOCK,
        frontend=factors.request,
        frontend_stream=factors.stream,
        frontend_token=factors.prompt_token,
    )
    found = simulate([spec], stream, routing_policy("random", random.Random(0)))
    at = np.concatenate([[0], np.cumsum(counts)])
    for i, stage in enumerate(stages):
        latency = stage["successes"]["latency"]
        mine = slice(at[i], at[i + 1])
        yield {
            "e2e": (float(found.e2e[mine].mean()), latency["request_latency"]["mean"]),
            "ttft": (float(found.ttft[mine].mean()), latency["time_to_first_token"]["mean"]),
        }


def _prefixes(shared, count, prompt):
    """Each of the users asks the same question again and again, after the system prompt of a group of them."""
    users = shared["num_unique_system_prompts"] * shared["num_users_per_system_prompt"]
    system, whole = shared["system_prompt_len"] // BLOCK, prompt // BLOCK
    user = np.arange(count) % users
    group = user // shared["num_users_per_system_prompt"]
    chain = np.empty((count, whole), np.int64)
    chain[:, :system] = group[:, None] * system + np.arange(system)
    chain[:, system:] = 10**6 + user[:, None] * (whole - system) + np.arange(whole - system)
    _, dense = np.unique(chain, return_inverse=True)
    return {"chain_start": np.arange(count + 1) * whole, "chain": dense.reshape(-1)}
