from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "cases" / "blueprint"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cases() -> Path:
    return CASES


@pytest.fixture
def root() -> Path:
    return ROOT
