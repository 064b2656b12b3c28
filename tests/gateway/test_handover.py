"""A gateway gives its sockets to its successor, and takes them back when that one fails."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter

import aiohttp
import msgspec
import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec, HostPort, encode_spec
from fabrictool.gateway import handover
from fabrictool.gateway.handover import SOCKET, take_over
from fabrictool.gateway.keyfile import encode_keys
from fabrictool.gateway.keys import hash_key, keys_digest
from fabrictool.gateway.reloading import KEYS_FILE
from fabrictool.gateway.run import run_on_mesh
from tests.gateway.conftest import until
from tests.mesh.conftest import Federation
from tests.ports import free_port

pytestmark = pytest.mark.asyncio
ADMIN = "admin-key-of-the-centre-0123"


class Place:
    """Where gateways of one name run, each in a deep folder of its own."""

    def __init__(self, folder):
        self.folder = folder / ("deep" * 30)
        self.federation = Federation(folder)
        self.about = {"fabric": "t", "provider": "alpha", "site": "s", "cluster": "c", "name": "g"}
        self.listen, self.mesh = (HostPort("127.0.0.1", free_port()) for _ in range(2))

    def unit(self, own, **changes):
        folder = RunFolder(self.folder / own)
        self.federation.folder = self.folder
        self.federation.node(f"{own}/identity", role="gateway")
        spec = GatewaySpec(**self.about | {"listen": self.listen, "mesh": self.mesh} | changes)
        folder.spec.write_bytes(encode_spec(spec))
        return folder, spec

    async def start(self, name):
        folder, spec = self.unit(name)
        running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
        await until(lambda: running.done() or (folder.path / "process.json").exists())
        return running, folder

    async def health(self):
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{self.listen.port}/health", timeout=aiohttp.ClientTimeout(5)) as answer,
        ):
            return answer.status


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


async def end(*running):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.gather(*running)


async def test_a_successor_that_dies_before_it_serves_leaves_everything_as_it_was(place):
    running, folder = await place.start("first")
    agent, _ = place.federation.node("agent")
    agent.dial([(place.mesh.host, place.mesh.port)])
    await until(lambda: agent.hub_tunnels)
    taken = await asyncio.to_thread(take_over, *reversed(place.unit("second")))
    assert taken.agents == 1
    assert [there.getsockname()[1] for there in (*taken.mesh, *taken.clients)] == [place.mesh.port, place.listen.port]
    assert await place.health() == 200, "the clients are still its own"
    assert await asyncio.to_thread(take_over, *reversed(place.unit("third"))) is None, "one at a time"
    for there in (*taken.mesh, *taken.clients):
        there.close()
    taken.close()
    late, _ = place.federation.node("late")
    late.dial([(place.mesh.host, place.mesh.port)])
    await until(lambda: late.hub_tunnels)
    await until(lambda: len(agent.hub_tunnels) == 1)
    assert await place.health() == 200
    for node in (agent, late):
        await node.close()
    await end(running)
    assert not (folder.path / SOCKET).exists()


async def test_a_successor_that_dies_while_the_other_one_ends_its_streams_gives_the_clients_back(place):
    running, _ = await place.start("first")
    taken = await asyncio.to_thread(take_over, *reversed(place.unit("second")))
    taken.serving()
    client = asyncio.create_task(place.health())
    await asyncio.sleep(0.3)
    assert not client.done(), "it waits in the queue of the successor"
    for there in (*taken.mesh, *taken.clients):
        there.close()
    taken.close()
    assert await client == 200
    await end(running)


async def test_agents_come_over_and_only_then_clients(place):
    first, _ = await place.start("first")
    agent, _ = place.federation.node("agent")
    agent.dial([(place.mesh.host, place.mesh.port)])
    await until(lambda: agent.hub_tunnels)
    second, folder = await place.start("second")
    assert {len(agent.hub_tunnels), len(set(agent.neighbours))} == {2}, "it has both as long as both are there"
    await until((folder.path / "status.json").exists)
    assert await place.health() == 200
    await agent.close()
    first.cancel()  # both are one process here, and its signals the second one's
    await asyncio.gather(first, return_exceptions=True)
    await end(second)


async def test_a_gateway_of_another_name_or_address_is_asked_for_nothing(place):
    running, _ = await place.start("first")
    for change in ({"name": "h"}, {"mesh": HostPort("127.0.0.1", free_port())}, {"fabric": "u"}):
        folder, spec = place.unit(f"other{sorted(change)}", **change)
        assert await asyncio.to_thread(take_over, spec, folder) is None
    folder, spec = place.unit("moved", listen=HostPort("127.0.0.1", free_port()))
    taken = await asyncio.to_thread(take_over, spec, folder)
    assert [there.getsockname()[1] for there in taken.mesh] == [place.mesh.port]
    assert taken.clients == ()
    for there in taken.mesh:
        there.close()
    taken.close()
    await end(running)


async def test_what_a_dead_gateway_left_is_passed_over(place, caplog):
    caplog.set_level("DEBUG", handover.__name__)
    folder, spec = place.unit("dead")
    (folder.path / SOCKET).touch()
    folder, spec = place.unit("next")
    assert take_over(spec, folder) is None


class Running:
    """A gateway in a process of its own, with a key API."""

    def __init__(self, place, own):
        self.folder, spec = place.unit(own)
        digest = keys_digest("t", [], hash_key(ADMIN))
        self.folder.spec.write_bytes(
            encode_spec(msgspec.structs.replace(spec, key_api="all", groups={"all": ()}, keys=digest))
        )
        (self.folder.path / KEYS_FILE).write_bytes(encode_keys([], hash_key(ADMIN)))
        (self.folder.path / KEYS_FILE).chmod(0o600)
        self.process = subprocess.Popen([sys.executable, "-m", "fabrictool.gateway", str(self.folder.path)])

    async def ready(self):
        await until(lambda: (self.folder.path / "process.json").exists() or self.process.poll() is not None, 60)
        assert self.process.poll() is None

    async def end(self):
        self.process.terminate()
        assert await asyncio.to_thread(self.process.wait, 60) == 0


async def test_keys_can_be_made_while_a_gateway_is_replaced(place):
    """Each call by a connection of its own, so that it comes to whichever gateway accepts just then; the other one
    knows a new key after its next look into the store.
    """
    answers, keys, over = Counter(), [], False

    async def call(http, method, path, key, body=None):
        url = f"http://127.0.0.1:{place.listen.port}{path}"
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        async with http.request(method, url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def make_and_use(http):
        while not over:
            status, made = await call(http, "POST", "/key/generate", ADMIN, {})
            answers["generate", status] += 1
            keys.append(made["key"])
            status, _ = await call(http, "GET", "/v1/models", keys[0])
            answers["use", status] += 1
            await asyncio.sleep(0.01)

    running = []
    try:
        running.append(Running(place, "first"))
        await running[0].ready()
        async with aiohttp.ClientSession() as http:
            client = asyncio.create_task(make_and_use(http))
            await until(lambda: len(keys) > 20 or client.done(), 60)
            running.append(Running(place, "second"))
            await running[1].ready()
            before = len(keys)
            await running[0].end()
            await until(lambda: len(keys) > before + 20 or client.done(), 60)
            over = True
            await client
            assert answers == {("generate", 200): len(keys), ("use", 200): len(keys)}
            for key in keys:
                while (await call(http, "GET", "/v1/models", key))[0] != 200:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            listed = (await call(http, "GET", "/key/list?size=1", ADMIN))[1]["total_count"]
        assert listed == len(keys)
        await running[1].end()
    finally:
        for gateway in running:
            gateway.process.kill()
            gateway.process.wait()
