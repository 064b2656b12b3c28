"""The pictures in the documentation are those that `top` draws today."""

from tests.tui.pictures import FOLDER, drawn


def test_the_pictures_of_the_documentation_are_true():
    drawn_now = drawn()
    kept = {path.name: path.read_text() for path in FOLDER.glob("top-*.svg")}
    stale = sorted(name for name in drawn_now.keys() | kept.keys() if drawn_now.get(name) != kept.get(name))
    assert not stale, f"write them anew and look at them: python -m tests.tui.pictures ({', '.join(stale)})"
