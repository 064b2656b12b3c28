"""A problem in Mélange's JSON from our forecasts: what one GPU of each kind serves of each size of request."""

import json

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.capacity import MAX_UTILISATION, MeanWorkload, replica
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel

MODEL = "meta-llama/Llama-2-7b-hf"
PRICES = {"l4": 0.7, "a40": 1.1, "l40s": 1.9, "a100-80g": 3.67, "h100-sxm": 7.516}
"""Per hour; round numbers of the kind that clouds ask, only an example."""
INPUTS, OUTPUTS = (25, 100, 250, 500, 1000, 2000), (25, 100, 250, 500, 1000)
"""Tokens in the middle of each bucket."""
CONTEXT = 4096


def throughput(device_id, given, made):
    """Requests/s of one GPU that does nothing else, up to the highest load that is planned; 0 where they do not fit."""
    model, device, cut = models()[MODEL], accelerators()[device_id], Parallelism()
    calibration = choose(shipped(), device_id, device.vendor, "vllm", "online")
    step = StepModel.of(model, Machine.of(device), cut, calibration.factors, weights="fp16", kv="fp16")
    space = room(model, cut, reported_memory(device), weights="fp16", kv="fp16")
    figures = replica(step, space, MeanWorkload(0.0, given, made, CONTEXT), 256, calibration)
    return round(MAX_UTILISATION * figures.capacity, 3)


def shares():
    """A histogram that falls with both lengths, as chats' do."""
    weights = [[1 / (1 + given / 300) ** 1.5 / (1 + made / 200) ** 1.5 for made in OUTPUTS] for given in INPUTS]
    total = sum(map(sum, weights))
    return [[round(weight / total, 4) for weight in row] for row in weights]


def main():
    """Prints the document."""
    gpus = {
        device: {"cost": price, "tputs": [[throughput(device, given, made) for made in OUTPUTS] for given in INPUTS]}
        for device, price in PRICES.items()
    }
    problem = {
        "gpu_info": gpus, "workload_distribution": shares(), "total_request_rate": 120.0, "slice_factor": 4,
    }  # fmt: skip
    print(json.dumps(problem, indent=1))


if __name__ == "__main__":
    main()
