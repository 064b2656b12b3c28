"""How long is waited for a first octet."""

from fabrictool.gateway.patience import IDLE_UPSTREAM_S, LEARNED, LEAST_S, UNKNOWN_STREAM_S, Patience


def test_patience_is_learned_by_model_and_form():
    patience = Patience()
    assert (patience.limit("m", stream=True), patience.limit("m", stream=False)) == (UNKNOWN_STREAM_S, IDLE_UPSTREAM_S)
    for _ in range(LEARNED):
        patience.learn("m", stream=True, seconds=0.2)
        patience.learn("thinker", stream=False, seconds=100.0)
    assert patience.limit("m", stream=True) == LEAST_S
    assert patience.limit("m", stream=False) == IDLE_UPSTREAM_S
    assert patience.limit("thinker", stream=False) == 400.0
