"""Real runs, request by request: the same arrivals and lengths into the event loop, each latency compared."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

import numpy as np

from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel

DATA = Path(__file__).parents[2] / "data" / "measured"
RUNS = {
    "llama-3.1-8b": (
        "vllm_run__RTXPRO6000__Llama-3.1-8B__vllm__requests.jsonl",
        "meta-llama/Llama-3.1-8B-Instruct",
        Parallelism(),
    ),
    "qwen3-30b-a3b": (
        "vllm_run__RTXPRO6000__Qwen3-30B-A3B-Instruct-2507__vllm__requests.jsonl",
        "Qwen/Qwen3-30B-A3B",
        Parallelism(dp=2, ep=2),
    ),
}
"""Slice → (the source's file, model, how it was cut: the runs' own configuration)."""
SLOTS, BUDGET = 128, 2048
"""Of each attention group."""


def play(name, factors, start=0, stop=None):
    """Metric → (forecast, measured) of requests `start` to `stop` of a run on RTX PRO 6000."""
    with gzip.open(DATA / f"replay-{name}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    column = {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}
    device, model = accelerators()["rtxpro6000"], models()[RUNS[name][1]]
    cut = RUNS[name][2]
    slots, budget = SLOTS * cut.dp, BUDGET * cut.dp
    step = StepModel.of(model, Machine.of(device), cut, factors)
    space = room(model, cut, reported_memory(device), weights="bf16", kv="bf16")
    spec = ReplicaSpec(step.times(slots, budget), slots, budget, space.kv_tokens, lanes=step.lanes)
    prompt, output = column["prompt"].astype(np.int64), column["output"].astype(np.int64)
    found = simulate([spec], Stream(column["arrival_s"], prompt, output), routing_policy("random", random.Random(0)))
    measured = {
        "ttft": column["ttft_s"],
        "tpot": (column["e2e_s"] - column["ttft_s"]) / np.maximum(output - 1, 1),
        "e2e": column["e2e_s"],
    }
    many = output > 1
    pick = np.arange(len(rows))
    pick = (pick >= start) & (pick < (stop or len(rows))) & many
    return {metric: (getattr(found, metric)[pick], values[pick]) for metric, values in measured.items()}
