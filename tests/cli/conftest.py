"""The command line in this process, in a folder with a small fabric; or on a terminal, where Ctrl-C is pressed."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from fabrictool.cli.main import main
from tests.answers import check_answer
from tests.simulator.fabrics import BLUEPRINT, INVENTORY


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """It holds a blueprint with its inventory, and what commands keep."""
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT)
    return tmp_path


@pytest.fixture
def command(folder, capsys, monkeypatch):
    """The command line in `folder`: (exit code, stdout, stderr); no traceback ever."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "Traceback" not in out
        check_answer(arguments, out)
        return code, out, err

    return run


@pytest.fixture
def simulated(command):
    """The JSON document of ``simulate`` on the blueprint here."""

    def run(*arguments):
        code, out, err = command("simulate", "-b", "blueprint.yaml", "--requests", 200, "--json", *arguments)
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def interrupted(folder):
    """Runs a command on a terminal and presses Ctrl-C when a text stands there: (exit code, stdout, the terminal)."""

    def run(text, *arguments):
        terminal, theirs = pty.openpty()
        line = [sys.executable, "-m", "fabrictool.cli.main", *map(str, arguments)]
        process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        shown = ""
        try:
            while True:
                before = text in shown
                try:
                    shown += os.read(terminal, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
                if text in shown and not before:
                    process.send_signal(signal.SIGINT)
            out = process.communicate(timeout=60)[0].decode()
        finally:
            process.kill()
            os.close(terminal)
        assert text in shown
        assert "Traceback" not in shown
        return process.returncode, out, shown

    return run
