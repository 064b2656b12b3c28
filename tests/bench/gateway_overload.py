"""Four times what an engine can serve, by an open loop: how much of the work is useful, and who waits.

    make bench ARGS=gateway_overload

The engine answers `SLOTS` requests at a time, first come, first served, and keeps what comes beyond in its own queue
without end, as engines do. An answer is useful if its first token comes before the patience of who asked ends. Peak is
what a closed loop gets of the same engine. The gateway has one core, with everything on; all others share the other.
"""

import asyncio
import collections
import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import gateway as rig
from tests.ports import free_port

SLOTS, SERVICE_S, SECONDS = 16, 0.2, 20.0
PEAK = SLOTS / SERVICE_S
PATIENCE_S = {"interactive": 2, "standard": 4, "batch": 8}
HASTY = 0.3
"""Of the peak, interactive requests, at each load."""
TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    def __init__(self):
        self.free, self.rng = asyncio.Semaphore(SLOTS), random.Random(1)

    async def answer(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                async with self.free:
                    writer.write(HEAD + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN))
                    await asyncio.sleep(SERVICE_S * self.rng.uniform(0.5, 1.5))
                    if writer.transport.is_closing():
                        return
                    writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(TOKEN + END), TOKEN + END))
        writer.close()


@dataclass
class Heard:
    useful: int = 0
    late: int = 0
    refused: int = 0
    wrong: int = 0
    waits: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))


class Load:
    """Connections are kept; one more is opened when all are in use."""

    def __init__(self, port):
        self.port, self.idle = port, []

    async def ask(self, kind, heard, until):
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        began = time.perf_counter()
        body = json.dumps(rig.BODY | {"stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.KEY}\r\n"
        head += f"x-fabric-priority: {kind}\r\nx-fabric-max-wait: {PATIENCE_S[kind]}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        if status == 429:
            heard.refused += 1
            writer.close()
            return
        if status != 200:
            heard.wrong += 1
            writer.close()
            return
        await reader.readuntil(b"data: ")
        now = time.perf_counter()
        heard.waits[kind].append(now - began)
        if now < until:
            heard.useful += now - began <= PATIENCE_S[kind]
            heard.late += now - began > PATIENCE_S[kind]
        await reader.readuntil(b"0\r\n\r\n")
        self.idle.append((reader, writer))

    async def closed(self, clients, seconds):
        heard, end = Heard(), time.perf_counter() + seconds

        async def client():
            while time.perf_counter() < end:
                await self.ask("standard", heard, end)

        await asyncio.gather(*(client() for _ in range(clients)))
        return heard.useful / seconds

    async def open(self, factor, seconds):
        rest = max(0.0, factor - HASTY) * PEAK / 2
        end, heard, tasks, rng = time.perf_counter() + seconds, Heard(), [], random.Random(2)

        async def arrivals(kind, rate):
            due = time.perf_counter()
            while rate and (due := due + rng.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(self.ask(kind, heard, end)))

        await asyncio.gather(arrivals("interactive", HASTY * PEAK), arrivals("standard", rest), arrivals("batch", rest))
        for task in asyncio.as_completed(tasks, timeout=seconds * (factor + 2)):
            await task
        return heard


def p99_ms(heard, kind):
    every = sorted(heard.waits[kind])
    return 1000 * every[int(0.99 * len(every))]


async def one_form(folder, name, *, slots):
    """Peak, and what is heard at half the peak and at four times."""
    engine = await asyncio.start_server(Engine().answer, "127.0.0.1", 0, backlog=4096)
    behind, port = engine.sockets[0].getsockname()[1], free_port()
    command = rig.GATEWAYS[name](folder, behind, port)
    room = f", slots: {SLOTS}" if slots else ""
    (folder / "nodes.yaml").write_text(
        f"nodes: [{{url: 'http://127.0.0.1:{behind}', models: [m], provider: alpha{room}}}]\ngroups: {{all: [alpha]}}\n"
        "priorities: {t: interactive}\n"
    )
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, rig.running(rig.GATEWAY_CORE, command, port))
        load = Load(port)
        peak = await load.closed(2 * SLOTS, SECONDS / 2)
        return peak, await load.open(0.5, SECONDS / 2), await load.open(4.0, SECONDS)


def main(_argv=None):
    """Print a row for each form of the gateway, and one for it without slots, which is no admission."""
    print(f"{SLOTS} slots, {SERVICE_S} s a request: {PEAK:.0f} requests/s at most; {HASTY} × of that are interactive\n")
    print("| gateway | peak/s | useful/s at 4 × | interactive TTFT p99 ms at 0.5 ×, at 4 × | late | refused | wrong |")
    print("|---|---|---|---|---|---|---|", flush=True)
    verdicts = []
    for name, slots in ((rig.OURS[0], True), (rig.OURS[-1], True), (rig.OURS[-1], False)):
        title = name if slots else f"{name}, no slots declared"
        with tempfile.TemporaryDirectory() as folder:
            try:
                peak, calm, heard = asyncio.run(one_form(Path(folder), name, slots=slots))
            except RuntimeError as error:
                print(f"| {title} | not measured: {error} | | | | | |")
                continue
        goodput, alone, hasty = heard.useful / SECONDS, p99_ms(calm, "interactive"), p99_ms(heard, "interactive")
        print(
            f"| {title} | {peak:.1f} | {goodput:.1f} ({goodput / peak:.2f} ×) | {alone:.0f}, {hasty:.0f} | {heard.late}"
            f" | {heard.refused} | {heard.wrong + calm.wrong} |",
            flush=True,
        )
        if slots:
            verdicts.append(f"{title}: goodput (must 0.9 ×) {rig.met(goodput >= 0.9 * peak)}")
            longest = 1000 * 2 * SERVICE_S
            verdicts.append(f"{title}: interactive p99 (must {longest:.0f} ms) {rig.met(hasty <= longest)}")
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
