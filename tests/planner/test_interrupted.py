"""A search that Ctrl-C ends."""

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner import chosen, plan
from fabrictool.planner.problem import Solution

FIRST = Solution({0: 1}, {}, (), "exact", optimal=False)


def cut_off(*found):
    yield from found
    raise KeyboardInterrupt


def test_the_best_placement_so_far_is_kept_for_those_who_ask():
    seen = []
    assert chosen._last(cut_off(FIRST), seen.append) == (FIRST, True)
    assert seen == [FIRST]


def test_without_a_placement_or_without_asking_it_goes_through():
    for found, progress in ((cut_off(), print), (cut_off(FIRST), None)):
        with pytest.raises(KeyboardInterrupt):
            chosen._last(found, progress)


def test_a_search_that_ends_by_itself_was_not_stopped():
    assert chosen._last(iter([FIRST]), None) == (FIRST, False)
    with pytest.raises(FabrictoolError, match="FT2902"):
        chosen._last(iter([]), None)


def test_what_was_explained_before_ctrl_c_is_kept():
    assert plan._until_interrupted(cut_off("because"), patient=False) == (["because"], True)
    assert plan._until_interrupted(["because", "and"], patient=False) == (["because", "and"], False)
    with pytest.raises(KeyboardInterrupt):
        plan._until_interrupted(cut_off("because"), patient=True)
