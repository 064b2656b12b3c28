"""What clients that take nothing cost the others: time between tokens of paced streams, alone and beside 500 of them.

    make bench ARGS=gateway_slow_readers

The streams come from the C mock of `gateway.py`, a token each 10 ms; those who take nothing ask another model, whose
engine writes as fast as it is let. The gateway has one core, with everything on; all others share the other one.
"""

import asyncio
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.bench import gateway as rig
from tests.ports import free_port

STREAMS, TOKENS, SLOW = 32, 400, 500
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n' % (b"x" * 4000)


async def flood(reader, writer):
    """An engine that never stops."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    try:
        while True:
            writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            await writer.drain()
    except OSError:
        writer.close()


def request(model):
    body = json.dumps(rig.BODY | {"model": model, "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.KEY}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


async def gaps(port):
    """Seconds between the tokens of one stream, as its client sees them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("m"))
    times = []
    while b"[DONE]" not in (line := await reader.readline()):
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
    writer.close()
    return [later - sooner for sooner, later in itertools.pairwise(times)]


async def p99_ms(port):
    every = sorted(gap for stream in await asyncio.gather(*(gaps(port) for _ in range(STREAMS))) for gap in stream)
    return 1000 * every[int(0.99 * len(every))]


async def measured(port):
    alone = await p99_ms(port)
    clients = []
    for _ in range(SLOW):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.transport.pause_reading()
        writer.write(request("flood"))
        clients.append((reader, writer))
        await asyncio.sleep(0.005)
    await asyncio.sleep(2)
    beside = await p99_ms(port)
    for _, writer in clients:
        writer.transport.abort()
    return alone, beside, await p99_ms(port)


async def one_form(folder, name, paced):
    engine = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = free_port()
    command = rig.GATEWAYS[name](folder, paced, port)
    flooding = engine.sockets[0].getsockname()[1]
    (folder / "nodes.yaml").write_text(
        f"nodes:\n- {{url: 'http://127.0.0.1:{paced}', models: [m], provider: alpha}}\n"
        f"- {{url: 'http://127.0.0.1:{flooding}', models: [flood], provider: alpha}}\ngroups: {{all: [alpha]}}\n"
    )
    keys = json.loads((folder / "keys.json").read_text())
    keys["keys"][0]["terms"].pop("models")
    (folder / "keys.json").write_text(json.dumps(keys))
    with rig.running(rig.GATEWAY_CORE, command, port):
        return await measured(port)


def main(_argv=None):
    """Print a line for each form of the gateway."""
    missing = [program for program in ("gcc", "taskset") if shutil.which(program) is None]
    if missing:
        print(f"not measured: {', '.join(missing)} is not installed (apt-get install gcc util-linux)")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["gcc", "-O2", "-o", folder / "mock", rig.HERE / "gateway_rig" / "mock_engine.c"], check=True)
        port = free_port()
        print(f"ms between tokens, p99, of {STREAMS} streams of {TOKENS}, one each {rig.PACE_MS} ms")
        with rig.running(rig.LOAD_CORE, [folder / "mock", port, TOKENS, rig.PACE_MS], port):
            for form in rig.OURS:
                try:
                    alone, beside, after = asyncio.run(one_form(folder, form, port))
                except RuntimeError as error:
                    print(f"  not measured: {form}: {error}")
                    continue
                held = rig.met(beside <= 2 * alone)
                print(f"  {form}: {alone:.1f} alone, {beside:.1f} beside {SLOW} that take nothing, {after:.1f} after")
                print(f"    {beside / alone:.2f} × (must 2): {held}")


if __name__ == "__main__":
    main()
