"""Which replicas may merge, and what fits then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.merging.groups import BlockPool, ReplicaGroup, groups


@pytest.mark.parametrize(("replicas", "count"), [(1, 1), (2, 3), (4, 7), (8, 15)])
def test_groups_grow_with_the_replicas(replicas, count):
    assert len(groups(replicas)) == count == len(set(groups(replicas)))


@given(st.integers(1, 16))
def test_groups_are_aligned_and_inside(replicas):
    for group in groups(replicas):
        assert group.first % group.degree == 0
        assert set(group.members) <= set(range(replicas))


@given(st.integers(1, 10**6), st.integers(0, 4), st.integers(1, 64))
def test_a_group_needs_a_share_of_the_blocks(tokens, power, size):
    pool = BlockPool(100, size)
    degree = 2**power
    needed = pool.needed(tokens, degree)
    assert needed * degree * size >= tokens > (needed - 1) * degree * size
    assert (needed <= pool.blocks) == (tokens <= pool.longest(degree))


def test_the_smallest_degree_that_holds_a_request():
    pool = BlockPool(10, 16)
    assert [pool.degree(tokens, 4) for tokens in (160, 161, 640, 641)] == [1, 2, 4, None]
    assert ReplicaGroup(2, 2).members == range(2, 4)
