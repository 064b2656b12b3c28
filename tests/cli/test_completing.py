"""What a shell offers after Tab: names from files, quickly, and nothing where nothing is known."""

import os
import shlex
import shutil
import sys

import pytest

from fabrictool.cli import completing
from fabrictool.cli.bash_words import joined
from tests.planner.test_companions import SMALL, loaded
from tests.terminal import ProgramOnTerminal


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def test_names_that_begin_so(here):
    loaded(here, {"a": SMALL})
    assert completing.clusters("") == ["c"]
    assert completing.whys("m@c") == ["m@c/g", "m@cpu"]
    whole = completing.whys("m@")[0]
    assert shlex.split(f"fabrictool plan --why-not {whole}")[-1] == whole, "one word for a shell"
    assert completing.explained("ft120")[0] == "FT1201"
    assert "models.slo" in completing.explained("models.s")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in completing.models("HuggingFaceTB/")
    assert completing.units("") == [], "nothing was applied yet"


def test_where_nothing_is_known_nothing_is_said(here, capfd):
    assert completing.units("") == completing.clusters("") == completing.whys("") == []
    (here / "blueprint.yaml").write_text("models: [")
    assert completing.units("") == completing.clusters("") == completing.whys("") == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "whole", "typed"),
    [
        (["f", "plan", "--why-not", "m", "@", "c"], ["f", "plan", "--why-not", "m@c"], "m"),
        (["f", "plan", "--why-not", "m", "@"], ["f", "plan", "--why-not", "m@"], "m"),
        (["f", "plan", "--why-not", "m", "@", ""], ["f", "plan", "--why-not", "m@"], "m"),
        (["f", "-w", "m", "@", "c", "-w", "n"], ["f", "-w", "m@c", "-w", "n"], ""),
        (["f", "-w", "m", "@", "c", "-w", "n", "@", "g"], ["f", "-w", "m@c", "-w", "n@g"], "n"),
        (["f", "u", "@", "h", "@", "x"], ["f", "u@h@x"], "u@h"),
        (["f", "m@c"], ["f", "m@c"], ""),
    ],
)
def test_words_that_bash_parts_at_an_at_sign_are_whole_again(words, whole, typed):
    line = joined(words, len(words) - 1)
    assert (line.words, line.word, line.typed) == (whole, len(whole) - 1, typed)


@pytest.fixture
def bash(here):
    """With our completion as it is installed, in a folder with a fabric of one cluster."""
    loaded(here, {"a": SMALL})
    program = here / "bin" / "fabrictool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fabrictool.cli.main "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    shell = ProgramOnTerminal(["bash", "--norc", "--noprofile", "-i"], cwd=here, environment=environment, columns=200)
    shell.type('bind "set enable-bracketed-paste off"; eval "$(_FABRICTOOL_COMPLETE=source_bash fabrictool)"\r')
    shell.type("complete -p fabrictool\r")
    shell.wait_for("-F _fabrictool_completion fabrictool")
    yield shell
    shell.close()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("m@c/", "m@c/g"),
        ("m@cp", "m@cpu"),
        ("m", "m@c"),
        ("m@", "m@c"),
        ("m@c/g --why-not m@cp", "m@c/g --why-not m@cpu"),
    ],
)
def test_tab_after_an_at_sign_in_bash(bash, typed, completed):
    bash.type(f"fabrictool plan --why-not {typed}\t\x01printf '<%s>' \r")  # Home, and what shows the line's words
    words = "".join(f"<{word}>" for word in f"fabrictool plan --why-not {completed}".split())
    bash.wait_for(words, within_s=20)
