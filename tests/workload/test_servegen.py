"""ServeGen's folders: rates, burstiness and lengths come back out, whatever cannot be used is counted."""

import json

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.servegen import draw, read

WINDOWS = 36
SHORT = {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{0: 0.5, 7: 0.5}"}
LONG = {"input_tokens": "{1000: 1.0}", "output_tokens": "{200: 0.5, 400: 0.5}"}
IDLE = {"input_tokens": "{}", "output_tokens": "{}"}


def rows(*windows):
    """Ten-minute windows; None is idle. The last two columns are not those of the rate, as in many real rows."""
    text = [
        f"{600 * i},0,0,,0,0" if one is None else f"{600 * i},{one[0]},{one[1]},{one[2]},0.5,9.0"
        for i, one in enumerate(windows)
    ]
    return "\n".join(text) + "\n"


@pytest.fixture
def client(tmp_path):
    """Writes the two files of a client; a text is written as it is, None not at all."""

    def write(number, trace, dataset):
        if trace is not None:
            text = trace if isinstance(trace, str) else rows(*trace)
            (tmp_path / f"chunk-{number}-trace.csv").write_text(text)
        if dataset is not None:
            text = dataset if isinstance(dataset, str) else json.dumps(dataset, indent=2)
            (tmp_path / f"chunk-{number}-dataset.json").write_text(text)
        return tmp_path

    return write


def per_window(trace, offset=0.0):
    return np.bincount(((trace.arrival + offset) // 600).astype(int), minlength=WINDOWS) / 600


@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
@pytest.mark.parametrize("cv", [0.4, 1.0, 3.0])
def test_rate_and_burstiness_of_a_client(client, family, cv):
    folder = client(0, [(4.0, cv, family)] * WINDOWS, {"0": SHORT})
    trace = draw(read(folder), seed=5)
    count = 4.0 * 600 * WINDOWS
    # A renewal process counts with a variance of cv² × the mean; four standard deviations.
    assert len(trace) == pytest.approx(count, abs=4 * cv * count**0.5)
    gaps = np.diff(trace.arrival)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    assert (np.diff(trace.arrival) >= 0).all()
    # Weibull gaps are not gamma gaps of the same mean and spread: their third moments differ.
    skew = ((gaps - gaps.mean()) ** 3).mean() / gaps.std() ** 3
    expected = {("Gamma", 3.0): 6.0, ("Weibull", 3.0): 9.6, ("Gamma", 0.4): 0.8, ("Weibull", 0.4): 0.28}
    if (family, cv) in expected:
        assert skew == pytest.approx(expected[family, cv], rel=0.25)


def test_bursty_clients_do_not_send_more_in_short_windows(client):
    # Ordinary renewals from the window's start would be (cv² - 1)/2 = 32 too many in each of 24.
    for number in range(60):
        folder = client(number, [(0.04, 8.0, "Weibull")] * WINDOWS, {"0": SHORT})
    assert len(draw(read(folder), seed=1)) == pytest.approx(60 * 24 * WINDOWS, rel=0.12)


def test_windows_have_their_own_rates_and_idle_ones_nothing(client):
    pattern = [(2.0, 1.0, "Gamma"), None, (8.0, 1.0, "Weibull"), (0.5, 1.0, "Gamma")]
    folder = client(3, pattern * (WINDOWS // 4), {"0": SHORT})
    found = per_window(draw(read(folder), seed=2)).reshape(-1, 4).mean(axis=0)
    # Times count from the first arrival, so that windows begin a little early.
    assert found == pytest.approx([2.0, 0.0, 8.0, 0.5], rel=0.12, abs=0.03)


def test_lengths_are_those_of_the_six_hours(client):
    folder = client(0, [(2.0, 1.0, "Gamma")] * 2 * WINDOWS, {"0": SHORT, "21600": LONG, "43200": IDLE})
    trace = draw(read(folder), seed=4)
    early = trace.arrival < 21600 - 10
    late = trace.arrival > 21600 + 10
    assert set(trace.prompt[early].tolist()) == {10, 30}
    assert (trace.prompt[early] == 30).mean() == pytest.approx(0.75, abs=0.02)
    # No answer is empty: a count of 0 is one token.
    assert set(trace.output[early].tolist()) == {1, 7}
    assert set(trace.prompt[late].tolist()) == {1000}
    assert trace.output[late].mean() == pytest.approx(300, rel=0.02)


def test_empty_lengths_leave_those_before_in_force(client):
    folder = client(0, [(2.0, 1.0, "Gamma")] * 2 * WINDOWS, {"0": SHORT, "21600": IDLE})
    clients = read(folder)
    assert (len(clients.windows), clients.dropped) == (2 * WINDOWS, {})
    folder = client(0, [(2.0, 1.0, "Gamma")] * 2 * WINDOWS, {"21600": SHORT})
    clients = read(folder)
    assert (len(clients.windows), clients.dropped) == (WINDOWS, {"windows without lengths": WINDOWS})


def test_the_same_seed_draws_the_same_and_hours_cut_it(client):
    client(0, [(1.0, 2.0, "Gamma")] * WINDOWS, {"0": SHORT})
    folder = client(1, [(0.5, 0.5, "Weibull")] * WINDOWS, {"0": LONG})
    whole, again, other = (draw(read(folder), seed) for seed in (7, 7, 8))
    assert whole.arrival.tolist() == again.arrival.tolist()
    assert whole.prompt.tolist() == again.prompt.tolist()
    assert whole.arrival.tolist() != other.arrival.tolist()
    hour = draw(read(folder, (1.1, 2.1)), 7)
    assert hour.span < 3600
    assert len(hour) == pytest.approx(1.5 * 3600, rel=0.15)
    at = np.searchsorted(whole.arrival, 1.1 * 3600 - 0.5)
    piece = whole.prompt[at : at + len(hour) + 5].tolist()
    assert any(piece[i : i + len(hour)] == hour.prompt.tolist() for i in range(6))


def test_a_rate_makes_all_clients_busier(client):
    client(0, [(1.0, 1.0, "Gamma")] * WINDOWS, {"0": SHORT})
    folder = client(1, [(3.0, 1.0, "Gamma"), None] * (WINDOWS // 2), {"0": LONG})
    trace = draw(read(folder), seed=3, rate=10.0)
    assert trace.rate == pytest.approx(10.0, rel=0.02)
    # 1 and 1.5 req/s on average are 2 to 3.
    assert (trace.prompt == 1000).mean() == pytest.approx(0.6, abs=0.02)


def test_what_is_broken_is_counted(client):
    good = [(1.0, 1.0, "Gamma")] * 6
    for number in range(12):
        client(number, good, {"0": SHORT})
    broken = [
        (good, None),
        (None, {"0": SHORT}),
        (good, "version https://git-lfs.github.com/spec/v1\n"),
        ("start,rate\n0,1\n", {"0": SHORT}),
        ([(-1.0, 1.0, "Gamma")], {"0": SHORT}),
        (good, {"0": {"text_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}"}}),
    ]
    for number, (trace, dataset) in enumerate(broken, start=12):
        folder = client(number, trace, dataset)
    clients = read(folder)
    assert clients.dropped == {
        "clients without a dataset": 1,
        "clients without a trace": 1,
        "clients with a broken dataset": 1,
        "clients with a broken trace": 2,
        "clients without input_tokens and output_tokens": 1,
    }
    assert draw(clients, 0).dropped == clients.dropped
    assert {window.client for window in clients.windows} == set(range(12))


@pytest.mark.parametrize(
    "trace",
    [
        "", "x", "0,1,1,Gamma,1", "0,1,1,Gamma,1,1,1", "0,nan,1,Gamma,1,1", "0,1,nan,Gamma,1,1", "0,1,-1,Gamma,1,1",
        "0,inf,1,Gamma,1,1", "0,1,1,Cauchy,1,1", "0,1,1,,1,1", "0,1,1,Gamma,x,1", "nan,1,1,Gamma,1,1",
        "600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1", "-600,1,1,Gamma,1,1", "0,1,1,Gamma,1,1\ninf,1,1,Gamma,1,1",
    ],
)  # fmt: skip
def test_a_trace_that_is_none(client, trace):
    with pytest.raises(InvalidInputError, match=r"FT2204.*1 clients with a broken trace"):
        read(client(0, trace, {"0": SHORT}))


@pytest.mark.parametrize(
    "dataset",
    [
        "", "[]", "[[1]]", "1", '{"x": {}}', "[" * 99999, {"0": []}, {"0": {"input_tokens": "{1: 1.0}"}},
        *(
            {"0": SHORT | {"output_tokens": text}}
            for text in ("{1: 0.5}", "{1: nan}", "{1: -1.0, 2: 2.0}", "{1.5: 1.0}", "{-1: 1.0}", "{1}", "{a: 1.0}",
                         "__import__('os')", "{99999999999: 1.0}", {"1": 1.0}, None, 3)
        ),
    ],
)  # fmt: skip
def test_a_dataset_that_is_none(client, dataset):
    with pytest.raises(InvalidInputError, match=r"FT2204.*1 clients with"):
        read(client(0, [(1.0, 1.0, "Gamma")], dataset))


def test_nothing_to_draw(client, tmp_path):
    with pytest.raises(InvalidInputError, match="no chunk-N-trace"):
        read(tmp_path)
    folder = client(0, [(1.0, 1.0, "Gamma")], {"0": SHORT})
    with pytest.raises(InvalidInputError, match=r"FT2204.*sends anything"):
        read(folder, (5.0, 6.0))
    with pytest.raises(InvalidInputError, match=r"FT2204.*at most"):
        draw(read(folder), 0, rate=1e7)
    with pytest.raises(InvalidInputError, match=r"FT2204.*no request"):
        draw(read(folder), 0, rate=1e-8)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="FT2202"):
            draw(read(folder), 0, rate=rate)
