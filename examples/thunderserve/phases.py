"""Prefill and decode on one instance or apart, with 16 or 4 bits between them: ThunderServe (paper 002, tables 5, 8).

LLaMA-30B on 4 A40 and 4 RTX 3090 Ti. `together`: each instance serves alone. `apart`: prefill on the A40, decode on
the 3090 Ti, 40 Gbit/s between. `mixed`: two pipelines over half of both instances each, 5 Gbit/s between these.
"""

import random
from dataclasses import fields, replace

import numpy as np

from fabrictool.catalog import accelerators, models
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.capacity import decode_seconds, prefill_seconds
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.network import HAND_LATENCY_S
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.stepmodel import KV_OCTETS, Machine, StepModel

MODEL = models()["huggyllama/llama-30b"]
PROMPT = 1025  # 1024 and the token that LLaMA's tokeniser puts in front
ANSWERS = (13, 129)  # the paper gives none; it quotes these medians of coding and of conversation
IN_FLIGHT, REQUESTS, SEQUENCES, BUDGET = 8, 600, 256, 8192
"""The paper does not say how many are in flight. With 8, and answers of 129, `together` serves what it says."""
LOADS = (1, 2, 4, 8, 16, 32, 64)
FAST, SLOW = 40e9 / 8, 5e9 / 8
WHOLE, HALVES = Parallelism(tp=4), Parallelism(tp=2, pp=2)
DEVICES = ("a40", "rtx3090ti")


def step(device_id, cut, scope, network=0.0):
    """Step times; stages of a pipeline are joined by `network` octets/s, by the node's own link if 0."""
    device = accelerators()[device_id]
    factors = choose(shipped(), device_id, device.vendor, "vllm", scope).factors
    machine = Machine.of(device, network=network or device.link_bandwidth)
    return StepModel.of(MODEL, machine, cut, factors, weights="fp16", kv="fp16")


def hand(bits, link):
    """Seconds to move one token's cache over `link` octets/s."""
    return kv_elements_per_token(MODEL, Parallelism()) * KV_OCTETS[{16: "fp16", 4: "int4"}[bits]] / link


def mixed_link():
    """Octets/s between the mixed plan's replicas: each instance moves its half of the layers over its own link."""
    return 2 * accelerators()["a40"].link_bandwidth


def alone():
    """(what, paper, ours) for one request by itself, ms; means where two kinds of device take part."""
    whole = {device: step(device, WHOLE, "static") for device in DEVICES}
    halves = [step(device, HALVES, "static", SLOW) for device in DEVICES]
    prefill = {device: 1e3 * prefill_seconds(one, float(PROMPT)) for device, one in whole.items()}
    decode = {device: decode_seconds(one, 1, PROMPT) for device, one in whole.items()}
    pipeline = sum(decode_seconds(one, 1, PROMPT) for one in halves) / 2
    return [
        ("prefill ms, together", 884, sum(prefill.values()) / 2),
        ("prefill ms, apart", 698, prefill["a40"]),
        ("prefill ms, mixed", 964, sum(1e3 * prefill_seconds(one, float(PROMPT)) for one in halves) / 2),
        ("KV ms, apart, 16 bits", 584, 1e3 * (PROMPT * hand(16, FAST) + HAND_LATENCY_S)),
        ("KV ms, apart, 4 bits", 133, 1e3 * (PROMPT * hand(4, FAST) + HAND_LATENCY_S)),
        ("KV ms, mixed, 4 bits", 41, 1e3 * (PROMPT * hand(4, mixed_link()) + HAND_LATENCY_S)),
        ("decode, together : apart", 1689 / 1126, sum(decode.values()) / 2 / decode["rtx3090ti"]),
        ("decode, mixed : apart", 1846 / 1126, pipeline / decode["rtx3090ti"]),
    ]


def replica(times, cut, role, *devices):
    """A replica with the memory of `devices`, each of which holds an equal share of its layers."""
    space = [room(MODEL, cut, reported_memory(accelerators()[d]), weights="fp16", kv="fp16").kv_tokens for d in devices]
    # Who decodes what was handed over takes in only what he can hold to its end: caches cross a slow link once.
    spared = 1.0 if role == "decode" else 0.0
    return ReplicaSpec(times, SEQUENCES, BUDGET, sum(space) // len(space), role=role, lanes=cut.pp, spared=spared)


def plans():
    """Name → replicas."""
    whole = {device: step(device, WHOLE, "online") for device in DEVICES}
    first, second = (
        step(d, HALVES, "online", SLOW).times(SEQUENCES, BUDGET, hand(4, mixed_link()), HAND_LATENCY_S) for d in DEVICES
    )
    # Half of the layers on either device: the mean of what all layers would take on each.
    mean = {f.name: (getattr(first, f.name) + getattr(second, f.name)) / 2 for f in fields(first) if f.name != "window"}
    both = replace(first, **mean)
    found = {"together": [replica(one.times(SEQUENCES, BUDGET), WHOLE, "unified", d) for d, one in whole.items()]}
    for bits in (16, 4):
        times = whole["a40"].times(SEQUENCES, BUDGET, hand(bits, FAST), HAND_LATENCY_S)
        answering = replica(whole["rtx3090ti"].times(SEQUENCES, BUDGET), WHOLE, "decode", "rtx3090ti")
        found[f"apart, {bits} bits"] = [replica(times, WHOLE, "prefill", "a40"), answering]
    found["mixed, 4 bits"] = [replica(both, HALVES, role, *DEVICES) for role in ("prefill", "decode")]
    return found


def throughput(specs, answer, in_flight=IN_FLIGHT):
    """Tokens/s, prompts and answers, with a constant number of requests in flight."""
    stream = Stream(np.zeros(REQUESTS), np.full(REQUESTS, PROMPT), np.full(REQUESTS, answer))
    done = simulate(specs, stream, routing_policy("least-loaded", random.Random(0)), clients=in_flight)
    return REQUESTS * (PROMPT + answer) / done.finish.max()


def main():
    """The table."""
    rows, replicas = alone(), plans()
    published = {"together": 1610, "apart, 16 bits": 2450, "apart, 4 bits": 3292, "mixed, 4 bits": 2196}
    for answer in ANSWERS:
        rows += [(f"tokens/s, {n}, {answer} out", published[n], throughput(s, answer)) for n, s in replicas.items()]
    print(f"{'what':34} {'paper':>8} {'ours':>8} {'error':>6}")
    for what, paper, ours in rows:
        digits = 2 if paper < 10 else 0
        print(f"{what:34} {paper:8.{digits}f} {ours:8.{digits}f} {ours / paper - 1:+6.0%}")
    print(f"\n{'tokens/s of plans, in flight':34}" + "".join(f" {count:6}" for count in LOADS))
    for answer in ANSWERS:
        for name, specs in replicas.items():
            served = "".join(f" {throughput(specs, answer, count):6.0f}" for count in LOADS)
            print(f"{f'{name}, {answer} out':34}{served}")


if __name__ == "__main__":
    main()
