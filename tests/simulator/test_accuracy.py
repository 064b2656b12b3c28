"""A frozen sample of real measurements that no fit has seen: forecasts stay as near as they once were.

The bounds are loose on purpose; `make validate-simulator` prints what is really reached.
"""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.cases import predict

_path = Path(__file__).parents[1] / "bench" / "simulator" / "measured.py"
_spec = importlib.util.spec_from_file_location("measured", _path)
measured = importlib.util.module_from_spec(_spec)
sys.modules["measured"] = measured
_spec.loader.exec_module(measured)


def sample(name, mode, count):
    rows = [o for o in measured.load(name) if o.case.mode == mode and measured.held_out(o)]
    return measured.sample(rows, count)


def errors(observations, metric):
    found, inside = [], []
    for one in observations:
        try:
            prediction = predict(one.case, shipped())
        except FabrictoolError:
            found.append(1.0)
            inside.append(False)
            continue
        value = getattr(one, metric)
        found.append(abs(getattr(prediction.estimate, metric) / value - 1))
        low, high = prediction.bands[metric]
        inside.append(low <= value <= high)
    return np.array(found), float(np.mean(inside))


@pytest.mark.parametrize(
    ("name", "mode", "metric", "median", "mean"),
    [
        ("silicon", "agg", "tpot", 0.15, 0.30),
        ("silicon", "agg", "ttft", 0.35, None),
        ("argonne", "batch", "e2e", 0.15, None),
    ],
)
def test_held_out_measurements_are_forecast_about_as_well_as_ever(name, mode, metric, median, mean):
    found, covered = errors(sample(name, mode, 150), metric)
    assert np.median(found) < median
    assert mean is None or found.mean() < mean
    assert 0.75 <= covered <= 0.99


def test_datasheets_alone_rank_devices_as_measurements_do():
    """Llama-3.1-70B at 8 bits on four devices, 32 requests in flight: H100 is slower than B200 in both."""
    spans = {}
    for one in measured.load("silicon"):
        case = one.case
        if "70B" in case.model.id and case.precision == "fp8" and case.cut.tp == 4 and case.concurrency == 32:
            relatives = [c for c in shipped() if c.device == "nvidia/*"]
            chosen = choose(relatives, "", "nvidia", case.engine, "online")
            spans.setdefault(case.device.id, []).append(
                (one.tpot, math.exp(-one.log_errors(chosen.factors)["tpot"]) * one.tpot)
            )
    means = {device: np.mean(pairs, axis=0) for device, pairs in spans.items()}
    assert len(means) >= 2
    assert sorted(means, key=lambda d: means[d][0]) == sorted(means, key=lambda d: means[d][1])
