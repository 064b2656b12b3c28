"""What an agent's row says of an engine that changes while it answers."""

import pytest

from fabrictool.status.elastic import MergingState, SharingReplica, SharingState, in_words

REPLICA = SharingReplica(model="a", weights=1 << 29, cache=1 << 28, physical=3 << 28)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (MergingState(replicas=4), "4 replicas apart"),
        (MergingState(replicas=4, groups=((0, 1), (2, 3))), "2 + 2 of 4 replicas merged"),
        (MergingState(replicas=4, lost=(3,), groups=((0, 1),)), "2 of 3 replicas merged"),
        (
            SharingState(capacity=2 << 30, budget=3 << 28, tracked=3 << 28, models=("a", "b"), replicas=(REPLICA,)),
            "1 of 2 models in 0.8 of 2.0 GiB",
        ),
    ],
)
def test_in_words(state, words):
    assert in_words(state) == words
