"""What one instance serves at most: forecast and measurement of OpenTela's E1 (paper 001, table 1), requests/s."""

import random

import numpy as np

from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel
from fabrictool.workload.lengths import Lengths

CASES = (
    ("meta-llama/Llama-2-13b-hf", (599, 822), (74, 211), 1, {"a100-80g": 5.05, "gh200": 12.61}),
    ("codellama/CodeLlama-34b-hf", (1169, 1276), (532, 435), 2, {"a100-80g": 1.49, "gh200": 4.79}),
    ("meta-llama/Llama-3.3-70B-Instruct", (727, 777), (64, 190), 4, {"a100-80g": 4.45, "gh200": 11.16}),
)


def forecast(model_id, device_id, prompt, answer, tp, count=3000):
    """Requests/s of one saturated instance; lengths are normal, clipped at 5 tokens, as in the experiment."""
    model, device, cut = models()[model_id], accelerators()[device_id], Parallelism(tp=tp)
    calibration = choose(shipped(), device_id, device.vendor, "vllm", "online")
    step = StepModel.of(model, Machine.of(device), cut, calibration.factors, weights="fp16", kv="fp16")
    space = room(model, cut, reported_memory(device), weights="fp16", kv="fp16")
    rng = np.random.default_rng(0)
    lengths = [Lengths("normal", *given, 5, 4096).draw(count, rng) for given in (prompt, answer)]
    spec = ReplicaSpec(step.times(256, 8192), 256, 8192, space.kv_tokens)
    done = simulate([spec], Stream(np.zeros(count), *lengths), routing_policy("random", random.Random(0)))
    return count / done.end


def main():
    """The table."""
    print(f"{'model':34} {'device':9} {'measured':>8} {'forecast':>8} {'error':>7}")
    for model_id, prompt, answer, tp, measured in CASES:
        for device_id, value in measured.items():
            found = forecast(model_id, device_id, prompt, answer, tp)
            print(f"{model_id:34} {device_id:9} {value:8.2f} {found:8.2f} {found / value - 1:+7.0%}")


if __name__ == "__main__":
    main()
