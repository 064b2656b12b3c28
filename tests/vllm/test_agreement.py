"""A real vLLM on this machine's processor: it is calibrated by what it served, and then forecast and measured again."""

import random

import pytest

from tests import agreement
from tests.vllm.conftest import VLLM
from tests.vllm.test_apply import bed, smollm2  # noqa: F401 - fixtures

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(2400)]


def test_plan_replay_and_measurement_agree_within_their_bands(bed):  # noqa: F811 - the fixture
    """As with the reference engine (`tests/e2e/test_agreement.py`), with less to do: a token of a prompt takes 24 ms
    without AMX, and where a queue grows percentiles are those of its length.
    """
    fabric, seed = bed(f"venv: {VLLM}"), random.SystemRandom().randrange(1 << 32)
    fabric.run("trust", "init")
    fabric.run("apply", "--yes", timeout=1200)
    first, second = (110, 0.4, (5, 30), (4, 24)), (100, 0.3, (10, 40), (6, 20))
    assert not agreement.disagreements(fabric, "smol", "vllm", seed, first, second), seed
