"""A calibration from operator times instead of serving runs: RTX PRO 6000 with vLLM, from LLMServingSim's profiles.

Efficiencies come from timings of single kernels (dense layers, experts, attention); what a step costs besides comes
from the first hundred requests of one real run, whose other two hundred `validate` then replays. Run with the folder of
that source; the calibration and the slice of the runs are committed.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))

from replay import DATA, RUNS, play

from fabrictool.catalog import accelerators, models
from fabrictool.catalog import calibrations as catalogue
from fabrictool.simulator.calibration import Calibration, Hull, choose, dumps, shipped
from fabrictool.simulator.operators import Parallelism, work
from fabrictool.simulator.stepmodel import SMOOTH, Machine, StepModel

DEVICE = "rtxpro6000"
MACHINE = Machine.of(accelerators()[DEVICE])
FITTED = ("compute", "bandwidth", "attention_bandwidth", "attention_compute")
UPPER = np.log([0.95, 1.0, 1.0, 0.9])


def main(argv):
    """Writes the slices of the runs and the calibration."""
    folder = Path(argv[0])
    for name, (source, *_) in RUNS.items():
        _slice(folder / source, DATA / f"replay-{name}.csv.gz")
    prior = choose([c for c in shipped() if c.device == "nvidia/*"], DEVICE, "nvidia", "vllm", "online")
    factors, points = _operators(folder, prior.factors)
    experts, more = _experts(folder, factors)
    overheads = _overheads(experts)
    hull = Hull((1, 128), (1, 8192), (1, 8192), (1, 1), ("meta-llama/Llama-3.1-8B-Instruct",))
    one = Calibration(
        device=DEVICE,
        engine="vllm",
        scope="online",
        factors=overheads,
        spreads=prior.spreads,
        unseen=prior.unseen,
        hull=hull,
        points=points + more,
        version="2",
        source="casys-kaist/LLMServingSim 5daddb2, kernel profiles and the first 100 requests of a run (vLLM 0.19)",
    )
    path = Path(catalogue.__file__).parent / f"{DEVICE}-vllm-online.toml"
    path.write_text(dumps(one))
    print(path, {name: round(getattr(overheads, name), 7) for name in (*FITTED, "kernel", "step", "sequence")})


def _slice(source, target):
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows.sort(key=lambda row: row["arrival_time"])
    start = rows[0]["arrival_time"]
    lines = ["arrival_s,prompt,output,ttft_s,e2e_s"]
    lines += [
        f"{r['arrival_time'] - start:.4f},{r['input_toks']},{r['output_toks']}"
        f",{r['first_token_ts'] - r['queued_ts']:.5f},{r['last_token_ts'] - r['queued_ts']:.5f}"
        for r in rows
    ]
    with gzip.GzipFile(target, "wb", mtime=0) as raw:
        raw.write(("\n".join(lines) + "\n").encode())


def _operators(folder, prior):
    """Dense layers and attention of Llama-3.1-8B on one device."""
    model = models()["meta-llama/Llama-3.1-8B-Instruct"]
    stem = "profile__RTXPRO6000__meta-llama__Llama-3.1-8B__bf16__tp1__"
    dense = defaultdict(float)
    with (folder / f"{stem}dense.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["layer"] not in ("embedding", "final_layernorm"):
                dense[int(row["tokens"])] += float(row["time_us"]) * 1e-6 * (1 + (row["layer"] == "layernorm"))
    with gzip.open(folder / f"{stem}attention.csv.gz", "rt") as lines:
        attention = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(lines)]
    decode = [a for a in attention if a["prefill_chunk"] == 0 and a["n_decode"] * a["kv_decode"] > 4096]
    prefill = [a for a in attention if a["n_decode"] == 0 and a["prefill_chunk"] >= 128]
    tokens = np.array(sorted(dense), dtype=float)
    times = np.array([dense[int(n)] for n in tokens])
    read = np.array([a["n_decode"] * a["kv_decode"] for a in decode])
    pairs = np.array([a["prefill_chunk"] * (a["kv_prefill"] + a["prefill_chunk"] / 2) for a in prefill])
    launch = 6e-6  # of one attention kernel, as the smallest profiles show

    def residuals(vector):
        factors = replace(prior, **dict(zip(FITTED, np.exp(vector), strict=True)))
        step = StepModel.of(model, MACHINE, Parallelism(), factors)
        return np.concatenate(
            [
                np.log(times / (step.linear(tokens) / model.layers)),
                np.log(np.array([a["time_us"] for a in decode]) * 1e-6 / (read * step.read / model.layers + launch))
                / 2,
                np.log(
                    np.array([a["time_us"] for a in prefill]) * 1e-6 / (step.attended(pairs) / model.layers + launch)
                )
                / 2,
            ]
        )

    start = np.log([getattr(prior, name) for name in FITTED])
    bounds = (np.full(len(FITTED), -4.0), UPPER)
    found = least_squares(residuals, np.minimum(start, UPPER - 1e-3), bounds=bounds, loss="soft_l1", f_scale=0.1)
    print(f"dense layers: {np.abs(np.expm1(residuals(found.x)[: len(tokens)])).mean():.1%} mean error")
    count = len(tokens) + len(decode) + len(prefill)
    return replace(prior, **dict(zip(FITTED, map(float, np.exp(found.x)), strict=True))), count


def _experts(folder, factors):
    """Grouped products of Qwen3-30B-A3B, by tokens and experts that are really touched."""
    model = models()["Qwen/Qwen3-30B-A3B"]
    path = folder / "profile__RTXPRO6000__Qwen__Qwen3-30B-A3B-Instruct-2507__bf16__tp1__moe.csv"
    with path.open() as lines:
        rows = [
            (int(r["tokens"]), int(r["activated_experts"]), float(r["time_us"]) * 1e-6) for r in csv.DictReader(lines)
        ]
    shapes = [m for m in work(model, Parallelism()).matmuls if m.name.startswith("experts")]
    peak = MACHINE.flops["bf16"] * factors.compute

    def time(vector, tokens, touched):
        total = math.exp(vector[2])
        for m in shapes:
            flops = 2.0 * tokens * model.active_experts * m.inputs * m.outputs
            octets = 2.0 * (touched * m.inputs * m.outputs + tokens * model.active_experts * (m.inputs + m.outputs))
            arithmetic = flops / (peak * math.exp(vector[0]))
            memory = octets / (MACHINE.bandwidth * factors.bandwidth * math.exp(vector[1]))
            total += (arithmetic**SMOOTH + memory**SMOOTH) ** (1 / SMOOTH)
        return total

    found = least_squares(
        lambda v: [math.log(t / time(v, n, k)) for n, k, t in rows],
        np.log([0.6, 0.9, 1e-5]),
        bounds=([-4, -2, -16], [0.0, 0.0, -8]),
        loss="soft_l1",
        f_scale=0.1,
    )
    compute, bandwidth, _ = map(float, np.exp(found.x))  # launches are the same for all kernels
    return replace(factors, expert_compute=compute, expert_bandwidth=bandwidth), len(rows)


def _overheads(factors):
    """What a step costs besides its kernels, so that the first hundred requests of the Llama run come out right."""

    def scaled(vector):
        share = float(np.exp(vector[0]))
        return replace(
            factors, kernel=factors.kernel * share, step=factors.step * share, sequence=factors.sequence * share
        )

    def residuals(vector):
        errors = play("llama-3.1-8b", scaled(vector), stop=100)
        return [math.log(measured.mean() / found.mean()) for found, measured in errors.values()]

    return scaled(least_squares(residuals, [0.0], bounds=([-4.0], [1.0]), diff_step=0.05).x)


if __name__ == "__main__":
    main(sys.argv[1:])
