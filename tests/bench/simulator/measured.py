"""The measured slices as observations, and how they are split: what a fit may see and what it is scored on."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import random
from collections import defaultdict
from pathlib import Path

from fabrictool.catalog.tables import accelerators, model
from fabrictool.simulator.cases import Case, PhaseWorkers
from fabrictool.simulator.fitting import Observation
from fabrictool.simulator.operators import Parallelism

DATA = Path(__file__).parents[2] / "data" / "measured"


def load(name, mark=""):
    """Observations of one slice that carry this mark, in file order; without one, all that may be learned from."""
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as lines:
        return [_observation(row) for row in csv.DictReader(lines) if row["mark"] == mark]


def architecture(observation):
    """What a model is to the simulator: those with other weights in the same shapes are no other model."""
    model = observation.case.model
    return f"{model.layers}x{model.hidden}h{model.heads}e{model.experts}"


def key(observation):
    """What a calibration is for."""
    case = observation.case
    return case.device.id, case.engine, case.scope


def groups(observations):
    """Key → observations."""
    found = defaultdict(list)
    for one in observations:
        found[key(one)].append(one)
    return dict(sorted(found.items()))


def held_out(observation):
    """A quarter of the shapes, by a hash of model, device, engine and lengths, as the design asks."""
    case = observation.case
    text = f"{case.model.id}|{case.device.id}|{case.engine}|{case.input_len}|{case.output_len}|{case.concurrency}"
    return hashlib.sha256(text.encode()).digest()[0] < 64


def sample(observations, most, seed=0):
    """At most `most` of them, drawn evenly."""
    chosen = list(observations)
    random.Random(seed).shuffle(chosen)
    return chosen[:most]


def _observation(row):
    def cut(prefix=""):
        return Parallelism(*(int(row[f"{prefix}{width}"] or 1) for width in ("tp", "pp", "ep", "dp")))

    pools = {}
    if row["mode"] == "disagg":
        pools = {p: PhaseWorkers(cut(f"{p}_"), int(row[f"{p}_workers"])) for p in ("prefill", "decode")}
    case = Case(
        device=accelerators()[row["device"]],
        model=model(row["model"]),
        engine=row["engine"],
        precision=row["precision"],
        kv_precision=row["kv_precision"],
        cut=cut(),
        input_len=int(row["input_len"]),
        output_len=int(row["output_len"]),
        concurrency=int(row["concurrency"]),
        mode=row["mode"],
        max_num_seqs=int(row["max_num_seqs"] or 0),
        max_num_batched_tokens=int(row["max_num_batched_tokens"] or 0),
        gpu_memory_utilization=float(row["gpu_memory_utilization"] or 0),
        recv_interval=int(row["scheduler_recv_interval"] or 1),
        **pools,
    )
    seconds = {m: float(row[f"{m}_ms"]) / 1e3 if row[f"{m}_ms"] else math.nan for m in ("ttft", "tpot", "e2e")}
    return Observation(case, **seconds)
