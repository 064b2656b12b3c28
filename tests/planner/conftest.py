"""Calibrations that stay as they are, for tests whose targets lie at the edge of what a placement can keep."""

from pathlib import Path

import pytest

from fabrictool.simulator.calibration import loads


@pytest.fixture
def kept_calibrations(monkeypatch):
    """vLLM on H100 and on NVIDIA's other devices as it was once learned: the catalogue learns more with time."""
    files = sorted((Path(__file__).parent / "calibrations").glob("*.toml"))
    known = tuple(loads(file.read_text(), file.name) for file in files)
    monkeypatch.setattr("fabrictool.simulator.calibration.shipped", lambda: known)
