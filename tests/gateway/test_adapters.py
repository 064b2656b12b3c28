"""Adapters at the gateway: names of their own on engines that they share with their base."""

import json

import aiohttp
import pytest

from fabrictool.domain.steps import MeasuredSteps
from fabrictool.domain.terms import KeyLimits, Terms
from fabrictool.gateway.directory import Directory
from fabrictool.gateway.keyfile import KeyRow
from fabrictool.gateway.keys import Keyring, hash_key
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody
from fabrictool.mesh.registry import Serving

CHAT = "/v1/chat/completions"
SESSION, SERVICE = b"n" * 16, b"e" * 16


def serving(*adapters, **more):
    node = NodeBody(
        federation="f", session=SESSION, lifecycle=Lifecycle.SERVING, version=1, role="agent", fabric="f",
        provider="alpha", site="s", cluster="c", node="n",
    )  # fmt: skip
    service = ServiceBody(
        federation="f", session=SESSION, service=SERVICE, lifecycle=Lifecycle.SERVING, version=1, replica="m/0",
        model="m", engine="vllm", adapters=adapters, **more,
    )  # fmt: skip
    return Serving(node, service)


@pytest.fixture
def directory():
    directory = Directory()
    directory.follow(SESSION, [serving("law", "sql")], None, 0.0)
    return directory


def test_an_engine_is_a_target_for_each_name_and_loaded_by_all(directory):
    (base,), (law,), (sql,) = (directory.of_model(name) for name in ("m", "law", "sql"))
    assert sorted(directory.models()) == ["law", "m", "sql"]
    law.in_flight, sql.in_flight = 2, 3
    assert (base.load, law.load, sql.load) == (5, 5, 5)
    assert law.ejection is base.ejection
    assert law.connector is base.connector
    directory.report(SESSION, ((SERVICE, 7, 1, 0.5, 4),))
    assert [(t.running, t.waiting, t.kv_use, t.foreign) for t in (base, law, sql)] == [(7, 1, 0.5, 4)] * 3
    directory.report(SESSION, ())
    assert [(t.running, t.load) for t in (base, law)] == [(0, 5), (0, 5)]


def test_what_a_replica_measured_and_how_its_engine_serves_is_known_of_all_its_names():
    directory, steps = Directory(), MeasuredSteps((4_000, 5_000), (3_000, 3_100))
    directory.follow(SESSION, [serving("law", steps=steps, by_priority=True)], None, 0.0)
    assert [(t.steps, t.by_priority) for t in directory] == [(steps, True)] * 2
    directory.follow(SESSION, [], None, 1.0)
    directory.follow(SESSION, [serving()], None, 2.0)
    assert [(t.steps, t.by_priority) for t in directory] == [(None, False)]


def test_with_the_engine_all_of_its_names_go(directory):
    directory.follow(SESSION, [], None, 1.0)
    assert list(directory.models()) == []


def test_an_adapter_of_a_planned_model_is_worth_waiting_for(directory):
    directory.follow(SESSION, [], None, 0.0)
    assert not directory.may_come("law", 1e6)
    directory.planned, directory.bases = {"m": (0,)}, {"law": "m"}
    assert directory.may_come("law", 1e6)
    assert not directory.may_come("sql", 1e6)


async def ask(bed, model):
    headers = {"authorization": f"Bearer {bed.KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(bed.url + CHAT, json={"model": model, "messages": []}) as answer,
    ):
        body = json.loads(await answer.text())
        return answer.status, body.get("error", {}).get("fabric_code")


@pytest.fixture
def terms():
    """Of the one key."""
    return lambda bed, **terms: bed.gateway.reload(
        bed.gateway._rules, Keyring([KeyRow("t1", hash_key(bed.KEY), "everyone", Terms(**terms))]), {}
    )


@pytest.mark.asyncio
async def test_the_bases_limits_count_for_its_adapters(make_bed, terms):
    bed = await make_bed().start()
    try:
        bed.gateway.stand_on({"only-a": "m"})
        terms(bed)
        bed.gateway.accounts.limit_models({"m": KeyLimits(requests_per_minute=2)})
        assert [await ask(bed, name) for name in ("m", "only-a")] == [(200, None)] * 2
        assert [status for status, _ in [await ask(bed, name) for name in ("m", "only-a")]] == [429, 429]
    finally:
        await bed.stop()


@pytest.mark.asyncio
async def test_a_key_for_a_model_is_good_for_its_adapters_and_one_for_an_adapter_for_it_alone(make_bed, terms):
    bed = await make_bed().start()
    try:
        bed.gateway.stand_on({"only-a": "m"})
        terms(bed, models=("m",))
        assert [(await ask(bed, name))[0] for name in ("m", "only-a")] == [200, 200]
        terms(bed, models=("only-a",))
        assert [await ask(bed, name) for name in ("m", "only-a")] == [(403, "FT8124"), (200, None)]
        headers = {"authorization": f"Bearer {bed.KEY}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(bed.url + "/v1/models") as answer:
            (listed,) = (await answer.json())["data"]
        assert (listed["id"], listed["parent"]) == ("only-a", "m")
    finally:
        await bed.stop()
