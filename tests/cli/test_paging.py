"""Long text on a terminal goes through the pager; everywhere else, and when the pager is of no use, it is printed."""

import os
import shutil
import sys

import pytest

from tests.terminal import ProgramOnTerminal

LONG, SHORT = ["plan", "--help"], ["explain", "FT1203"]
LAST_WORDS = "Show this message and exit."


@pytest.fixture
def on_terminal(tmp_path):
    started = []

    def run(arguments, *, rows=24, **environment):
        kept = {name: value for name, value in os.environ.items() if name not in ("PAGER", "LESS", "NO_COLOR")}
        line = [sys.executable, "-m", "fabrictool.cli.main", *arguments]
        environment = kept | {"TERM": "xterm"} | environment
        started.append(ProgramOnTerminal(line, cwd=tmp_path, environment=environment, rows=rows))
        return started[-1]

    yield run
    for program in started:
        program.close()


@pytest.fixture
def pager(tmp_path):
    """One that says that it is there."""
    path = tmp_path / "pager"
    path.write_text('#!/bin/sh\necho "LESS is $LESS"\nexec cat\n')
    path.chmod(0o755)
    return str(path)


def shown(program):
    assert program.end() == 0
    assert "Traceback" not in program.seen
    return program.seen.replace("\r\n", "\n")


def test_what_is_longer_than_the_screen_goes_through_the_pager(on_terminal, pager):
    text = shown(on_terminal(LONG, PAGER=pager))
    assert text.startswith("LESS is FRX\n")
    assert LAST_WORDS in text
    assert shown(on_terminal(LONG, PAGER=pager, LESS="R")).startswith("LESS is R\n")
    assert shown(on_terminal(["catalogue", "devices"], PAGER=pager)).startswith("LESS is FRX\n")


def test_what_fits_is_printed(on_terminal, pager):
    assert "LESS" not in shown(on_terminal(SHORT, PAGER=pager))
    assert "LESS" not in shown(on_terminal(LONG, PAGER=pager, rows=500))
    assert "LESS" in shown(on_terminal(SHORT, PAGER=pager, rows=4))


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        (["--no-pager"], {"PAGER": "a pager"}),
        ([], {"PAGER": ""}),
        ([], {"PAGER": "cat"}),
        ([], {"PAGER": "no-such-pager-here"}),
        ([], {"TERM": "dumb"}),
    ],
)
def test_without_a_pager_all_is_printed(on_terminal, more, environment):
    text = shown(on_terminal([*more, *LONG], **environment))
    assert "Usage: fabrictool plan" in text
    assert LAST_WORDS in text


@pytest.mark.parametrize("command", ["true", "false", "head -n 1"])
def test_a_pager_that_goes_early_is_no_error(on_terminal, command):
    shown(on_terminal(["catalogue", "models"], PAGER=command))


@pytest.mark.skipif(shutil.which("less") is None, reason="no less here")
def test_less_itself_and_an_interrupt_inside_it(on_terminal):
    program = on_terminal(LONG)
    program.wait_for("Usage: fabrictool plan")
    program.wait_for("\x1b[K")
    program.type("\x03")
    program.wait_for("\x07")
    program.type_until("G", LAST_WORDS)  # a key that comes while it is at the interrupt is dropped
    program.type("q")
    shown(program)


def test_json_and_pipes_have_no_pager(on_terminal, pager, command, monkeypatch):
    assert shown(on_terminal(["catalogue", "devices", "--json"], PAGER=pager)).startswith("{")
    monkeypatch.setenv("PAGER", pager)
    code, out, _ = command("plan", "--help")
    assert (code, "LESS" in out) == (0, False)
    assert LAST_WORDS in out
