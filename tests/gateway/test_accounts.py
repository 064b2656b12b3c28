"""Keys with terms: models, an end, limits, and budgets that no number of gateways overspends."""

import asyncio
import json
import os
import signal
import threading

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.domain.terms import BudgetTerms, KeyLimits, Terms
from fabrictool.gateway.accounts import KeyAccounts, Ticket, most_tokens, period_of
from fabrictool.gateway.directory import Directory
from fabrictool.gateway.keeping import RECORDS_FILE, budgeting, records_folder
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import Consumer, Keyring, hash_key
from fabrictool.gateway.openai import GatewayResponse, peek
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.run import run_on_mesh
from fabrictool.gateway.runlist import run_on_list
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.tables import REQUESTS
from tests.gateway.conftest import until
from tests.gateway.test_run import unit
from tests.manual_clock import ManualClock

CHAT = "/v1/chat/completions"


def with_terms(bed, **terms):
    rows = [KeyRow("t1", hash_key(bed.KEY), "everyone", Terms(**terms)), KeyRow("t2", hash_key(bed.ALPHA_KEY))]
    bed.gateway.reload(bed.gateway._rules, Keyring(rows), {})


async def ask(bed, key=None, **fields):
    headers = {"authorization": f"Bearer {key or bed.KEY}"}
    body = {"model": "m", "messages": []} | fields
    async with aiohttp.ClientSession(headers=headers) as http, http.post(bed.url + CHAT, json=body) as answer:
        return answer, json.loads(await answer.text())


def refusal(outcome):
    answer, body = outcome
    return answer.status, body["error"]["code"], body["error"]["fabric_code"]


@pytest.mark.asyncio
async def test_a_key_of_some_models(bed):
    with_terms(bed, models=("only-a",))
    assert (await ask(bed, model="only-a"))[0].status == 200
    assert refusal(await ask(bed)) == (403, "model_not_allowed", "FT8124")
    assert (await ask(bed, bed.ALPHA_KEY))[0].status == 200, "terms are a key's own"
    headers = {"authorization": f"Bearer {bed.KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(bed.url + "/v1/models") as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == ["only-a"]


@pytest.mark.asyncio
async def test_a_key_that_ends(bed):
    with_terms(bed, expires_at=bed.clock.wall() + 10)
    assert (await ask(bed))[0].status == 200
    bed.clock.advance(10)
    assert refusal(await ask(bed)) == (401, "invalid_api_key", "FT8102")


@pytest.mark.asyncio
async def test_limits_of_a_key(bed):
    kept = []
    bed.gateway.sinks.append(kept.append)
    with_terms(bed, limits=KeyLimits(requests_per_minute=2))
    assert [(await ask(bed))[0].status for _ in range(2)] == [200, 200]
    limited = await ask(bed)
    assert refusal(limited) == (429, "rate_limit_exceeded", "FT8125")
    assert limited[0].headers["retry-after"] == "30"
    assert (kept[-1].status, kept[-1].end, kept[-1].model, kept[-1].tenant) == (429, "refused", "m", "t1")
    bed.clock.advance(30)
    assert (await ask(bed))[0].status == 200


@pytest.mark.asyncio
async def test_the_limits_of_a_model_are_everybodys(bed):
    bed.gateway.accounts.limit_models({"m": KeyLimits(tokens_per_minute=5)})
    assert (await ask(bed))[0].status == 200
    assert refusal(await ask(bed, bed.ALPHA_KEY))[2] == "FT8125"
    assert (await ask(bed, model="only-a"))[0].status == 200


@pytest.mark.asyncio
async def test_open_requests_of_a_key_are_counted_to_their_ends(bed):
    with_terms(bed, limits=KeyLimits(concurrency=1))
    bed.a.mode = bed.b.mode = "hang"
    first = asyncio.create_task(ask(bed))
    await until(lambda: bed.gateway.status().totals.in_flight == 1)
    assert refusal(await ask(bed))[2] == "FT8125"
    first.cancel()
    await until(lambda: bed.gateway.status().totals.in_flight == 0)
    bed.a.mode = bed.b.mode = "ok"
    assert (await ask(bed))[0].status == 200


@pytest.mark.asyncio
async def test_a_body_that_cannot_be_asked_for_figures_takes_no_place(bed):
    """It is no UTF-8 where nobody looked before."""
    kept = []
    bed.gateway.sinks.append(kept.append)
    bed.gateway.accounts.limit_models({"m": KeyLimits(concurrency=1)})
    body = b'{"model":"m","stream":true,"messages":[],"stream_options":{"include_usage":false,"\xff":1}}'
    headers = {"authorization": f"Bearer {bed.KEY}", "content-type": "application/json"}
    url = bed.url + "/v1/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, data=body) as answer:
        assert (answer.status, (await answer.json())["error"]["fabric_code"]) == (400, "FT8101")
    assert [(record.status, record.end) for record in kept] == [(400, "refused")]
    assert (await ask(bed))[0].status == 200


@pytest.mark.interpreted
@pytest.mark.asyncio
async def test_a_fault_of_ours_gives_back_what_its_request_took(bed, monkeypatch):
    bed.gateway.accounts.limit_models({"m": KeyLimits(concurrency=1)})
    with monkeypatch.context() as broken:
        broken.setattr("fabrictool.gateway.gateway.passed_on", lambda *_: 1 / 0)
        assert (await ask(bed))[0].status == 500
    assert (await ask(bed))[0].status == 200


@pytest.mark.asyncio
async def test_a_budget_is_set_aside_used_and_given_back(bed, tmp_path):
    """The engines say 5 tokens a request."""
    ledger = StoreProcess(lambda: str(tmp_path / "r.db"))
    with_terms(bed, budget=BudgetTerms(3000))
    async with budgeting(bed.gateway.accounts, ledger):
        assert (await ask(bed, max_tokens=100))[0].status in (200, 429)
        await until(lambda: next(iter(bed.gateway.accounts._purses.values()))[0].held > 1100)
        for _ in range(5):
            assert (await ask(bed, max_tokens=100))[0].status == 200
        assert refusal(await ask(bed, max_tokens=3000)) == (429, "insufficient_quota", "FT8126")
        assert refusal(await ask(bed, model="m", max_tokens=None))[2] in ("FT8126", "FT8127")
    account = f"test:t1/{hash_key(bed.KEY)[:12]}"
    left = ledger.take(account, "total", wanted=9999, limit=3000)
    ledger.close()
    assert left in (3000 - 5 * 5, 3000 - 6 * 5)


class SlowLedger:
    """A ledger that answers when it is let; not a store."""

    def __init__(self):
        self.open = threading.Event()
        self.taken = []

    def take(self, account, period, *, wanted, limit):
        self.open.wait(20)
        self.taken.append(wanted)
        return min(wanted, limit)

    def give(self, account, period, tokens):
        self.taken.append(-tokens)


@pytest.mark.asyncio
async def test_a_request_waits_while_its_purse_is_filled(bed):
    """After a rest its purse was given back: the first request takes longer, and is not refused."""
    kept, ledger = [], SlowLedger()
    bed.gateway.sinks.append(kept.append)
    with_terms(bed, budget=BudgetTerms(100_000))
    ledger.open.set()
    async with budgeting(bed.gateway.accounts, ledger):
        assert (await ask(bed, max_tokens=10))[0].status == 200
        bed.clock.advance(61)
        await bed.gateway.accounts.turn(ledger)
        assert ledger.taken[-1] < 0, "it was given back"
        ledger.open.clear()
        several = [asyncio.create_task(ask(bed, max_tokens=10)) for _ in range(4)]
        gone = asyncio.create_task(ask(bed, max_tokens=10))
        await until(lambda: len(bed.gateway.accounts._after_turn) == 5)
        gone.cancel()
        await until(lambda: kept[-1].status == 499)
        assert (kept[-1].end, kept[-1].model) == ("cancelled", "m")
        ledger.open.set()
        assert [answer.status for answer, _ in await asyncio.gather(*several)] == [200] * 4
        assert len(kept) == 6
    assert bed.gateway.status().totals.in_flight == 0


@pytest.mark.asyncio
async def test_a_request_does_not_wait_for_ever(bed):
    ledger = SlowLedger()
    accounts = bed.gateway.accounts
    with_terms(bed, budget=BudgetTerms(100_000))
    waiting = asyncio.create_task(ask(bed, max_tokens=10))
    await until(lambda: accounts._after_turn)
    bed.clock.advance(9)
    assert refusal(await waiting) == (429, "rate_limit_exceeded", "FT8125")
    ledger.open.set()
    async with budgeting(accounts, ledger):
        assert (await ask(bed, max_tokens=10))[0].status == 200


@pytest.mark.parametrize(
    ("path", "fields", "context", "most"),
    [
        (CHAT, {"max_tokens": 10}, 4096, 1024 + 10),
        (CHAT, {"max_tokens": 10, "n": 3}, 4096, 3 * 1024 + 30),
        (CHAT, {"max_tokens": 100_000}, 4096, 4096),
        (CHAT, {"max_tokens": 100_000}, 0, 1024 + 100_000),
        (CHAT, {"max_completion_tokens": 10, "max_tokens": 7}, 0, 1024 + 10),
        (CHAT, {"max_tokens": -5}, 0, None),
        (CHAT, {"max_tokens": -5, "max_completion_tokens": 10}, 4096, 4096),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 100_000}, 0, 1024 + 100_000),
        (CHAT, {"max_output_tokens": 10}, 0, None),
        (CHAT, {"max_tokens": 10, "n_predict": -1}, 4096, 4096),
        ("/v1/completions", {"max_completion_tokens": 1}, 4096, 4096),
        ("/v1/completions", {"max_completion_tokens": 1000, "max_tokens": 10}, 0, 1024 + 1000),
        ("/v1/messages", {"max_completion_tokens": 1, "max_tokens": 100}, 0, 1024 + 100),
        ("/v1/responses", {"max_tokens": 1}, 0, None),
        (CHAT, {}, 4096, 4096),
        (CHAT, {"n": 2}, 4096, 8192),
        (CHAT, {}, 0, None),
        (CHAT, {"max_tokens": 10, "messages": [{"image_url": "x"}]}, 0, None),
        (CHAT, {"max_tokens": 10, "messages": [{"image_url": "x"}]}, 4096, 4096),
        ("/v1/completions", {"max_tokens": 10, "prompt": ["a", "b"]}, 0, 2 * 1024 + 20),
        ("/v1/completions", {"max_tokens": 10, "prompt": [1, 2]}, 0, 1024 + 10),
        ("/v1/responses", {"max_output_tokens": 10, "previous_response_id": "r"}, 4096, 4096),
        ("/v1/embeddings", {"input": "x"}, 0, 1024),
        ("/v1/rerank", {"query": "q" * 98, "documents": ["a", "b", "c"]}, 0, 3 * (100 + 1024)),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c" * 48, "d"]}, 0, 2 * (50 + 1024)),
    ],
)
def test_what_a_request_can_cost(path, fields, context, most):
    body = msgspec.json.encode({"model": "m"} | fields)
    bounded = most_tokens(peek(body, path), path, body, context)
    capped = most is None or (context and most % context == 0)
    assert bounded == (most if capped else most + len(body))


def test_an_escape_cannot_hide_a_picture():
    body = b'{"model": "m", "max_tokens": 10, "messages": [{"image\\u005furl": "x"}]}'
    assert most_tokens(peek(body, CHAT), CHAT, body, 4096) == 4096
    harmless = b'{"model": "m", "max_tokens": 10, "messages": [{"content": "caf\\u00e9 \\u003cb\\u003e"}]}'
    assert most_tokens(peek(harmless, CHAT), CHAT, harmless, 4096) == 1024 + 10 + len(harmless)


def test_periods():
    wall = 1_763_769_600.0
    assert [period_of(BudgetTerms(1, per), wall) for per in ("day", "month", "total")] == [
        "2025-11-22",
        "2025-11",
        "total",
    ]


class FaultyLedger:
    """In memory; `fails`: before it is done, or after."""

    def __init__(self):
        self.taken, self.fails = 0, ""

    def _failing(self, when):
        if self.fails == when:
            self.fails = ""
            raise FabrictoolError.of("FT8120", "away")

    def take(self, account, period, *, wanted, limit):
        self._failing("before")
        granted = max(0, min(wanted, limit - self.taken))
        self.taken += granted
        self._failing("after")
        return granted

    def give(self, account, period, tokens):
        self._failing("before")
        self.taken -= tokens
        self._failing("after")


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 400)),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(["counted", "cancelled", "refused"])),
    st.tuples(st.just("turn"), st.integers(0, 2), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("crash"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("stop"), st.integers(0, 2), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("wait"), st.integers(0, 100), st.just(0)),
)


@given(st.lists(STEPS, max_size=80), st.integers(1, 6000))
@settings(max_examples=150)
def test_no_budget_is_overspent_by_three_gateways_that_crash(steps, budget):
    """What was used, and what open requests may use at most, is never more than the budget."""
    clock, ledger = ManualClock(), FaultyLedger()
    consumer = Consumer("t", None, "k", "t", Terms(budget=BudgetTerms(budget)))
    gateways = [KeyAccounts(clock, "f") for _ in range(3)]
    used, tickets, lost = 0, [], 0
    for kind, index, argument in steps:
        if kind == "ask":
            body = msgspec.json.encode({"model": "m", "max_tokens": argument})
            ticket = gateways[index].admit(consumer, peek(body, CHAT), CHAT, body, Directory())
            if isinstance(ticket, Ticket):
                tickets.append((gateways[index], ticket))
        elif kind == "end" and tickets:
            _, ticket = tickets.pop(index % len(tickets))
            counted = argument == "counted"
            tokens = (ticket.most // 2, ticket.most - ticket.most // 2) if counted else (0, 1)
            end = "answered" if counted else argument
            record = RequestRecord(
                "r", 0.0, CHAT, 200, end, 1.0, provider="p", prompt_tokens=tokens[0], completion_tokens=tokens[1],
                counted=counted,
            )  # fmt: skip
            ticket.settle(record)
            used += ticket._used(record)
        elif kind == "turn":
            ledger.fails = argument
            asyncio.run(gateways[index].turn(ledger))
        elif kind == "crash":
            lost += sum(ticket.most for owner, ticket in tickets if owner is gateways[index])
            tickets = [entry for entry in tickets if entry[0] is not gateways[index]]
            gateways[index] = KeyAccounts(clock, "f")
        elif kind == "stop":
            ledger.fails = argument
            asyncio.run(gateways[index].close(ledger))
        elif kind == "wait":
            clock.advance(index)
        assert used + lost + sum(ticket.most for _, ticket in tickets) <= ledger.taken <= budget


def spend(open_store, budget):
    """Four gateways take and give at the same time; returns what they hold and what the store says."""
    held = []
    open_store().close()  # Alembic makes tables in one thread of a process

    def gateway(number):
        store = open_store()
        mine = 0
        for turn in range(30):
            mine += store.take("f:t", "total", wanted=7 + number, limit=budget)
            if turn % 5 == number and mine > 3:
                store.give("f:t", "total", 3)
                mine -= 3
        store.close()
        held.append(mine)

    threads = [threading.Thread(target=gateway, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_store()
    rest = store.take("f:t", "total", wanted=budget, limit=budget)
    store.close()
    return sum(held), rest


def test_the_ledger_in_sqlite(tmp_path):
    held, rest = spend(lambda: RecordStore(str(tmp_path / "r.db")), 600)
    assert held + rest == 600
    assert held > 500


def test_the_ledger_in_postgresql(postgres):
    held, rest = spend(lambda: RecordStore(postgres.url), 600)
    assert held + rest == 600
    assert held > 500


def test_nothing_is_asked_of_who_has_no_terms():
    body = b'{"model": "m"}'
    admitted = KeyAccounts(ManualClock(), "f").admit(Consumer("t", None), peek(body, CHAT), CHAT, body, Directory())
    assert admitted is None
    assert not isinstance(admitted, GatewayResponse)


@pytest.mark.asyncio
async def test_a_tenants_terms_are_those_of_the_spec_and_its_budget_outlives_the_gateway(tmp_path):
    """In the default store, beside the run folder; a start gives back what the one before had and did not use."""
    folder, spec = unit(tmp_path)
    key = "k" * 20
    (folder.path / "keys.json").write_bytes(encode_keys([KeyRow("anna", hash_key(key), "all")]))
    (folder.path / "keys.json").chmod(0o600)
    terms = Terms(budget=BudgetTerms(100_000), models=("m",))
    spec = msgspec.structs.replace(spec, terms={"anna": terms})
    for _ in range(2):
        (folder.path / "process.json").unlink(missing_ok=True)
        running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
        await until(lambda running=running: running.done() or folder.process().get("listen"))
        headers, url = {"authorization": f"Bearer {key}"}, f"http://{folder.process()['listen']}{CHAT}"
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(url, json={"model": "other"}) as answer:
                assert answer.status == 403
            async with http.post(url, json={"model": "m"}) as answer:
                assert answer.status == 503
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 10)
    store = RecordStore(str(records_folder(tmp_path, "t", "g") / RECORDS_FILE))
    assert store.take("t:anna", "total", wanted=10**9, limit=100_000) == 100_000
    store.close()


@pytest.mark.asyncio
async def test_a_plain_gateway_with_budgets_wants_a_folder_for_them():
    keyring = Keyring([KeyRow("t", hash_key("k" * 20), None, Terms(budget=BudgetTerms(1)))])
    more = {"policy_name": "random", "retries": 0, "tls": None, "records": None, "ready": print}
    with pytest.raises(InvalidInputError) as refused:
        await run_on_list(StaticRegistry([]), SystemClock(), host="127.0.0.1", port=0, keyring=keyring, **more)
    assert refused.value.problems[0].hint == "give --records FOLDER"


@pytest.mark.asyncio
async def test_a_plain_gateway_keeps_records_and_budgets_in_a_folder(tmp_path):
    key = "k" * 20
    keyring = Keyring([KeyRow("t", hash_key(key), None, Terms(budget=BudgetTerms(1000)))])
    ready, more = asyncio.get_running_loop().create_future(), {"policy_name": "random", "retries": 0, "tls": None}
    serving = run_on_list(
        StaticRegistry([StaticNode("http://127.0.0.1:1", ["m"], "p")]), SystemClock(), host="127.0.0.1", port=0,
        keyring=keyring, records=tmp_path, ready=ready.set_result, **more,
    )  # fmt: skip
    running = asyncio.create_task(serving)
    url, headers = f"http://{await ready}{CHAT}", {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json={"model": "m"}) as answer:
        assert answer.status == 400, "nothing says how long the answer may be"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    store = RecordStore(str(tmp_path / RECORDS_FILE))
    assert store.read(select(REQUESTS.c.status, REQUESTS.c.model)) == [(400, "m")]
    assert store.take(f"static:t/{hash_key(key)[:12]}", "total", wanted=2000, limit=1000) == 1000
    store.close()
