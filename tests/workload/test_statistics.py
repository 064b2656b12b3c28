"""The figures of a trace, against values computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.formats import read
from fabrictool.workload.generate import Recipe, generate
from fabrictool.workload.statistics import statistics
from fabrictool.workload.trace import Trace, merge

LINES = """\
{"t":0,"in":40,"out":10,"model":"a","prefix":[1,2],"block":16,"latency":1}
{"t":10,"in":40,"out":10,"model":"a","prefix":[1,3],"block":16,"latency":3}
{"t":70,"in":20,"out":80,"model":"b","prefix":[1,2],"block":16}
{"t":100,"in":100,"out":100,"model":"a","prefix":[4],"block":16,"latency":5}
"""


def test_by_hand():
    found = statistics(read(LINES))
    assert found.requests == 4
    assert found.span_s == 100.0
    assert found.rate == pytest.approx(0.03)
    # Gaps 10, 60, 30: mean 33.3, standard deviation sqrt(1266.7/3).
    assert found.gap_cv == pytest.approx(math.sqrt(1266.6667 / 3) / 33.3333, rel=1e-5)
    assert found.input["mean"] == 50
    assert found.input["p50"] == 40
    assert found.output["p50"] == 45
    # Minutes 0 and 1 have 100 and 300 tokens.
    assert found.peak_to_mean == pytest.approx(1.5)
    # Tenths of 100 s: two requests, at 0 and 10, then one at 70 and one at the very end.
    assert found.io_ratio[0] == 4.0
    assert found.io_ratio[1] == 4.0
    assert found.io_ratio[7] == 0.25
    assert found.io_ratio[9] == 1.0
    assert [math.isnan(x) for x in found.io_ratio] == [i not in (0, 1, 7, 9) for i in range(10)]
    assert list(found.popularity.items()) == [("a", 0.75), ("b", 0.25)]
    assert found.top_tenth == 0.75
    # The second shares one block; the third both, but has only 20 tokens.
    assert found.prefix_reuse == pytest.approx((16 + 20) / 200)
    assert found.latency["mean"] == 3
    assert found.dropped == {}


def test_one_request():
    found = statistics(read('{"t": 5, "in": 1, "out": 2}'))
    assert (found.rate, found.gap_cv, found.peak_to_mean, found.prefix_reuse) == (0.0, 0.0, 1.0, 0.0)
    assert found.io_ratio[0] == 0.5
    assert found.latency == {}
    assert found.popularity == {"": 1.0}


def test_a_trace_over_centuries_needs_no_memory_for_them():
    found = statistics(read('{"t": 0, "in": 1, "out": 1}\n{"t": 9e11, "in": 1, "out": 5}'))
    assert found.peak_to_mean == pytest.approx(1.5)


def test_a_poisson_trace_has_a_cv_of_one():
    assert statistics(generate(Recipe(3.0), 20_000, 1)).gap_cv == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("step", [1.0, 0.5])
def test_stamps_of_whole_seconds_are_no_bursts(step):
    calm = generate(Recipe(10.0), 20_000, 1)
    stamped = replace(calm, arrival=np.floor(calm.arrival / step) * step)
    assert statistics(stamped).gap_cv == pytest.approx(1.0, abs=0.2)


def test_a_cut_piece_starts_anew_and_keeps_its_prefixes():
    trace = read(LINES)
    piece = trace.only(trace.arrival >= 10)
    assert piece.arrival.tolist() == [0, 60, 90]
    # Of the piece's 160 prompt tokens only the block 1 of its second request came before.
    assert statistics(piece).prefix_reuse == pytest.approx(16 / 160)
    only_b = trace.of_model("b")
    assert only_b.models == ("b",)
    assert only_b.prompt.tolist() == [20]
    assert len(trace.of_model("nobody")) == 0


def test_another_rate():
    trace = read(LINES).at_rate(3.0)
    assert trace.rate == pytest.approx(3.0)
    assert trace.arrival.tolist() == pytest.approx([0, 0.1, 0.7, 1.0])
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidInputError, match="FT2202"):
            trace.at_rate(wrong)
    with pytest.raises(InvalidInputError, match="FT2202"):
        trace.only(slice(1)).at_rate(1.0)


def test_traces_are_merged_by_time():
    def one(*times):
        count = len(times)
        return Trace(np.array(times, dtype=float), np.arange(1, count + 1), np.ones(count, dtype=np.int64))

    merged = merge({"x": one(0, 5), "y": one(1, 2, 9)})
    assert merged.arrival.tolist() == [0, 1, 2, 5, 9]
    assert [merged.models[i] for i in merged.model] == ["x", "y", "y", "x", "y"]
    assert merged.prompt.tolist() == [1, 1, 2, 2, 3]
