"""Several models out of one memory, by real iterations: the same scheduler as in the simulator."""

import gc
import json
import random
import subprocess
import sys
import threading
import time

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from fabrictool.base.clock import SystemClock
from fabrictool.engines.reference import __main__ as program
from fabrictool.engines.reference import sharing_engine
from fabrictool.engines.reference.answers import EngineLimits, LatencyTargets
from fabrictool.engines.reference.engine import ReferenceEngine
from fabrictool.engines.reference.kv import KvPool, block_bytes
from fabrictool.engines.reference.model import Transformer
from fabrictool.engines.reference.quantify import Quantified, measure, quantified
from fabrictool.engines.reference.resident import ResidentModel
from fabrictool.engines.reference.server import EngineServer
from fabrictool.engines.reference.sharing_engine import SharingEngine, SharingModel
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights
from fabrictool.sharing.quantified import RESTED_S, IterationTable, RefinedTable
from fabrictool.status.elastic import ElasticState, in_words
from tests.engines.asking import Client, prompt
from tests.tiny_model import write_tiny_model

LIMITS = EngineLimits(context=256, max_seqs=6, blocks=64, block_size=8, token_budget=64)
PATIENT = LatencyTargets(600.0, 600.0)
NAMES = ("a", "b", "c")


def table(prefill=1e-6, decode=1e-5):
    """Seconds of a prompt's token, and of a step."""
    return IterationTable.sampled(lambda tokens: prefill * tokens, lambda *_: decode, LIMITS.context, LIMITS.max_seqs)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three that differ in their weights, and in how many they have."""
    folder = tmp_path_factory.mktemp("models")
    loaded = {}
    for seed, name in enumerate(NAMES):
        path = folder / f"{name}.gguf"
        write_tiny_model(path, seed=seed, layers=2 + seed)
        weights = load_weights(path, None, lambda _: None)
        loaded[name] = SharingModel(
            name, weights, Tokenizer(weights.metadata), LIMITS, Quantified(table(), weights.flat.nbytes / 1e9)
        )
    return loaded


@pytest.fixture(scope="module")
def alone(models):
    """What an engine for this model alone answers: (name, prompt, most) → (text, why it ended)."""
    clients = {}
    for name, model in models.items():
        limits = LIMITS._replace(blocks=256)
        engine = ReferenceEngine(model.weights, model.tokenizer, limits, SystemClock())
        engine.start()
        clients[name] = Client(engine)
    yield lambda name, *asked: clients[name].text(clients[name].ask(*asked))
    for client in clients.values():
        client.engine.stop()


@pytest.fixture
def start():
    """engine = start(models, memory, …): it is stopped at the end."""
    engines = []

    def begin(models, memory, clock=None, **options):
        engine = SharingEngine(list(models), memory, clock or SystemClock(), **options)
        engines.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in engines:
        engine.stop()


def octets(model, tokens):
    """Of a replica with a cache of so many tokens."""
    blocks = -(-tokens // LIMITS.block_size)
    return model.weights.flat.nbytes + blocks * block_bytes(model.weights.config, LIMITS.block_size)


def clients_of(engine):
    return {name: Client(service) for name, service in engine.services.items()}


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Watched(threading.Thread):
    """Keeps the largest memory that was ever tracked, or in use."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine, self.over, self.states = engine, threading.Event(), []

    def run(self):
        while not self.over.wait(0.001):
            state = self.engine.state()
            self.states.append((state.tracked, sum(replica.physical for replica in state.replicas)))


@pytest.mark.parametrize("tight", [False, True])
def test_answers_are_those_of_each_model_alone(models, alone, start, tight):
    """Room for all, or for one and a half of them, so that they load, grow, shrink, leave and give caches up."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    memory = (octets(models["b"], 256) + octets(models["c"], 400)) if tight else 1 << 30
    engine = start(models.values(), memory, keep_alive_s=0.01 if tight else 60.0)
    watched = Watched(engine)
    watched.start()
    clients, asked = clients_of(engine), []
    for _ in range(40):
        name = rng.choice(NAMES)
        length = rng.randint(1, 150)
        what = prompt(rng, length), rng.randint(1, LIMITS.context - length)
        asked.append((name, *what, clients[name].ask(*what, targets=PATIENT)))
        if rng.random() < 0.3:
            left = rng.choice(NAMES)  # at any moment: while it waits, while memory changes, while it is answered
            number = clients[left].ask(prompt(rng, rng.randint(1, 150)), 100, targets=PATIENT)
            time.sleep(rng.uniform(0.0, 0.02))
            engine.services[left].cancel(number)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, 0.05))
    answers = [clients[name].text(number) for name, *_, number in asked]
    watched.over.set()
    watched.join()
    state = engine.state()
    assert answers == [alone(*what) for *what, _ in asked], f"seed {seed}"
    assert state.in_time >= len(asked)
    assert max(tracked for tracked, _ in watched.states) <= memory
    if tight:
        assert state.loads >= 3
        assert state.unloads > 0
        assert state.resizes > 0
        # Neither request nor block is left behind.
        until(lambda: not engine.state().replicas)
        assert engine.state().tracked == engine.state().budget == 0
    else:
        assert (state.loads, state.unloads, state.evicted) == (3, 0, 0)
        assert all(resident.free == resident.blocks for resident in engine._resident.values())


def test_who_has_most_time_gives_its_cache_up_and_is_computed_anew(models, alone, start):
    """Answers that are longer than thought: the second one does not fit beside the first to its end."""
    model, rng = models["a"], random.Random(5)
    engine = start([model], octets(model, 256))
    client = clients_of(engine)["a"]
    asked = [(prompt(rng, 60), 150) for _ in range(3)]
    numbers = [client.ask(*what, targets=PATIENT) for what in asked]
    assert [client.text(number) for number in numbers] == [alone("a", *what) for what in asked]
    assert engine.state().evicted > 0
    assert engine.services["a"].stats.preemptions == engine.state().evicted


def test_an_idle_model_makes_room_at_once(models, start):
    """It would stay for a minute, and the other's request would be dropped."""
    a, c = models["a"], models["c"]
    engine = start([a, c], octets(c, 256) + 1000, ttft_s=20.0, tpot_s=20.0, keep_alive_s=60.0)
    clients = clients_of(engine)
    for name in "acac":
        assert clients[name].text(clients[name].ask([5, 6, 7], 4))[1] in ("stop", "length")
    state = engine.state()
    assert (state.loads, state.unloads, state.dropped) == (4, 3, 0)
    assert [replica.model for replica in state.replicas] == ["c"]


def test_a_model_without_requests_leaves_after_a_while(models, start):
    engine = start(models.values(), 1 << 30, keep_alive_s=0.05)
    client = clients_of(engine)["b"]
    client.text(client.ask([5, 6, 7], 4))
    until(lambda: not engine.state().replicas)
    assert (engine.state().loads, engine.state().unloads) == (1, 1)


def test_what_nobody_can_begin_in_time_is_dropped(models, start):
    engine = start([models["a"]], 1 << 30)
    client = clients_of(engine)["a"]
    assert client.text(client.ask([5, 6, 7], 4, targets=LatencyTargets(1e-9, 1e-9))) == ("", "dropped")
    assert client.text(client.ask([5, 6, 7], 4, targets=PATIENT))[1] in ("stop", "length")
    assert engine.state().dropped == 1
    assert engine.services["a"].stats.finished["dropped"] == 1


def test_a_client_that_leaves_frees_its_blocks(models, start):
    engine = start([models["a"]], 1 << 30, ttft_s=60.0, tpot_s=60.0)
    client = clients_of(engine)["a"]
    left, stays = (client.ask([5, number], 250) for number in (6, 7))
    client.until(left, 2)
    engine.services["a"].cancel(left)
    assert client.text(left)[1] == "cancelled"
    assert client.text(stays)[1] in ("stop", "length")
    (resident,) = engine._resident.values()
    assert resident.free == resident.blocks
    assert engine.services["a"].stats.preemptions == 0


class CountedTime:
    """A clock that iterations move on, by what the table says of them."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def in_turn():
    """A scheduler of turns that knows no time: each model that has something to do, one after the other."""
    last = -1

    def choose(replicas, now):
        nonlocal last
        able = [
            replica
            for replica in replicas
            if replica.batch and replica.ready_at <= now and not replica.node.ledger.is_changing(replica.id)
        ]
        if not able:
            return None
        chosen = min(able, key=lambda replica: (replica.id <= last, replica.id))
        last = chosen.id
        return chosen

    return choose


def run_counted(models, monkeypatch, **options):
    """Long prompts that have time and short ones that have little, all at once: (state, seconds that it took)."""
    clock = CountedTime()
    tables = {"a": table(prefill=0.005, decode=0.02), "b": table(prefill=0.005, decode=0.02)}
    step = ResidentModel.step

    def timed(self, rows):
        tokens = sum(len(row[1]) for row in rows)
        clock.now += 0.005 * tokens if len(rows) == 1 and rows[0][2] == 0 else 0.02
        return step(self, rows)

    monkeypatch.setattr(ResidentModel, "step", timed)
    chosen = [models[name]._replace(quantified=Quantified(tables[name], 1e-6)) for name in "ab"]
    engine = SharingEngine(chosen, 1 << 30, clock, **options)
    engine._spawn = lambda work: work()
    clients, rng = clients_of(engine), random.Random(3)
    asked = [("a", clients["a"].ask(prompt(rng, 100), 8, targets=LatencyTargets(8.0, 0.5))) for _ in range(8)]
    asked += [("b", clients["b"].ask(prompt(rng, 20), 8, targets=LatencyTargets(1.5, 0.5))) for _ in range(8)]
    engine.start()
    for name, number in asked:
        clients[name].text(number)
    engine.stop()
    monkeypatch.setattr(ResidentModel, "step", step)
    return engine.state()


def test_by_headroom_fewer_requests_are_late_than_in_turn(models, monkeypatch):
    by_headroom, turns = run_counted(models, monkeypatch), run_counted(models, monkeypatch, turns=in_turn())
    assert by_headroom.in_time + by_headroom.late + by_headroom.dropped == 16
    assert by_headroom.late == 0
    assert by_headroom.in_time > turns.in_time
    assert turns.late > 0


def test_a_cache_changes_its_size_with_requests_in_it(models):
    """Scattered blocks come together; one whose request leaves meanwhile is free afterwards."""
    weights, rng = models["b"].weights, random.Random(4)
    prompts = {number: prompt(rng, 20) for number in range(4)}
    changed, still = (ResidentModel(weights, 40, LIMITS.block_size) for _ in range(2))
    for model in (changed, still):
        for number, tokens in prompts.items():
            model.step([(number, tokens, 0)])
        model.forget(1)
    for blocks in (12, 60, 9):
        move = changed.move(blocks)
        move.copy()
        if blocks == 60:
            changed.forget(2)
            still.forget(2)
        changed.moved(move)
        rows = [(number, [7], 20) for number in prompts if number not in (1, 2)]
        assert np.array_equal(changed.step(rows), still.step(rows))
        assert changed.blocks == blocks
        assert changed.blocks - changed.free == still.blocks - still.free
    with pytest.raises(AssertionError, match="do not fit"):
        changed.move(3)


@pytest.fixture
def counted(monkeypatch):
    """A clock that says two milliseconds for each token of an iteration, or what `pace` says of it."""
    clock, step = CountedTime(), Transformer.step
    clock.pace, clock.iterations = 0.002, 0

    def timed(self, batch, pool):
        clock.iterations += 1
        clock.now += clock.pace * sum(len(rows.tokens) for rows in batch)
        return step(self, batch, pool)

    monkeypatch.setattr(Transformer, "step", timed)
    return clock


def test_iterations_are_measured_once(counted, tmp_path):
    """What is measured is kept as long as it is about true; a file that cannot be read is measured anew."""
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    weights = load_weights(path, None, lambda _: None)
    limits = LIMITS._replace(context=64, max_seqs=2)

    def iterations(**more):
        before = counted.iterations
        table = quantified(path, weights, limits._replace(**more), counted, tmp_path).iterations
        return table, counted.iterations - before

    first, many = iterations()
    assert iterations() == (first, 6), "two samples, the least of three each"
    counted.pace = 0.003
    assert iterations() == (first, 6)
    counted.pace = 0.006
    slower, again = iterations()
    assert again == many + 6
    assert slower.prefill == pytest.approx([3 * seconds for seconds in first.prefill])
    (kept,) = (tmp_path / "quantified").iterdir()
    kept.write_text("{")
    assert iterations()[1] == many
    assert iterations(max_seqs=4)[1] > many


def test_what_is_measured_is_what_iterations_take(models, counted):
    measured = measure(models["c"].weights, LIMITS, counted).iterations
    assert measured.lengths[-1] >= LIMITS.context
    assert measured.batches[-1] >= LIMITS.max_seqs
    assert measured.prefill == pytest.approx([0.002 * length for length in measured.lengths])
    assert [row[-1] for row in measured.decode] == pytest.approx([0.002 * batch for batch in measured.batches])


def test_a_table_follows_the_pace_of_iterations():
    refined = RefinedTable(table(prefill=0.001, decode=0.02))
    assert (refined.prefill_s(64), refined.decode_s(1, 64)) == pytest.approx((0.064, 0.02))
    for _ in range(60):
        refined.learn_prefill(64, 0.128, 5.0)
        refined.learn_decode(1, 64, 0.01, 5.0)
    assert (refined.prefill_s(32), refined.decode_s(2, 100)) == pytest.approx((0.064, 0.01), rel=0.01)
    refined.learn_decode(1, 64, 1000.0, 5.0)
    assert refined.decode_pace < 0.7, "a pause of the machine is no pace"
    refined.rest(5.0 + 10 * RESTED_S)
    assert (refined.prefill_pace, refined.decode_pace) == pytest.approx((1.0, 1.0), rel=0.01)


def test_a_pace_at_which_nobody_could_be_served_is_forgotten(models, start):
    """Iterations that took three seconds, at targets of a quarter: refused at first, not for ever."""
    engine = start([models["a"]], 1 << 30, ttft_s=30.0)
    client = clients_of(engine)["a"]
    client.text(client.ask([5, 6, 7], 4))
    (times,) = engine.core.models["a"].tables.values()
    times.decode_pace, times.heard_at = 3.0 / times.table.decode_s(1, 32), engine._clock.monotonic()
    assert client.text(client.ask([5, 6, 7], 4, targets=LatencyTargets(0.2, 0.2)))[1] == "dropped"
    times.heard_at -= 100 * RESTED_S
    assert client.text(client.ask([5, 6, 7], 4, targets=LatencyTargets(20.0, 0.2)))[1] in ("stop", "length")


def test_a_model_whose_load_was_given_up_while_it_waited_is_loaded_later(models, start):
    """It waits for memory that another gives back, its client leaves, and it leaves before it was there."""
    a, b, c = (models[name] for name in NAMES)
    engine = start([a, b, c], octets(c, 256) + 1000, ttft_s=60.0, tpot_s=60.0)
    slow, held = [], threading.Event()

    def spawn(work):
        slow.append(threading.Thread(target=lambda: (held.wait(60), work()), daemon=True))
        slow[-1].start()

    clients = clients_of(engine)
    clients["a"].text(clients["a"].ask([5, 6], 2))
    engine._spawn = spawn
    left = clients["b"].ask([5, 6], 2)  # for which a leaves, slowly
    until(lambda: {r.model: r.memory for r in engine.state().replicas} == {"a": "leaving", "b": "held"})
    engine.services["b"].cancel(left)
    assert clients["b"].text(left)[1] == "cancelled"
    other = clients["c"].ask([5, 6], 2)  # for which b leaves, before it was there
    until(lambda: {r.model for r in engine.state().replicas} == {"a", "c"})
    held.set()
    assert clients["c"].text(other)[1] in ("stop", "length")
    assert clients["b"].text(clients["b"].ask([5, 6], 2))[1] in ("stop", "length")
    for thread in slow:
        thread.join()


def test_a_load_that_fails_stops_the_engine_and_ends_every_request(models, monkeypatch, caplog):
    failures = []
    engine = SharingEngine([models["a"]], 1 << 30, SystemClock(), failures.append, ttft_s=60.0)
    monkeypatch.setattr(sharing_engine, "ResidentModel", lambda *_: 1 / 0)
    engine.start()
    client = clients_of(engine)["a"]
    assert client.text(client.ask([5, 6], 2))[1] == "error"
    until(lambda: failures)
    assert engine.failure == "ZeroDivisionError: division by zero"
    assert "the compute thread failed" in caplog.text
    engine.stop()


def test_stopping_waits_for_no_load(models):
    engine, held = SharingEngine([models["a"]], 1 << 30, SystemClock(), ttft_s=60.0), threading.Event()
    threads = []

    def spawn(work):
        threads.append(threading.Thread(target=lambda: (held.wait(60), work()), daemon=True))
        threads[-1].start()

    engine._spawn = spawn
    engine.start()
    client = clients_of(engine)["a"]
    number = client.ask([5, 6], 2)
    until(lambda: engine.state().replicas)
    engine.stop(timeout_s=30.0)
    assert not engine._thread.is_alive()
    assert client.text(number)[1] == "cancelled"
    held.set()
    for thread in threads:  # what it loads is nobody's, and no other test's
        thread.join()


def test_a_cache_that_was_left_is_no_longer_there(models, start):
    """Without a search for cycles, which an idle engine never does."""

    def pools():
        return [thing for thing in gc.get_objects() if isinstance(thing, KvPool)]

    gc.collect()
    others = {id(pool): pool for pool in pools()}  # held, so that no other one gets their places
    gc.disable()
    try:
        engine = start([models["a"]], octets(models["a"], 300), ttft_s=60.0, tpot_s=60.0)
        client = clients_of(engine)["a"]
        for _ in range(3):
            numbers = [client.ask([5, 6, 7], 100) for _ in range(3)]
            for number in numbers:
                client.text(number)
        until(lambda: all(replica.memory == "ready" for replica in engine.state().replicas))
        assert engine.state().resizes > 0
        until(lambda: sum(id(pool) not in others for pool in pools()) == 1)
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_a_server_answers_for_each_by_its_name(models, start):
    engine = start([models["a"], models["b"]], 1 << 30)
    server = EngineServer(SystemClock(), max_waiting=8)
    server.serve(engine, engine.services)
    runner = web.AppRunner(server.application(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    ask = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "fabric": {"ttft_s": 60, "tpot_s": 60}}
    async with aiohttp.ClientSession() as http:

        async def post(path, body):
            async with http.post(url + path, json=body) as answer:
                return answer.status, await answer.json()

        async def get(path):
            async with http.get(url + path) as answer:
                return await answer.read()

        for name in "ab":
            status, answer = await post("/v1/completions", {**ask, "model": name})
            assert (status, answer["model"]) == (200, name)
        assert (await post("/v1/completions", {**ask, "model": "c"}))[0] == 404
        status, answer = await post("/v1/completions", {**ask, "model": "a", "fabric": {"ttft_s": -1, "tpot_s": 1}})
        assert (status, answer["error"]["param"]) == (400, "fabric.ttft_s")
        late = {**ask, "model": "a", "fabric": {"ttft_s": 1e-9, "tpot_s": 1e-9}}
        for stream in (False, True):
            status, answer = await post("/v1/completions", {**late, "stream": stream})
            assert (status, answer["error"]["code"]) == (503, "no_room_in_time")
        assert [entry["id"] for entry in json.loads(await get("/v1/models"))["data"]] == ["a", "b"]
        state = msgspec.json.decode(await get("/fabric/state"), type=ElasticState)
        assert (state.models, state.in_time, state.dropped) == (("a", "b"), 2, 2)
        samples = list(text_string_to_metric_families((await get("/metrics")).decode()))
        finished = next(family for family in samples if family.name == "vllm:request_success")
        assert {s.labels["model_name"] for s in finished.samples} == {"a", "b"}
        assert sum(s.value for s in finished.samples if s.labels["finished_reason"] == "dropped") == 2
        memory = next(family for family in samples if family.name == "fabrictool:memory_capacity_bytes")
        assert [s.value for s in memory.samples] == [1 << 30]
        assert in_words(state) == "2 of 2 models in 0.0 of 1.0 GiB"
        assert (await post("/fabric/mode", {"merged": True}))[0] == 404
    await runner.cleanup()


def test_smollm2_shares_a_node(smollm2_path, smollm2_cache, models, start, alone):
    """A real model beside a random one, with room for both, then for one at a time."""
    weights = load_weights(smollm2_path, smollm2_cache, lambda _: None)
    tokenizer = Tokenizer(weights.metadata)
    capital = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    real = SharingModel("real", weights, tokenizer, LIMITS, Quantified(table(), 0.5))
    for memory in (1 << 30, octets(real, 256) + 1000):
        engine = start([real, models["a"]], memory, ttft_s=600.0, tpot_s=600.0)
        clients = clients_of(engine)
        asked = [(name, clients[name].ask(*what)) for name, what in 2 * [("real", (capital, 8)), ("a", ([5, 6], 20))]]
        answers = [(name, clients[name].text(number)) for name, number in asked]
        assert answers == 2 * [("real", ("The capital of France is Paris.", "stop")), ("a", alone("a", [5, 6], 20))]
        assert bool(engine.state().unloads) is (memory < 1 << 30)
        engine.stop()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    for seed, name in enumerate(NAMES):
        write_tiny_model(folder / f"{name}.gguf", seed=seed)
    return folder


def arguments(paths, *options):
    usual = ["--model", "a.gguf", "--served-name", "a", "--port", "0", "--context", "64", "--max-num-seqs", "2"]
    return [*usual, "--cache-dir", str(paths / "cache"), *options]


TWO = ("--model", "b.gguf", "--served-name", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "b.gguf"), "each --model wants a --served-name of its own"),
        (("--model", "b.gguf", "--served-name", "a"), "each --model wants a --served-name of its own"),
        ((*TWO, "--replicas", "2"), "--replicas are of one --model"),
        ((*TWO, "--keep-alive", "soon"), "'soon' is no time"),
        ((*TWO, "--kv-memory", "1GiB"), "give --memory in place of"),
        (("--keep-alive", "2s"), "--keep-alive is of several models"),
    ],
)
def test_options_that_contradict_each_other_are_said_to(paths, monkeypatch, capsys, options, words):
    monkeypatch.setattr(program, "configure_logging", lambda level: None)  # of the whole process
    with pytest.raises(SystemExit) as ended:
        program.main(arguments(paths, *options))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [((*TWO, "--memory", "1KiB"), 65, "FT7026"), ((*TWO, "--replicas", "2"), 2, "--replicas are of one --model")],
)
def test_what_cannot_be_is_said_without_a_traceback(paths, options, code, words):
    command = [sys.executable, "-m", "fabrictool.engines.reference", *arguments(paths, *options)]
    done = subprocess.run(command, cwd=paths, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
