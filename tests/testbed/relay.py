"""A TCP relay in user space that makes a path bad: late, narrow, stalling, resetting, or half-open.

The kernels that we test on have no netem. What this cannot imitate: the TCP handshake itself is not late, and lost
packets show as stalls, as they do to an application. Standard library only; runs as a script in any machine:

    relay.py LISTEN_HOST LISTEN_PORT TO_HOST TO_PORT '{"delay_s": 0.05}'

prints the port it listens on, then takes new settings as JSON objects, one a line, until its input ends.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from dataclasses import dataclass, field, replace

CHUNK = 16 * 1024
IN_FLIGHT = 1024  # chunks a direction: 16 MiB are on the way before the sender feels the delay
RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send RST


@dataclass(frozen=True)
class Weather:
    """How bad the path is. Times in seconds; each direction has it once, so a round trip has the delay twice."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # up to so much more, never out of order
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    stall_rate: float = 0.0  # chance that a chunk is held up, and all behind it
    stall_s: float = 1.0
    reset_rate: float = 0.0  # chance that a chunk ends its connection with RST
    swallow: bool = False  # half-open: connections are accepted, bytes are read and vanish


@dataclass
class Relay:
    """Serves until it is cancelled; `weather` may be exchanged at any time."""

    to: tuple[str, int]
    weather: Weather
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.weather.swallow:
                while await reader.read(CHUNK):
                    pass
            else:
                await self._connect(reader, writer)
        except OSError:
            pass
        finally:
            await _close(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.to)
        except OSError:
            _reset(writer)
            return
        connection = Connection(self, (writer, far_writer))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(connection.carry(reader, far_writer))
                both.create_task(connection.carry(far_reader, writer))
        except* OSError:
            pass
        finally:
            await _close(far_writer)


@dataclass
class Connection:
    """Two directions with one fate: once bytes of it have vanished, no later byte may arrive."""

    relay: Relay
    ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    holed: bool = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take(reader, waiting))
            both.create_task(self._hand_on(waiting, writer))

    async def _take(self, reader: asyncio.StreamReader, waiting: "asyncio.Queue[tuple[float, bytes]]") -> None:
        now, chance = asyncio.get_running_loop().time, self.relay.chance
        free_at = due = 0.0
        while True:
            chunk = await reader.read(CHUNK)
            weather = self.relay.weather
            self.holed |= weather.swallow
            if chunk and chance.random() < weather.reset_rate:
                for end in self.ends:
                    _reset(end)
                raise ConnectionResetError
            free_at = max(free_at, now())
            if weather.bytes_per_s:
                free_at += len(chunk) / weather.bytes_per_s
            if chance.random() < weather.stall_rate:
                free_at += weather.stall_s
            due = max(due, free_at + weather.delay_s + chance.uniform(0, weather.jitter_s))
            await waiting.put((due, chunk))
            if not chunk:
                return

    async def _hand_on(self, waiting: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        while True:
            due, chunk = await waiting.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if self.holed or self.relay.weather.swallow:
                self.holed = True
            elif chunk:
                writer.write(chunk)
                await writer.drain()
            elif writer.can_write_eof():
                writer.write_eof()
            if not chunk:
                return


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


async def main(host: str, port: str, to_host: str, to_port: str, settings: str = "{}") -> None:
    relay = Relay((to_host, int(to_port)), Weather(**json.loads(settings)))
    server = await asyncio.start_server(relay.serve, host, int(port))
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        relay.weather = replace(relay.weather, **json.loads(line))
        print("changed", flush=True)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
