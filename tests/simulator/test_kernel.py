"""The event loop against its plain twin, and against what queueing theory and arithmetic know."""

import importlib.util
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.fleet import (
    STEP_BY_STEP,
    Fleet,
    ReplicaSpec,
    Stream,
    simulate,
)
from fabrictool.simulator.memory import NOTHING, RequestMemory
from fabrictool.simulator.report import inter_token_latencies, inter_token_mean
from fabrictool.simulator.steptimes import StepTimes
from tests.seeds import seeds

_spec = importlib.util.spec_from_file_location("stepwise", Path(__file__).with_name("stepwise.py"))
stepwise = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stepwise)


def times(slots=32, budget=256, **rates):
    base = StepTimes(
        decode=0.01 + 0.001 * np.arange(slots + 1),
        mixed=0.012 + 1e-4 * np.arange(budget + slots + 1),
        sample=1e-4 * np.arange(slots + 1),
        read=2e-7,
        pair=1e-8,
    )
    return replace(base, **rates)


def spec(**changes):
    return replace(ReplicaSpec(times(), max_num_seqs=32, token_budget=256, kv_tokens=1 << 20), **changes)


def stream(count, rate, seed=0, prompt=(1, 400), output=(1, 60), **more):
    rng = np.random.default_rng(seed)
    return Stream(
        np.cumsum(rng.exponential(1 / rate, count)),
        rng.integers(*prompt, count, endpoint=True),
        rng.integers(*output, count, endpoint=True),
        **more,
    )


def play(specs, requests, pick="least-loaded", **more):
    return simulate(specs, requests, routing_policy(pick, random.Random(0)), **more)


def service(seconds, slots=1):
    """A server that takes `seconds` for each job: one token, computed by its prefill."""
    flat = np.zeros(slots + 1)
    return StepTimes(decode=flat, mixed=np.full(3, seconds), sample=flat)


@seeds(60, drawn=20, long=500)
def test_the_kernel_equals_stepping_one_by_one(seed):
    rng = random.Random(seed)
    rate, kv = rng.choice([0.5, 3.0, 20.0]), rng.choice([640, 1200, 1 << 20])
    slots, budget, lanes = rng.choice([1, 4, 32]), rng.choice([16, 64, 256]), rng.choice([1, 2, 3])
    window, levels = rng.choice([0, 100]), rng.choice([1, 3])
    requests = stream(60, rate, seed)
    requests = replace(requests, priority=np.random.default_rng(seed + 1).integers(0, levels, 60))
    groups = rng.choice([1, lanes])
    shared = 5e-5 * np.arange(budget + slots + 1) * (groups > 1)
    windowed = {"window": window, "read_window": 1e-7 * (window > 0), "pair_window": 2e-8 * (window > 0)}
    drafted = rng.choice([{}, {}, {"queries": 4, "decoded": 2.6, "draft": 2e-4 * np.arange(slots + 1)}])
    beside = rng.choice([NOTHING, NOTHING, RequestMemory(fixed=20.0, windowed=0.4, window=windowed["window"])])
    one = spec(
        times=times(slots, budget, **windowed, **drafted, groups=groups, shared=shared),
        beside=beside,
        max_num_seqs=slots,
        token_budget=max(budget, slots + 1),
        kv_tokens=kv,
        lanes=lanes,
        prefill_first=rng.random() < 0.5,
        spared=rng.choice([0.0, 0.1, 1.0]),
        recv_interval=rng.choice([1, 1, 7]),
        balance_steps=rng.choice([0, 0, 5]),
        whole_prompts=rng.random() < 0.3,
    )
    found = play([one], requests)
    jobs = [
        stepwise.Job(i, float(a), int(p), int(o), int(q))
        for i, (a, p, o, q) in enumerate(
            zip(requests.arrival, requests.prompt, requests.output, requests.priority, strict=True)
        )
    ]
    stepwise.Engine(one).play(jobs)
    assert np.allclose(found.first, [j.first for j in jobs], rtol=1e-9, atol=1e-9)
    assert np.allclose(found.finish, [j.finish for j in jobs], rtol=1e-9, atol=1e-9)
    assert found.preempted.tolist() == [j.preempted for j in jobs]


@pytest.mark.parametrize("kv", [1 << 20, 6000])
def test_fast_forward_equals_step_by_step(kv):
    requests = stream(400, 6.0, prompt=(10, 900), output=(1, 300))
    one = spec(kv_tokens=kv)
    fast = play([one], requests)
    fleet = Fleet([one], requests, routing_policy("least-loaded", random.Random(0)), limit=STEP_BY_STEP)
    fleet.advance()
    slow = fleet.outcome()
    assert np.allclose(fast.finish, slow.finish, rtol=1e-9)
    assert fast.accounts.tokens[0] == slow.accounts.tokens[0]
    assert np.isclose(fast.accounts.read[0], slow.accounts.read[0])
    assert fast.accounts.steps[0] == slow.accounts.steps[0]


def test_attention_groups_wait_for_a_prompt_each():
    """Two groups, one long answer: a prompt waits 50 decode steps, and no longer when a second prompt has come."""
    two = spec(times=times(groups=2, shared=np.zeros(1)), lanes=2, balance_steps=50)
    long = Stream(np.array([0.0, 1.0]), np.array([10, 10]), np.array([2000, 5]))
    step = 0.011  # of the long answer, alone
    waited = [float(play([replace(two, balance_steps=n)], long).ttft[1]) for n in (0, 50)]
    assert waited[1] - waited[0] == pytest.approx(50 * step, abs=1.5 * step)
    three = Stream(np.array([0.0, 1.0, 1.2]), np.array([10, 10, 10]), np.array([2000, 5, 5]))
    first = play([two], three).first
    assert first[1] == first[2] < 1.3
    alone = replace(two, times=times(), lanes=1)
    assert float(play([alone], long).ttft[1]) < 0.1, "without groups there is nobody to wait for"


def test_the_same_seed_gives_the_same_bytes():
    outcomes = [play([spec(), spec(), spec()], stream(500, 20.0)) for _ in range(2)]
    assert outcomes[0].finish.tobytes() == outcomes[1].finish.tobytes()
    assert outcomes[0].replica.tobytes() == outcomes[1].replica.tobytes()


def test_tokens_are_conserved():
    requests = stream(300, 8.0)
    found = play([spec(), spec()], requests)
    # Each token but the last is computed once: prompts by prefill, answers after the first by decode steps.
    assert found.accounts.tokens.sum() == requests.prompt.sum() + (requests.output - 1).sum()
    assert np.isfinite(found.finish).all()
    assert (found.first > found.arrival).all()
    assert (found.finish >= found.first).all()


def test_one_request_alone_takes_what_its_steps_take():
    found = play([spec()], Stream(np.array([5.0]), np.array([300]), np.array([4])))
    t = spec().times
    first = t.mixed[256] + t.sample[0] + 256 * 257 / 2 * t.pair
    second = t.mixed[44] + t.sample[1] + (44 * 256 + 44 * 45 / 2) * t.pair
    decode = sum(t.decode[1] + length * t.read for length in (301, 302, 303))
    assert found.first[0] == pytest.approx(5.0 + first + second, rel=1e-12)
    assert found.finish[0] == pytest.approx(5.0 + first + second + decode, rel=1e-12)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_deterministic_server_waits_like_m_d_1(load):
    count = 60_000
    rng = np.random.default_rng(7)
    ones = np.ones(count, dtype=np.int64)
    requests = Stream(np.cumsum(rng.exponential(1 / load, count)), ones, ones)
    one = ReplicaSpec(service(1.0), max_num_seqs=1, token_budget=1, kv_tokens=64)
    found = play([one], requests)
    waited = float(found.e2e.mean()) - 1.0
    assert waited == pytest.approx(load / (2 * (1 - load)), rel=0.05)  # Pollaczek-Khinchine


def test_an_exponential_server_waits_like_m_m_1():
    """One slot and answers of geometric length, which are exponential but for the step's own size."""
    count, load, step, mean = 60_000, 0.6, 1e-3, 50
    rng = np.random.default_rng(5)
    requests = Stream(
        np.cumsum(rng.exponential(step * mean / load, count)),
        np.ones(count, dtype=np.int64),
        rng.geometric(1 / mean, count),
    )
    each = StepTimes(decode=np.full(2, step), mixed=np.full(3, step), sample=np.zeros(2))
    found = play([ReplicaSpec(each, max_num_seqs=1, token_budget=1, kv_tokens=1 << 20)], requests)
    assert float(found.e2e.mean()) == pytest.approx(step * mean / (1 - load), rel=0.05)


def test_a_batch_server_shares_like_m_g_1_ps():
    """With steps in proportion to the batch, every request gets an equal share of the server: processor sharing."""
    count, load, step = 20_000, 0.6, 1e-3
    rng = np.random.default_rng(3)
    output = 1 + rng.geometric(1 / 50, count)
    slots = 200
    batch = step * np.arange(slots + 1)
    # A step with a prompt of one token in it serves the others as well, and costs what they cost.
    shared = StepTimes(decode=batch, mixed=np.concatenate([[0.0], batch]), sample=np.zeros(slots + 1))
    mean = step * 50
    requests = Stream(np.cumsum(rng.exponential(mean / load, count)), np.ones(count, dtype=np.int64), output)
    found = play([ReplicaSpec(shared, slots, slots + 1, 1 << 24)], requests)
    assert float(found.e2e.mean()) == pytest.approx(mean / (1 - load), rel=0.06)


def test_littles_law_holds():
    requests = stream(4000, 6.0)
    fleet = Fleet([spec()], requests, routing_policy("least-loaded", random.Random(0)))
    ends = float(requests.arrival[-1])
    inside = []
    for at in np.linspace(0, ends, 4000):
        fleet.advance(float(at))
        state = fleet.replicas[0]
        inside.append(state.decoding + state.prefilling + state.waiting)
    fleet.advance()
    found = fleet.outcome()
    rate = len(requests.arrival) / ends
    assert np.mean(inside) == pytest.approx(rate * float(found.e2e.mean()), rel=0.05)


def test_a_closed_loop_keeps_its_clients_busy():
    requests = Stream(np.zeros(200), np.full(200, 100), np.full(200, 20))
    found = play([spec()], requests, clients=8)
    order = np.argsort(found.arrival, kind="stable")
    events = sorted([(t, 1) for t in found.arrival] + [(t, -1) for t in found.finish])
    level, most = 0, 0
    for _, change in events:
        level += change
        most = max(most, level)
    assert most == 8
    assert found.arrival[order[8]] == pytest.approx(found.finish.min())


def test_a_longer_prompt_and_a_slower_device_never_come_sooner():
    means = [float(play([spec()], stream(200, 1.0, prompt=(p, p))).e2e.mean()) for p in (100, 400, 1600)]
    assert means == sorted(means)
    slow = spec(times=replace(spec().times, decode=spec().times.decode * 2))
    requests = stream(300, 3.0)
    assert play([slow], requests).e2e.mean() > play([spec()], requests).e2e.mean()


def test_shared_prefixes_are_computed_once():
    count = 20
    ids = np.array([[0, 1, 2, 10 + i] for i in range(count)], dtype=np.int64)
    shared = Stream(
        np.arange(count, dtype=float) * 5,
        np.full(count, 256),
        np.full(count, 4),
        chain_start=np.arange(count + 1) * 4,
        chain=ids.ravel(),
    )
    found = play([spec(prefix_tokens=64)], shared)
    assert found.cached[0] == 0
    assert set(found.cached[1:].tolist()) == {192}
    assert found.ttft[1] < found.ttft[0]
    none = play([spec()], shared)
    assert none.cached.sum() == 0


def test_a_small_cache_forgets_the_least_recently_used_prefix():
    # Three prompts of 128 tokens and room for two and a bit: A B A C, then B is gone and A is not.
    names = [0, 1, 0, 2, 0, 1]
    requests = Stream(
        np.arange(6, dtype=float) * 5,
        np.full(6, 129),
        np.full(6, 2),
        chain_start=np.arange(7) * 1,
        chain=np.array(names, dtype=np.int64),
    )
    found = play([spec(prefix_tokens=128, kv_tokens=19 * 16)], requests)
    assert found.cached.tolist() == [0, 0, 128, 0, 128, 0]


@pytest.mark.parametrize(("host", "cached"), [(0, 0), (128, 1), (256, 2), (1024, 2)])
def test_the_hosts_memory_keeps_what_the_cache_drops(host, cached):
    """Three prompts in turn, and a cache for one: with room for two more on the host each is found again there."""
    names = [0, 1, 2, 0, 1, 2]
    requests = Stream(
        np.arange(6, dtype=float) * 5,
        np.full(6, 129),
        np.full(6, 2),
        chain_start=np.arange(7) * 1,
        chain=np.array(names, dtype=np.int64),
    )
    load = 0.003
    shelved = spec(prefix_tokens=128, kv_tokens=10 * 16, host_tokens=host, times=times(swap=load / 128))
    found = play([shelved], requests)
    again = found.cached[3:]
    assert found.cached[:3].sum() == 0
    # The oldest makes room: where the host holds one of them, it is never the one that comes next.
    assert again.tolist() == ([128] * 3 if cached == 2 else [0] * 3)
    if cached == 2:
        t = shelved.times
        step = t.mixed[1] + t.sample[1] + (128 + 1) * t.pair
        assert found.ttft[3] == pytest.approx(step + load)


def test_swapping_out_costs_transfers_instead_of_computing_again():
    requests = stream(60, 20.0, prompt=(100, 300), output=(40, 60))
    tight = spec(kv_tokens=1600)
    again = play([tight], requests)
    swapped = play([replace(tight, swap=True, times=times(swap=1e-7))], requests)
    assert again.preempted.sum() > 0
    assert swapped.preempted.sum() > 0
    assert swapped.accounts.tokens.sum() < again.accounts.tokens.sum()


def test_prefill_and_decode_replicas_hand_over():
    hand = times(hand=1e-5, hand_latency=0.05)
    pair = [spec(times=hand, role="prefill"), spec(times=hand, role="decode")]
    requests = Stream(np.array([0.0]), np.array([200]), np.array([3]))
    found = play(pair, requests)
    t = hand
    first = t.mixed[200] + t.sample[1] + 200 * 201 / 2 * t.pair
    decode = sum(t.decode[1] + length * t.read for length in (201, 202))
    sent = first + 200 * 1e-5 + 0.05
    assert found.first[0] == pytest.approx(sent), "the replica that decodes sends the whole answer"
    assert found.finish[0] == pytest.approx(sent + decode)
    late = [replace(one, frontend=0.1, frontend_stream=0.01) for one in pair]
    found = play(late, Stream(np.zeros(2), np.array([200, 200]), np.array([40, 3])))
    assert found.first[0] == pytest.approx(sent + 2 * 0.1), "two front ends"
    behind = found.first[1] - (sent + first + 2 * 0.1 + 0.01)
    assert 0.0 <= behind < 1.1 * t.decode[1], "one answer beside it, and the step under way"
    many = play(pair, stream(300, 4.0))
    assert np.isfinite(many.finish).all()


def test_a_replica_that_dies_loses_answers_in_progress_and_no_other():
    requests = stream(200, 10.0)
    dying = spec(down=5.0, drain=5.0, max_num_seqs=2)
    found = play([dying, spec()], requests, "round-robin")
    assert len(found.lost) > 0
    lost = set(found.lost.tolist())
    assert all(np.isfinite(found.finish[i]) for i in range(200) if i not in lost)
    assert (found.first[found.lost] < 5.0).all()
    assert found.retried > 0
    assert set(found.replica[requests.arrival > 5.0].tolist()) == {1}


def test_requests_wait_at_the_gateway_for_a_cold_start():
    found = play([spec(up=30.0)], stream(20, 10.0))
    assert (found.first > 30.0).all()
    assert np.isfinite(found.finish).all()


def test_requests_that_nobody_will_ever_serve_again_are_refused():
    requests = stream(400, 10.0)
    found = play([spec(drain=20.0, down=30.0)], requests)
    assert len(found.refused) > 0
    over = np.isfinite(found.finish).sum() + len(found.refused) + len(found.lost)
    assert over == len(requests.arrival)


def test_nobody_serves_what_nobody_may():
    found = play([spec(drain=0.0, down=0.5)], stream(20, 10.0))
    assert len(found.refused) + len(found.lost) > 0
    assert not np.isfinite(found.finish[found.arrival > 1.0]).any()


def test_a_request_that_fits_nowhere_is_refused_and_the_others_go_on():
    requests = Stream(np.array([0.0, 0.1]), np.array([5000, 50]), np.array([10, 10]))
    found = play([spec(kv_tokens=1024)], requests)
    assert found.refused.tolist() == [0]
    assert math.isfinite(found.finish[1])


def test_urgent_requests_overtake():
    count = 60
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 2, count)
    requests = Stream(np.zeros(count), np.full(count, 200), np.full(count, 20), priority=levels)
    found = play([spec(max_num_seqs=4)], requests)
    assert found.ttft[levels == 0].mean() < 0.6 * found.ttft[levels == 1].mean()


def test_least_loaded_routing_uses_all_replicas():
    found = play([spec() for _ in range(4)], stream(400, 20.0))
    counts = np.bincount(found.replica, minlength=4)
    assert counts.min() > 60


def test_inter_token_latencies_are_those_of_the_steps():
    flat = times(read=0.0)
    found = play([spec(times=flat)], Stream(np.array([0.0]), np.array([10]), np.array([101])))
    assert found.accounts.itl.sum() == 100
    assert inter_token_latencies(found.accounts, [0.5])[0] == pytest.approx(flat.decode[1], rel=0.011)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"arrival": np.array([1.0, 0.0])}, "FT2102"),
        ({"arrival": np.array([0.0, math.nan])}, "FT2102"),
        ({"prompt": np.array([0, 5])}, "FT2103"),
    ],
)
def test_streams_that_make_no_sense_are_refused(change, code):
    requests = replace(Stream(np.array([0.0, 1.0]), np.array([5, 5]), np.array([5, 5])), **change)
    with pytest.raises(InvalidInputError) as caught:
        play([spec()], requests)
    assert caught.value.problems[0].code == code


def test_replicas_that_make_no_sense_are_refused():
    requests = stream(3, 1.0)
    with pytest.raises(InvalidInputError, match="no replica"):
        play([], requests)
    with pytest.raises(InvalidInputError, match="finite"):
        play([spec(times=replace(times(), decode=np.array([math.nan] * 33)))], requests)


INTERPRETED = """
import sys
sys.modules["numba"] = None
import random, numpy as np
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator import kernel
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.steptimes import StepTimes
assert not kernel.COMPILED
given = np.load(sys.argv[1])
times = StepTimes(given["decode"], given["mixed"], given["sample"], read=2e-7, pair=1e-8)
found = simulate(
    [ReplicaSpec(times, 32, 256, 1600, prefix_tokens=64)] * 2,
    Stream(given["arrival"], given["prompt"], given["output"], chain_start=given["start"], chain=given["chain"]),
    routing_policy("least-loaded", random.Random(0)),
)
np.save(sys.argv[2], found.finish)
"""


def test_without_a_compiler_the_times_are_the_same(tmp_path):
    requests = stream(40, 5.0)
    start = np.arange(41) * 2
    chain = np.random.default_rng(5).integers(0, 6, 80)
    arrays = {"arrival": requests.arrival, "prompt": requests.prompt, "output": requests.output}
    tables = {"decode": times().decode, "mixed": times().mixed, "sample": times().sample}
    np.savez(tmp_path / "given.npz", **arrays, **tables, start=start, chain=chain)
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path / "given.npz"), str(tmp_path / "found.npy")]
    subprocess.run(command, check=True, timeout=120)
    here = play([spec(kv_tokens=1600, prefix_tokens=64)] * 2, replace(requests, chain_start=start, chain=chain))
    assert np.allclose(np.load(tmp_path / "found.npy"), here.finish, rtol=1e-12)


@pytest.mark.parametrize("prompt", [1023, 1024, 1025])
def test_handed_over_caches_give_all_their_blocks_back(prompt):
    pair = [spec(role="prefill", kv_tokens=100_000), spec(role="decode", kv_tokens=5840)]
    requests = Stream(np.arange(400) * 0.05, np.full(400, prompt), np.full(400, 13))
    fleet = Fleet(pair, requests, routing_policy("round-robin", random.Random(0)))
    fleet.advance()
    assert np.isfinite(fleet.outcome().finish).all()
    assert (fleet.replicas.free == fleet.replicas.blocks).all()


def test_a_cache_stays_where_it_was_computed_until_it_has_arrived():
    """Room for one prompt, and a link that takes 2 s for it: the second begins when the first's cache is away."""
    slow = times(hand=2.0 / 160, hand_latency=0.0)
    prefill, decode = spec(times=slow, role="prefill", kv_tokens=160), spec(times=slow, role="decode")
    two = Stream(np.zeros(2), np.full(2, 160), np.full(2, 2))
    first = play([prefill, decode], two).first
    assert first[1] == pytest.approx(2 * first[0])
    roomy = play([replace(prefill, kv_tokens=320), decode], two).first
    assert roomy[1] < first[1] - 0.9 * (first[0] - 2.0), "both prompts at once; their caches go one after the other"


def test_a_cache_sets_out_when_the_receiver_has_room():
    """One place for decoding: the second cache goes after the first answer, and keeps its room till then."""
    slow = times(hand=1.0 / 160, hand_latency=0.0)
    prefill = spec(times=slow, role="prefill", kv_tokens=160 * 3)
    decode = spec(times=slow, role="decode", max_num_seqs=1)
    requests = Stream(np.zeros(4), np.full(4, 160), np.full(4, 50))
    found = play([prefill, decode], requests)
    answer = found.finish[0] - found.first[0]
    assert np.diff(found.finish) == pytest.approx(np.full(3, 1.0 + answer))
    assert found.first[1:] == pytest.approx(found.finish[:-1] + 1.0)


def test_a_prefill_replica_that_dies_leaves_prompts_to_be_computed_again():
    slow = times(hand=1.0 / 160, hand_latency=0.0)
    dying = spec(times=slow, role="prefill", down=1.5, drain=1.5)
    requests = Stream(np.zeros(4), np.full(4, 160), np.full(4, 5))
    fleet = Fleet([dying, spec(times=slow, role="decode")], requests, routing_policy("round-robin", random.Random(0)))
    fleet.advance()
    found = fleet.outcome()
    assert np.isfinite(found.finish).all()
    # Three were on their way or still there: their prompts are computed once more, each with its first token.
    assert fleet.replicas.tokens[1] == 3 * 161 + 4 + 3 * 3
    assert (fleet.replicas.free == fleet.replicas.blocks).all()


@seeds(30, drawn=20, long=1000)
def test_whatever_dies_no_block_and_no_request_is_forgotten(seed):
    rng = random.Random(seed)
    link = times(hand=rng.choice([0.0, 1e-4, 3e-3, 3e-2]), hand_latency=rng.choice([0.0, 0.05, 5.0]))
    beside = RequestMemory(rng.choice([0.0, 40.0]), 0.0, 0)
    together = rng.uniform(1, 12)
    prefixes = {"prefix_tokens": 16, "host_tokens": rng.choice([0, 160])} if rng.random() < 0.5 else {}

    def replica(role):
        down = rng.choice([math.inf, together, rng.uniform(1, 15)])
        lives = {"up": rng.choice([0.0, 0.0, 0.5 * min(down, 8.0)]), "down": down}
        lives["drain"] = down if rng.random() < 0.5 else math.inf
        size = {"kv_tokens": rng.choice([640, 1600, 1 << 20]), "max_num_seqs": rng.choice([1, 4, 32])}
        return spec(times=link, role=role, beside=beside, **size, **lives, **prefixes)

    requests = stream(80, 8.0, seed)
    requests = replace(
        requests,
        priority=np.random.default_rng(seed).integers(0, rng.choice([1, 3]), 80),
        chain_start=np.arange(81) * 4,
        chain=np.concatenate([rng.sample(range(12), 4) for _ in range(80)]),
    )
    specs = [replica(role) for role in ("prefill", "prefill", "decode", "decode", "decode")]
    fleet = Fleet(specs, requests, routing_policy("least-loaded", random.Random(0)), clients=rng.choice([0, 0, 6]))
    if rng.random() < 0.5:
        for until in range(1, 15):
            fleet.advance(float(until))
    fleet.advance()
    found = fleet.outcome()
    over = np.isfinite(found.finish)
    assert not over[found.lost].any()
    over[found.lost] = over[found.refused] = True
    assert over.all()
    state = fleet.replicas
    idle = state.evictable * (state.chain_tokens // 16)
    assert (state.free + idle == state.blocks).all()
    assert not np.stack([state.coming, state.owed, state.decoding]).any()
    assert (fleet.lists.itl >= 0).all()
    for i in np.flatnonzero(np.isfinite(found.finish)):
        last = fleet.requests.whither[i] if fleet.requests.handed[i] else fleet.requests.where[i]
        assert specs[last].up <= fleet.requests.finish[i] <= specs[last].down, i


def test_a_site_that_goes_down_leaves_no_answer_behind():
    """Both ends go while a cache is on its way: nobody who is gone decodes it, and its way ends with them."""
    slow = times(hand=10.0 / 160, hand_latency=0.0)
    both = [spec(times=slow, role=role, down=1.0, drain=1.0) for role in ("prefill", "decode")]
    lone = play(both, Stream(np.zeros(1), np.full(1, 160), np.full(1, 5)))
    assert not np.isfinite(lone.finish).any()
    another = play([*both, spec(times=slow, role="decode")], Stream(np.zeros(3), np.full(3, 160), np.full(3, 5)))
    assert np.isfinite(another.finish).sum() + len(another.lost) == 3


def test_what_waits_for_a_replica_to_come_up_is_no_deadlock():
    """A full prefill replica, whose decode replica starts later, played in slices."""
    pair = [spec(role="prefill", kv_tokens=160), spec(role="decode", up=5.0)]
    requests = Stream(np.array([0.0, 0.0, 1.0]), np.full(3, 150), np.full(3, 5))
    whole, sliced = play(pair, requests), play(pair, requests, samples=10)
    assert np.isfinite(whole.finish).all()
    assert np.array_equal(whole.finish, sliced.finish)


def test_prefixes_that_never_came_are_computed():
    slow = times(hand=10.0 / 160, hand_latency=0.0)
    pair = [spec(times=slow, role="prefill", down=1.0, drain=1.0, prefix_tokens=16)]
    pair.append(spec(times=slow, role="decode", prefix_tokens=16))
    one = Stream(np.zeros(1), np.full(1, 160), np.full(1, 5), chain_start=np.array([0, 10]), chain=np.arange(10))
    assert play(pair, one).accounts.tokens[1] == 161 + 3


def test_room_that_is_free_again_is_seen_at_the_next_step():
    """A long answer runs, and the other place was kept for a cache whose sender dies: the third has it at once."""
    slow = times(hand=10.0 / 160, hand_latency=0.0)
    quick = times(hand=0.0, hand_latency=0.0)
    dying = spec(times=slow, role="prefill", down=1.0, drain=1.0, weight=1e9)
    trio = [dying, spec(times=quick, role="prefill"), spec(times=quick, role="decode", max_num_seqs=2)]
    requests = Stream(np.array([0.0, 0.1, 0.2]), np.full(3, 160), np.array([1000, 5, 5]))
    for limit in (STEP_BY_STEP, 1 << 30):
        fleet = Fleet(trio, requests, routing_policy("round-robin", random.Random(0)), limit=limit)
        for i, where in enumerate((1, 0, 1)):
            fleet.requests.where[i] = where
        fleet.advance()
        assert 1.0 < fleet.outcome().finish[2] < 1.3, limit


def test_drafts_decode_more_than_a_token_beside_prompts_too():
    """Prompts in every step: an answer of 41 tokens takes 20 steps where each decodes two, and 40 where it is one."""
    plain = times(read=0.0, pair=0.0)
    drafted = replace(plain, queries=3, decoded=2.0, draft=np.zeros(1))
    requests = Stream(np.zeros(2), np.array([10, 100_000]), np.array([41, 1]))
    one, two = (play([spec(times=t)], requests) for t in (plain, drafted))
    steps = [(found.finish[0] - found.first[0]) / (0.012 + 0.0256 + 1e-4) for found in (one, two)]
    assert steps == pytest.approx([40, 20], rel=0.03)
    assert two.accounts.tokens.sum() == one.accounts.tokens.sum()


def test_a_prompt_has_blocks_for_what_is_computed_of_it_and_may_be_put_back():
    """40 blocks: an answer that has 7 of them and grows, and a prompt of 32 that is computed by 7 tokens a step."""
    tight = spec(kv_tokens=640, token_budget=8)
    two = Stream(np.array([0.0, 0.2]), np.array([100, 510]), np.array([300, 2]))
    found = play([tight], two)
    assert found.preempted.tolist() == [0, 1]
    assert np.isfinite(found.finish).all()
    assert found.first[1] > found.finish[0], "begun, put back, and begun anew when the answer was over"
    assert found.accounts.tokens[0] > 100 + 510 + 299 + 1, "what was computed in vain counts"
    patient = play([replace(tight, spared=1.0)], two)
    assert patient.preempted.sum() == 0, "an engine that keeps room for whole answers does not begin it"
    earlier = play([replace(tight, whole_prompts=True)], two)
    assert earlier.preempted.tolist() == [1, 0], "before chunked prefill it is the answer that makes way"


def test_a_window_takes_room_from_the_cache():
    """Room for two prompts with what their windows hold, where it would be four without."""
    heavy = RequestMemory(fixed=96.0, windowed=1.0, window=64)
    windowed = times(window=64)
    waiting = Stream(np.zeros(4), np.full(4, 150), np.full(4, 8))
    tight = spec(times=windowed, kv_tokens=4 * 160)
    at_once, in_turn = (play([replace(tight, beside=beside)], waiting).first for beside in (NOTHING, heavy))
    assert (at_once < at_once[0] + 0.2).all()
    assert in_turn[2] > in_turn[1] + 0.05
    refused = play([replace(tight, beside=RequestMemory(fixed=600.0))], waiting)
    assert len(refused.refused) == 4


def test_swapped_caches_give_all_their_blocks_back():
    requests = Stream(np.zeros(100), np.full(100, 16), np.full(100, 100))
    fleet = Fleet([spec(kv_tokens=160, swap=True)], requests, routing_policy("round-robin", random.Random(0)))
    fleet.advance()
    assert fleet.outcome().preempted.sum() > 0
    assert np.isfinite(fleet.outcome().finish).all()
    assert (fleet.replicas.free == fleet.replicas.blocks).all()


def test_a_lone_request_gains_nothing_from_more_lanes():
    lone = Stream(np.zeros(1), np.array([4000]), np.array([50]))
    one, four = (play([spec(lanes=lanes)], lone).tpot[0] for lanes in (1, 4))
    assert four == pytest.approx(one)


def test_a_closed_loop_counts_what_its_clients_wait_for_outside_the_steps():
    """Little's law over the whole answer: never more in flight than there are clients."""
    requests = stream(300, 1.0)
    found = play([spec(frontend=0.3, frontend_token=1e-4)], requests, clients=4)
    span = float(found.finish.max() - found.arrival.min())
    assert float(found.e2e.sum()) / span <= 4 + 1e-9
    assert found.ttft.min() > 0.3
    assert (found.finish >= found.first).all()


def test_a_first_token_comes_later_for_each_other_request_in_flight():
    at_once = Stream(np.zeros(8), np.full(8, 16), np.full(8, 40))
    plain, crowded = (play([spec(frontend_stream=delay)], at_once) for delay in (0.0, 0.01))
    # The first to come is computed before the others are there.
    assert (crowded.ttft - plain.ttft) == pytest.approx([0.0] + [7 * 0.01] * 7)
    assert crowded.finish == pytest.approx(plain.finish)
    lone = Stream(np.zeros(1), np.array([16]), np.array([40]))
    assert play([spec(frontend_stream=0.01)], lone).ttft == pytest.approx(play([spec()], lone).ttft)


def test_what_attention_groups_share_counts_the_tokens_of_all_of_them():
    """A lone prompt occupies one group, and the experts see no other tokens; the next seven occupy all four."""
    table = 1e-4 * np.arange(257)
    own = times(shared=table, groups=4, pair=0.0)
    requests = [Stream(np.zeros(n), np.full(n, 32), np.ones(n, int)) for n in (1, 8)]
    lone, eight = (play([spec(times=own, lanes=4)], some) for some in requests)
    assert lone.ttft[0] == pytest.approx(own.mixed[32] + table[32] + own.sample[1])
    rest = own.mixed[7 * 32 // 4] + table[7 * 32] + own.sample[7]
    assert eight.ttft == pytest.approx([lone.ttft[0]] + [lone.ttft[0] + rest] * 7)


def test_the_mean_gap_counts_tokens_and_not_answers():
    found = play([spec()], Stream(np.zeros(31), np.full(31, 50), np.array([400] + [2] * 30)))
    tokens = found.output - 1
    gaps = float((found.finish - found.first).sum()) / float(tokens.sum())
    assert inter_token_mean(found.accounts) == pytest.approx(gaps, rel=0.02)
    assert float(np.nanmean(found.tpot)) > 1.2 * gaps, "the mean over answers is another figure"


def test_the_gap_of_a_hand_over_is_before_the_first_token():
    hand = times(hand_latency=1.0)
    pair = [spec(times=hand, role="prefill"), spec(times=hand, role="decode")]
    found = play(pair, Stream(np.array([0.0]), np.array([64]), np.array([3])))
    assert found.accounts.itl.sum() == 2
    assert found.first[0] > 1.0
    (longest,) = inter_token_latencies(found.accounts, [1.0])
    assert longest < 0.1


def test_the_gap_of_a_preemption_is_a_gap_between_tokens():
    found = play([spec(kv_tokens=800)], stream(60, 20.0, prompt=(100, 300), output=(40, 60)))
    assert found.preempted.sum() > 0
    tokens = found.output.sum() - len(found.output)
    assert found.accounts.itl.sum() == tokens
    (longest,) = inter_token_latencies(found.accounts, [1.0])
    assert longest > np.nanmax(found.tpot) * 0.99


def test_a_decode_replica_that_dies_loses_no_answer_of_which_nobody_has_a_part():
    """At 1 s one cache has landed, one is on the way and one is kept: of the first the client has a token already."""
    slow = times(hand=1.0 / 160, hand_latency=0.0)
    ends = {"down": 1.5, "drain": 1.5}
    replicas = [
        spec(times=slow, role="prefill"),
        spec(times=slow, role="decode", kv_tokens=160 * 2 + 64, **ends),
        spec(times=slow, role="decode", up=1.6),
    ]
    requests = Stream(np.zeros(3), np.full(3, 160), np.full(3, 200))
    fleet = Fleet(replicas, requests, routing_policy("round-robin", random.Random(0)))
    fleet.advance()
    found = fleet.outcome()
    assert found.lost.tolist() == [0]
    assert found.retried == 2
    assert np.isfinite(found.finish[1:]).all()
    assert (found.first[1:] > 1.6).all()
    assert (fleet.replicas.free[[0, 2]] == fleet.replicas.blocks[[0, 2]]).all()


def test_two_caches_that_fill_an_idle_replica_are_decoded_one_after_the_other():
    """The first has no room for its next token while the second is coming: it stops before it has gone on at all."""
    slow = times(hand=0.7 / 160, hand_latency=0.0)
    pair = [spec(times=slow, role="prefill"), spec(times=slow, role="decode", kv_tokens=320)]
    found = play(pair, Stream(np.zeros(2), np.full(2, 160), np.full(2, 5)))
    assert np.isfinite(found.finish).all()
    assert found.preempted.sum() > 0
    assert found.accounts.itl.sum() == 2 * 4
    (shortest, longest) = inter_token_latencies(found.accounts, [0.01, 1.0])
    assert shortest > 0.5 * slow.decode[1]
    assert longest > 0.6


def test_a_decode_replica_that_dies_loses_the_answers_that_had_begun():
    hand = times(hand=1e-5)
    pair = [
        spec(times=hand, role="prefill"),
        spec(times=hand, role="decode", down=5.0, drain=5.0),
        spec(times=hand, role="decode"),
    ]
    found = play(pair, stream(200, 10.0), "round-robin")
    begun = (found.first < 5.0) & ~np.isfinite(found.finish)
    assert begun.any()
    assert set(np.flatnonzero(begun)) <= set(found.lost.tolist())
    assert found.retried == 0


def test_an_interruption_without_anybody_to_show_progress_to_goes_through():
    class Stop(type(routing_policy("round-robin", random.Random(0)))):
        def pick(self, candidates, request):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate([spec(), spec()], stream(10, 1.0), Stop())
    partial = simulate([spec(), spec()], stream(10, 1.0), Stop(), progress=lambda done, count: None)
    assert not partial.complete
