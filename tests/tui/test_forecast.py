"""What the last plan forecast of a model, beside what is measured."""

import msgspec
import pytest

from fabrictool.domain.plan import Band
from fabrictool.domain.state import ModelPromise
from fabrictool.tui.problems import beyond_forecast
from tests.tui.test_top import OPERATOR, column, gateway, labels, settled, text, top

PROMISE = ModelPromise(ttft_p95_s=Band(0.5, 0.4, 0.6), tpot_p95_s=Band(0.03, 0.02, 0.04), slo="meets", attainment=0.996)
LLAMA = msgspec.structs.replace(gateway().models[0], samples=200, ttft_p95_s=0.612, tpot_p95_s=0.031)


def test_above_the_band_is_a_miss_and_of_few_answers_nothing_is_said():
    assert beyond_forecast(LLAMA, PROMISE) == (True, False)
    assert beyond_forecast(msgspec.structs.replace(LLAMA, ttft_p95_s=0.6, tpot_p95_s=0.05), PROMISE) == (False, True)
    assert beyond_forecast(msgspec.structs.replace(LLAMA, samples=19), PROMISE) == (False, False)
    assert beyond_forecast(msgspec.structs.replace(LLAMA, ttft_p95_s=None, tpot_p95_s=None), PROMISE) == (False, False)
    assert beyond_forecast(LLAMA, None) == (False, False)


def measured():
    return gateway(models=[LLAMA, gateway().models[1]])


@pytest.mark.asyncio
async def test_the_forecast_stands_beside_what_is_measured():
    app = top(measured, msgspec.structs.replace(OPERATOR, forecasts={"llama": PROMISE}))
    async with app.run_test(size=(160, 30)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        assert column(app, "FORECAST") == ["500 ms / 30 ms  miss", "–"]
        assert column(app, "TTFT") == ["612 ms ▲", "–"]
        assert column(app, "TPOT") == ["31 ms", "–"]
        await pilot.press("enter")
        await settled(pilot)
        page = text(app, "#text")
        assert "the last plan forecasts 500 ms, 400 ms to 600 ms  ▲ miss: it takes longer" in page
        assert "the last plan forecasts 30 ms, 20 ms to 40 ms\n" in page
        assert "the last plan forecasts of its SLO: meets, 99.6% of requests within it" in page


@pytest.mark.asyncio
async def test_a_narrow_screen_marks_the_measured_figure():
    app = top(measured, msgspec.structs.replace(OPERATOR, forecasts={"llama": PROMISE}))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        assert "FORECAST" not in labels(app)
        assert column(app, "TTFT") == ["612 ms ▲", "–"]


@pytest.mark.asyncio
async def test_without_a_blueprint_there_is_no_forecast():
    app = top(measured)
    async with app.run_test(size=(160, 30)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        assert column(app, "FORECAST") == ["–", "–"]
