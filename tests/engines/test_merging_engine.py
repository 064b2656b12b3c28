"""Replicas that merge and split while they answer: the same tokens, whatever happens on the way."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError
from fabrictool.engines.reference.answers import EngineLimits
from fabrictool.engines.reference.engine import ReferenceEngine
from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.merging_engine import MergingEngine
from fabrictool.engines.reference.model import SequenceRows, Shard, Transformer
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights
from fabrictool.merging.groups import ReplicaGroup
from fabrictool.merging.requests import MergingOptions, Split, Transition
from fabrictool.merging.triggers import LoadTrigger
from tests.engines.asking import Client, prompt
from tests.tiny_model import write_tiny_model

LIMITS = EngineLimits(context=256, max_seqs=6, blocks=16, block_size=8, token_budget=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path, width=48, heads=6, kv_heads=3)  # which needs heads of nothing to be cut in two or four
    return path


@pytest.fixture(scope="module")
def weights(model):
    return load_weights(model, model.parent / "cache", lambda _: None, 4)


@pytest.fixture
def start(model, weights):
    """engine = start(replicas, …): it is stopped at the end."""
    engines = []

    def begin(replicas=2, *, limits=LIMITS, trigger=None, **options):
        options.setdefault("switch_s", 0.0)
        engine = MergingEngine(
            weights, Tokenizer(weights.metadata), limits, SystemClock(), model=model, cache=model.parent / "cache",
            replicas=replicas, options=MergingOptions(places=limits.max_seqs, budget=limits.token_budget, **options),
            trigger=trigger,
        )  # fmt: skip
        engines.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def alone(model):
    """What the ordinary engine answers, with the model's own heads: (prompt, most) → text."""
    limits = LIMITS._replace(blocks=256)
    weights = load_weights(model, None, lambda _: None)
    engine = ReferenceEngine(weights, Tokenizer(weights.metadata), limits, SystemClock())
    engine.start()
    client = Client(engine)
    yield lambda prompt, most: client.text(client.ask(prompt, most))
    engine.stop()


def settled(engine):
    """Clients hear of a last token before its step is accounted for."""
    deadline = time.monotonic() + 10
    while engine.core.in_flight or engine._sent or engine._tables:
        assert time.monotonic() < deadline
        engine._wake()
        time.sleep(0.001)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_members_of_a_group_compute_what_one_computes(model, weights, degree):
    """Partial sums are added here, in one thread after the other."""
    tokens = prompt(random.Random(1), 20)
    own = load_weights(model, None, lambda _: None)
    assert own.config.kv_heads == 3 < weights.config.kv_heads
    whole = Transformer(own).step([SequenceRows(tokens, 0, [0, 1, 2], True)], KvPool(own.config, 8, 8))
    barrier, parts = threading.Barrier(degree), [None] * degree
    logits = [None] * degree

    def member(rank):
        def reduce(part):
            parts[rank] = part
            barrier.wait()
            total = sum(parts[1:], parts[0])
            barrier.wait()
            return total

        pool = KvPool(weights.config, 8, 8).merged(degree)
        shard = Transformer(weights, Shard(rank, degree, reduce))
        logits[rank] = shard.step([SequenceRows(tokens, 0, list(range(-(-20 // (8 * degree)))), True)], pool)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.abs(np.concatenate(logits, axis=1) - whole).max() < 1e-4


@pytest.mark.parametrize("degree", [2, 4])
def test_views_are_the_same_memory(weights, degree):
    pool = KvPool(weights.config, 8, 8)
    merged = pool.merged(degree)
    assert merged.addresses == pool.addresses
    assert merged.blocks == pool.blocks
    assert merged.block_size == 8 * degree
    first, last = weights.flat[:1].ctypes.data, weights.flat[-1:].ctypes.data
    for rank in range(degree):
        for layer in Transformer(weights, Shard(rank, degree, lambda part: part))._layers:
            for matrix in (*layer.qkv, layer.attn_output, *layer.gate_up, layer.ffn_down):
                assert first <= matrix.ctypes.data <= last
                assert matrix.flags.c_contiguous
                assert np.shares_memory(matrix, weights.flat)


def test_replicas_answer_as_one_does(start, alone):
    engine, rng = start(), random.Random(2)
    client = Client(engine)
    asked = [(prompt(rng, rng.randint(1, 60)), rng.randint(1, 30)) for _ in range(8)]
    numbers = [client.ask(*ask) for ask in asked]
    assert [client.text(number) for number in numbers] == [alone(*ask) for ask in asked]


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_group_answers_as_one_does(start, alone, replicas):
    engine, rng = start(replicas, fixed=replicas), random.Random(3)
    client = Client(engine)
    asked = [(prompt(rng, rng.randint(1, 100)), rng.randint(1, 30)) for _ in range(6)]
    numbers = [client.ask(*ask) for ask in asked]
    assert [client.text(number) for number in numbers] == [alone(*ask) for ask in asked]


@pytest.mark.parametrize("schedule", range(10))
def test_text_is_the_same_whenever_replicas_merge_and_split(start, alone, schedule):
    """Random merges and splits, priorities, ways to merge and to split, under requests that run. Twice each, for to
    start an engine's processes takes as long as what they then do.
    """
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    trigger = LoadTrigger(1e9, 1e9)
    engine = start(
        trigger=trigger, priority_degree=2, turns=rng.randint(1, 4), split=rng.choice(list(Split)),
        load_transition=rng.choice(list(Transition)), priority_transition=rng.choice(list(Transition)),
    )  # fmt: skip
    client = Client(engine)
    for _ in range(2):
        asked = [(prompt(rng, rng.randint(1, 60)), rng.randint(20, 60)) for _ in range(rng.randint(1, 6))]
        numbers = [client.ask(*ask, priority=rng.randint(0, 1)) for ask in asked]
        for _ in range(12):
            engine.merge(rng.choice([True, False]))
            number = rng.choice(numbers)
            client.until(number, client.tokens(number) + rng.randint(1, 6))
        texts = [client.text(number) for number in numbers]
        assert texts == [alone(*ask) for ask in asked], (seed, schedule)
        settled(engine)
        assert engine.core.free == [LIMITS.blocks] * 2
        assert [allocator.free for allocator in engine._allocators] == [LIMITS.blocks] * 2


def test_together_replicas_answer_what_none_of_them_holds(start, alone):
    engine = start()
    long = prompt(random.Random(4), 180)
    assert len(long) > LIMITS.blocks * LIMITS.block_size
    client = Client(engine)
    assert client.text(client.ask(long, 20)) == alone(long, 20)
    assert engine.core.counts.formed == 1


def test_priority_waits_least_where_others_pause_and_longest_where_they_are_finished(start, alone):
    """By what two others had been told when its first token came: a long one and a short one, on a replica each."""
    rng, told = random.Random(9), {}
    asked = [(prompt(rng, 10), 110), (prompt(rng, 10), 60)]
    urgent = prompt(rng, 10), 5
    for transition in Transition:
        engine = start(priority_degree=2, priority_transition=transition, pause_s=60.0)
        client = Client(engine)
        others = [client.ask(*ask) for ask in asked]
        for number in others:
            client.until(number, 3)

        def note(kind=transition, client=client, others=others):
            told[kind] = [client.tokens(other) for other in others]

        number = client.ask(*urgent, priority=0, first=note)
        assert client.text(number) == alone(*urgent)
        assert [client.text(other) for other in others] == [alone(*ask) for ask in asked]
        long, short = (client.tokens(other) for other in others)
    # How far they had come when it was asked differs from run to run: only who was finished first says something.
    assert told[Transition.HARD][1] < short, "nobody was finished first"
    assert told[Transition.SOFT][1] == short
    assert told[Transition.SOFT][0] < long, "the short one alone was finished first"
    assert told[Transition.SEQUENTIAL] == [long, short]


def test_priority_is_answered_first_and_others_go_on(start, alone):
    engine, rng = start(priority_degree=2), random.Random(5)
    client = Client(engine)
    asked = [(prompt(rng, 20), 100) for _ in range(2)]
    ordinary = [client.ask(*ask) for ask in asked]
    client.until(ordinary[0], 3)
    urgent = prompt(rng, 20), 20
    number = client.ask(*urgent, priority=0)
    assert client.text(number) == alone(*urgent)
    assert all(client.tokens(o) < 100 for o in ordinary)
    assert [client.text(o) for o in ordinary] == [alone(*ask) for ask in asked]
    assert engine.core.counts.recomputed == 0


def test_who_leaves_gives_back_its_blocks(start):
    engine = start(trigger=LoadTrigger(1e9, 1e9))
    client = Client(engine)
    numbers = [client.ask(prompt(random.Random(6), 30), 60) for _ in range(4)]
    client.until(numbers[0], 3)
    for number in numbers:
        engine.cancel(number)
    assert {client.text(number)[1] for number in numbers} == {"cancelled"}
    after = client.ask([5, 6], 3)
    assert client.text(after)[1] in ("length", "stop")
    settled(engine)
    assert engine.core.free == [LIMITS.blocks] * 2


def test_a_killed_worker_ends_its_group_and_nothing_else(start, alone):
    engine, rng = start(fixed=None, trigger=LoadTrigger(1e9, 1e9)), random.Random(7)
    client = Client(engine)
    asked = [(prompt(rng, 30), 90) for _ in range(3)]
    numbers = [client.ask(*ask) for ask in asked]
    client.until(numbers[0], 5)
    assert engine.core.formed == [ReplicaGroup(0, 2)]
    os.kill(engine._replicas[1].process.pid, signal.SIGKILL)
    assert [client.text(number) for number in numbers] == [alone(*ask) for ask in asked]
    assert engine.failure is None
    assert engine.core.closed == {1}
    after = prompt(rng, 10), 5
    assert client.text(client.ask(*after)) == alone(*after)
    assert engine.context == LIMITS.blocks * LIMITS.block_size


def test_what_only_both_held_is_given_up_when_one_is_killed(start):
    engine = start()
    client = Client(engine)
    number = client.ask(prompt(random.Random(8), 180), 60)
    client.until(number, 2)
    os.kill(engine._replicas[0].process.pid, signal.SIGKILL)
    assert client.text(number)[1] == "error"
    assert engine.failure is None


def test_the_engine_fails_when_no_worker_is_left(start):
    engine = start()
    client = Client(engine)
    number = client.ask(prompt(random.Random(9), 20), 100)
    client.until(number, 2)
    for replica in engine._replicas:
        os.kill(replica.process.pid, signal.SIGKILL)
    assert client.text(number)[1] == "error"
    engine._thread.join(10)
    assert "no replica is left" in engine.failure


def test_an_engine_whose_workers_cannot_start_says_so_and_leaves_nothing(weights, tmp_path):
    broken = tmp_path / "gone.gguf"
    engine = MergingEngine(
        weights, Tokenizer(weights.metadata), LIMITS, SystemClock(), model=broken, cache=None, replicas=2,
        options=MergingOptions(),
    )  # fmt: skip
    names = [replica.memory.name for replica in engine._replicas]
    with pytest.raises(FabrictoolError, match="FT7025"):
        engine.start()
    assert not any(replica.process.is_alive() for replica in engine._replicas)
    for name in names:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)
    engine.stop()


def test_no_worker_outlives_its_engine(model, tmp_path):
    """The process is killed while its replicas wait for each other in a group."""
    script = tmp_path / "engine.py"
    script.write_text(
        f"""
import time
from pathlib import Path
from tests.engines.test_merging_engine import *

if __name__ == "__main__":
    model = Path({str(model)!r})
    weights = load_weights(model, model.parent / "cache", lambda _: None, 2)
    engine = MergingEngine(weights, Tokenizer(weights.metadata), LIMITS, SystemClock(), model=model,
        cache=model.parent / "cache", replicas=2, options=MergingOptions(places=6, budget=64, switch_s=0.0, fixed=2))
    engine.start()
    print(*(replica.process.pid for replica in engine._replicas), flush=True)
    client = Client(engine)
    client.text(client.ask([5, 6, 7], 3))
    print("answered", flush=True)
    while True:
        client.text(client.ask([5, 6, 7], 200))
"""
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == b"answered\n"
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
