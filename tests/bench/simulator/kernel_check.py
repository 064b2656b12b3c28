"""Kernels that were timed by themselves against what the step model takes them for. Nothing is fitted to them."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.operators import Attention, Matmul, Parallelism
from fabrictool.simulator.stepmodel import OCTETS, Machine, StepModel

if TYPE_CHECKING:
    from pathlib import Path

SHORTEST_US = 30.0
"""Below that a launch is a good part of a kernel's time, which the model counts by the layer."""
SIZES = ((64, "up to 64 tokens"), (511, "65 to 511 tokens"), (1 << 30, "512 tokens and more"))
PROMPTS = ((1024, "prompts up to 1,024"), (4096, "prompts up to 4,096"), (1 << 30, "longer prompts"))
CACHES = ((50e6, "up to 50 MB of cache"), (200e6, "up to 200 MB of cache"), (1e15, "more cache"))
LARGE_MESSAGE = 1 << 20
ORDER = [name for _, name in (*SIZES, *PROMPTS, *CACHES)]


def read(path: Path):
    """The rows of a table in `import_measured.KERNEL_COLUMNS`; numbers where they are."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(lines)]


def _value(text):
    try:
        return float(text)
    except ValueError:
        return text


def forecast_us(row, step: StepModel):
    """What the model says of one row; None for kernels that are none of its operators."""
    if row["op"] == "matmul":
        products = [Matmul("one", row["k"], row["n"], 1.0, precision=row["dtype"])]
    elif row["op"] == "experts":
        share = row["chosen"] / row["experts"]
        shapes = ((row["k"], 2 * row["n"]), (row["n"], row["k"]))
        products = [Matmul("one", i, o, 1.0, row["experts"], share, row["dtype"]) for i, o in shapes]
    elif row["op"] in ("decode_attention", "prefill_attention"):
        pair = 4.0 * row["heads"] * row["head_dim"]
        layer = Attention(1, pair, 2.0 * row["kv_heads"] * row["head_dim"], pair)
        tokens = row["batch"] * row["context"]
        decode = row["op"] == "decode_attention"
        return 1e6 * (tokens * step._read(layer) if decode else tokens * row["context"] / 2 * step._pair(layer))
    else:
        return None
    return 1e6 * float(step._products(products, np.array([row["m"]])).sum())


def _size(row):
    if row["op"] == "decode_attention":
        octets = row["batch"] * row["context"] * row["kv_heads"] * row["head_dim"] * 4
        return next(name for most, name in CACHES if octets <= most)
    if row["op"] == "prefill_attention":
        return next(name for most, name in PROMPTS if row["context"] <= most)
    return next(name for most, name in SIZES if row["m"] <= most)


def share_of_peak(row, machine: Machine):
    """(share of the memory's peak, of the matrix units') that a row's kernel reached."""
    seconds = 1e-6 * row["median_us"]
    if row["op"] in ("decode_attention", "prefill_attention"):
        tokens = row["batch"] * row["context"]
        octets = tokens * row["kv_heads"] * row["head_dim"] * 4
        operations = 4.0 * row["heads"] * row["head_dim"] * tokens
        if row["op"] == "prefill_attention":
            operations *= row["context"] / 2
        return octets / seconds / machine.bandwidth, operations / seconds / machine.peak("bf16")[0]
    weights, used = row["n"] * row["k"], row["m"]
    if row["op"] == "experts":
        weights *= 3 * row["experts"] * (1 - (1 - row["chosen"] / row["experts"]) ** row["m"])
        used = row["m"] * row["chosen"] * 3 * row["n"] * row["k"] / weights
    operations = 2.0 * used * weights
    return (
        weights * OCTETS[row["dtype"]] / seconds / machine.bandwidth,
        operations / seconds / machine.peak(row["dtype"])[0],
    )


def errors(rows, device, factors):
    """(kind, precision and size), forecast over measured less 1, and the shares of the peaks; long kernels only."""
    machine = Machine.of(accelerators()[device])
    any_model = next(iter(models().values()))  # every row brings its own shapes
    step = StepModel.of(any_model, machine, Parallelism(), factors)
    for row in rows:
        expected = forecast_us(row, step)
        if expected is not None and row["median_us"] >= SHORTEST_US:
            error = expected / row["median_us"] - 1
            yield (row["op"], row["dtype"], _size(row)), error, *share_of_peak(row, machine)


def table(rows, device, factors):
    """Markdown lines, one a kind and size."""
    found = defaultdict(list)
    for key, *values in errors(rows, device, factors):
        found[key].append(values)
    yield "| kernel | precision | size | rows | of memory's peak | of the units' peak | forecast: bias | mean error |"
    yield "|---|---|---|---|---|---|---|---|"
    for (op, dtype, size), values in sorted(found.items(), key=lambda item: (*item[0][:2], ORDER.index(item[0][2]))):
        off, memory, compute = np.array(values).T
        yield (
            f"| {op.replace('_', ' ')} | {dtype} | {size} | {len(off)} | {np.median(memory):.2f}"
            f" | {np.median(compute):.2f} | {100 * np.median(off):+.0f} % | {100 * np.abs(off).mean():.0f} % |"
        )


def all_reduces(rows, factors):
    """Markdown lines, one a device and engine: how far the model's all-reduces are from timed ones."""
    found = defaultdict(list)
    any_model = next(iter(models().values()))
    for row in rows:
        cut = Parallelism(tp=int(row["devices"]))
        step = StepModel.of(any_model, Machine.of(accelerators()[row["device"]]), cut, factors)
        expected = 1e6 * float(step._all_reduce(np.array(row["octets"]), cut.tp))
        found[row["device"], row["engine"]].append((row["octets"] > LARGE_MESSAGE, expected / row["median_us"] - 1))
    yield "| device | engine | rows | messages up to 1 MiB: bias | mean error | larger ones: bias | mean error |"
    yield "|---|---|---|---|---|---|---|"
    for (device, engine), values in sorted(found.items()):
        cells = []
        for large in (False, True):
            off = np.array([error for is_large, error in values if is_large is large])
            cells.append(f"{100 * np.median(off):+.0f} % | {100 * np.abs(off).mean():.0f} %")
        yield f"| {device} | {engine} | {len(values)} | {' | '.join(cells)} |"
