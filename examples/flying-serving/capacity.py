"""Tokens that the KV cache of Llama-3-70B holds on H200: forecast and table 2 of Flying Serving (paper 003).

Its engine keeps communicators and buffers for every degree at once; 21.9 GB a device explain all three rows.
"""

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism

PUBLISHED = {2: 264e3, 4: 959e3, 8: 2.3e6}
RESERVED_OCTETS = 21.9e9


def main():
    """The table."""
    model, memory = models()["meta-llama/Meta-Llama-3-70B"], reported_memory(accelerators()["h200"])
    print(f"{'tp':>2} {'published':>10} {'forecast':>10} {'error':>7} {'as vLLM is set by default':>26}")
    for tp, published in PUBLISHED.items():
        cut = Parallelism(tp=tp)
        found = room(model, cut, memory, weights="bf16", kv="bf16", usable=0.9, reserved=RESERVED_OCTETS).kv_tokens
        default = room(model, cut, memory, weights="bf16", kv="bf16").kv_tokens
        print(f"{tp:2} {published:10,.0f} {found:10,} {found / published - 1:+7.1%} {default:26,}")


if __name__ == "__main__":
    main()
