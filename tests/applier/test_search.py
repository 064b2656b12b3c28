"""A search that Ctrl-C ends."""

import pytest

from fabrictool.applier import planning
from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.problem import Solution

FIRST = Solution({0: 1}, {}, (), "exact", optimal=False)


def cut_off(*found):
    yield from found
    raise KeyboardInterrupt


def test_the_best_placement_so_far_is_kept_for_those_who_ask():
    seen = []
    assert planning._last(cut_off(FIRST), seen.append) == (FIRST, True)
    assert seen == [FIRST]


def test_without_a_placement_or_without_asking_it_goes_through():
    for found, progress in ((cut_off(), print), (cut_off(FIRST), None)):
        with pytest.raises(KeyboardInterrupt):
            planning._last(found, progress)


def test_a_search_that_ends_by_itself_was_not_stopped():
    assert planning._last(iter([FIRST]), None) == (FIRST, False)
    with pytest.raises(FabrictoolError, match="FT2902"):
        planning._last(iter([]), None)


def test_what_was_explained_before_ctrl_c_is_kept():
    assert planning._said(cut_off("because"), patient=False) == (["because"], True)
    assert planning._said(["because", "and"], patient=False) == (["because", "and"], False)
    with pytest.raises(KeyboardInterrupt):
        planning._said(cut_off("because"), patient=True)
