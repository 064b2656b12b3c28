"""Engines that lie about their tokens, clients that write long headers, a store that is there and silent: what a
reviewer broke once.
"""

import asyncio
import contextlib
import json
import socket

import aiohttp
import msgspec
import pytest
from aiohttp import web

from fabrictool.domain.terms import BudgetTerms, KeyLimits, Terms
from fabrictool.gateway.accounts import KeyAccounts
from fabrictool.gateway.keeping import RECORDS_FILE, budgeting, spooling
from fabrictool.gateway.keyfile import KeyRow
from fabrictool.gateway.keys import Consumer, Keyring, hash_key
from fabrictool.gateway.records import RequestRecord, StoreAwayError
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.tables import REQUESTS
from tests.gateway.conftest import until
from tests.gateway.scripted import ScriptedEngine, says, streams
from tests.manual_clock import ManualClock

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HUGE = [-5, -(2**70), 2**41, 2**63, 2**64, 10**30]


@pytest.fixture
def engine():
    return ScriptedEngine()


async def gateway(make_bed, engine, **terms):
    await engine.start()
    bed = await make_bed().start(nodes=[StaticNode(engine.url, ["m"], "alpha", context=4096)])
    rows = [KeyRow("t1", hash_key(bed.KEY), "everyone", Terms(**terms))]
    bed.gateway.reload(bed.gateway._rules, Keyring(rows), {})
    bed.kept = []
    bed.gateway.sinks.append(bed.kept.append)
    return bed


async def post(bed, path=CHAT, headers=None, **fields):
    headers = {"authorization": f"Bearer {bed.KEY}"} | (headers or {})
    body = {"model": "m", "messages": [], "max_tokens": 8} | fields
    async with aiohttp.ClientSession(headers=headers) as http, http.post(bed.url + path, json=body) as answer:
        return answer.status, await answer.text()


@pytest.mark.asyncio
async def test_figures_that_cannot_be_stop_nothing(make_bed, engine, tmp_path):
    bed = await gateway(make_bed, engine, budget=BudgetTerms(10**9), limits=KeyLimits(tokens_per_minute=10**9))
    store = StoreProcess(lambda: str(tmp_path / RECORDS_FILE))
    try:
        async with spooling(tmp_path, store, "f", "g") as spool, budgeting(bed.gateway.accounts, store):
            bed.gateway.record_in(spool, opt_out=False)
            for figure in HUGE:
                for usage in ({"prompt_tokens": figure, "completion_tokens": 1}, {"completion_tokens": figure}):
                    engine.script.append(says({"id": "c", "choices": [], "usage": usage}))
                    assert (await post(bed))[0] == 200
            engine.script.append(
                says({"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
            )
            assert (await post(bed))[0] == 200
            await until(lambda: spool.waiting_octets == 0)
            bed.gateway._metrics.fold()
            ((purse, _),) = bed.gateway.accounts._purses.values()
            assert purse.reserved == 0
        with contextlib.closing(RecordStore(str(tmp_path / RECORDS_FILE))) as records:
            rows = records.read(REQUESTS.select())
        assert len(rows) == 2 * len(HUGE) + 1
        assert [record.counted for record in bed.kept] == [False] * 2 * len(HUGE) + [True]
        assert all(0 <= record.prompt_tokens + record.completion_tokens < 10**6 for record in bed.kept)
    finally:
        await asyncio.to_thread(store.close)
        await bed.stop()
        await engine.stop()


def messages(last=b""):
    """A stream as vLLM has it: the prompt's figures come first, with an answer of nothing."""
    begin = {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 0}
    pieces = [{"type": "message_start", "message": {"id": "m1", "usage": begin}}]
    pieces += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word"}} for _ in range(40)
    ]
    pieces += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
    ]
    return [f"event: {piece['type']}\ndata: {json.dumps(piece)}\n\n".encode() for piece in pieces] + [last]


@pytest.mark.asyncio
async def test_a_message_that_its_client_cuts_off_is_not_free(make_bed, engine):
    bed = await gateway(make_bed, engine)
    try:

        async def begin(request):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for piece in messages():
                await response.write(piece)
            await engine.release.wait()
            return response

        engine.script.append(begin)
        headers = {"authorization": f"Bearer {bed.KEY}"}
        body = {"model": "m", "messages": [], "max_tokens": 100, "stream": True}
        async with aiohttp.ClientSession(headers=headers) as http, http.post(bed.url + MESSAGES, json=body) as answer:
            text = b""
            while b"partial_json" not in text:
                text += await answer.content.readany()
        await until(lambda: bed.kept)
        (record,) = bed.kept
        assert (record.end, record.completion_tokens, record.prompt_tokens) == ("cancelled", 42, 12)
        assert not record.counted
        engine.release.set()
        last = {"type": "message_delta", "usage": {"output_tokens": 50}}
        engine.script.append(streams(*messages(f"data: {json.dumps(last)}\n\n".encode())))
        await post(bed, MESSAGES, stream=True)
        assert (bed.kept[1].prompt_tokens, bed.kept[1].cached_tokens, bed.kept[1].completion_tokens) == (12, 7, 50)
        assert bed.kept[1].counted
    finally:
        await bed.stop()
        await engine.stop()


@pytest.mark.asyncio
async def test_an_answer_that_is_too_large_to_hold_is_counted_all_the_same(make_bed, engine):
    bed = await gateway(make_bed, engine)
    try:
        usage = {"prompt_tokens": 11, "completion_tokens": 6000}
        engine.script.append(says({"id": "c", "choices": [{"text": "x" * (9 << 20)}], "usage": usage}))
        status, text = await post(bed)
        assert (status, len(text) > 9 << 20) == (200, True)
        (record,) = bed.kept
        assert (record.prompt_tokens, record.completion_tokens, record.counted) == (11, 6000, True)
    finally:
        await bed.stop()
        await engine.stop()


@pytest.mark.asyncio
async def test_an_answer_without_figures_costs_a_budget_what_was_set_aside(make_bed, engine):
    bed = await gateway(make_bed, engine, budget=BudgetTerms(10**6))
    try:
        ledger = Ledger()
        async with budgeting(bed.gateway.accounts, ledger):
            engine.script.append(says({"id": "c", "choices": []}))
            await post(bed)
        assert 1024 < ledger.taken < 4096
    finally:
        await bed.stop()
        await engine.stop()


@pytest.mark.asyncio
async def test_long_headers_leave_nothing_behind(make_bed, engine):
    bed = await gateway(make_bed, engine)
    try:
        for number in range(30):
            names = ", ".join(f"nobody{number}-{n}" for n in range(200))
            assert (await post(bed, headers={"x-fabric-providers": f"alpha, {names}"}))[0] == 200
            status, text = await post(bed, headers={"x-fabric-labels": f"{names}"})
            assert (status, "FT8114" in text) == (400, True)
        kept = {key[3] for key in bed.gateway.directory._entitled}
        assert kept <= {None, frozenset({"alpha"})}
    finally:
        await bed.stop()
        await engine.stop()


@pytest.mark.asyncio
async def test_what_is_refused_leaves_no_record_where_none_is_wanted(make_bed, engine):
    bed = await gateway(make_bed, engine)
    try:
        bed.gateway._opt_out = True
        assert (await post(bed, headers={"x-fabric-record": "no"}, messages=7, model=7))[0] == 400
        assert bed.kept == []
        assert 'code="400"' in bed.gateway.exposition().decode()
    finally:
        await bed.stop()
        await engine.stop()


class Ledger:
    """Has all that is asked for; the first `fails` calls of `give` do not come back."""

    def __init__(self, fails=0):
        self.taken, self.fails, self.takes = 0, fails, 0

    def take(self, account, period, *, wanted, limit):
        self.taken += wanted
        self.takes += 1
        return wanted

    def give(self, account, period, tokens):
        if self.fails:
            self.fails -= 1
            raise StoreAwayError.of("FT8120", "away", hint="")
        self.taken -= tokens


def people(number):
    budget = BudgetTerms(1_000_000)
    return {f"k{n}": Consumer(f"k{n}", None, f"{n}", f"k{n}", Terms(budget=budget)) for n in range(number)}


@pytest.mark.asyncio
async def test_purses_that_could_not_be_given_back_are_given_back_later():
    clock, ledger = ManualClock(), Ledger(fails=1)
    accounts = KeyAccounts(clock, "f")
    accounts.change_terms(people(200))
    await accounts.turn(ledger)
    held = ledger.taken
    clock.advance(100.0)
    await accounts.turn(ledger)
    assert ledger.taken == held, "the ledger was away"
    await accounts.turn(ledger)
    assert ledger.taken == held // 200, "all but the one that was on its way"


@pytest.mark.asyncio
async def test_one_key_that_is_made_fills_one_purse():
    clock, ledger = ManualClock(), Ledger()
    accounts = KeyAccounts(clock, "f")
    accounts.change_terms(people(200))
    await accounts.turn(ledger)
    clock.advance(100.0)
    await accounts.turn(ledger)
    assert ledger.taken == 0
    before = ledger.takes
    accounts.change_terms(people(201))
    await accounts.turn(ledger)
    assert ledger.takes == before + 1


def test_a_store_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("fabrictool.gateway.storeprocess.CALL_S", 0.5)
    monkeypatch.setattr("fabrictool.gateway.storeprocess.END_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/d"
        process = StoreProcess(lambda: address)
        try:
            with pytest.raises(StoreAwayError):
                process.put("f", "g", b"{}\n")
            with pytest.raises(StoreAwayError):
                process.take("a", "total", wanted=1, limit=1)
        finally:
            process.close()


def test_a_record_that_no_table_holds_is_counted_and_stops_no_other(tmp_path, postgres):
    good = RequestRecord("a", 1.0, CHAT, 200, "answered", 1.0, model="m")
    lines = [
        msgspec.json.encode(msgspec.structs.replace(good, id=f"{n}", **change))
        for n, change in enumerate(
            ({}, {"prompt_tokens": 2**63}, {"completion_tokens": -1}, {"replica": "a\0b"}, {"status": 2**70}, {})
        )
    ]
    for address in (str(tmp_path / RECORDS_FILE), postgres.url):
        process = StoreProcess(lambda address=address: address)
        try:
            assert process.put("f", "g", b"\n".join(lines)) == 3
            with contextlib.closing(RecordStore(address)) as store:
                assert sorted(row[0] for row in store.read(REQUESTS.select())) == ["0", "3", "5"]
        finally:
            process.close()
