"""Records as demand: what is read of a store as a trace and as sketches, and what stays when records are forgotten."""

import random
import sqlite3

import aiohttp
import msgspec
import pytest
from sqlalchemy import func, select

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.demand import Choice, demand_hours, recorded, replicas
from fabrictool.gateway.keeping import spooling
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.tables import REQUESTS
from fabrictool.workload.profile import profiles
from tests.gateway.rows import put

EVER = Choice(0.0, 1e12)
HOUR = 3600.0


def row(number, at, **about):
    fields = {"status": 200, "end": "answered", "e2e_s": 2.0, "prompt_tokens": 100, "completion_tokens": 10}
    record = RequestRecord(id=f"r{number}", at=at, path="/v1/chat/completions", **fields | {"model": "m"} | about)
    return {"fabric": "f", "gateway": "g", "hour": int(at // HOUR)} | msgspec.structs.asdict(record)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    address = str(tmp_path / "r.db") if request.param == "sqlite" else request.getfixturevalue("postgres").url
    opened = RecordStore(address)
    yield opened
    opened.close()


def test_a_trace_has_what_was_answered_and_says_what_it_left_out(store):
    put(
        store,
        [
            row(1, 1000.0, ttft_s=0.5, stream=True),
            row(2, 1002.0, prefix_of="r1", prefix_tokens=48, e2e_s=1.5),
            row(3, 1003.0, end="cancelled", ttft_s=0.1, prefix_of="r2", prefix_tokens=32),
            row(4, 1004.0, end="broken"),
            row(5, 1005.0, status=503, end="refused"),
            row(6, 1006.0, model="other", replica="other/0"),
            row(7, 1007.0, completion_tokens=0),
        ],
    )
    trace = recorded(store, "it", EVER)
    assert trace.arrival.tolist() == [0.0, 2.0, 3.0, 6.0]
    assert trace.dropped == {"failed requests": 2, "no token count": 1}
    assert trace.latency.tolist()[:2] == [2.0, 1.5]
    assert str(trace.latency[2]) == "nan", "how long a client waited before it left is not how long an answer takes"
    chains = [trace.chain[trace.chain_start[i] : trace.chain_start[i + 1]].tolist() for i in range(4)]
    assert trace.block_tokens == 16
    assert [len(chain) for chain in chains] == [3, 3, 2, 0]
    assert chains[0] == chains[1]
    assert chains[2] == chains[0][:2]
    assert len(recorded(store, "it", Choice(0.0, 1e12, "other"))) == 1
    assert replicas(store, EVER) == ["", "other/0"]
    with pytest.raises(InvalidInputError, match="no usable row"):
        recorded(store, "it", Choice(2000.0, 3000.0))


def test_forgotten_records_leave_the_same_demand(store):
    """Of one store that forgets, hour by hour, and again when records come late, and of one that does not."""
    draws, at, rows = random.Random(), 0.0, []
    for number in range(1500):
        at += draws.expovariate(0.05)
        rows.append(row(number, at, model=draws.choice("ab"), prompt_tokens=draws.randint(1, 4000)))
    late = rows[::7]
    put(
        store,
        [it for it in rows if it not in late] + [row("x", 5.0, end="broken"), {**row("y", at), "fabric": "other"}],
    )
    put(store, [{**row("z", 5.0), "fabric": "other"}])
    before = at - 2.5 * HOUR
    while store.forget("f", before):
        pass
    put(store, late)
    assert store.forget("f", before) == sum(it["hour"] < before // HOUR for it in late)
    (kept, oldest) = store.read(select(func.count(), func.min(REQUESTS.c.hour)).where(REQUESTS.c.fabric == "f"))[0]
    assert kept == sum(it["hour"] >= before // HOUR for it in rows)
    assert oldest >= before // HOUR
    assert store.read(select(func.count()).where(REQUESTS.c.fabric == "other"))[0][0] == 2
    known = {profile.model: profile for profile in profiles(demand_hours(store, since=0.0, until=1e12))}
    for model in "ab":
        its = [it["prompt_tokens"] for it in rows if it["model"] == model]
        assert known[model].demand.requests == len(its)
        assert known[model].demand.input.sums.total == sum(its)
        assert known[model].demand.input.most == max(its)


def test_a_store_of_the_release_before_is_read_as_it_is(tmp_path):
    path = tmp_path / "r.db"
    RecordStore(str(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("drop table fabrictool_profiles")
        for name in ("prefix_of", "prefix_tokens"):
            db.execute(f"alter table fabrictool_requests drop column {name}")
        db.execute("update fabrictool_layout set version_num = '0002'")
        numbers = "hour, status, retries, prompt_tokens, cached_tokens, completion_tokens, stream, counted, at, e2e_s"
        texts = "id, fabric, gateway, path, end, tenant, key, model, provider, replica"
        values = "0, 200, 0, 100, 0, 10, 0, 1, 10.0, 2.0, 'r1', 'f', 'g', '/', 'answered', '', '', 'm', '', ''"
        db.execute(f"insert into fabrictool_requests ({numbers}, {texts}) values ({values})".replace("end", '"end"'))  # noqa: S608
    store = RecordStore(str(path), read_only=True)
    assert len(recorded(store, "it", EVER)) == 1
    assert len(demand_hours(store, since=0.0, until=1e12)) == 1
    store.close()
    grown = RecordStore(str(path))
    put(grown, [row(2, 20.0, prefix_of="r1", prefix_tokens=16)])
    assert recorded(grown, "it", EVER).chain is not None
    grown.close()


@pytest.mark.asyncio
async def test_a_conversation_is_recorded_with_what_it_repeats(bed, tmp_path):
    """From requests over sockets to a trace that a simulator plays."""
    headers = {"authorization": f"Bearer {bed.KEY}"}
    process = StoreProcess(lambda: str(tmp_path / "r.db"))
    system = {"role": "system", "content": "You are a careful assistant. " * 100}
    messages = [system]
    async with spooling(tmp_path, process, "f", "g") as spool, aiohttp.ClientSession(headers=headers) as http:
        bed.gateway.record_in(spool, opt_out=True)
        bed.a.prompt_tokens = 1000
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn}: " + str(turn) * 400})
            body = {"model": "only-a", "messages": messages}
            async with http.post(bed.url + "/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            messages.append({"role": "assistant", "content": "x" * 200})
        hidden = {**headers, "x-fabric-record": "no"}
        await (await http.post(bed.url + "/v1/chat/completions", json=body, headers=hidden)).read()
    process.close()
    store = RecordStore(str(tmp_path / "r.db"), read_only=True)
    rows = store.read(select(REQUESTS.c.id, REQUESTS.c.prefix_of, REQUESTS.c.prefix_tokens).order_by(REQUESTS.c.at))
    assert [earlier for _, earlier, _ in rows] == ["", *(name for name, *_ in rows[:-1])]
    assert [tokens % 16 for *_, tokens in rows] == [0] * 4
    assert rows[0][2] == 0
    assert 700 < rows[1][2] < rows[2][2] < rows[3][2] < 1000
    trace = recorded(store, "it", EVER)
    assert trace.block_tokens == 16
    (profile,) = profiles(demand_hours(store, since=0.0, until=1e12))
    assert profile.demand.shared_tokens == sum(tokens for *_, tokens in rows)
    store.close()
    text = (tmp_path / "r.db").read_bytes()
    assert b"careful" not in text
    assert b"Question" not in text
