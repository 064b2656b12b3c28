"""What a demand may say of how its requests come."""

import pytest
from pydantic import ValidationError

from fabrictool.domain.blueprint import Demand
from fabrictool.workload.arrivals import CVS

DECLARED = {"rate": "1 req/s", "input": "1 tok", "output": "1 tok"}


@pytest.mark.parametrize("cv", [*CVS, 2.5])
def test_it_may_say_how_uneven_they_come(cv):
    assert Demand.model_validate(DECLARED).cv is None
    assert Demand.model_validate(DECLARED | {"cv": cv}).cv == cv


@pytest.mark.parametrize("cv", [CVS[0] / 1.01, CVS[1] * 1.01, 0, "much"])
def test_what_no_arrivals_can_be_is_refused(cv):
    with pytest.raises(ValidationError):
        Demand.model_validate(DECLARED | {"cv": cv})


def test_a_trace_says_it_itself_and_it_alone_is_no_demand():
    with pytest.raises(ValidationError, match="a trace already says what `cv` says"):
        Demand.model_validate({"trace": "t.jsonl", "cv": 2.0})
    with pytest.raises(ValidationError, match="lacks `rate` and `output`"):
        Demand.model_validate({"cv": 2.0, "input": "1 tok"})
