"""What reaches a terminal: no character of others that it obeys, figures to the right, and nothing beyond its edge."""

import io
import json
import re
import sys

import pytest

from fabrictool.base.errors import Place, Problem
from fabrictool.base.text import escaped_json, visible
from fabrictool.cli.output import data, json_data, paint, print_problems, say, table

NASTY = "a\x1b[2Jb\x1b]0;title\x07c\u202ed\x9be\rf\x7fg\udc80\u2066"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Stands for stdout and stderr from the moment on at which it is called for; colours are on."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def begin():
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return begin


def harmless(text):
    obeyed = {character for character in text if character < " "} - {"\n", "\t"}
    return not obeyed | (set(text) & set("\x7f\x9b\u202e\u2066\udc80"))


def test_escapes_and_characters_that_turn_the_writing_are_shown_not_obeyed(terminal):
    stream = terminal()
    data(NASTY)
    say(NASTY)
    print_problems([Problem("FT1", NASTY, Place(file=NASTY, line=1, column=1, source_line=NASTY), NASTY)])
    shown = stream.getvalue().replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert shown.count("\ufffd[2J") == 6
    assert harmless(shown)
    shown.encode()  # halves of characters cannot be printed at all


def test_json_stays_the_same_document_without_them(terminal):
    stream = terminal()
    json_data({"text": NASTY})
    assert json.loads(stream.getvalue()) == {"text": NASTY}
    assert harmless(stream.getvalue())
    assert json.loads(escaped_json(json.dumps(NASTY, ensure_ascii=False))) == NASTY


def test_our_own_colours_are_seen_on_a_terminal_alone(terminal, capsys, monkeypatch):
    stream = terminal()
    data(paint("bad\x1b[2J", "error"))
    assert stream.getvalue() == "\x1b[31mbad\ufffd[2J\x1b[0m\n"
    monkeypatch.undo()
    data(paint("bad", "error"))
    assert capsys.readouterr().out == "bad\n"


def test_colours_of_an_engines_log_are_left_out():
    assert visible("\x1b[32mINFO\x1b[0m ready\r\n") == "INFO ready\n"


def test_figures_stand_to_the_right_and_words_to_the_left():
    lines = table(["NAME", "TTFT", "N"], [["a", "640 ms", "9"], ["bb", "–", "120"]]).splitlines()
    assert lines == ["NAME    TTFT    N", "a     640 ms    9", "bb         –  120"]


def test_a_table_is_folded_between_words_and_never_in_one():
    rows = [["replica/smollm2-135m/0", "alpha-local", "running", "the engine loads its weights and says how far it is"]]
    text = table(["UNIT", "CLUSTER", "STATE", "DETAIL"], rows, columns=60)
    assert max(map(len, text.splitlines())) <= 60
    assert set(" ".join(rows[0]).split()) <= set(text.split())
    assert len(table(["UNIT", "CLUSTER", "STATE", "DETAIL"], rows).splitlines()) == 2  # a file has no edge


def test_a_cell_in_colour_is_as_wide_as_it_looks():
    assert table(["A", "B"], [[paint("x", "error"), "y"]]).splitlines()[1].endswith("  y")


def test_an_error_is_said_once(capsys):
    problem = Problem("FT1", "x")
    print_problems([problem, Problem("FT1", "x")])
    assert capsys.readouterr().err.count("FT1") == 1


LINKS = "FORCE_HYPERLINK", "TERM_PROGRAM", "VTE_VERSION", "WT_SESSION", "KONSOLE_VERSION", "DOMTERM", "STY"


@pytest.fixture
def complaint(tmp_path):
    file = tmp_path / "a b\x07.yaml"
    file.write_text("x")
    return Problem("FT1201", NASTY, Place(file=str(file), line=3, column=1))


def test_a_place_leads_to_its_file_where_terminals_have_links(terminal, complaint, monkeypatch):
    for name in LINKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "WezTerm")
    stream = terminal()
    print_problems([complaint])
    begin, end = stream.getvalue().index("\x1b]8;;file://"), stream.getvalue().index("\x1b]8;;\x1b\\")
    target, text = stream.getvalue()[begin + 5 : end].split("\x1b\\")
    assert target.endswith("/a%20b%07.yaml")
    assert text.endswith("a b\ufffd.yaml:3:1")
    rest = re.sub(r"\x1b\]8;;[^\x1b]*\x1b\\|\x1b\[[0-9]*m", "", stream.getvalue())
    assert harmless(rest), "nobody else's escape became a link"


@pytest.mark.parametrize(
    ("environment", "linked"),
    [
        ({}, False),
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "xterm-kitty"}, True),
        ({"VTE_VERSION": "7600"}, True),
        ({"VTE_VERSION": "5000"}, False),
        ({"VTE_VERSION": "7600", "STY": "1.pts"}, False),
        ({"VTE_VERSION": "7600", "NO_COLOR": "1"}, False),
        ({"VTE_VERSION": "7600", "TERM": "dumb"}, False),
        ({"FORCE_HYPERLINK": "1"}, True),
        ({"FORCE_HYPERLINK": "0", "TERM": "xterm-kitty"}, False),
    ],
)
def test_links_are_for_terminals_that_are_known_to_have_them(terminal, complaint, monkeypatch, environment, linked):
    for name in LINKS:
        monkeypatch.delenv(name, raising=False)
    stream = terminal()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    print_problems([complaint])
    assert ("\x1b]8" in stream.getvalue()) is linked


def test_a_pipe_gets_no_link(complaint, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_HYPERLINK", "1")
    print_problems([complaint])
    assert "\x1b" not in capsys.readouterr().err
