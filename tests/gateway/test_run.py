"""A gateway as a unit of a fabric: what it needs to start, and what it says while it runs."""

import asyncio
import os
import signal
from types import SimpleNamespace
from unittest.mock import patch

import aiohttp
import msgspec
import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import InvalidInputError
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec, HostPort, encode_spec, mark_of
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import hash_key, keys_digest, pseudonym_of
from fabrictool.gateway.reloading import Reloading
from fabrictool.gateway.rules import routing_rules
from fabrictool.gateway.run import SCRAPED, run_on_mesh
from fabrictool.gateway.tails import OF_A_SESSION_KEPT, SESSIONS_KEPT, Tails
from fabrictool.gateway.view import as_tenant
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.status.documents import Event, GatewayStatus, HandedRow, ModelRow, NodeRow, ServiceRow, Totals
from tests.gateway.conftest import until
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio


def unit(folder, **options):
    """A run folder with an identity in it, and a spec."""
    federation = Federation(folder)
    federation.node("run/identity", role="gateway", **options)
    about = {"fabric": "t", "provider": "alpha", "site": "s", "cluster": "c", "name": "g"}
    anywhere = HostPort("127.0.0.1", 0)
    told = {"tenants": {"anna": "all"}, "replicas": {"m": (0,)}}
    return RunFolder(folder / "run"), GatewaySpec(**about, listen=anywhere, mesh=anywhere, **told)


async def test_a_gateway_whose_tenants_keys_are_missing_does_not_start(tmp_path):
    folder, spec = unit(tmp_path)
    with pytest.raises(InvalidInputError) as refused:
        await run_on_mesh(spec, folder, SystemClock())
    assert refused.value.problems[0].code == "FT8005"


async def test_status_and_metrics_are_on_loopback_and_warn_of_a_certificate_that_ends(tmp_path):
    folder, spec = unit(tmp_path, seconds=3600)
    keys = folder.path / "keys.json"
    keys.write_bytes(encode_keys([KeyRow("anna", hash_key("k" * 20), "all")]))
    keys.chmod(0o600)
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or (folder.path / "process.json").exists())
    document = msgspec.json.decode((folder.path / "process.json").read_bytes())
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://{document['listen']}/status") as answer:
            assert answer.status == 401
        ((scraped,),) = [entry["targets"] for entry in msgspec.json.decode((folder.path / SCRAPED).read_bytes())]
        async with http.get(f"http://{scraped}/metrics") as answer:
            assert "fabric_inflight 0.0" in await answer.text()
        status, warnings = {}, []
        while not warnings:
            async with http.get(document["status"]) as answer:
                status = await answer.json()
            warnings = [e["text"] for e in status["events"] if e["kind"] == "certificate-ends"]
            await asyncio.sleep(0.05)
    assert len(warnings) == 1
    assert "fabrictool apply" in warnings[0]
    (row,) = status["nodes"]
    assert 0 < row["certificate_ends_at"] - status["at"] < 2 * 3600
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == "signal SIGTERM"
    assert not (folder.path / SCRAPED).exists()


async def test_a_tenant_sees_no_events_no_metrics_and_no_nodes_that_serve_it_nothing(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or (folder.path / "process.json").exists())
    listen, url = folder.process()["listen"], folder.process()["status"]
    headers = {"authorization": f"Bearer {'k' * 20}"}
    async with aiohttp.ClientSession() as http:
        async with http.get(url) as answer:
            whole = await answer.json()
        async with http.get(f"http://{listen}/status", headers=headers) as answer:
            seen = await answer.json()
        async with http.get(f"http://{listen}/metrics", headers=headers) as answer:
            assert answer.status == 404
    assert [node["role"] for node in whole["nodes"]] == ["gateway"]
    assert (seen["nodes"], seen["models"], seen["events"]) == ([], [], [])
    assert seen["fabric"] == "t"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)


def service_row(replica, model):
    return ServiceRow(
        service="00", replica=replica, model=model, engine="reference", precision="", context=0, lifecycle="SERVING",
        accepting=True, note="a log line",
    )  # fmt: skip


async def test_what_a_tenant_may_know_of_the_status():
    def node(provider, *models):
        services = [service_row(f"{model}/0", model) for model in models]
        return NodeRow(
            session="00", role="agent", provider=provider, site="s", cluster="c", node="n", lifecycle="SERVING",
            connected=True, services=services, free=[1], certificate_ends_at=1.0,
        )  # fmt: skip

    def model(name, requests, *providers):
        return ModelRow(
            model=name, ready=1, replicas=1, providers=list(providers), in_flight=0, requests=requests, failures=0,
            tokens=10 * requests, planned=2, missing=[f"{name}/1"],
        )  # fmt: skip

    status = GatewayStatus(
        release="1", at=0.0, started_at=0.0, fabric="t", session="05", listen="l:1", mesh="m:1", policy="",
        nodes=[node("alpha", "open", "secret"), node("beta", "open")],
        models=[model("open", 3, "alpha", "beta"), model("secret", 5, "alpha")],
        totals=Totals(requests=8, tokens=80), registry_records=7, registry_root="ab",
        handed=[HandedRow(model="secret", sender="s", receiver="t", prompts=1, tokens=2, octets=3)],
        events=[Event(at=0.0, kind="evicted", subject="x")],
    )  # fmt: skip
    seen = as_tenant(status, lambda provider, model: (provider, model) == ("alpha", "open"))
    assert [(n.provider, [(s.model, s.note) for s in n.services]) for n in seen.nodes] == [("alpha", [("open", "")])]
    assert [(m.model, m.providers, m.planned, m.missing) for m in seen.models] == [("open", ["alpha"], None, [])]
    assert (seen.totals.requests, seen.totals.tokens) == (3, 30)
    assert (seen.events, seen.handed, seen.mesh) == ([], [], "")
    assert (seen.registry_records, seen.registry_root) == (0, "")
    assert [(n.free, n.certificate_ends_at) for n in seen.nodes] == [([], None)]


async def test_the_fleet_is_shown_on_loopback_and_to_no_client(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or (folder.path / "process.json").exists())
    listen, url = folder.process()["listen"], folder.process()["status"]
    async with aiohttp.ClientSession() as http:
        for page in ("/fleet", "/records"):
            async with http.get(url.replace("/status", page)) as answer:
                document = await answer.json()
            assert (document["kind"], document["role"], document["fabric"]) == (page[1:], "gateway", "t")
            async with http.get(f"http://{listen}{page}", headers={"authorization": f"Bearer {'k' * 20}"}) as answer:
                assert answer.status == 404
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)


async def test_a_gateway_that_comes_back_does_not_say_that_it_has_left(tmp_path):
    """`apply` puts `again` into its folder, and stopping it `stopped`."""
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    for mark, left in (("again", False), ("stopped", True)):
        (folder.path / mark).touch()
        (folder.path / "process.json").unlink(missing_ok=True)
        with patch.object(MeshNode, "leave", autospec=True) as leave:
            running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
            await until(lambda task=running: task.done() or (folder.path / "process.json").exists())
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running, 10)
        assert leave.called == left


def keys_file(folder, *keys):
    rows = [KeyRow("anna", hash_key(key), "all") for key in keys]
    path = folder.path / "keys.json"
    path.write_bytes(encode_keys(rows))
    path.chmod(0o600)
    return keys_digest("t", rows)


async def statuses(http, url, *keys):
    found = []
    for key in keys:
        async with http.get(f"http://{url}/v1/models", headers={"authorization": f"Bearer {key}"}) as answer:
            found.append(answer.status)
    return found


async def test_new_keys_and_rules_are_taken_over_by_the_process_that_serves(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    folder.spec.write_bytes(encode_spec(spec))
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))

    def in_force():
        return folder.health().get("spec") == mark_of(folder.spec.read_bytes())

    await until(lambda: running.done() or ((folder.path / "process.json").exists() and in_force()))
    listen, url = folder.process()["listen"], folder.process()["status"]
    async with aiohttp.ClientSession() as http:
        assert await statuses(http, listen, "k" * 20, "n" * 20) == [200, 401]
        new = msgspec.structs.replace(
            spec,
            keys=keys_file(folder, "n" * 20),
            policy="random",
            weights={"m@c/p:1": 0.5},
            groups={"all": ("alpha",)},
        )
        folder.spec.write_bytes(encode_spec(new))
        await until(in_force)
        assert await statuses(http, listen, "k" * 20, "n" * 20) == [401, 200]
        async with http.get(url) as answer:
            status = await answer.json()
        assert (status["policy"], status["spec"]) == ("random", mark_of(encode_spec(new)))
        (event,) = [event for event in status["events"] if event["kind"] == "reloaded"]
        assert event["text"] == "policy, groups, keys, weights"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == "signal SIGTERM"


async def unchanged():
    """The certificate."""
    return False


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"listen": HostPort("127.0.0.1", 1)}, "a new gateway"),
        ({"keys": "other"}, "not hold the keys"),
        ({"policy": "best"}, "power-of-two"),
        (None, "not a unit's spec"),
    ],
)
async def test_a_spec_that_does_not_load_is_refused_and_the_former_one_stays_in_force(tmp_path, change, word):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    folder.spec.write_bytes(encode_spec(spec))
    told, taken = [], []
    reloading = Reloading(spec, folder, lambda *new: taken.append(new), lambda *it: told.append(it), unchanged)
    assert await reloading.look()
    former = reloading.mark
    assert former == mark_of(folder.spec.read_bytes())
    written = b"{" if change is None else encode_spec(msgspec.structs.replace(spec, retries=9, **change))
    folder.spec.write_bytes(written)
    assert await reloading.look()
    assert (reloading.mark, reloading.spec, taken) == (former, spec, [])
    assert word in reloading.refusal
    assert [event[:2] for event in told] == [("reload-refused", "g")]
    assert not await reloading.look(), "said once"
    folder.spec.write_bytes(encode_spec(msgspec.structs.replace(spec, retries=5)))
    assert await reloading.look()
    assert (reloading.refusal, taken[0][0].retries) == ("", 5)


async def test_a_file_system_that_is_away_for_a_moment_is_no_refusal_for_ever(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "k" * 20))
    folder.spec.write_bytes(encode_spec(spec))
    reloading = Reloading(spec, folder, lambda *_: None, lambda *_: None, unchanged)
    assert await reloading.look()
    away = folder.spec.rename(tmp_path / "away")
    assert await reloading.look()
    assert "FT4302" in reloading.refusal
    away.rename(folder.spec)
    assert await reloading.look()
    assert (reloading.refusal, reloading.mark) == ("", mark_of(folder.spec.read_bytes()))


async def test_the_end_of_a_log_is_taken_from_the_agent_whose_engine_it_was_and_of_our_provider_alone(tmp_path):
    federation = Federation(tmp_path)
    hub, _ = federation.node("hub", role="gateway")
    senders = {name: federation.node(name, provider=name)[0] for name in ("alpha", "beta")}
    port, records = await hub.listen("127.0.0.1", 0), {}
    gateway = GatewayServer(SystemClock(), fabric="t", rules=routing_rules("random", {}, {}, 0), keyring=None)
    gateway.join(hub)
    for name, sender in senders.items():
        sender.dial([("127.0.0.1", port)])
        about = {"federation": sender.federation, "session": sender.session, "version": 1}
        where = {"fabric": "t", "provider": name, "site": "s", "cluster": "c", "node": "n"}
        sender.publish(NodeBody(**about, **where, lifecycle=Lifecycle.SERVING, role="agent"))
        records[name] = [bytes([number]) * 16 for number in range(OF_A_SESSION_KEPT + 2)]
        for service in records[name]:
            what = {"replica": "m/0", "model": "m", "engine": "e"}
            sender.publish(ServiceBody(**about, **what, service=service, lifecycle=Lifecycle.JOIN))
    await until(lambda: len(hub.registry) == 2 * (1 + OF_A_SESSION_KEPT + 2))
    for name, sender in senders.items():
        for service in records[name]:
            gateway.follower.tail_heard(sender.session, service, f"of {name}")
    alpha, beta = senders["alpha"].session, senders["beta"].session
    kept = [gateway.follower.tails.of(alpha, service) for service in records["alpha"]]
    assert kept == ["", ""] + ["of alpha"] * OF_A_SESSION_KEPT
    assert {gateway.follower.tails.of(beta, service) for service in records["beta"]} == {""}
    gateway.follower.tail_heard(alpha, b"x" * 16, "of nobody's engine")
    assert gateway.follower.tails.of(alpha, b"x" * 16) == ""
    for node in (*senders.values(), hub):
        await node.close()


async def test_ends_of_logs_are_kept_of_so_many_sessions():
    tails, registry = Tails(), SimpleNamespace(services_of=lambda session: [SimpleNamespace(service=b"s")])
    for number in range(SESSIONS_KEPT + 1):
        claims = SimpleNamespace(provider="p", role="agent")
        assert tails.take(SimpleNamespace(session=b"%d" % number, claims=claims), b"s", "x", registry, "p")
    assert [tails.of(b"%d" % number, b"s") for number in (0, 1, SESSIONS_KEPT)] == ["", "x", "x"]


async def test_pseudonyms_are_made_before_a_tenant_asks(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, keys=keys_file(folder, "first" * 4), fabric="t")
    folder.spec.write_bytes(encode_spec(spec))
    pseudonym_of.cache_clear()
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or pseudonym_of.cache_info().currsize == 1)
    folder.spec.write_bytes(encode_spec(msgspec.structs.replace(spec, keys=keys_file(folder, "second" * 4))))
    await until(lambda: running.done() or pseudonym_of.cache_info().currsize == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)


async def test_what_another_hub_claims_to_hold_is_not_routed_to_against_the_votes():
    """Only a tunnel proves that a session lives which was voted out."""
    asked, session = [], b"s" * 16
    gateway = GatewayServer(SystemClock(), fabric="t", rules=routing_rules("random", {}, {}, 0), keyring=None)
    registry = SimpleNamespace(serving_of=lambda _, *, wall, linked: asked.append((bool(wall), linked)) or [])
    for straight, relayed in ((None, None), ("a tunnel", None), (None, "a relayed one")):
        relays = SimpleNamespace(tunnel=lambda _, it=relayed: it, hubs_to=lambda _: [b"h" * 16])
        gateway.follower.mesh = SimpleNamespace(
            registry=registry, tunnel=lambda _, it=straight: it, relays=relays, reaches=lambda _: True
        )
        gateway.follower._follow(session)
    assert asked == [(True, False), (True, True), (True, True)]
