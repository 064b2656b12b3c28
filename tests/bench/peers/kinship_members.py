"""How fast news spread among members of kinship (SWIM with Lifeguard, a core in Rust), and what silence costs.

Run by `tests/bench/mesh.py` with the interpreter in which kinship is installed; prints JSON. All members but the one
that is killed are in this process, as those of our own mesh are; what is written is as long as a record of ours.
"""

import asyncio
import base64
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import kinship

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.network import carried, own_network

SIZES = (8, 32, 128)
WRITES = 30
IDLE_S = 5.0
WRITERS, EVERY_S, ROUNDS = 10, 3.0, 2
RECORD_OCTETS = 270
KILLS = {"local": 3, "lan": 1}
WITHIN_S = 90.0
FIRST_PORT = 17000


def config(preset, number, key):
    port = FIRST_PORT + number
    seeds = [] if number == 0 else [f"127.0.0.1:{FIRST_PORT}"]
    make = {"lan": kinship.Config.lan, "local": kinship.Config.local}[preset]
    return make(bind=f"127.0.0.1:{port}", name=f"n{number}", seeds=seeds, keys=[key], runtime_threads=1)


def new_key():
    return base64.b64encode(secrets.token_bytes(32)).decode()


class Members:
    """As many as wanted, and when each heard of what."""

    def __init__(self, preset, count, key):
        self.preset, self.count, self.key = preset, count, key
        self.clusters, self.heard = [], {}

    async def up(self, stack):
        for number in range(self.count):
            cluster = kinship.Cluster(config(self.preset, number, self.key))
            stack.push_async_callback(cluster.close)
            await cluster.start()
            self.clusters.append(cluster)
            task = asyncio.create_task(self._listen(number, cluster.events()))
            stack.callback(task.cancel)
        await until(lambda: all(len(cluster.members()) == self.count for cluster in self.clusters))

    async def _listen(self, number, events):
        async for event in events:
            now = time.perf_counter()
            if isinstance(event, kinship.MemberUpdated):
                self.heard.setdefault(event.member.meta["v"], {})[number] = now
            elif isinstance(event, kinship.MemberDead):
                self.heard.setdefault(("dead", event.member.name), {})[number] = now
            elif isinstance(event, kinship.EventsLost):
                sys.exit("events were lost: the figures would be wrong")

    async def write(self, number, value):
        await self.clusters[number].set_meta({"v": value, "fill": "x" * (RECORD_OCTETS - len(value) - 5)})

    async def spread(self, number, value):
        """Milliseconds until each other member has it."""
        begin = time.perf_counter()
        await self.write(number, value)
        await until(lambda: len(self.heard.get(value, ())) == self.count - 1)
        return [1000 * (at - begin) for at in self.heard.pop(value).values()]


async def until(condition):
    give_up = time.perf_counter() + WITHIN_S
    while not condition():
        if time.perf_counter() > give_up:
            raise TimeoutError("it did not come to pass")
        await asyncio.sleep(0.002)


def summary(times):
    times = sorted(times)
    return {
        "p50_ms": round(statistics.median(times), 2),
        "p95_ms": round(times[int(0.95 * (len(times) - 1))], 2),
        "max_ms": round(times[-1], 2),
    }


async def spread_and_silence(preset, count, alone):
    """`alone`: on a network of this process, whose octets are counted."""
    async with AsyncExitStack() as stack:
        members = Members(preset, count, new_key())
        begin = time.perf_counter()
        await members.up(stack)
        row = {"members": count, "preset": preset, "join_s": round(time.perf_counter() - begin, 2)}
        await asyncio.sleep(2.0)
        delays, lasts = [], []
        for number in range(WRITES):
            of_write = await members.spread(number % count, f"w{number}")
            delays += of_write
            lasts.append(max(of_write))
            await asyncio.sleep(0.02)
        row |= summary(delays) | {"last_p50_ms": summary(lasts)["p50_ms"]}
        if not alone:
            return row
        await asyncio.sleep(5.0)
        before = carried()
        await asyncio.sleep(IDLE_S)
        row["idle_octets_s"] = round((carried() - before) / IDLE_S / count)
        before, begin = carried(), time.perf_counter()
        for turn in range(ROUNDS):
            for number in range(min(WRITERS, count)):
                await members.write(number, f"c{turn}-{number}")
            await asyncio.sleep(EVERY_S)
        row["churn_octets_s"] = round((carried() - before) / (time.perf_counter() - begin) / count)
        return row


async def killed(preset, count=32):
    """Milliseconds from kill -9 of another process's member until each of the rest holds it for dead."""
    async with AsyncExitStack() as stack:
        members = Members(preset, count, new_key())
        await members.up(stack)
        delays = []
        for trial in range(KILLS[preset]):
            number = count + trial
            arguments = [sys.executable, __file__, "member", preset, str(number), members.key]
            child = subprocess.Popen(arguments)  # noqa: ASYNC220 - a benchmark may block before it measures
            name = f"n{number}"
            await until(lambda n=name: all(n in {m.name for m in c.members()} for c in members.clusters))
            await asyncio.sleep(2.0)
            begin = time.perf_counter()
            child.kill()
            child.wait()
            await until(lambda n=name: len(members.heard.get(("dead", n), ())) == count)
            delays += [1000 * (at - begin) for at in members.heard["dead", name].values()]
        return summary(delays) | {"members": count + 1, "preset": preset, "kills": KILLS[preset]}


async def be_member(preset, number, key):
    async with kinship.Cluster(config(preset, number, key)):
        await asyncio.sleep(3600)


def main(argv):
    if argv[:1] == ["member"]:
        asyncio.run(be_member(argv[1], int(argv[2]), argv[3]))
        return
    alone = own_network()
    rows = [asyncio.run(spread_and_silence(preset, size, alone)) for preset in ("local", "lan") for size in SIZES]
    kills = [asyncio.run(killed(preset)) for preset in ("local", "lan")]
    print(json.dumps({"version": kinship.__version__, "spread": rows, "killed": kills}), flush=True)
    os._exit(0)  # at the end of the interpreter its threads crash, now and then


if __name__ == "__main__":
    main(sys.argv[1:])
