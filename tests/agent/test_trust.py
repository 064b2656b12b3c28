"""Whom an agent serves, by its own rules: refused at the gateway's door, told anew while it serves."""

import asyncio
import os
import signal
import sys

import aiohttp
import msgspec
import pytest

from fabrictool.agent import agent as agent_module
from fabrictool.agent import forwarder as forwarder_module
from fabrictool.agent.agent import Agent
from fabrictool.agent.guarding import GATEWAY_GRACE_S, GROUP_GRACE_S, Guard
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec, AgentTrust, GatewaySpec, HostPort, encode_spec, mark_of
from fabrictool.engines.paths import MODEL_PATHS
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import Keyring, hash_key, keys_digest
from fabrictool.gateway.run import run_on_mesh
from fabrictool.mesh.framing import StreamHead
from tests.agent.test_agent import ScriptedAdapter
from tests.gateway.conftest import until
from tests.mesh.conftest import Federation

ENGINE = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(b'{"choices": []}')
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
ANNA, BEN = KeyRow("anna", hash_key("a" * 20), "all"), KeyRow("ben", hash_key("b" * 20), "few")


def head(group="", tenant=""):
    return StreamHead(b"s" * 16, "POST", "/v1/x", (), 0, group, tenant)


def code(guard, group, gateway="beta", now=0.0):
    denial = guard.denial(head(group), gateway, now)
    return denial.code if denial is not None else ""


@pytest.mark.parametrize(
    ("groups", "gateways", "group", "answer"),
    [
        (("all",), (), "all", ""),
        (("all",), (), "few", "FT8111"),
        (("all",), (), "", ""),  # a gateway of an earlier release says nothing of groups
        ((), (), "", "FT8111"),  # nobody is served, whatever is said
        (None, (), "any", ""),
        (None, (), "", ""),
        (("all",), ("beta",), "all", ""),
        (("all",), ("alpha", "gamma"), "all", "FT8112"),
    ],
)
def test_whom_an_agent_serves(groups, gateways, group, answer):
    assert code(Guard("alpha", AgentTrust(groups=groups, gateways=gateways)), group) == answer


def test_what_is_allowed_holds_at_once_and_what_is_taken_away_when_gateways_have_heard_of_it():
    guard = Guard("alpha", AgentTrust(groups=("all",), gateways=("beta",)))
    guard.take_over(AgentTrust(groups=("few",), gateways=("gamma",)), 100.0)
    assert [code(guard, "few", "gamma", 100.0), code(guard, "all", "beta", 100.0)] == ["", ""]
    guard.take_over(AgentTrust(groups=("few",), gateways=("gamma",)), 101.0)
    assert code(guard, "all", "gamma", 100.0 + GROUP_GRACE_S - 1) == ""
    assert code(guard, "all", "gamma", 100.0 + GROUP_GRACE_S) == "FT8111"
    assert code(guard, "few", "beta", 100.0 + GATEWAY_GRACE_S - 1) == ""
    assert code(guard, "few", "beta", 100.0 + GATEWAY_GRACE_S) == "FT8112"


def test_a_pseudonym_is_one_tenants_in_one_fabric_whichever_key_it_shows():
    second = KeyRow("anna", hash_key("c" * 20), "all")
    anna = Keyring([ANNA, second, BEN], "f").pseudonym("anna")
    assert anna == Keyring([second, ANNA], "f").pseudonym("anna")
    others = {Keyring([ANNA, second, BEN], "f").pseudonym("ben"), Keyring([ANNA, second], "g").pseudonym("anna")}
    others.add(Keyring([KeyRow("anna", hash_key("d" * 20), "all")], "f").pseudonym("anna"))
    assert len(others | {anna}) == 4, "another tenant's, another fabric's and another key's differ"
    assert (len(anna), Keyring([ANNA], "f").pseudonym("nobody")) == (32, "")


class Bed:
    """A gateway of provider beta, and two agents of alpha behind it."""

    def __init__(self, folder):
        self.folder, self.federation = folder, Federation(folder)
        self.agents, self.tasks = [], []

    async def start(self, trust):
        self.federation.node("gateway/identity", role="gateway", provider="beta")
        run = RunFolder(self.folder / "gateway")
        (run.path / "keys.json").write_bytes(encode_keys([ANNA, BEN]))
        (run.path / "keys.json").chmod(0o600)
        anywhere = HostPort("127.0.0.1", 0)
        spec = GatewaySpec(
            fabric="t", provider="beta", site="s", cluster="c", name="g", listen=anywhere, mesh=anywhere,
            groups={"all": ("alpha",), "few": ("alpha",)}, tenants={"anna": "all", "ben": "few"},
            keys=keys_digest("t", [ANNA, BEN]),
        )  # fmt: skip
        run.spec.write_bytes(encode_spec(spec))
        self.gateway = asyncio.create_task(run_on_mesh(spec, run, SystemClock()))
        await until(lambda: self.gateway.done() or (run.path / "process.json").exists())
        self.process = run.process()
        host, _, port = self.process["mesh"].rpartition(":")
        for number in (0, 1):
            self.federation.node(f"agent-{number}/identity")
            folder = RunFolder(self.folder / f"agent-{number}")
            told = AgentSpec(
                fabric="t", provider="alpha", site="s", cluster="c", partition="n", replica=f"m/{number}", model="m",
                source="x", engine="fake", hubs=(HostPort(host, int(port)),), drain_s=0.1, trust=trust,
            )  # fmt: skip
            folder.spec.write_bytes(encode_spec(told))
            agent = Agent(told, folder, SystemClock(), python=sys.executable, cache=self.folder)
            self.agents.append((agent, folder, told))
            self.tasks.append(asyncio.create_task(agent.run()))
        await until(lambda: all(folder.health().get("ready") for _, folder, _ in self.agents), seconds=30)
        async with aiohttp.ClientSession() as http:
            for _ in range(200):
                if [row["ready"] for row in (await self.status(http))["models"]] == [2]:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("the gateway does not see both")

    async def status(self, http):
        async with http.get(self.process["status"]) as answer:
            return await answer.json()

    async def ask(self, http, key, path="/v1/chat/completions"):
        url = f"http://{self.process['listen']}{path}"
        async with http.post(url, json={"model": "m"}, headers={"authorization": f"Bearer {key * 20}"}) as answer:
            return answer.status, await answer.json()

    async def stop(self):
        for agent, _, _ in self.agents:
            agent.request_stop("enough")
        await asyncio.wait_for(asyncio.gather(*self.tasks), 20)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(self.gateway, 20)


@pytest.mark.asyncio
async def test_an_agent_refuses_in_words_that_reach_the_client_and_takes_new_rules_over(tmp_path, monkeypatch):
    adapter = ScriptedAdapter()
    adapter.script = ENGINE
    monkeypatch.setattr(agent_module, "adapter", lambda name: adapter)
    monkeypatch.setattr(agent_module, "resolve", lambda source: source)
    monkeypatch.setattr(agent_module, "LOOK_S", 0.1)
    bed = Bed(tmp_path)
    await bed.start(AgentTrust(groups=("all",), gateways=("beta",)))
    async with aiohttp.ClientSession() as http:
        assert [(await bed.ask(http, "a"))[0] for _ in range(2)] == [200, 200]
        status, document = await bed.ask(http, "b")
        assert (status, document["error"]["fabric_code"]) == (403, "FT8111")
        assert "'few'" in document["error"]["message"]
        totals = (await bed.status(http))["totals"]
        assert (totals["retries"], totals["failures"]) == (0, 0)
        assert sum(agent.status().refused for agent, _, _ in bed.agents) == 1, "it is not tried at another replica"
        counted = [agent.status().requests_of for agent, _, _ in bed.agents]
        assert {name for names in counted for name in names} == {f"all/{Keyring([ANNA], 't').pseudonym('anna')}"}
        engines = [agent.status().engine.pid for agent, _, _ in bed.agents]
        for _, folder, told in bed.agents:
            new = msgspec.structs.replace(told, trust=AgentTrust(groups=("all", "few"), gateways=("beta",)))
            folder.spec.write_bytes(encode_spec(new))
        await until(lambda: all(f.health().get("spec") == mark_of(f.spec.read_bytes()) for _, f, _ in bed.agents))
        assert (await bed.ask(http, "b"))[0] == 200
        assert [agent.status().engine.pid for agent, _, _ in bed.agents] == engines
    await bed.stop()


@pytest.mark.asyncio
async def test_all_that_a_gateway_offers_reaches_an_engine_and_the_rest_is_no_failure_of_it(tmp_path, monkeypatch):
    adapter = ScriptedAdapter()
    adapter.script = ENGINE
    monkeypatch.setattr(agent_module, "adapter", lambda name: adapter)
    monkeypatch.setattr(agent_module, "resolve", lambda source: source)
    bed = Bed(tmp_path)
    await bed.start(AgentTrust(groups=("all",), gateways=("beta",)))
    async with aiohttp.ClientSession() as http:
        assert {path: (await bed.ask(http, "a", path))[0] for path in MODEL_PATHS} == dict.fromkeys(MODEL_PATHS, 200)
        monkeypatch.setattr(forwarder_module, "MODEL_PATHS", frozenset({"/v1/chat/completions"}))  # of another release
        for _ in range(4):
            status, document = await bed.ask(http, "a", "/tokenize")
            assert (status, document["error"]["fabric_code"]) == (404, "FT8107")
        totals = (await bed.status(http))["totals"]
        assert (totals["retries"], totals["failures"]) == (0, 0)
        assert await replicas_out(bed, http) == ["0.0", "0.0"]
    await bed.stop()


async def replicas_out(bed, http):
    async with http.get(bed.process["status"].removesuffix("/status") + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return [line.split()[-1] for line in lines if line.startswith("fabric_replica_out{")]


@pytest.mark.asyncio
async def test_an_agent_does_not_take_over_what_needs_another_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "adapter", lambda name: ScriptedAdapter())
    Federation(tmp_path).node("run/identity")
    folder = RunFolder(tmp_path / "run")
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="fake")
    folder.spec.write_bytes(encode_spec(spec))
    agent = Agent(spec, folder, SystemClock(), python=sys.executable, cache=tmp_path)
    await agent._watch.look()
    assert agent.health().spec == mark_of(folder.spec.read_bytes())
    former, wanted = agent.health().spec, msgspec.structs.replace(spec, max_num_seqs=9)
    folder.spec.write_bytes(encode_spec(wanted))
    await agent._watch.look()
    assert agent.health().spec == former
    assert [event.kind for event in agent.status().events] == ["reload-refused"]
