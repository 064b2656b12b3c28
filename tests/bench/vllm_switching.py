"""How fast a server with plugins/vllm-switching is in both modes, and how long a switch takes.

usage: vllm_switching.py URL MODEL [NAME=URL …]; others that serve the model without it are asked turn by turn with it
"""

import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx

TOKENS, TOGETHER, TURNS = 48, 8, 5


def ask(url, path, body):
    answer = httpx.post(url + path, json=body, timeout=600)
    return answer.raise_for_status().json()


def seconds(url, model, number):
    """For that many requests of some tokens at the same time."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [body | {"prompt": f"The story of number {place} begins"} for place in range(number)]
    began = time.monotonic()
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(lambda own: ask(url, "/v1/completions", own), bodies))
    return time.monotonic() - began


def arrivals(url, model):
    """When each token of a request came."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body | {"prompt": "A story"}, timeout=600) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        return [time.monotonic() for line in lines if json.loads(line[6:])["choices"]]


def to(url, mode):
    """Switch, and what the scheduler says of it."""
    return ask(url, "/collective_rpc", {"method": "set_mode", "args": [mode]})["results"][0]


def main(url, model, *others):
    """Turn by turn, so that what else the machine does meets all of them."""
    places = {"merged": url, "split": url} | dict(other.split("=", 1) for other in others)
    rows = {name: [] for name in places}
    for _ in range(TURNS):
        for name, place in places.items():
            if place == url:
                to(url, name)
            rows[name].append((seconds(place, model, 1), seconds(place, model, TOGETHER)))
    for mode, times in rows.items():
        alone, together = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{mode}: {alone / TOKENS * 1000:.1f} ms per token of one request, "
            f"{TOGETHER * TOKENS / together:.1f} tokens/s of {TOGETHER}"
        )
    pauses, moves, usual, longest = [], [], [], []
    for turn in range(2 * TURNS):
        with ThreadPoolExecutor(2) as pool:
            load = pool.submit(seconds, url, model, TOGETHER - 1)
            tokens = pool.submit(arrivals, url, model)
            time.sleep(1)
            said = to(url, ("split", "merged")[turn % 2])
            pauses.append(said["seconds"] * 1000)
            moves.append(said["moved"])
            gaps = [1000 * (later - sooner) for sooner, later in itertools.pairwise(tokens.result())]
            load.result()
        usual.append(statistics.median(gaps))
        longest.append(max(gaps[2:]))
    print(f"a switch: {statistics.median(pauses):.2f} ms in the scheduler (longest {max(pauses):.2f}), moved {moves}")
    print(
        f"between two tokens of one of {TOGETHER} requests: {statistics.median(usual):.0f} ms, and the longest time, "
        f"in which prefixes are computed again, {statistics.median(longest):.0f} ms"
    )
    for report in ask(url, "/collective_rpc", {"method": "switching"})["results"]:
        own = [switch * 1000 for switch in report["switch_s"]]
        print(
            f"worker {report['rank']}: {statistics.median(own):.2f} ms (longest {max(own):.2f}) in {len(own)} switches"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
