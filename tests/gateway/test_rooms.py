"""Pairs whose two replicas get a request at once: who is asked for what, and what a client hears if one fails.

The servers find each other as SGLang's do, by a room; no real one ever ran here, for its kernels are built for GPUs.
"""

import asyncio
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.directory import Directory, meeting_place
from fabrictool.gateway.pairs import HANDED_HEADER
from fabrictool.gateway.rooms import ROOMS, unfit
from fabrictool.gateway.staticlist import StaticNode, read_registry
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody
from fabrictool.mesh.registry import Serving
from tests.gateway.conftest import until
from tests.gateway.test_pairs import FakePairEngine, ask, at_rest, handed

PLACES = {"p": ("prefill", "one"), "q": ("prefill", "one"), "d": ("decode", "one"), "e": ("decode", "one")}


class FakeSGLang(FakePairEngine):
    """A server of SGLang's for one phase, by script; it is no model.

    In a room each waits for the other one, as long as it takes; without a room it refuses.
    """

    def __init__(self, name, phase, rooms):
        super().__init__(name, {})
        self.phase, self.rooms = phase, rooms
        self.cancelled = 0

    async def answer(self, request):
        raw = await request.read()
        asked = json.loads(raw)
        self.bodies.append(raw)
        self.asked.append(asked)
        try:
            return await self._answer(request, asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request, asked):
        if request.path == "/tokenize":
            return web.json_response({"tokens": [1, 2]})
        if "bootstrap_room" not in asked:
            return web.json_response({"error": {"message": "received without bootstrap room id"}}, status=400)
        if self.mode.isdigit():
            return web.json_response({"error": {"message": f"{self.name} says {self.mode}"}}, status=int(self.mode))
        if self.mode == "reset":
            request.transport.abort()
        if self.mode in ("reset", "hang"):
            await self.release.wait()
        room = self.rooms[asked["bootstrap_host"], asked["bootstrap_port"], asked["bootstrap_room"]]
        room[self.phase].set()
        await room["decode" if self.phase == "prefill" else "prefill"].wait()
        if self.mode == "late-reset":
            request.transport.abort()
            await self.release.wait()
        if self.phase == "prefill":
            return await self._computed(room)
        await room["computed"].wait()
        return await self._say(request, asked)

    async def _computed(self, room):
        if self.mode == "slow":
            await self.release.wait()
        if self.mode == "aborts":
            return web.json_response({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
        if self.mode == "garbage":
            return web.Response(body=b"{]", content_type="application/json")
        if self.mode != "lies":
            room["computed"].set()
        if self.mode == "computes-and-hangs":
            await self.release.wait()
        usage = {"prompt_tokens": 400, "completion_tokens": 1, "total_tokens": 401}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        return web.json_response({"id": "p", "choices": [choice], "usage": usage})

    async def _say(self, request, asked):
        if self.mode == "half":
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"by "}}]}\n\n')
            await self.release.wait()
            request.transport.abort()
            return response
        return await self.say(request, asked)


@pytest_asyncio.fixture
async def pairs(make_bed):
    """Prefill p and q, decode d and e, all at one site; others come by `bed.more`."""
    bed = await rooms_bed(make_bed, PLACES)
    yield bed
    await over(bed)


async def rooms_bed(make_bed, places, more=(), provider_of=None):
    rooms = defaultdict(lambda: defaultdict(asyncio.Event))
    engines, nodes = {}, []
    for number, (name, (phase, site)) in enumerate(places.items()):
        engines[name] = engine = FakeSGLang(name, phase, rooms)
        await engine.start()
        meets_at = f"10.0.0.{number}:8998" if phase == "prefill" else ""
        provider = (provider_of or {}).get(name, "alpha")
        at = {"phase": phase, "site": site, "engine": "sglang", "pairing": "together", "meets_at": meets_at}
        nodes.append(StaticNode(engine.url, ["m"], provider, **at))
    bed = await make_bed().start(nodes=[*nodes, *more])
    bed.gateway.count_caches({"m": 1024.0})
    bed.rooms, bed.engines = rooms, engines
    bed.of = SimpleNamespace(**engines)
    return bed


async def over(bed):
    await bed.stop()
    for engine in bed.engines.values():
        await engine.stop()


def asked_of(bed, names):
    (one,) = [bed.engines[name] for name in names if bed.engines[name].asked]
    return one


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["a question", "a long one " * 200])
async def test_both_get_it_at_once_and_the_client_hears_the_one_that_decodes(pairs, stream, words):
    raw = b'{"model": "m", "max_tokens":  64, "stream": %s, "messages": [{"role": "user", "content": "%s"}]}' % (
        json.dumps(stream).encode(), words.encode()
    )  # fmt: skip
    answer = await ask(pairs, raw=raw)
    assert answer.status == 200
    prefiller, decoder = asked_of(pairs, "pq"), asked_of(pairs, "de")
    (wish,), (other,) = prefiller.asked, decoder.asked
    ways = [
        {name: asked.pop(name) for name in sorted(asked) if name.startswith("bootstrap")} for asked in (wish, other)
    ]
    assert ways[0] == ways[1]
    assert (ways[0]["bootstrap_host"], ways[0]["bootstrap_port"]) in {("10.0.0.0", 8998), ("10.0.0.1", 8998)}
    assert 0 <= ways[0]["bootstrap_room"] < ROOMS
    assert wish["stream"] is False
    assert "stream_options" not in wish
    for name in ("max_tokens", "messages"):
        assert wish[name] == other[name]
    if not stream:
        assert decoder.bodies[0].endswith(raw[1:]), "the client's own octets"
    said = "".join(re.findall(r'"content": ?"([^"]*)"', answer.text))
    assert said == ("by " if stream else "") + decoder.name
    assert answer.headers[HANDED_HEADER] == f"127.0.0.1:{prefiller.port}"
    assert answer.headers["x-fabric-replica"] == f"127.0.0.1:{decoder.port}"
    (record,) = pairs.records
    assert (record.prompt_tokens, record.completion_tokens, record.retries) == (400, 2, 0), "once, and the decoder's"
    assert record.replica == f"127.0.0.1:{decoder.port}"
    assert handed(pairs) == {"handed": 1.0}
    assert at_rest(pairs)
    (row,) = pairs.gateway.status().handed
    assert (row.sender, row.receiver, row.tokens, row.octets) == ("one", "one", 400, 400 * 1024)


@pytest.mark.asyncio
async def test_each_request_has_a_room_of_its_own(pairs):
    answers = await asyncio.gather(*(ask(pairs, stream=bool(n % 2)) for n in range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    assert len(pairs.rooms) == 20
    assert len(pairs.of.p.asked) + len(pairs.of.q.asked) == len(pairs.of.d.asked) + len(pairs.of.e.asked) == 20
    assert len(pairs.of.p.asked) > 0 < len(pairs.of.q.asked)
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_several_prompts_go_together(pairs):
    answer = await ask(pairs, path="/v1/completions", prompt=["one", "two"])
    assert answer.status == 200
    assert asked_of(pairs, "pq").asked[0]["bootstrap_room"] == asked_of(pairs, "de").asked[0]["bootstrap_room"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/v1/chat/completions", {"n": 2}, "`n`"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "`best_of`"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, "`echo`"),
        ("/v1/responses", {"input": "x"}, "/v1/responses"),
        ("/v1/embeddings", {"input": "x"}, "/v1/embeddings"),
    ],
)
async def test_what_they_cannot_share_is_refused_in_plain_words(pairs, path, fields, word):
    answer = await ask(pairs, path=path, **fields)
    assert (answer.status, "FT8163" in answer.text, word in answer.text) == (400, True, True)
    assert not any(engine.asked for engine in pairs.engines.values())
    assert [(record.status, record.end) for record in pairs.records] == [(400, "refused")]
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_tokens_are_counted_without_a_room(pairs):
    answer = await ask(pairs, path="/tokenize", prompt="x")
    assert (answer.status, "tokens" in answer.text) == (200, True)
    assert pairs.of.p.asked == pairs.of.q.asked == []


def test_defaults_and_single_answers_can_be_shared():
    assert unfit("/v1/completions?x=1", b'{"n": 1, "best_of": null, "echo": true, "logprobs": null}') == ""
    assert "cannot be read" in unfit("/v1/completions", b"[" * 100_000)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["500", "503", "reset", "late-reset", "aborts", "garbage"])
async def test_a_prefill_replica_that_fails_costs_a_retry_and_no_answer(pairs, mode):
    pairs.of.p.mode = mode
    answers = [await ask(pairs, stream=stream) for stream in (False, True, False, True)]
    assert [answer.status for answer in answers] == [200] * 4
    assert {answer.headers[HANDED_HEADER] for answer in answers} == {f"127.0.0.1:{pairs.of.q.port}"}
    failed = len(pairs.of.p.asked)
    assert 1 <= failed <= 4
    assert sum(record.retries for record in pairs.records) == failed
    await until(lambda: pairs.of.d.cancelled + pairs.of.e.cancelled == failed)
    assert handed(pairs) == {"handed": 4.0}
    assert [record.completion_tokens for record in pairs.records] == [2] * 4
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_one_that_is_gone_is_left_alone_for_a_while(pairs):
    await pairs.of.p.stop()
    for _ in range(10):
        assert (await ask(pairs)).status == 200
    failures = {target.replica: target.failures for target in pairs.gateway.directory}
    assert failures.pop(f"127.0.0.1:{pairs.of.p.port}") == 1
    assert set(failures.values()) == {0}


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["500", "reset", "aborts"])
async def test_where_no_prefill_replica_is_left_the_client_hears_so_at_once(pairs, mode):
    pairs.of.p.mode = pairs.of.q.mode = mode
    for stream in (False, True):
        answer = await ask(pairs, stream=stream)
        assert (answer.status, "FT8105" in answer.text, "no prefill replica" in answer.text) == (503, True, True)
        assert answer.headers["retry-after"]
    assert [record.end for record in pairs.records] == ["refused"] * 2
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["500", "502", "503", "reset", "late-reset"])
async def test_another_one_decodes_where_the_first_fails(pairs, mode):
    pairs.of.d.mode = mode
    answers = [await ask(pairs, stream=stream) for stream in (False, True, False, True)]
    assert [answer.status for answer in answers] == [200] * 4
    assert {answer.headers["x-fabric-replica"] for answer in answers} == {f"127.0.0.1:{pairs.of.e.port}"}
    assert len(pairs.of.d.asked) >= 1
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize("who", ["p", "d"])
async def test_a_request_that_is_wrong_is_the_clients_business(make_bed, who):
    bed = await rooms_bed(make_bed, {"p": PLACES["p"], "d": PLACES["d"]})
    try:
        bed.engines[who].mode = "400"
        for stream in (False, True):
            answer = await ask(bed, stream=stream)
            assert (answer.status, f"{who} says 400" in answer.text) == (400, True)
        assert [record.retries for record in bed.records] == [0, 0]
        assert at_rest(bed)
        assert {target.failures for target in bed.gateway.directory} == {0}
    finally:
        await over(bed)


@pytest.mark.asyncio
async def test_a_slow_prompt_is_waited_for(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "slow"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.rooms and all(room["decode"].is_set() for room in pairs.rooms.values()))
    pairs.clock.advance(20.0)
    await asyncio.sleep(0)
    assert not asking.done()
    pairs.of.p.release.set()
    pairs.of.q.release.set()
    assert (await asking).status == 200
    assert pairs.records[0].retries == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("who", ["pq", "de", "p", "d"])
async def test_a_pair_that_stands_still_is_given_up(pairs, who):
    for name in who:
        pairs.engines[name].mode = "hang"
    asking = [asyncio.create_task(ask(pairs)) for _ in range(4)]
    await until(lambda: any(pairs.engines[name].asked for name in who))
    await until(lambda: sum(target.in_flight for target in pairs.gateway.directory) == 0 or len(pairs.records) < 4)
    while not all(task.done() for task in asking):
        pairs.clock.advance(700.0)
        await asyncio.sleep(0.01)
    statuses = {(await task).status for task in asking}
    assert statuses <= ({504} if len(who) == 2 else {200, 504})
    assert len(pairs.records) == 4
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_one_that_says_it_computed_and_did_not_is_blamed_beside_the_one_that_waits(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "lies"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.rooms and all(len(room) >= 2 for room in pairs.rooms.values()))
    while not asking.done():
        pairs.clock.advance(700.0)
        await asyncio.sleep(0.01)
    assert (await asking).status == 504
    failed = {target.phase for target in pairs.gateway.directory if target.failures}
    assert failed == {"prefill", "decode"}, "nothing shows which of them it was"
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_both(pairs, stream):
    pairs.of.p.mode = pairs.of.q.mode = "slow"
    asking = asyncio.create_task(ask(pairs, stream=stream))
    await until(lambda: pairs.rooms and all(len(room) >= 2 for room in pairs.rooms.values()))
    asking.cancel()
    await until(lambda: pairs.of.p.cancelled + pairs.of.q.cancelled == 1)
    await until(lambda: pairs.of.d.cancelled + pairs.of.e.cancelled == 1)
    await until(lambda: pairs.records)
    assert (pairs.records[0].status, pairs.records[0].end) == (499, "cancelled")
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_an_answer_that_is_whole_waits_for_nobody(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "computes-and-hangs"
    answer = await ask(pairs)
    assert answer.status == 200
    await until(lambda: pairs.of.p.cancelled + pairs.of.q.cancelled == 1)
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_a_stream_that_breaks_off_says_so(pairs):
    pairs.of.d.mode = pairs.of.e.mode = "half"
    asking = asyncio.create_task(ask(pairs, stream=True))
    await until(lambda: pairs.rooms and all("computed" in room for room in pairs.rooms.values()))
    pairs.of.d.release.set()
    pairs.of.e.release.set()
    answer = await asking
    assert (answer.status, "by " in answer.text, "FT8106" in answer.text) == (200, True, True)
    assert "[DONE]" not in answer.text
    assert pairs.records[0].end == "broken"
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("places", "providers"),
    [
        ({"d": ("decode", "one")}, {}),
        ({"p": ("prefill", "one")}, {}),
        ({"p": ("prefill", "two"), "d": ("decode", "one")}, {}),
        ({"p": ("prefill", "one"), "d": ("decode", "one")}, {"p": "beta"}),
    ],
)
async def test_a_half_alone_or_a_stranger_as_the_other_half_answers_nobody(make_bed, places, providers):
    """Another provider's record could have a replica connect anywhere, and write into its caches."""
    bed = await rooms_bed(make_bed, places, provider_of=providers)
    try:
        answer = await ask(bed)
        lacking = "decode" if "d" not in places else "prefill"
        assert (answer.status, f"no {lacking} replica" in answer.text) == (503, True)
        assert not any(engine.asked for engine in bed.engines.values())
        assert bed.records[0].end == "refused"
    finally:
        await over(bed)


@pytest.mark.asyncio
async def test_replicas_that_share_otherwise_are_no_half_of_such_a_pair(make_bed):
    others = {"v": FakePairEngine("v", {}), "w": FakePairEngine("w", {})}
    for engine in others.values():
        await engine.start()
    more = [
        StaticNode(others["v"].url, ["m"], "alpha", phase="prefill", site="one", engine="vllm"),
        StaticNode(others["w"].url, ["n"], "alpha", phase="decode", site="one", engine="vllm"),
    ]
    bed = await rooms_bed(make_bed, {"d": PLACES["d"]}, more)
    try:
        assert (await ask(bed)).status == 503
        assert others["v"].asked == [] == bed.of.d.asked
    finally:
        await over(bed)
        for engine in others.values():
            await engine.stop()


@pytest.mark.asyncio
async def test_one_that_needs_nobody_answers_where_no_pair_is_left(make_bed):
    alone = FakePairEngine("u", {})
    await alone.start()
    bed = await rooms_bed(
        make_bed, {"p": PLACES["p"], "d": PLACES["d"]}, [StaticNode(alone.url, ["m"], "alpha", site="one")]
    )
    try:
        bed.of.p.mode = "reset"
        answers = [await ask(bed) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["x-fabric-replica"] for answer in answers} == {f"127.0.0.1:{alone.port}"}
        assert all("bootstrap_room" not in asked for asked in alone.asked)
        assert len(bed.of.p.asked) >= 1
        assert (await ask(bed, n=2)).status == 200, "it takes what a pair cannot"
        assert at_rest(bed)
    finally:
        await over(bed)
        await alone.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap\\u005fhost"])
async def test_a_client_cannot_send_a_replica_anywhere(pairs, name):
    answer = await ask(pairs, raw=f'{{"model": "m", "{name}": "192.0.2.1", "messages": []}}'.encode())
    assert (answer.status, "FT8162" in answer.text) == (400, True)
    assert not any(engine.asked for engine in pairs.engines.values())


def test_the_registry_says_who_shares_how_and_nothing_of_a_place_that_is_none():
    """Models of which nobody shares at once are served as ever: also when the last of them is gone."""
    directory = Directory()
    about = {"federation": "f", "session": b"n" * 16, "lifecycle": Lifecycle.SERVING, "version": 1}
    node = NodeBody(**about, role="agent", fabric="f", provider="alpha", site="s", cluster="c", node="n")
    served = {"replica": "m/0", "model": "m", "engine": "sglang", "phase": "prefill"}
    for number, (told, place) in enumerate(
        [("10.0.0.7:8998", ("10.0.0.7", 8998)), ("169.254.169.254:80", None), (None, None)]
    ):
        service = bytes([number]) * 16
        body = ServiceBody(**about, **served, service=service, pairing="together", meets_at=told)
        directory.follow(b"n" * 16, [Serving(node, body)], None, 0.0)
        (target,) = directory.of_model("m")
        assert (target.pairing, target.phase, target.meets_at, target.in_rooms) == ("together", "prefill", place, True)
        assert dict(directory.in_rooms) == {"m": 1}
    directory.follow(b"n" * 16, [Serving(node, ServiceBody(**about, **served, service=b"v" * 16))], None, 0.0)
    assert dict(directory.in_rooms) == {}
    assert dict(directory.split) == {"m": 1}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ("10.0.0.7:8998", ("10.0.0.7", 8998)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("2001:db8::7:8998", ("[2001:db8::7]", 8998)),
        ("", None),
        ("10.0.0.7:0", None),
        ("10.0.0.7:65536", None),
        ("0.0.0.0:80", None),
        ("169.254.169.254:80", None),
        ("224.0.0.1:80", None),
        ("gateway.example:80", None),
        ("10.0.0.7/x:80", None),
    ],
)
def test_only_an_address_of_one_machine_is_a_meeting_place(told, place):
    assert meeting_place(told) == place


@pytest.mark.parametrize(
    "entry", ["phase: prefill", "phase: decode, meets_at: '10.0.0.1:1'", "phase: prefill, meets_at: '0.0.0.0:1'"]
)
def test_a_list_says_where_a_prefill_server_is_found_and_of_no_other(tmp_path, entry):
    path = tmp_path / "list.yaml"
    path.write_text(f"nodes: [{{url: 'http://127.0.0.1:1', models: [m], pairing: together, {entry}}}]")
    with pytest.raises(InvalidInputError, match=re.escape("nodes[0]: meets_at")):
        read_registry(path)
