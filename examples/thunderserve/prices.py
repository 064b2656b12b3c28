"""What prefill and decode of one request cost on the cloud GPUs of ThunderServe (paper 002, figure 1 and table 1)."""

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.capacity import decode_seconds, prefill_seconds
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Machine, StepModel

MODEL = "meta-llama/Llama-2-7b-hf"
PROMPT, ANSWER = 512, 16
DOLLARS_PER_HOUR = {"a100-80g": 1.753, "a6000": 0.483, "a5000": 0.223, "a40": 0.403, "rtx3090ti": 0.307}
CLAIMS = (("prefill", "a40", "rtx3090ti"), ("decode", "rtx3090ti", "a40"))
"""(phase, the device that the figure shows to be cheaper, the dearer one)"""


def seconds(device_id):
    """Seconds of (prefill, decode) of one request alone; the prompt's step yields the first token."""
    device = accelerators()[device_id]
    factors = choose(shipped(), device_id, device.vendor, "vllm", "static").factors
    step = StepModel.of(models()[MODEL], Machine.of(device), Parallelism(), factors, weights="fp16", kv="fp16")
    return prefill_seconds(step, float(PROMPT)), (ANSWER - 1) * decode_seconds(step, 1, PROMPT + ANSWER / 2)


def main():
    """Two tables: prices, and which device is cheaper for which phase."""
    price = {}
    print(f"{'device':10} {'$/h':>6} {'prefill ms':>11} {'decode ms':>10} {'prefill $/1e6':>14} {'decode $/1e6':>13}")
    for device, hourly in DOLLARS_PER_HOUR.items():
        prefill, decode = seconds(device)
        price[device] = {"prefill": prefill * hourly / 3600 * 1e6, "decode": decode * hourly / 3600 * 1e6}
        print(f"{device:10} {hourly:6.3f} {prefill * 1e3:11.1f} {decode * 1e3:10.1f}", end=" ")
        print(f"{price[device]['prefill']:14.2f} {price[device]['decode']:13.2f}")
    print(f"\n{'phase':8} {'cheaper in paper':17} {'cheaper in ours':16} {'dearer by':>9}")
    for phase, cheap, dear in CLAIMS:
        ours = min(cheap, dear, key=lambda device: price[device][phase])
        other = dear if ours == cheap else cheap
        print(f"{phase:8} {cheap:17} {ours:16} {price[other][phase] / price[ours][phase] - 1:+9.0%}")


if __name__ == "__main__":
    main()
