"""How fast a server with plugins/vllm-switching is in both modes, and how long a switch takes.

usage: vllm_switching.py URL MODEL [plain]; with `plain` of vLLM without it
"""

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


def to(url, mode):
    """Switch, and what the scheduler says of it."""
    return ask(url, "/collective_rpc", {"method": "set_mode", "args": [mode]})["results"][0]


def main(url, model, kind=None):
    """Turn by turn, so that what else the machine does meets both modes."""
    rows = {kind: []} if kind else {"merged": [], "split": []}
    for _ in range(TURNS):
        for mode, times in rows.items():
            if kind != "plain":
                to(url, mode)
            times.append((seconds(url, model, 1), seconds(url, model, TOGETHER)))
    for mode, times in rows.items():
        alone, together = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{mode}: {alone / TOKENS * 1000:.1f} ms per token of one request, "
            f"{TOGETHER * TOKENS / together:.1f} tokens/s of {TOGETHER}"
        )
    if kind == "plain":
        return
    pauses, moves = [], []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(TURNS):
            load = pool.submit(seconds, url, model, TOGETHER)
            time.sleep(0.5)
            for mode in ("split", "merged"):
                said = to(url, mode)
                pauses.append(said["seconds"] * 1000)
                moves.append(said["moved"])
            load.result()
    print(f"a switch: {statistics.median(pauses):.2f} ms in the scheduler (longest {max(pauses):.2f}), moved {moves}")
    for report in ask(url, "/collective_rpc", {"method": "switching"})["results"]:
        own = [switch * 1000 for switch in report["switch_s"]]
        print(
            f"worker {report['rank']}: {statistics.median(own):.2f} ms (longest {max(own):.2f}) in {len(own)} switches"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
