"""How fast the event loop is: Llama-3-8B on one H100, 512 tokens in, 128 out, Poisson arrivals. Requests a second.

The peers' figures are those measured on a two-core machine for the same job; ours are measured here and now, each in
a process of its own, beside a floor: an interpreter that starts and imports NumPy.
"""

import resource
import subprocess
import sys
import time

JOB = """
import random, sys, time
import numpy as np
from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import policy
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
    found = simulate([spec], stream, policy("random", random.Random(0)))
    return time.perf_counter() - began, found
play(10)
took, found = play(count)
print(took, float(found.ttft.mean()), float(found.tpot.mean()), float(found.e2e.mean()))
"""


def main(_):
    """A table: requests, rate, engine seconds, requests/s, whole process, memory."""
    floor = _run(["-c", "import numpy"])
    _run(["-c", JOB, "10", "6"])  # the first run may compile
    print(f"floor (python, numpy): {floor[1]:.2f} s")
    print(f"{'requests':>9} {'req/s in':>9} {'engine s':>9} {'simulated req/s':>16} {'process s':>10} {'peak MB':>8}")
    for count, rate in ((10_000, 6), (10_000, 30), (100_000, 30), (1_000_000, 30)):
        out, wall, peak = _run(["-c", JOB, str(count), str(rate)])
        took, ttft, tpot, e2e = map(float, out.split())
        print(f"{count:9} {rate:9} {took:9.3f} {count / took:16,.0f} {wall:10.2f} {peak / 1024:8.0f}")
    print(f"latencies at 30 req/s: TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms, E2E {1e3 * e2e:.0f} ms")
    print(print("peers, engine only, 10,000 at 30 req/s: Vidur 1,000, BLIS 754, AISimulate 9,900 req/s"))
    return 0


def _run(arguments):
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=600)
    peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return done.stdout, time.perf_counter() - began, peak


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
