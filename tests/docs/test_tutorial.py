"""The tutorial's commands, carried out one after the other, print what the page shows.

Two things differ: the model, which is a tiny random one in the place of the real (the catalogue's numbers are the real
one's, and so all forecasts), and the ports. Ids, times and paths are compared as such, and `...` stands for any lines.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from fabrictool.cli.main import main
from tests.ports import free_port
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/ten-minutes.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(VALID, PLAN, APPLY, _ANSWER, NOTHING, CHANGE, MISTAKE, STATUS, BROUGHT_BACK, EVENTS, DESTROY) = BLOCKS
KEY = "k" * 48


class Reader:
    """Somebody who follows the page in a folder of their own."""

    def __init__(self, folder, capfd):
        self.folder, self._capfd = folder, capfd
        self.ports = {str(free_port()): "8011", str(free_port()): "8012"}
        model = folder / "tiny.gguf"
        write_tiny_model(model, context=2048)
        for name in ("blueprints", "inventory"):
            shutil.copytree(ROOT / name, folder / name)
        self.edit(r"pypi://\S+", f"file://{model}")
        for ours, theirs in self.ports.items():
            self.edit(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}")

    def edit(self, before, after):
        path = self.folder / "blueprints/local.yaml"
        text, count = re.subn(before, after, path.read_text())
        assert count == 1
        path.write_text(text)

    def run(self, *arguments, code=0):
        """What the command printed, to whichever stream."""
        self._capfd.readouterr()
        got = main(list(arguments))
        out, err = self._capfd.readouterr()
        assert got == code, err
        for ours, theirs in self.ports.items():
            out, err = out.replace(ours, theirs), err.replace(ours, theirs)
        return out + err


@pytest.fixture
def reader(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "fabric-tutorial"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FABRICTOOL_DEMO_KEY", KEY)
    yield Reader(tmp_path, capfd)
    main(["destroy", "--yes"])


def lines(text):
    """Without what is another on each machine and at each time."""
    text = re.sub(r"\S*/fabric-tutorial", "~/fabric-tutorial", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "TIME", text)
    text = re.sub(r"\d+(\.\d+)? s\b", "N s", text)
    text = re.sub(r"\b[0-9a-f]{7,64}\b", "ID", text)
    kept = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return [line for line in kept if not line.startswith(("… ", "· "))]  # progress depends on speed


def shows(block, printed):
    """Each part of `block` between two `...` stands in `printed`, in this order."""
    got = lines(printed)
    at = 0
    for part in "\n".join(["", *lines(block), ""]).split("\n...\n"):
        wanted = part.strip("\n").splitlines()
        starts = [i for i in range(at, len(got) - len(wanted) + 1) if got[i : i + len(wanted)] == wanted]
        assert starts, "\n".join(["the page says:", *wanted, "", "the command printed:", *got[at:]])
        at = starts[0] + len(wanted)


def shows_in_any_order(block, printed):
    """For what is done side by side."""
    missing = set(lines(block)) - set(lines(printed))
    assert not missing, "\n".join([*sorted(missing), "", "is not among:", *lines(printed)])


@pytest.mark.e2e
def test_the_tutorial_prints_what_it_shows(reader):
    shows(VALID, reader.run("validate") + reader.run("trust", "init"))
    shows(PLAN, reader.run("plan", "-o", "plan.json"))
    shows_in_any_order(APPLY, reader.run("apply", "plan.json", "--yes"))
    shows(NOTHING, reader.run("plan"))
    reader.edit("rate: 0.5 req/s", "rate: 0.5")
    shows(MISTAKE, reader.run("validate", code=65))
    reader.edit("rate: 0.5", "rate: 0.5 req/s")
    reader.edit("context: 2048 tok", "context: 1024 tok")
    shows(CHANGE, reader.run("plan", "-v", "-o", "plan.json"))
    reader.run("apply", "plan.json", "--yes")
    units = {unit["address"]: unit for unit in json.loads(reader.run("status", "--json"))["units"]}
    os.kill(units["replica/smollm2-135m/1"]["pid"], signal.SIGKILL)
    shows(STATUS, reader.run("status", code=1))
    shows(BROUGHT_BACK, reader.run("plan"))
    reader.run("apply", "--yes")
    shows_in_any_order(EVENTS, reader.run("events", "-n", "8"))
    shows_in_any_order(DESTROY, reader.run("destroy", "--yes"))
