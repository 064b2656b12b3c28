"""How much faster an H100 is than an RTX 3090: the static batches of OpenTela's figure 8 (paper 001), forecast."""

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.cases import Case, predict
from fabrictool.simulator.operators import Parallelism

BATCHES = ((1024, 1024, 1), (2048, 512, 4), (512, 2048, 8))
MODEL = "meta-llama/Llama-2-7b-hf"  # the text names none; the experiment's public notebook has this one
DEVICES = ("h100-sxm", "rtx3090")


def forecast(device_id, prompt, answer, batch):
    """(seconds of the whole batch, low, high): the mean over its requests and the 90 % band."""
    device, model = accelerators()[device_id], models()[MODEL]
    case = Case(device, model, "vllm", "fp16", "fp16", Parallelism(), prompt, answer, batch, "batch")
    found = predict(case, shipped())
    return found.estimate.e2e, *found.bands["e2e"]


def main():
    """The table; the paper's own bars are in an image only."""
    print(
        f"{'in':>5} {'out':>5} {'batch':>5}" + "".join(f"{d + ' s':>12} {'band':>14}" for d in DEVICES) + "  speed-up"
    )
    for batch in BATCHES:
        row = [forecast(device, *batch) for device in DEVICES]
        print("{:5} {:5} {:5}".format(*batch), end="")
        for seconds, low, high in row:
            print(f"{seconds:12.1f} {f'{low:.1f} to {high:.1f}':>14}", end="")
        print(f"{row[1][0] / row[0][0]:10.2f}")


if __name__ == "__main__":
    main()
