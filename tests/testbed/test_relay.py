"""The relay's weather, without a bed."""

import asyncio
import contextlib

import pytest

from tests.testbed.relay import Relay, Weather

pytestmark = pytest.mark.asyncio


async def _echo(reader, writer):
    try:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def handlers_end(before):
    """Servers do not end the connections that they handle, of which half-open ones would never end."""
    handlers = asyncio.all_tasks() - before
    for handler in handlers:
        handler.cancel()
    await asyncio.wait_for(asyncio.gather(*handlers, return_exceptions=True), 20)


@contextlib.asynccontextmanager
async def path(**weather):
    """A relay before an echo server, and a connection through it."""
    before = asyncio.all_tasks()
    async with await asyncio.start_server(_echo, "127.0.0.1") as server:
        relay = Relay(server.sockets[0].getsockname(), Weather(**weather))
        async with await asyncio.start_server(relay.serve, "127.0.0.1") as front:
            reader, writer = await asyncio.open_connection(*front.sockets[0].getsockname())
            yield relay, reader, writer
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            await handlers_end(before)


def now():
    return asyncio.get_running_loop().time()


async def test_in_good_weather_all_bytes_arrive_in_order_and_so_does_the_end():
    sent = bytes(range(256)) * 4096
    async with path(jitter_s=0.002) as (_, reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), 20) == sent


@pytest.mark.parametrize(
    "weather",
    [
        {"delay_s": 0.1},
        {"stall_rate": 1.0, "stall_s": 0.1},
        {"bytes_per_s": 10_000.0},  # 1000 bytes there and back
    ],
    ids=lambda weather: next(iter(weather)),
)
async def test_nothing_comes_earlier_than_the_weather_allows(weather):
    async with path(**weather) as (_, reader, writer):
        begin = now()
        writer.write(bytes(1000))
        await asyncio.wait_for(reader.readexactly(1000), 20)
        assert now() - begin >= 0.199  # a bound from below: a slow machine cannot break it


async def test_chunks_in_flight_do_not_add_up_their_delays():
    async with path(delay_s=0.2) as (_, reader, writer):
        begin = now()
        for _ in range(50):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.002)
        await asyncio.wait_for(reader.readexactly(50), 20)
        assert now() - begin < 5  # one after the other they would take 20 s


async def test_a_reset_is_a_reset():
    async with path(reset_rate=1.0) as (_, reader, writer):
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 20)


async def test_a_half_open_path_accepts_and_says_nothing():
    async with path(swallow=True) as (_, reader, writer):
        writer.write(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)


async def test_a_connection_that_lost_bytes_stays_lost_when_the_weather_improves():
    async with path() as (relay, reader, writer):
        writer.write(b"before")
        assert await asyncio.wait_for(reader.readexactly(6), 20) == b"before"
        relay.weather = Weather(swallow=True)
        writer.write(b"lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        relay.weather = Weather()
        writer.write(b"after")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        async with path() as (_, fresh, out):
            out.write(b"new")
            assert await asyncio.wait_for(fresh.readexactly(3), 20) == b"new"


async def test_a_port_that_nobody_serves_ends_in_a_reset():
    before, relay = asyncio.all_tasks(), Relay(("127.0.0.1", 1), Weather())
    async with await asyncio.start_server(relay.serve, "127.0.0.1") as front:
        reader, writer = await asyncio.open_connection(*front.sockets[0].getsockname())
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 20)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await handlers_end(before)
