"""Workers of one gateway: limits that they share, one address for clients, one store."""

import asyncio
import contextlib
import json
import signal
import sys

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from sqlalchemy import select

from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec, HostPort, encode_spec
from fabrictool.domain.terms import KeyLimits, Terms
from fabrictool.gateway.accounts import KeyAccounts
from fabrictool.gateway.directory import Directory
from fabrictool.gateway.keeping import RECORDS_FILE, records_folder
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import Consumer, hash_key
from fabrictool.gateway.openai import GatewayResponse, peek
from fabrictool.gateway.sharing import SILENT_S, LimitSharing
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.tables import REQUESTS
from tests.gateway.conftest import until
from tests.manual_clock import ManualClock
from tests.mesh.conftest import Federation
from tests.ports import free_port

CHAT = "/v1/chat/completions"
KEY = "k" * 24
BODY = b'{"model": "m", "messages": [], "max_tokens": 5}'


class Worker:
    """The accounts of a worker, and what it tells the others."""

    def __init__(self, folder, name, clock, limits, model_limits=None):
        self.accounts = KeyAccounts(clock, "f")
        self.anna = Consumer("anna", "all", "k", "anna", Terms(limits=limits))
        self.accounts.change_terms({"anna": self.anna})
        self.accounts.limit_models(model_limits or {})
        self.sharing = LimitSharing(folder, name, self.accounts, clock)
        self.sharing.process = name
        self.sharing.open()
        self.open = []

    def ask(self):
        """Whether a request may begin."""
        ticket = self.accounts.admit(self.anna, peek(BODY, CHAT), CHAT, BODY, Directory())
        if isinstance(ticket, GatewayResponse):
            return False
        self.open.append(ticket)
        return True

    def end(self, tokens=0):
        for allowance in self.open.pop().allowances:
            allowance.end(tokens)


async def talk(*workers):
    for _ in range(2):
        for worker in workers:
            worker.sharing.turn()
        await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def workers(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(number, limits, model_limits=None, clock=None):
            clock = clock or ManualClock()
            started = []
            for n in range(number):
                started.append(Worker(tmp_path, f"w{n}", clock, limits, model_limits))
                stack.callback(started[-1].sharing.close)
            return clock, *started

        yield start


@pytest.mark.asyncio
async def test_requests_of_a_minute_are_those_of_all_workers(workers):
    clock, first, second, third = workers(3, KeyLimits(requests_per_minute=60))
    await talk(first, second, third)
    assert [first.ask() for _ in range(30)] == [True] * 30
    await talk(first, second, third)
    assert [second.ask() for _ in range(31)] == [True] * 30 + [False]
    await talk(first, second, third)
    assert not third.ask(), "also where nobody has asked yet"
    assert not first.ask()
    clock.advance(1.0)
    assert third.ask()
    await talk(first, second, third)
    assert not first.ask()


@pytest.mark.asyncio
async def test_tokens_and_open_requests_are_shared_too(workers):
    clock, first, second = workers(2, KeyLimits(tokens_per_minute=600, concurrency=2))
    await talk(first, second)
    assert first.ask()
    assert first.ask()
    await talk(first, second)
    assert not second.ask(), "two are open"
    first.end(tokens=900)
    await talk(first, second)
    assert not second.ask(), "more was used than a minute has"
    clock.advance(40.0)
    await talk(first, second)
    assert second.ask()


@pytest.mark.asyncio
async def test_a_models_limit_is_everybodys(workers):
    _, first, second = workers(2, KeyLimits(), {"m": KeyLimits(concurrency=1)})
    await talk(first, second)
    assert first.ask()
    await talk(first, second)
    assert not second.ask()
    first.end()
    await talk(first, second)
    assert second.ask()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["ends", "killed"])
async def test_the_open_requests_of_a_worker_that_is_gone_are_no_more(workers, tmp_path, how):
    clock, first, second = workers(2, KeyLimits(concurrency=1, requests_per_minute=10**6))
    await talk(first, second)
    assert first.ask()
    await talk(first, second)
    assert not second.ask()
    if how == "ends":
        first.sharing.close()
    else:
        asyncio.get_running_loop().remove_reader(first.sharing._socket.fileno())
        first.sharing._socket.close()  # its socket's file stays
        first.sharing._socket = None
    for _ in range(10):
        clock.advance(SILENT_S / 5)
        second.sharing.turn()
        await asyncio.sleep(0)
    assert second.ask()
    assert [entry.name for entry in (tmp_path / "workers").iterdir()] == ["w1"]


@pytest.mark.asyncio
async def test_who_comes_later_hears_what_is_open_and_no_history(workers, tmp_path):
    clock, first = workers(1, KeyLimits(concurrency=1, requests_per_minute=100))
    for _ in range(50):
        assert first.ask()
        first.end()
    assert first.ask()
    late = Worker(tmp_path, "w9", clock, KeyLimits(concurrency=1, requests_per_minute=100))
    try:
        await talk(first, late)
        assert not late.ask()
        first.end()
        await talk(first, late)
        assert late.ask()
    finally:
        late.sharing.close()


@pytest.mark.asyncio
async def test_what_could_not_be_told_is_told_later(workers):
    _, first, second = workers(2, KeyLimits(requests_per_minute=10))
    await talk(first, second)
    sent = []
    first.sharing._send = lambda *_: sent.append(1) or False
    assert [first.ask() for _ in range(4)] == [True] * 4
    await talk(first, second)
    assert sent
    del first.sharing._send
    await talk(first, second)
    assert [second.ask() for _ in range(7)] == [True] * 6 + [False]


@pytest.mark.asyncio
async def test_words_that_are_none_do_no_harm(workers, tmp_path):
    _, first, second = workers(2, KeyLimits(requests_per_minute=10))
    path = str(tmp_path / "workers" / "w1")
    for data in (b"", b"x", msgspec.msgpack.encode(["w0", [["key nobody", 1, 1, 1]]]), b"\x00" * 1000):
        first.sharing._socket.sendto(data, path)
    await talk(first, second)
    assert second.ask()


async def asked(port):
    """By a connection of its own, as the kernel deals them out."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "m", "messages": []}
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as http,
        http.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as answer,
    ):
        return answer.status, json.loads(await answer.text())


@contextlib.asynccontextmanager
async def two_processes(tmp_path, **about):
    """As `apply` starts the workers of a gateway `main`; its address for clients."""
    port, processes, federation = free_port(), [], Federation(tmp_path)
    try:
        for name in ("main", "main-2"):
            federation.node(f"units/{name}/identity", role="gateway")
            folder = RunFolder(tmp_path / "units" / name)
            keys = folder.path / "keys.json"
            keys.write_bytes(encode_keys([KeyRow("anna", hash_key(KEY), "all")]))
            keys.chmod(0o600)
            place = {"fabric": "t", "provider": "alpha", "site": "s", "cluster": "c", "tenants": {"anna": "all"}}
            addresses = {"listen": HostPort("127.0.0.1", port), "mesh": HostPort("127.0.0.1", 0)}
            spec = GatewaySpec(**place, **addresses, name=name, shares="main", replicas={"m": (0,)}, **about)
            folder.spec.write_bytes(encode_spec(spec))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fabrictool.gateway", str(folder.path), stderr=asyncio.subprocess.DEVNULL
            )
            processes.append(process)
            await until(lambda folder=folder: (folder.path / "process.json").exists())
        yield port, records_folder(tmp_path / "units", "t", "main"), processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.mark.asyncio
async def test_two_processes_accept_at_one_address_and_keep_one_limit_and_one_store(tmp_path):
    """One is killed, and the other serves on; then that one is told to end."""
    terms = {"anna": Terms(limits=KeyLimits(requests_per_minute=40))}
    async with two_processes(tmp_path, terms=terms) as (port, shared, (first, second)):
        await until(lambda: len(list((shared / "workers").iterdir())) == 2)
        await asyncio.sleep(0.3)
        statuses = []
        for _ in range(60):
            statuses.append((await asked(port))[0])
            await asyncio.sleep(0.02)
        # No model serves here, and that is counted as a request. Two that knew nothing of each other let all begin.
        assert 40 <= statuses.count(503) <= 46
        assert statuses.count(429) == 60 - statuses.count(503)

        def by_gateway():
            if not (shared / RECORDS_FILE).exists():
                return []
            with contextlib.closing(RecordStore(str(shared / RECORDS_FILE), read_only=True)) as store:
                return [gateway for (gateway,) in store.read(select(REQUESTS.c.gateway))]

        await until(lambda: len(by_gateway()) == 60)
        assert set(by_gateway()) == {"main", "main-2"}, "the kernel deals connections out to both"
        first.send_signal(signal.SIGKILL)
        await first.wait()
        assert {(await asked(port))[0] for _ in range(10)} <= {503, 429}
        second.send_signal(signal.SIGTERM)
        await asyncio.wait_for(second.wait(), 30)
        assert len(by_gateway()) == 70
