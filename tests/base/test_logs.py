"""Log lines that nobody checked before they were written."""

import io
import logging

import pytest

from fabrictool.base.logs import _Lines


class Unspeakable:
    def __str__(self):
        raise ValueError

    __repr__ = __str__


@pytest.fixture
def written():
    handler, stream = _Lines(io.StringIO()), None
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    stream = handler.stream

    def write(words, *arguments):
        record = logging.LogRecord("fabrictool.x", logging.WARNING, __file__, 1, words, arguments, None)
        handler.handle(record)
        return stream.getvalue().splitlines()

    return write


@pytest.mark.parametrize(
    ("words", "arguments"), [("%s of %s", ("eight",)), ("of", ("eight",)), ("%d of", ("eight",)), ("%(a)s", ("eight",))]
)
def test_a_line_whose_arguments_do_not_fit_is_written_as_it_is(written, capsys, words, arguments):
    (line,) = written(words, *arguments)
    assert line.startswith(f"WARNING fabrictool.x: {words} ('eight',) (a defect of this log line: ")
    assert written("and %s", "so on")[1:] == ["WARNING fabrictool.x: and so on"]
    assert capsys.readouterr().err == "", "no trace back between the lines"


def test_whatever_cannot_be_said_at_all_is_nothing_to_its_caller(written, capsys):
    assert written("%s", Unspeakable()) == []
    assert "Logging error" in capsys.readouterr().err
    assert written("and %s", "so on") == ["WARNING fabrictool.x: and so on"]
