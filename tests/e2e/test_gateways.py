"""Two gateways of two providers: neither is needed, and each can be replaced under load."""

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.conftest import ALPHA_KEY, BLUEPRINT, KEY
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GATEWAY = "gateway: {cluster: one, listen: 127.0.0.1:%(listen)s, mesh: 127.0.0.1:%(mesh)s}\n"
EAST = "  east: {cluster: one, listen: 127.0.0.1:%(listen)s, mesh: 127.0.0.1:%(mesh)s}\n"
WEST = "  west: {cluster: two, listen: 127.0.0.1:%(west)s, mesh: 127.0.0.1:%(west_mesh)s}\n"
ONE, BOTH = (BLUEPRINT.replace(GATEWAY, "gateways:\n" + those) for those in (EAST, EAST + WEST))
PROVIDERS = ("alpha", "beta")
REPLICAS = ["replica/tiny/0", "replica/tiny/1"]


@pytest.fixture
def pair(fabric_bed):
    """A fabric with the gateways east and west."""
    assert GATEWAY in BLUEPRINT
    fabric_bed.write(blueprint=BOTH, west=free_port(), west_mesh=free_port())
    return fabric_bed


def ports(bed):
    return [bed.values["listen"], bed.values["west"]]


def ask(port, provider="alpha, beta", key=KEY, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json", "x-fabric-providers": provider},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own loopback URL
        return json.load(answer) | {"provider": answer.headers["x-fabric-provider"]}


def providers(port):
    """Whose replicas answer behind a gateway, each asked by itself."""
    return {ask(port, provider)["provider"] for provider in PROVIDERS}


def pids(bed):
    return {address: unit.pid for (address, state), unit in bed.units().items() if state == "running"}


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def steady_load(addresses, workers=3):
    """Clients that try the next address when one fails; yields what they got, and what no address gave them."""
    answers, failures, over = [], [], threading.Event()

    def client(turn):
        while not over.is_set():
            turn += 1
            errors = []
            for step in range(len(addresses)):
                port = addresses[(turn + step) % len(addresses)]
                try:
                    answers.append(ask(port, PROVIDERS[turn // 2 % 2], max_tokens=8)["provider"])
                    break
                except (OSError, http.client.HTTPException) as error:
                    text = ""
                    if isinstance(error, urllib.error.HTTPError):
                        with error:
                            text = error.read().decode()
                    errors.append(f"{port}: {error!r} {text}")
            else:
                failures.append(errors)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield answers, failures
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_either_gateway_dies_and_the_other_answers_for_all_replicas(pair):
    pair.up()
    assert pair.running() == ["gateway/east", "gateway/west", *REPLICAS]
    for port in ports(pair):
        assert providers(port) == {"alpha", "beta"}
    status = json.loads(pair.run("status", "--json").stdout)
    assert status["good"]
    assert sorted(status["gateways"]) == ["east", "west"]
    for name, other in (("east", "west"), ("west", "east")):
        before = pids(pair)
        os.kill(before[f"gateway/{name}"], signal.SIGKILL)
        survivor = pair.values["west" if other == "west" else "listen"]
        assert providers(survivor) == {"alpha", "beta"}
        shown = json.loads(pair.run("status", "--json", code=1).stdout)
        assert [*shown["gateways"]] == [other]
        assert shown["gateway"]["models"][0]["ready"] == 2
        assert f"gateway/{name} killed" in " ".join(shown["drift"])
        pair.run("reconcile")
        after = pids(pair)
        assert {a: pid for a, pid in after.items() if a != f"gateway/{name}"} == {
            a: pid for a, pid in before.items() if a != f"gateway/{name}"
        }
        until(lambda port=pair.values["listen" if name == "east" else "west"]: providers(port) == {"alpha", "beta"})


def test_a_second_gateway_comes_and_goes_and_restarts_nobody(pair):
    pair.write(blueprint=ONE)
    pair.up()
    before = pids(pair)
    pair.write(blueprint=BOTH)
    plan = json.loads(pair.run("plan", "--json").stdout)
    told = [("update", replica) for replica in REPLICAS]  # beta's gateways may ask, too
    changes = [(a["kind"], a["address"]) for a in plan["actions"] if a["kind"] != "keep"]
    assert changes == [*told, ("create", "gateway/west")]
    pair.run("apply", "--yes")
    both = pids(pair)
    assert both == before | {"gateway/west": both["gateway/west"]}
    assert providers(pair.values["listen"]) == {"alpha", "beta"}
    assert providers(pair.values["west"]) == {"alpha", "beta"}, "the agents heard of it from the registry"
    assert "No changes" in pair.run("plan").stdout
    pair.write(blueprint=ONE)
    pair.run("apply", "--yes")
    assert pids(pair) == before


def test_the_only_gateway_dies_and_another_elsewhere_gets_its_agents(pair):
    pair.write(blueprint=ONE)
    pair.up()
    before = pids(pair)
    os.kill(before["gateway/east"], signal.SIGKILL)
    pair.write(blueprint=ONE.replace("  east:", "  west:"), listen=free_port(), mesh=free_port())
    plan = pair.run("plan").stdout
    assert "no gateway that it knows will be there: it is told of others" in plan
    pair.run("apply", "--yes")
    after = pids(pair)
    assert {address: after[address] for address in REPLICAS} == {address: before[address] for address in REPLICAS}
    assert providers(pair.values["listen"]) == {"alpha", "beta"}
    assert "No changes" in pair.run("plan").stdout


def test_both_gateways_are_replaced_under_load_and_nothing_fails(pair):
    pair.up()
    before = pids(pair)
    old = ports(pair)
    pair.write(blueprint=BOTH, listen=free_port(), west=free_port())
    with steady_load([*old, *ports(pair)]) as (answers, failures):
        until(lambda: len(answers) > 20)
        pair.run("apply", "--yes")
        enough = len(answers) + 20
        until(lambda: len(answers) > enough)
    assert failures == []
    assert set(answers) == {"alpha", "beta"}
    after = pids(pair)
    assert sorted(address for address in after if after[address] != before[address]) == ["gateway/east", "gateway/west"]
    for port in ports(pair):
        assert providers(port) == {"alpha", "beta"}


def test_the_only_gateway_is_replaced_at_its_address_and_neither_a_request_nor_a_stream_notices(fabric_bed):
    """Its successor takes over the sockets: nobody is refused, whether he keeps his connection or not."""
    assert GATEWAY in BLUEPRINT
    fabric_bed.up()
    before, port = pids(fabric_bed), fabric_bed.values["listen"]
    fabric_bed.write(blueprint=BLUEPRINT.replace(GATEWAY, GATEWAY.replace("}\n", ", trace: 1MiB}\n")))
    plan = json.loads(fabric_bed.run("plan", "--json").stdout)
    changes = [(a["kind"], a["address"]) for a in plan["actions"] if a["kind"] != "keep"]
    assert changes == [("replace", "gateway/main")]
    over, kept, asked = threading.Event(), [], http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

    def keeps_its_connection():
        while not over.is_set():
            try:
                asked.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                answer = asked.getresponse()
                kept.append((answer.status, len(answer.read()) > 0))
            except (OSError, http.client.HTTPException) as error:
                kept.append(repr(error))
                asked.close()

    keeper = threading.Thread(target=keeps_its_connection)
    keeper.start()
    try:
        with steady_load([port]) as (answers, failures):
            until(lambda: len(answers) > 10)
            shown = fabric_bed.run("apply", "--yes").stdout
            enough = len(answers) + 20
            until(lambda: len(answers) > enough)
    finally:
        over.set()
        keeper.join()
        asked.close()
    assert "replace gateway/main" in shown
    assert failures == []
    assert set(kept) == {(200, True)}
    after = pids(fabric_bed)
    assert [address for address in after if after[address] != before[address]] == ["gateway/main"]
    assert "No changes" in fabric_bed.run("plan").stdout


def test_a_changed_key_reaches_both_gateways_while_they_serve(pair):
    pair.up()
    before = pids(pair)
    new = "ftk_another-key-of-the-same-tenant"
    with steady_load(ports(pair), workers=1) as (_, failures):
        pair.environment["FT_ALPHA_KEY"] = new
        shown = pair.run("apply", "--yes").stdout
        assert "2 update" in shown
    assert failures == []
    assert pids(pair) == before
    for port in ports(pair):
        assert ask(port, "alpha", key=new)["provider"] == "alpha"
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(port, "alpha", key=ALPHA_KEY)
        with refused.value as answer:
            assert answer.code == 401
    status = json.loads(pair.run("status", "--json").stdout)
    assert [unit["spec"] for unit in status["units"] if unit["address"].startswith("gateway")] == ["current"] * 2
    assert "reloaded" in pair.run("events").stdout
    assert "No changes" in pair.run("plan").stdout


def test_another_provider_for_a_group_restarts_nobody_and_no_request_meets_an_agent_that_does_not_know(pair):
    pair.up()
    before = pids(pair)
    pair.write(blueprint=BOTH.replace("only-alpha: {allow: [alpha]}", "only-alpha: {allow: [alpha, beta]}"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(pair.values["listen"], "beta", key=ALPHA_KEY)
    with refused.value as answer:
        assert answer.code == 403
    over, codes = threading.Event(), []

    def watch():
        while not over.is_set():
            try:
                ask(pair.values["listen"], key=ALPHA_KEY)
            except urllib.error.HTTPError as error:
                with error:
                    codes.append(error.read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert "3 update" in pair.run("apply", "--yes").stdout, "beta's agent, and both gateways"
    finally:
        over.set()
        watcher.join()
    assert codes == []
    assert pids(pair) == before
    for port in ports(pair):
        assert ask(port, "beta", key=ALPHA_KEY)["provider"] == "beta"
    assert "No changes" in pair.run("plan").stdout
