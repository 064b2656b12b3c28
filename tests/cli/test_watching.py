"""Following a log."""

import pytest

from fabrictool.cli.watching import _after


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        (["c"], ["a", "b", "c"], []),
        (["a", "b", "c"], ["a", "b", "c", "d"], ["d"]),
        (["a", "b", "c"], ["c", "d"], ["d"]),
        (["a", "a"], ["a", "a", "a"], []),
        (["a"], ["x", "y"], ["x", "y"]),
        ([], ["x"], ["x"]),
    ],
)
def test_following_a_log_prints_each_line_once(before, now, new):
    assert _after(before, now) == new
