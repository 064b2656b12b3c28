"""What is measured, what the replay says and what the plan forecasts, of one model that a gateway really serves."""

import asyncio
import itertools
import json
import random
import re
import time

import aiohttp

from tests.conftest import KEY

WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "as", "with", "by", "he", "at", "it", "from")
PERCENTILE = 0.95
WARM_UP = 8
STRETCH = 10


def requests(seed, count, rate, words, tokens):
    """(seconds, prompt, most tokens) of an open loop; `words` and `tokens` are the ends of uniform ranges."""
    rng = random.Random(seed)
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        yield at, " ".join(rng.choice(WORDS) for _ in range(rng.randint(*words))), rng.randint(*tokens)


def send(url, model, wanted):
    """All of them, each at its time; fails on the first that is not answered."""

    async def one_by_one():
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            began = time.monotonic()

            async def ask(at, prompt, most):
                await asyncio.sleep(began + at - time.monotonic())
                body = {"model": model, "prompt": prompt, "max_tokens": most, "ignore_eos": True, "stream": True}
                headers = {"authorization": f"Bearer {KEY}"}
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

            async with asyncio.TaskGroup() as group:
                for request in wanted:
                    group.create_task(ask(*request))

    asyncio.run(one_by_one())


def exported(bed, earlier, count):
    """`count` requests of the gateway's records, behind so many `earlier` ones, as lines of a trace of their own."""
    (store,) = (bed.folder / "state").rglob("records.db")
    deadline = time.monotonic() + 60
    while True:
        bed.run("trace", "export", str(store), "-o", "all.jsonl")
        lines = [json.loads(line) for line in (bed.folder / "all.jsonl").read_text().splitlines()]
        if len(lines) >= earlier + count:
            break
        assert time.monotonic() < deadline, len(lines)
        time.sleep(1)
    assert len(lines) == earlier + count
    lines = lines[earlier:]
    return [line | {"t": line["t"] - lines[0]["t"]} for line in lines]


def write_trace(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(lines):
    """Metric → (mean, from, to), seconds; the last two are where the 95th percentile of very many requests would be.

    It is drawn again and again from stretches of the run, for requests that came one after the other waited together.
    """
    rng = random.Random(0)

    def of(values):
        stretches = [values[at : at + STRETCH] for at in range(len(values) - STRETCH + 1)]
        drawn = []
        for _ in range(1000):
            again = sorted(itertools.chain(*rng.choices(stretches, k=len(values) // STRETCH)))
            drawn.append(again[int(PERCENTILE * len(again))])
        drawn.sort()
        return sum(values) / len(values), drawn[50], drawn[949]

    late = [line for line in lines if line["out"] > 1]
    return {
        "ttft": of([line["ttft"] for line in lines]),
        "tpot": of([(line["latency"] - line["ttft"]) / (line["out"] - 1) for line in late]),
        "e2e": of([line["latency"] for line in lines]),
    }


def disagreements(bed, model, engine, seed, first, second):
    """What `outside` says after a calibration by `first`'s requests, measured with `second`'s.

    Both are (number of requests, rate, words of a prompt, tokens of an answer), as `requests` takes them.
    """
    send(bed.url, model, requests(seed, WARM_UP, 0.5, (5, 10), (2, 4)))  # what is slow once
    send(bed.url, model, requests(seed + 1, *first))
    write_trace(bed.folder / "first.jsonl", exported(bed, WARM_UP, first[0]))
    service = ("--device", "cpu", "--engine", engine, "--model", "HuggingFaceTB/SmolLM2-135M-Instruct")
    print(bed.run("calibrate", "first.jsonl", *service, "-o", "mine").stdout)
    send(bed.url, model, requests(seed + 2, *second))
    lines = exported(bed, WARM_UP + first[0], second[0])
    write_trace(bed.folder / "second.jsonl", lines)
    blueprint, inventory = bed.folder / "blueprint.yaml", bed.folder / "inventory.yaml"
    blueprint.write_text(re.sub(r"demand: .*", "demand: {trace: second.jsonl}", blueprint.read_text()))
    inventory.write_text(f"{inventory.read_text()}calibrations: [mine]\n")
    return outside(bed, model, lines)


def compared(bed, model, lines):
    """(what, metric, measured range, band) of replay and plan, for a blueprint whose demand is these lines.

    The replay's band is of means, the plan's of the 95th percentile.
    """
    seen = measured(lines)
    played = json.loads(bed.run("simulate", "--trace", "second.jsonl", "--json").stdout)["models"][0]
    for metric, (low, high) in sorted(played["bands"].items()):
        forecast, mean = played["latency"][metric]["mean"], seen[metric][0]
        yield "replay, mean", metric, (mean, mean), (low * forecast, high * forecast)
    plan = json.loads(bed.run("plan", "--json").stdout)
    (forecast,) = (its for its in plan["forecast"]["models"] if its["model"] == model)
    for metric in ("ttft", "tpot", "e2e"):
        band = forecast[f"{metric}_p95_s"]
        yield "plan, p95", metric, seen[metric][1:], (band["low"], band["high"])


def outside(bed, model, lines):
    """What of `compared` does not agree; prints all of it."""
    odd = []
    for what, metric, (least, most), (low, high) in compared(bed, model, lines):
        print(f"{what:12} {metric:4} measured {least:.3f} to {most:.3f} s  band {low:.3f} to {high:.3f} s")
        if most < low or high < least:
            odd.append((what, metric))
    return odd
