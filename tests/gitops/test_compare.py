"""The same change, or another one than the reviewed."""

import msgspec
import pytest

from fabrictool.planner.compare import differences
from tests.gitops.plans import action, plan, spec

REVIEWED = plan(action("create", operation="o-g1"), action("keep", "m/1", former="o"), warnings=("old",))


@pytest.mark.parametrize(
    "fresh",
    [
        REVIEWED,
        plan(action("create", operation="o-g2", reason="the former one ended"), action("keep", "m/1", former="p")),
        plan(action("create", operation="o-g1")),
    ],
)
def test_what_a_person_reviews_is_the_same(fresh):
    assert differences(REVIEWED, fresh) == ()


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        (plan(), "create was reviewed, nothing would be done"),
        (plan(action("create"), action("delete", "m/1", former="o")), "nothing was reviewed, delete would be done"),
        (plan(action("create", spec=spec(options={"x": "1"}))), "another specification"),
        (plan(action("create", cluster="d")), "elsewhere"),
        (plan(action("create"), blueprint_digest="other"), "another blueprint"),
        (plan(action("create"), fabric="g"), "fabric f, not g"),
    ],
)
def test_what_is_not(fresh, said):
    found = differences(REVIEWED, fresh)
    assert len(found) == 1
    assert said in found[0]


def test_the_order_of_actions_does_not_matter():
    made = plan(action("create"), action("create", "m/1"))
    assert differences(made, msgspec.structs.replace(made, actions=made.actions[::-1])) == ()
