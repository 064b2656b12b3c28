"""Times between samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.sharing.quantified import IterationTable

TABLE = IterationTable.sampled(lambda n: 0.01 + n * n / 1e6, lambda b, n: 0.02 + 0.001 * b + b * n / 1e6, 4096, 64)
LENGTHS = st.floats(1, 10_000)
BATCHES = st.floats(0, 200)


def test_samples_are_kept():
    for length in TABLE.lengths:
        assert TABLE.prefill_s(length) == pytest.approx(0.01 + length * length / 1e6)
        for batch in TABLE.batches:
            assert TABLE.decode_s(batch, length) == pytest.approx(0.02 + 0.001 * batch + batch * length / 1e6)


def test_beyond_the_last_sample_the_line_goes_on():
    slope = (TABLE.prefill_s(4096) - TABLE.prefill_s(2048)) / 2048
    assert TABLE.prefill_s(8192) == pytest.approx(TABLE.prefill_s(4096) + 4096 * slope)
    assert TABLE.decode_s(0.5, 100) == TABLE.decode_s(1, 100)


@given(LENGTHS, LENGTHS, BATCHES, BATCHES)
def test_more_never_takes_less(short, long, few, many):
    short, long = sorted((short, long))
    few, many = sorted((few, many))
    assert TABLE.prefill_s(short) <= TABLE.prefill_s(long) + 1e-12
    assert TABLE.decode_s(few, short) <= TABLE.decode_s(many, long) + 1e-12


@given(LENGTHS, BATCHES)
def test_small_differences_make_small_differences(length, batch):
    assert TABLE.prefill_s(length + 1e-6) == pytest.approx(TABLE.prefill_s(length), rel=1e-5)
    assert TABLE.decode_s(batch + 1e-6, length + 1e-6) == pytest.approx(TABLE.decode_s(batch, length), rel=1e-5)
