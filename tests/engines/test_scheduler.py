"""The planner against a model of the engine: whatever the pool and the requests, every request ends, correctly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.engines.reference.kv import BlockAllocator
from fabrictool.engines.reference.scheduler import ContinuousBatcher


def fake_token(prefix):
    """A 'model': the next token follows from the whole prefix, so a lost or repeated token changes the rest."""
    return hash(tuple(prefix)) % 1000


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens))
    return tokens


def check_invariants(scheduler, allocator):
    held = [block for s in scheduler._running for block in s.blocks]
    assert len(held) == len(set(held))
    assert allocator.free + len(held) == allocator.total
    assert sorted(held + allocator._free) == list(range(allocator.total))
    for s in scheduler._running:
        assert s.computed <= len(s.blocks) * scheduler._block_size
    assert all(not s.blocks and s.computed == 0 for s in scheduler._waiting)


def compute(plan, memory, block_size):
    """Carry a plan out: write its tokens into the blocks, and sample from what the blocks then hold."""
    sampled = {}
    for work in plan.work:
        for at, token in enumerate(work.tokens, start=work.position):
            memory[work.blocks[at // block_size], at % block_size] = token
        if work.samples:
            length = work.position + len(work.tokens)
            prefix = [memory[work.blocks[at // block_size], at % block_size] for at in range(length)]
            sampled[work.request] = fake_token(prefix)
    return sampled


def drive(requests, *, blocks, block_size, max_seqs, budget, cancel=frozenset(), late=frozenset()):
    """Runs to the end; returns answers and the number of preemptions. The 'memory' checks what each step reads."""
    allocator = BlockAllocator(blocks)
    scheduler = ContinuousBatcher(allocator, block_size=block_size, max_seqs=max_seqs, token_budget=budget)
    memory = {}
    answers = {i: list(prompt) for i, (prompt, _) in enumerate(requests)}
    done, preemptions, steps = set(cancel), 0, 0
    for i, (prompt, _) in enumerate(requests):
        if i not in late:
            scheduler.add(i, prompt)
    while done != set(answers):
        if steps == 3:
            for i in late:
                scheduler.add(i, requests[i][0])
            for i in cancel:
                scheduler.remove(i)
        plan = scheduler.plan()
        check_invariants(scheduler, allocator)
        preemptions += len(plan.preempted)
        assert len(plan.work) <= max_seqs
        assert sum(len(w.tokens) for w in plan.work) <= max(budget, max_seqs)
        assert plan.work or steps < 3, "nothing to do, and requests are not done"
        sampled = compute(plan, memory, block_size)
        scheduler.commit(plan, sampled)
        for i, token in sampled.items():
            answers[i].append(token)
            if len(answers[i]) == len(requests[i][0]) + requests[i][1] and i not in done:
                done.add(i)
                assert scheduler.remove(i)
        check_invariants(scheduler, allocator)
        steps += 1
        assert steps < 5000
    for i in cancel:
        scheduler.remove(i)
    assert allocator.free == allocator.total
    return answers, preemptions


request = st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 20))


@settings(max_examples=80)
@given(
    requests=st.lists(request, min_size=1, max_size=8),
    block_size=st.integers(1, 16),
    spare=st.integers(0, 10),
    max_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_every_request_ends_with_the_right_tokens(requests, block_size, spare, max_seqs, budget, data):
    blocks = -(-50 // block_size) + spare
    late = data.draw(st.frozensets(st.integers(0, len(requests) - 1)))
    answers, _ = drive(requests, blocks=blocks, block_size=block_size, max_seqs=max_seqs, budget=budget, late=late)
    assert answers == {i: expected(prompt, count) for i, (prompt, count) in enumerate(requests)}


def test_preemption_happens_and_changes_nothing():
    requests = [(list(range(i, i + 12)), 30) for i in range(4)]
    answers, preemptions = drive(requests, blocks=14, block_size=4, max_seqs=4, budget=16)
    assert preemptions > 0
    assert answers == {i: expected(prompt, count) for i, (prompt, count) in enumerate(requests)}


def test_cancelled_requests_leave_no_blocks():
    requests = [([1] * 20, 20) for _ in range(5)]
    answers, _ = drive(requests, blocks=12, block_size=4, max_seqs=3, budget=8, cancel=frozenset({0, 2, 4}))
    assert answers[1] == expected([1] * 20, 20)


def test_removing_an_unknown_request_says_so():
    scheduler = ContinuousBatcher(BlockAllocator(4), block_size=4, max_seqs=1, token_budget=4)
    assert not scheduler.remove(9)


def test_a_block_cannot_be_freed_twice():
    allocator = BlockAllocator(2)
    blocks = allocator.take(2)
    allocator.give_back(blocks)
    with pytest.raises(AssertionError, match="twice"):
        allocator.give_back(blocks)
    assert allocator.take(3) is None
    assert allocator.free == 2


def test_a_plan_can_be_committed_once_and_in_order():
    scheduler = ContinuousBatcher(BlockAllocator(4), block_size=4, max_seqs=2, token_budget=4)
    scheduler.add(1, [1, 2, 3])
    first = scheduler.plan()
    scheduler.plan()
    with pytest.raises(AssertionError, match="not the last"):
        scheduler.commit(first, {1: 5})
