"""A gateway whose replicas are full: who waits, who goes first, who is refused; told by order and number."""

import asyncio
import dataclasses
import json

import aiohttp
import pytest

from fabrictool.gateway.directory import RoutingTarget
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.gateway.upstream import Connector
from fabrictool.routing.admission import PATIENCE_S, STANDARD
from tests.gateway.conftest import FakeEngine, until

pytestmark = pytest.mark.asyncio
SLOTS = 4
SENT = 5
"""At the same time to one replica: its slots, and one more that is there when a step ends."""


class SlowEngine(FakeEngine):
    """Answers one request for each `free`, in the order in which they came."""

    def __init__(self, name):
        super().__init__(name)
        self.permits = asyncio.Semaphore(0)
        self.begun, self.inside, self.most_inside = [], 0, 0

    async def answer(self, request):
        body = await request.json()
        self.begun.append(body["user"])
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await self.permits.acquire()
        finally:
            self.inside -= 1
        return await super().answer(request)

    def free(self, number=1):
        for _ in range(number):
            self.permits.release()


class Load:
    """Requests with names, and what became of them."""

    def __init__(self, bed, http):
        self.bed, self.http, self.statuses, self.tasks, self.heads = bed, http, {}, [], {}

    async def ask(self, name, priority="", *, wait="", key=None, model="m", seen=True):
        before = self.waiting() + self.inside()
        self.tasks.append(asyncio.create_task(self._ask(name, priority, wait, key or self.bed.KEY, model)))
        if seen:
            await until(lambda: self.waiting() + self.inside() > before or name in self.statuses)

    async def _ask(self, name, priority, wait, key, model):
        headers = {"authorization": f"Bearer {key}"}
        headers |= {"x-fabric-priority": priority} if priority else {}
        headers |= {"x-fabric-max-wait": wait} if wait else {}
        body = {"model": model, "messages": [], "user": name}
        async with self.http.post(self.bed.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            self.statuses[name] = answer.status
            self.heads[name] = answer.headers, text

    def waiting(self):
        return sum(self.bed.gateway._admission.waiting().values())

    def inside(self):
        return self.bed.engine.inside


@pytest.fixture
def full_bed(make_bed):
    async def start(**rules):
        bed = make_bed()
        bed.engine = SlowEngine("slow")
        await bed.engine.start()
        await bed.start(nodes=[StaticNode(bed.engine.url, ["m", "other"], "alpha", slots=SLOTS)])
        change = {"priorities": {"t1": "interactive"}} | rules
        bed.gateway.reload(dataclasses.replace(bed.gateway._rules, **change), bed.gateway._keyring, {})
        return bed

    return start


async def ended(bed, load):
    bed.engine.free(1000)
    await asyncio.gather(*load.tasks)
    totals = bed.gateway.status().totals
    assert totals.in_flight == load.waiting() == 0
    assert bed.gateway._admission._queues == {}
    await bed.stop()
    await bed.engine.stop()


async def test_the_more_important_go_first_batch_last_and_no_more_than_its_slots_are_sent(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        assert (load.inside(), load.waiting()) == (SENT, 0)
        for name, priority in (("b", "batch"), ("s", "standard"), ("i", ""), ("s2", "standard"), ("i2", "interactive")):
            await load.ask(name, priority)
        assert (load.inside(), load.waiting()) == (SENT, 5)
        for number in range(SENT + 5):
            bed.engine.free()
            await until(lambda number=number: len(load.statuses) == number + 1)
        assert bed.engine.begun[SENT:] == ["i", "i2", "s", "s2", "b"]
        assert set(load.statuses.values()) == {200}
        assert bed.engine.most_inside == SENT
        await ended(bed, load)


async def test_who_does_not_want_to_wait_hears_429_without_a_tick(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("patient", "interactive")
        await load.ask("at once", "interactive", wait="0")
        await until(lambda: "at once" in load.statuses)  # no time passes: nothing is looked at by the second
        assert load.statuses == {"at once": 429}
        assert load.heads["at once"][0]["retry-after"] == "1"
        assert load.waiting() == 1
        await ended(bed, load)


async def test_a_key_cannot_ask_for_more_than_it_has_and_a_wrong_word_is_told(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("of t1", "standard")
        await load.ask("of t2", "interactive", key=bed.ALPHA_KEY)
        await load.ask("hasty", "interactive")
        await load.ask("wrong", "urgent")
        await load.ask("wronger", "batch", wait="-1")
        bed.engine.free(1000)
        await until(lambda: len(load.statuses) == SENT + 5)
        assert bed.engine.begun[SENT:] == ["hasty", "of t1", "of t2"], "t2 has `standard` and no more"
        assert {name for name, status in load.statuses.items() if status == 400} == {"wrong", "wronger"}
        assert "interactive, standard, batch" in load.heads["wrong"][1]
        await ended(bed, load)


async def test_who_would_not_wait_is_refused_at_once_with_a_time_to_come_again(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("patient")
        await load.ask("timely", wait="7")
        bed.clock.advance(8.0)
        bed.gateway._admission.tick(bed.clock.monotonic())
        await until(lambda: "timely" in load.statuses)
        bed.clock.advance(PATIENCE_S[STANDARD] + 1)
        bed.gateway._admission.tick(bed.clock.monotonic())
        await until(lambda: "patient" in load.statuses)
        headers, text = load.heads["timely"]
        error = json.loads(text)["error"]
        assert (load.statuses["timely"], load.statuses["patient"]) == (429, 429)
        assert (error["fabric_code"], error["code"], error["type"]) == ("FT8131", "busy", "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert bed.gateway.status().totals.failures == 0, "no replica failed"
        await ended(bed, load)


async def test_a_full_queue_refuses_the_least_important(full_bed, monkeypatch):
    monkeypatch.setattr("fabrictool.gateway.admission.LIMIT", 2)
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("b", "batch")
        await load.ask("s", "standard")
        await load.ask("b2", "batch")
        await load.ask("i", "interactive", seen=False)
        await until(lambda: len(load.statuses) == 2)
        assert load.statuses == {"b2": 429, "b": 429}
        assert load.waiting() == 2
        await ended(bed, load)
        assert bed.engine.begun[SENT:] == ["i", "s"]


async def test_who_goes_away_while_it_waits_leaves_no_trace(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("gone")
        load.tasks.pop().cancel()
        await until(lambda: load.waiting() == 0)
        records = []
        bed.gateway.sinks.append(records.append)
        await ended(bed, load)
        assert "gone" not in bed.engine.begun


async def test_models_of_one_server_share_its_slots(full_bed):
    bed = await full_bed()
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for number in range(SENT):
            await load.ask(f"first {number}")
        await load.ask("other", model="other")
        assert load.waiting() == 1
        bed.engine.free()
        await until(lambda: "other" in bed.engine.begun)
        await ended(bed, load)


@pytest.mark.parametrize("rules", [{"admission": False}, {}], ids=["turned-off", "no-pressure"])
async def test_without_pressure_or_turned_off_no_queue_is_made(full_bed, rules):
    bed = await full_bed(**rules)
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        number = 3 * SENT if rules else SENT
        for name in range(number):
            await load.ask(str(name))
        assert load.inside() == number
        assert bed.gateway._admission._kept == {}
        await ended(bed, load)


async def test_at_four_times_what_can_be_served_the_engine_is_never_idle_and_haste_is_kept(full_bed):
    """Sixteen rounds: each frees four slots and brings sixteen requests, one of them interactive."""
    bed = await full_bed()
    rounds = 16
    async with aiohttp.ClientSession() as http:
        load = Load(bed, http)
        for turn in range(rounds):
            for number in range(4 * SLOTS):
                priority = "interactive" if number == 0 else "standard" if number < 2 * SLOTS else "batch"
                await load.ask(f"{priority} {turn}-{number}", priority, wait="3")
            assert load.inside() >= SLOTS, "who waits is sent on at once"
            if turn:
                began = [int(name.split()[1].split("-")[0]) for name in bed.engine.begun if name.startswith("i")]
                assert began[-1] >= turn - 1, "an interactive request waits for the next free slot, no longer"
            done = len(bed.engine.seen)
            bed.engine.free(SLOTS)
            await until(lambda done=done: len(bed.engine.seen) == done + SLOTS)
            await until(lambda: load.inside() >= SENT - 1 or not load.waiting())
            bed.clock.advance(1.0)
            bed.gateway._admission.tick(bed.clock.monotonic())
        interactive = {name: status for name, status in load.statuses.items() if name.startswith("i")}
        answered = sum(status == 200 for status in load.statuses.values())
        assert answered >= 0.9 * SLOTS * (rounds - 1)
        assert set(interactive.values()) == {200}
        assert set(load.statuses.values()) == {200, 429}
        await ended(bed, load)


async def test_what_an_engines_queue_shows_is_learned_and_tried_again():
    target = RoutingTarget(b"k", "m", "alpha", Connector(), "m/0")
    target.loaded(running=20, waiting=0)
    assert target.slots == 0, "nobody waits in it: nobody knows"
    target.loaded(running=20, waiting=3)
    assert target.slots == 20
    target.in_flight = 22
    target.loaded(running=22, waiting=0)
    assert target.slots == 22, "it takes them all: perhaps it takes more"
    target.declared_slots = 23
    for _ in range(5):
        target.in_flight = target.slots
        target.loaded(running=target.slots, waiting=0)
    assert target.slots == 23
