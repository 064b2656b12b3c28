"""What changing a device's memory takes: caches that grow and shrink, weights that come and go.

Run it with torch on a machine with a CUDA device; prints what `fabrictool.sharing.placement.MemoryTimes` holds beside
the paper's figures (LLM-Mesh, figure 8, an A100: 32 to 64 GB takes 1.9 s, 32 to 16 GB 0.3 s).
"""

import statistics
import time

import torch

GB = 10**9
REPEATS = 5


def timed(work):
    """Median seconds, the device's work included; the first is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def resize(before, after):
    """A new cache, what both hold copied, the old one freed."""

    def work():
        old = torch.empty(before, dtype=torch.uint8, device="cuda")
        old[::4096] = 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        new = torch.empty(after, dtype=torch.uint8, device="cuda")
        kept = min(before, after)
        new[:kept].copy_(old[:kept])
        torch.cuda.synchronize()
        del old
        torch.cuda.empty_cache()
        seconds.append(time.perf_counter() - began)
        del new
        torch.cuda.empty_cache()

    seconds = []
    for _ in range(REPEATS + 1):
        work()
    return statistics.median(seconds[1:])


def main():
    """The table."""
    name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    print(f"{name}, {total / GB:.0f} GB, torch {torch.__version__}")
    for before, after in ((8, 16), (16, 32), (32, 64), (16, 8), (32, 16)):
        if (before + after) * GB < 0.95 * total:
            print(f"cache {before:3} -> {after:3} GB: {resize(before * GB, after * GB):7.3f} s")
        else:
            print(f"cache {before:3} -> {after:3} GB: does not fit beside itself")
    size = 8 * GB
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned.fill_(1)
    for what, host in (("pinned", pinned), ("pageable", pageable)):
        to = timed(lambda host=host: device.copy_(host, non_blocking=True))
        back = timed(lambda host=host: host.copy_(device, non_blocking=True))
        print(f"{what} memory of the host: to the device {size / to / GB:5.1f} GB/s, back {size / back / GB:5.1f} GB/s")
    print(
        f"in the device: {2 * size / timed(lambda: device[: size // 2].copy_(device[size // 2 :])) / GB / 2:7.1f} GB/s"
    )


if __name__ == "__main__":
    main()
