"""What of a healing is carried out, and which troubles a watch goes on in spite of."""

import pytest

from fabrictool.applier.reconcile import allowed, passes
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    PolicyDeniedError,
    Problem,
    StaleError,
    UnreachableError,
)
from fabrictool.planner.healing import Healing
from tests.gitops.plans import action, plan

TWO = Healing((), plan(action("create", "m/0"), action("delete", "m/1"), action("delete", "m/2")))


def test_as_many_deletions_as_are_allowed_are_carried_out():
    assert allowed(TWO, max_delete=2, watches=False) == (TWO.plan, ())


def test_too_many_are_refused_where_nobody_watches():
    with pytest.raises(PolicyDeniedError, match="would stop 2 units, but --max-delete allows 1"):
        allowed(TWO, max_delete=1, watches=False)


def test_a_watch_heals_the_rest_and_has_something_to_say_before_it_does():
    chosen, left_out = allowed(TWO, max_delete=1, watches=True)
    assert [change.kind for change in chosen.changes] == ["create"]
    assert [problem.code for problem in left_out] == ["FT3001"]


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (AppliedInPartError([Problem("FT5105", "it died")]), True),
        (StaleError.of("FT4004", "moved"), True),
        (InterruptedByUserError.of("FT4103", "Ctrl-C"), True),
        (UnreachableError.of("FT5109", "no answer", transient=True), True),
        (UnreachableError.of("FT5301", "another host key"), False),
        (FabrictoolError.of("FT6302", "no trust material"), False),
    ],
)
def test_what_the_next_look_may_find_gone(error, goes_on):
    assert passes(error) is goes_on
