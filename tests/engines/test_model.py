"""The numbers: against an independent float64 computation, and against itself in every way to cut up the work."""

import hashlib
import json

import numpy as np
import pytest

from fabrictool.engines.reference.kv import BlockAllocator, KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.sampling import Sampler, Sampling
from fabrictool.engines.reference.scheduler import ContinuousBatcher
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights
from tests.tiny_model import write_tiny_model

PROMPT = [10, 120, 7, 250, 99, 3, 64, 65, 66, 200, 17, 31, 42]


def last_logits(model, prompt, *, chunk=None, block_size=16, blocks=None):
    pool = KvPool(model.config, 64, block_size)
    table = blocks or list(range(-(-len(prompt) // block_size)))
    logits = None
    for at in range(0, len(prompt), chunk or len(prompt)):
        part = prompt[at : at + (chunk or len(prompt))]
        logits = model.step([SequenceRows(part, at, table, True)], pool)
    return logits[0]


def test_smollm2_logits_are_those_of_the_committed_computation(cases, smollm2_path, smollm2_cache):
    fixture = json.loads((cases / "smollm2_logits.json").read_text())
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == fixture["model_sha256"]
    model = Transformer(load_weights(smollm2_path, smollm2_cache, lambda _: None))
    for case in fixture["prompts"].values():
        pool = KvPool(model.config, 4, 16)
        for position, token in enumerate(case["tokens"]):
            logits = model.step([SequenceRows([token], position, [2], True)], pool)[0]
            np.testing.assert_allclose(logits[fixture["vocab"]], case["logits"][position], rtol=0, atol=1e-3)
            assert int(logits.argmax()) == case["argmax"][position]
        whole = last_logits(model, case["tokens"])
        np.testing.assert_allclose(whole[fixture["vocab"]], case["logits"][-1], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"quantised": True},
        {"tied": False},
        {"heads": 4, "kv_heads": 4},
        {"heads": 8, "kv_heads": 1, "layers": 3},
        {"rope_factors": True},
    ],
    ids=["plain", "q4_1", "untied", "no-groups", "one-kv-head", "rope-factors"],
)
def test_tiny_models_equal_the_independent_computation(naive, tmp_path, shape):
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, seed=11, **shape)
    model = Transformer(load_weights(path, None, lambda _: None))
    wanted = naive.all_logits(path, PROMPT)
    assert wanted.std() > 0.5  # not a flat distribution that everything equals
    for length in (1, 2, len(PROMPT)):
        got = last_logits(model, PROMPT[:length])
        np.testing.assert_allclose(got, wanted[length - 1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
def test_chunked_prefill_equals_whole(tiny, chunk):
    model = Transformer(tiny)
    np.testing.assert_allclose(last_logits(model, PROMPT, chunk=chunk), last_logits(model, PROMPT), atol=1e-4)


def test_scattered_tiny_blocks_equal_one_block(tiny):
    model = Transformer(tiny)
    scattered = last_logits(model, PROMPT, block_size=2, blocks=[40, 3, 17, 18, 5, 60, 1])
    np.testing.assert_allclose(scattered, last_logits(model, PROMPT), atol=1e-4)


def test_a_mixed_batch_equals_its_requests_alone(tiny):
    model = Transformer(tiny)
    pool = KvPool(model.config, 16, 4)
    model.step([SequenceRows(PROMPT[:6], 0, [9, 2], False)], pool)
    batch = [
        SequenceRows(PROMPT[6:7], 6, [9, 2], True),  # decodes
        SequenceRows(PROMPT[2:9], 0, [0, 1], True),  # a whole prompt
        SequenceRows(PROMPT[:3], 0, [5], False),  # a chunk that samples nothing
        SequenceRows([200], 0, [7], True),  # a prompt of one token
    ]
    logits = model.step(batch, pool)
    assert logits.shape == (3, model.config.vocab)  # three rows through the output: the way of few rows
    for got, prompt in zip(logits, (PROMPT[:7], PROMPT[2:9], [200]), strict=True):
        np.testing.assert_allclose(got, last_logits(model, prompt), atol=1e-4)


def test_large_activations_do_not_overflow():
    from fabrictool.engines.reference.model import _silu

    x = np.array([-1e4, -100.0, 0.0, 100.0, 1e4], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(_silu(x), [0, 0, 0, 100, 1e4], atol=1e-6)


def generate(model, prompts, count, *, blocks, block_size=4, max_seqs=4, budget=16):
    """Greedy answers through the real planner and the real pool; returns them and the number of preemptions."""
    allocator = BlockAllocator(blocks)
    scheduler = ContinuousBatcher(allocator, block_size=block_size, max_seqs=max_seqs, token_budget=budget)
    pool = KvPool(model.config, blocks, block_size)
    answers, preemptions, greedy = {i: [] for i in range(len(prompts))}, 0, Sampler(Sampling(temperature=0.0))
    for i, prompt in enumerate(prompts):
        scheduler.add(i, prompt)
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan()
        preemptions += len(plan.preempted)
        logits = model.step([SequenceRows(w.tokens, w.position, w.blocks, w.samples) for w in plan.work], pool)
        sampled = {
            w.request: greedy.draw(row) for w, row in zip([w for w in plan.work if w.samples], logits, strict=True)
        }
        scheduler.commit(plan, sampled)
        for i, token in sampled.items():
            answers[i].append(token)
            if len(answers[i]) == count:
                scheduler.remove(i)
    return answers, preemptions


def test_preempted_and_batched_answers_equal_those_made_alone(tiny):
    model = Transformer(tiny)
    prompts = [PROMPT, PROMPT[3:], PROMPT[::-1], PROMPT[5:9]]
    alone = {i: generate(model, [p], 24, blocks=64)[0][0] for i, p in enumerate(prompts)}
    assert len({tuple(answer) for answer in alone.values()}) == 4
    batched, none = generate(model, prompts, 24, blocks=64)
    tight, some = generate(model, prompts, 24, blocks=14)
    assert none == 0
    assert some > 0
    assert batched == alone
    assert tight == alone


def test_sampling_is_greedy_at_zero_and_repeats_with_its_seed():
    logits = np.array([0.1, 3.0, 2.9, -1.0], dtype=np.float32)
    assert Sampler(Sampling(temperature=0.0)).draw(logits) == 1

    def draws(**kind):
        sampler = Sampler(Sampling(**kind))
        return [sampler.draw(logits) for _ in range(200)]

    assert draws(seed=5) == draws(seed=5)
    assert draws(seed=5) != draws(seed=6)
    assert draws(seed=-1) == draws(seed=-1)
    assert set(draws(seed=1)) >= {1, 2}
    assert set(draws(seed=1, top_k=1)) == {1}
    assert set(draws(seed=1, top_p=0.01)) == {1}
    assert set(draws(seed=1, top_k=2, temperature=50.0)) == {1, 2}
    assert set(draws(seed=1, top_p=0.9)) == {1, 2}  # 0.50 + 0.45 reach 0.9, the other two weigh 0.04


def test_sampling_follows_the_distribution():
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(shares).astype(np.float32)
    for kind, wanted in (
        ({}, shares),
        ({"top_p": 0.75}, np.array([0.625, 0.375, 0, 0])),
        ({"top_k": 3}, np.array([0.5, 0.3, 0.15, 0]) / 0.95),
        ({"temperature": 0.5}, shares**2 / (shares**2).sum()),
    ):
        sampler = Sampler(Sampling(seed=3, **kind))
        counts = np.bincount([sampler.draw(logits) for _ in range(4000)], minlength=4) / 4000
        np.testing.assert_allclose(counts, wanted, atol=0.03)


def test_tiny_model_files_are_reproducible(tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_tiny_model(tmp_path / name, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
    assert Tokenizer(load_weights(tmp_path / "a", None, lambda _: None).metadata).vocab == 265


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 20])
def test_every_way_through_a_matrix_gives_the_same(rows):
    from fabrictool.engines.reference.model import _CACHED, _project

    random = np.random.Generator(np.random.PCG64(1))
    weight = random.normal(size=(1001, 576)).astype(np.float32)
    assert weight.size > 2 * _CACHED  # several parts, the last one short
    x = random.normal(size=(rows, 576)).astype(np.float32)
    np.testing.assert_allclose(_project(x, weight), x.astype(np.float64) @ weight.T, atol=1e-3)
