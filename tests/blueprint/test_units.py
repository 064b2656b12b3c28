from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.base.units import (
    Bandwidth,
    Carbon,
    Compute,
    Duration,
    Memory,
    Power,
    Price,
    Quantity,
    Rate,
    Share,
    Tokens,
    UnitError,
)

REAL = [Duration, Rate, Bandwidth, Power, Carbon, Compute]
WHOLE = [Memory, Tokens]


@pytest.mark.parametrize("kind", REAL)
@given(value=st.floats(min_value=1e-12, max_value=1.0) | st.just(0.0))
def test_reals_round_trip_exactly(kind, value):
    quantity = kind(value * float(kind.MOST))
    assert kind.parse(str(quantity)) == quantity


@given(value=st.floats(min_value=0.0, max_value=1.0).filter(lambda v: v == 0 or v > 1e-12))
def test_shares_round_trip_exactly(value):
    assert Share.parse(str(Share(value))) == value


@pytest.mark.parametrize("kind", WHOLE)
@given(value=st.integers(min_value=0, max_value=10**12))
def test_whole_ones_round_trip_exactly(kind, value):
    assert kind.parse(str(kind(value))) == value


@given(
    amount=st.floats(min_value=0, max_value=1e9).filter(lambda v: v == 0 or v > 1e-9),
    currency=st.from_regex("[A-Z]{3}", fullmatch=True),
)
def test_prices_round_trip_exactly(amount, currency):
    assert Price.parse(str(Price(amount, currency))) == Price(amount, currency)


@given(text=st.text(max_size=80))
@pytest.mark.parametrize("kind", [*REAL, *WHOLE, Share, Price])
def test_any_text_is_a_quantity_or_a_unit_error(kind, text):
    error = unit_error(kind, text)
    assert error is None or (error.code in {"FT1110", "FT1111", "FT1112", "FT1113"} and error.hint)


def unit_error(kind, text):
    try:
        kind.parse(text)
    except UnitError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kind", "text", "value", "printed"),
    [
        (Duration, "800ms", 0.8, "800ms"),
        (Duration, "1.5h", 5400.0, "1.5h"),
        (Duration, "90 s", 90.0, "1.5m"),
        (Duration, "7d", 604800.0, "168h"),
        (Memory, "80GiB", 80 * 2**30, "80GiB"),
        (Memory, "80GB", 80 * 10**9, "80GB"),
        (Memory, "1.5KiB", 1536, "1.5KiB"),
        (Tokens, "2048 tok", 2048, "2048 tok"),
        (Rate, "22req/s", 22.0, "22 req/s"),
        (Bandwidth, "1 Gbit/s", 125e6, "125 MB/s"),
        (Bandwidth, "3.35 TB/s", 3.35e12, "3.35 TB/s"),
        (Power, "1.2 kW", 1200.0, "1.2 kW"),
        (Share, "99.5%", 0.995, "99.5%"),
        (Carbon, "45.5 g/kWh", 45.5, "45.5 g/kWh"),
        (Compute, "989.4 TFLOP/s", 989.4e12, "989.4 TFLOP/s"),
    ],
)
def test_examples(kind, text, value, printed):
    assert kind.parse(text) == value
    assert str(kind.parse(text)) == printed
    assert f"{kind.parse(text)}" == printed


@pytest.mark.parametrize(
    ("kind", "text", "code", "hint"),
    [
        (Duration, "800", "FT1110", "write `800ms` or `800s`?"),
        (Carbon, "45 gCO2/kWh", "FT1111", "did you mean `45 g/kWh`?"),
        (Carbon, "0.4 kg/kWh", "FT1111", "did you mean `400 g/kWh`?"),
        (Share, "0.99", "FT1110", "write `99%`?"),
        (Share, "95", "FT1110", "write `95%`?"),
        (Price, "2", "FT1110", "write `2 CHF/h`?"),
        (Duration, "3 minutes", "FT1111", "did you mean `3m`?"),
        (Memory, "80G", "FT1111", "did you mean `80GiB`?"),
        (Memory, "80gb", "FT1111", "did you mean `80GB`?"),
        (Bandwidth, "10Gbps", "FT1111", "did you mean `10 Gbit/s`?"),
        (Memory, "0.5B", "FT1113", "such as"),
        (Duration, "1e3s", "FT1112", "write `1000 s`"),
        (Rate, "1e400 req/s", "FT1112", "such as"),
        (Duration, "5" * 40 + "s", "FT1113", "such as"),
        (Rate, "240 req/min", "FT1111", "did you mean `4 req/s`?"),
        (Rate, "100 rpm", "FT1111", "did you mean `1.667 req/s`?"),
        (Tokens, "32k tok", "FT1111", "did you mean `32000 tok`?"),
        (Tokens, "32k", "FT1111", "did you mean `32000 tok`?"),
        (Bandwidth, "10GB", "FT1111", "did you mean `10 GB/s`?"),
        (Bandwidth, "10Gb", "FT1111", "did you mean `10 Gbit/s`?"),
        (Bandwidth, "10Gb/s", "FT1111", "did you mean `10 Gbit/s`?"),
        (Bandwidth, "1 GiB/s", "FT1111", "did you mean `1.073741824 GB/s`?"),
        (Memory, "80Gbit", "FT1111", "did you mean `10GB`?"),
        (Power, "500 mW", "FT1111", "did you mean `0.5 W`?"),
        (Compute, "3 FLOP/s", "FT1111", "units:"),
        (Duration, "2 weeks", "FT1111", "did you mean `14d`?"),
        (Duration, "900000d", "FT1113", "at most"),
        (Rate, "1000000000000 req/s", "FT1113", "at most"),
        (Memory, "9999999TB", "FT1113", "at most"),
        (Price, "99999999999 CHF/h", "FT1113", "at most"),
    ],
)
def test_mistakes_have_their_mend(kind, text, code, hint):
    with pytest.raises(UnitError) as error:
        kind.parse(text)
    assert error.value.code == code
    assert error.value.hint.startswith(hint)


@pytest.mark.parametrize("kind", Quantity.__subclasses__())
def test_units_of_printing_are_known_and_descend(kind):
    for leaf in kind.__subclasses__():
        factors = [leaf.UNITS[unit] for unit in leaf.PRINTED]
        assert factors == sorted(factors, reverse=True)
        assert leaf.UNITS[leaf.PRINTED[-1]] <= Decimal("1e9")
        for example in leaf.EXAMPLES:
            assert leaf.parse(example) > 0


def test_arithmetic_gives_plain_numbers():
    assert type(Duration(2.0) * 3) is float
    assert type(Memory(2) + 1) is int
