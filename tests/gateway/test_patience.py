"""How long is waited for a first octet."""

import asyncio
from collections import Counter
from dataclasses import replace

import aiohttp
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.specs import PatienceRule
from fabrictool.gateway.exchange import SHARE
from fabrictool.gateway.patience import (
    LEARNED,
    LENGTHS_KEPT,
    LOOK,
    PLAIN,
    REASONING,
    REASONS_FROM,
    REASONS_NO_MORE,
    STREAM,
    UNKNOWN,
    Patience,
)
from fabrictool.gateway.staticlist import StaticNode, declared_patience, read_registry
from fabrictool.routing.retry_budget import ALWAYS, RETRIED
from tests.gateway.conftest import FakeEngine, until

CHAT_PATH = "/v1/chat/completions"


def test_patience_is_learned_by_model_and_form():
    patience = Patience()
    assert (patience.limit("m", STREAM), patience.limit("m", CHAT_PATH)) == (
        UNKNOWN.unknown_s,
        UNKNOWN.unknown_whole_s,
    )
    for _ in range(LEARNED):
        patience.learn("m", STREAM, 0.2)
        patience.learn("m", "/tokenize", 0.01)
        patience.learn("thinker", CHAT_PATH, 100.0)
    assert patience.limit("m", STREAM) == UNKNOWN.least_s
    assert patience.limit("m", "/tokenize") == UNKNOWN.least_whole_s
    assert patience.limit("m", CHAT_PATH) == UNKNOWN.most_s
    assert patience.limit("thinker", CHAT_PATH) == 400.0


def test_what_is_declared_holds_and_the_rest_is_learned():
    patience = Patience()
    patience.declare({"m": PatienceRule(first_byte_s=45.0), "slow": PatienceRule(whole_s=900.0, idle_s=60.0)})
    assert [patience.limit("m", form) for form in (STREAM, CHAT_PATH)] == [45.0, UNKNOWN.unknown_whole_s]
    assert (patience.idle("m"), patience.deadline("m")) == (UNKNOWN.idle_s, UNKNOWN.deadline_s)
    assert [patience.limit("slow", form) for form in (STREAM, CHAT_PATH)] == [UNKNOWN.unknown_s, 900.0]
    assert (patience.idle("slow"), patience.deadline("slow")) == (60.0, 1800.0), "a second attempt has as long"
    for _ in range(LEARNED):
        patience.learn("m", STREAM, 100.0)
    assert patience.limit("m", STREAM) == 45.0


@pytest.mark.parametrize(("declared", "kind"), [(True, REASONING), (False, PLAIN), (None, UNKNOWN)])
def test_whether_a_model_reasons_may_be_declared(declared, kind):
    patience = Patience()
    patience.declare({"m": PatienceRule(reasoning=declared)})
    assert patience.kind("m") is kind
    assert patience.reasons("m") is declared
    for _ in range(LENGTHS_KEPT):
        patience.learn("m", STREAM, 0.1, REASONS_FROM)
    assert patience.kind("m") is (PLAIN if declared is False else REASONING)


def answers(patience, tokens, number=LENGTHS_KEPT):
    for _ in range(number):
        patience.learn("m", CHAT_PATH, 1.0, tokens)
    return patience.kind("m")


def test_whether_a_model_reasons_is_learned_from_how_long_its_answers_are():
    patience = Patience()
    assert answers(patience, 87, LEARNED - 1) is UNKNOWN
    assert answers(patience, 87, LOOK) is PLAIN
    assert answers(patience, REASONS_FROM, LENGTHS_KEPT // 2 - LOOK) is PLAIN, "not by a few long answers"
    assert answers(patience, 1782) is REASONING
    assert patience.idle("m") == REASONING.idle_s > PLAIN.idle_s
    assert answers(patience, REASONS_NO_MORE) is REASONING, "it does not change to and fro"
    assert answers(patience, REASONS_NO_MORE - 1) is PLAIN
    assert answers(patience, 0) is PLAIN, "what has no tokens says nothing"


NODES = "nodes: [{url: http://127.0.0.1:1, models: [m, n]}]\n"


def test_a_static_list_says_what_a_blueprint_says(tmp_path):
    path = tmp_path / "nodes.yaml"
    path.write_text(NODES + "models: {m: {reasoning: true, patience: {first_byte: 45s, whole: 5m}}, n: {}}\n")
    assert declared_patience(read_registry(path)) == {"m": PatienceRule(45.0, 300.0, None, True), "n": PatienceRule()}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("{other: {reasoning: true}}", "no node serves it"),
        ("{m: {patience: {idle: soon}}}", "not a duration"),
        ("{m: {patience: {idle: 10ms}}}", "between 1s and 24h"),
        ("{m: {patience: {idel: 60s}}}", "not a registry"),
        ("{m: {reason: true}}", "not a registry"),
    ],
)
def test_what_a_static_list_cannot_mean_is_refused(tmp_path, models, words):
    path = tmp_path / "nodes.yaml"
    path.write_text(f"{NODES}models: {models}\n")
    with pytest.raises(InvalidInputError) as raised:
        read_registry(path)
    assert {problem.code for problem in raised.value.problems} == {"FT8001"}
    assert words in str(raised.value)


def session(bed):
    timeout = aiohttp.ClientTimeout(total=20)
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}, timeout=timeout)


async def ask(bed, http, **fields):
    async with http.post(bed.url + CHAT_PATH, json={"model": "m", "messages": []} | fields) as answer:
        await answer.read()
        return answer.status


async def pass_time(bed, seconds, step=1.0):
    """Seconds in which the gateway looks after its connections, as it does each second."""
    for _ in range(int(seconds / step)):
        bed.clock.advance(step)
        for connection in list(bed.gateway.connections):
            connection.expire()
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_what_a_hung_engine_costs_is_not_learned(bed):
    patience = bed.gateway._metrics.patience
    async with session(bed) as http:
        for _ in range(2 * LEARNED):
            assert await ask(bed, http, stream=True) == 200
        assert patience.limit("m", STREAM) == UNKNOWN.least_s
        for _ in range(3):
            bed.a.mode, seen = "hang", len(bed.a.seen)
            asking = []
            while len(bed.a.seen) == seen:
                asking.append(asyncio.create_task(ask(bed, http, stream=True)))
                await asyncio.sleep(0.02)
            await pass_time(bed, UNKNOWN.least_s + 2)
            assert set(await asyncio.gather(*asking)) == {200}
            bed.a.mode = "ok"
            bed.clock.advance(60)
            assert patience.limit("m", STREAM) == UNKNOWN.least_s


@pytest.mark.asyncio
async def test_waiting_for_a_slot_is_not_learned(make_bed):
    engine = FakeEngine("x")
    await engine.start()
    bed = await make_bed().start(nodes=[StaticNode(engine.url, ["m"], "alpha", slots=1)])
    async with session(bed) as http:
        for _ in range(LEARNED):
            assert await ask(bed, http, stream=True) == 200
        engine.mode = "stream-hang"
        asking = []
        while not bed.gateway._admission.queued:
            asking.append(asyncio.create_task(ask(bed, http, stream=True)))
            await asyncio.sleep(0.02)
        streams = [connection.exchange for connection in bed.gateway.connections if connection.exchange]
        await until(lambda: sum(stream._passing for stream in streams) == len(asking) - 1)
        bed.clock.advance(20.0)
        engine.mode = "ok"
        engine.release.set()
        assert set(await asyncio.gather(*asking)) == {200}
    assert bed.gateway._metrics.patience.limit("m", STREAM) == UNKNOWN.least_s
    await engine.stop()
    await bed.stop()


async def hung(bed, http):
    """A request for a whole answer that an engine sits on, of a model of which nothing is known yet."""
    bed.a.mode = "hang"
    while True:
        asking = asyncio.create_task(ask(bed, http))
        await asyncio.wait([asking], timeout=0.1)
        if bed.a.seen:
            return asking


@pytest.mark.asyncio
async def test_an_engine_that_hangs_at_first_does_not_use_up_a_requests_time_while_another_is_free(bed):
    async with session(bed) as http:
        asking = await hung(bed, http)
        await pass_time(bed, SHARE * UNKNOWN.deadline_s - 2)
        assert not asking.done()
        await pass_time(bed, 4)
        assert await asking == 200
        assert (len(bed.a.seen), bed.gateway.status().totals.retries) == (1, 1)
        assert not any(target.ejection.out_until for target in bed.gateway.directory), "its answer may only be long"
        (alpha,) = [t for t in bed.gateway.directory if (t.provider, t.model) == ("alpha", "m")]
        alpha.ejection.failed(bed.clock.monotonic(), bed.clock.monotonic())
        assert not alpha.ejection.out_until, "nor is it half of a failure"


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["learned", "its-limit-is-declared", "it-is-declared-to-reason"])
async def test_an_answer_of_a_model_that_is_known_is_not_cut_within_its_limit(bed, why):
    patience = bed.gateway._metrics.patience
    if why == "learned":
        for _ in range(LEARNED):
            patience.learn("m", CHAT_PATH, 150.0)
    elif why == "its-limit-is-declared":
        patience.declare({"m": PatienceRule(whole_s=UNKNOWN.deadline_s)})
    else:
        patience.declare({"m": PatienceRule(reasoning=True)})
    limit = patience.limit("m", CHAT_PATH)
    assert limit >= UNKNOWN.deadline_s
    async with session(bed) as http:
        asking = await hung(bed, http)
        await pass_time(bed, limit - 5)
        assert not asking.done()
        bed.a.release.set()
        assert await asking == 200
    assert (bed.gateway.status().totals.retries, bed.clock.monotonic() < limit) == (0, True)


@pytest.mark.asyncio
async def test_the_wait_for_a_slot_does_not_make_an_attempts_share_less(bed):
    async with session(bed) as http:
        asking = await hung(bed, http)
        (exchange,) = [connection.exchange for connection in bed.gateway.connections if connection.exchange]
        exchange._began -= 0.4 * UNKNOWN.deadline_s
        await pass_time(bed, 0.4 * UNKNOWN.deadline_s)
        assert not asking.done()
        await pass_time(bed, 0.1 * UNKNOWN.deadline_s + 2)
        assert await asking == 200
        assert len(bed.b.seen) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["it-is-out", "no-retries"])
async def test_where_nobody_else_could_answer_it_is_waited_for_as_long_as_ever(make_bed, why):
    bed = await make_bed().start(retries=0 if why == "no-retries" else 2)
    async with session(bed) as http:
        asking = await hung(bed, http)
        (beta,) = [target for target in bed.gateway.directory if target.provider == "beta"]
        if why == "it-is-out":
            beta.ejection.out_until = UNKNOWN.deadline_s
        await pass_time(bed, SHARE * UNKNOWN.deadline_s + 5)
        assert not asking.done()
        bed.a.release.set()
        assert await asking == 200
    await bed.stop()


@pytest.mark.asyncio
async def test_where_many_requests_fail_slowly_some_are_tried_again_and_the_others_hear_so_at_once(bed):
    bed.a.mode = "hang"
    async with session(bed) as http:
        asking = [asyncio.create_task(ask(bed, http, stream=True)) for _ in range(80)]
        await until(lambda: len(bed.a.seen) == 40)
        await pass_time(bed, UNKNOWN.unknown_s + 2)
        statuses = Counter(await asyncio.gather(*asking))
        allowed = ALWAYS + RETRIED * 80
        assert 40 + ALWAYS <= statuses[200] <= 40 + allowed
        assert statuses[200] + statuses[504] == 80
        (left,) = [
            line for line in bed.gateway.exposition().decode().splitlines() if line[:19] == "fabric_retries_left"
        ]
        assert 0.0 <= float(left.split()[1]) < 1.0


@pytest.mark.asyncio
async def test_what_fails_at_once_is_no_matter_of_the_budget(bed):
    bed.a.mode = "reset"
    budget = bed.gateway._metrics.retry_budget
    for _ in range(2 * int(ALWAYS)):
        budget.spend(bed.clock.monotonic())
    async with session(bed) as http:
        for _ in range(30):
            assert await ask(bed, http) == 200
            bed.clock.advance(40)
            budget.spend(bed.clock.monotonic())
    assert bed.gateway.status().totals.retries > 10


@pytest.mark.asyncio
async def test_a_model_that_reasons_is_given_longer_and_tried_again_once(make_bed):
    engines = [FakeEngine(str(number)) for number in range(4)]
    for engine in engines:
        await engine.start()
        engine.mode = "hang"
    bed = await make_bed().start(nodes=[StaticNode(e.url, ["m", "thinker"], "alpha") for e in engines])
    patience = {"thinker": PatienceRule(reasoning=True)}
    bed.gateway.reload(replace(bed.gateway._rules, patience=patience), bed.gateway._keyring, {})
    async with session(bed) as http:
        asking = asyncio.create_task(ask(bed, http, stream=True, model="thinker"))
        await until(lambda: any(engine.seen for engine in engines))
        await pass_time(bed, UNKNOWN.unknown_s + 10)
        assert not asking.done()
        await pass_time(bed, 2 * REASONING.unknown_s)
        assert await asking == 504
        assert sum(len(engine.seen) for engine in engines) == 2
        for target in bed.gateway.directory:
            target.ejection.answered()
        asking = asyncio.create_task(ask(bed, http, stream=True))
        await until(lambda: sum(len(engine.seen) for engine in engines) == 3)
        await pass_time(bed, 4 * UNKNOWN.unknown_s)
        assert await asking == 504
        assert sum(len(engine.seen) for engine in engines) == 2 + 3
    for engine in engines:
        engine.release.set()
        await engine.stop()
    await bed.stop()
