"""What `top` records, and how it is shown again: whole, cut off by a kill, and moved about in."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.main import main
from fabrictool.status.sightings import Sighting, encode_sighting, read_recording
from fabrictool.tui.app import Top, snapshot
from fabrictool.tui.feeds import MadeUpFabric, Playback
from tests.tui.test_top import NOW, settled, text

LOOKS = 120


@pytest.fixture(scope="module")
def looks():
    """Two minutes of a fabric that is made up."""
    feed = MadeUpFabric(12, begun=NOW)
    return [feed.look() for _ in range(LOOKS)]


@pytest.fixture
def recording(tmp_path, looks):
    path = tmp_path / "seen.ndjson"
    path.write_bytes(b"".join(map(encode_sighting, looks)))
    return path


def test_a_recording_is_read_as_it_was_written(recording, looks):
    assert read_recording(recording) == looks


def test_what_a_kill_cut_off_costs_one_look(recording, looks):
    data = recording.read_bytes()
    recording.write_bytes(data[: len(data) - 100])
    assert read_recording(recording) == looks[:-1]
    recording.write_bytes(data[:1000] + b"\n\xff\xfe{}\n" + data[len(encode_sighting(looks[0])) :])
    assert read_recording(recording) == looks[1:], "a damaged line is passed over"


@pytest.mark.parametrize("text_of_it", [b"", b"{}\n", b"not JSON at all\n"])
def test_what_is_no_recording_is_refused(tmp_path, capsys, text_of_it):
    path = tmp_path / "other"
    path.write_bytes(text_of_it)
    with pytest.raises(FabrictoolError) as caught:
        read_recording(path)
    assert caught.value.problems[0].code == "FT5206"
    assert main(["top", "--replay", str(path), "--snapshot"]) != 0
    assert "FT5206" in capsys.readouterr().err


def test_a_replay_shows_what_was_seen_then(looks):
    there = Playback(looks)
    there.jump(0.5)
    assert there.at == pytest.approx(LOOKS / 2, abs=1)
    shown = snapshot(there, (120, 36), "nodes")
    assert f"replay {there.at + 1}/{LOOKS}" in shown
    assert snapshot(there, (120, 36), "nodes") == shown, "the same, whenever it is looked at"


@pytest.mark.asyncio
async def test_moving_in_time(looks):
    app = Top(Playback(looks), 3600.0)
    async with app.run_test(size=(140, 36)) as pilot:
        await settled(pilot)
        assert "replay 1/120" in text(app, "#headline")
        await pilot.press("full_stop")
        await settled(pilot)
        assert "replay 2/120" in text(app, "#headline")
        await pilot.press("dollar_sign")
        await settled(pilot)
        assert "replay 120/120" in text(app, "#headline")
        assert "STALE" not in text(app, "#headline"), "its time is the recording's"
        await pilot.press("less_than_sign", "comma")
        await settled(pilot)
        assert "replay 89/120" in text(app, "#headline")


@pytest.mark.asyncio
async def test_every_look_is_written_at_once():
    file, feed = io.BytesIO(), MadeUpFabric(3, begun=NOW)
    app = Top(feed, 0.01, clock=lambda: NOW, record=file)
    async with app.run_test(size=(100, 30)) as pilot:
        for _ in range(200):
            await pilot.pause(0.01)
            if file.getvalue().count(b"\n") >= 3:
                break
    assert file.getvalue().count(b"\n") >= 3


def test_a_killed_recorder_leaves_what_it_saw(tmp_path):
    path = tmp_path / "seen.ndjson"
    program = (
        "import sys; from fabrictool.tui.app import Top; from fabrictool.tui.feeds import MadeUpFabric\n"
        "file = open(sys.argv[1], 'ab')\n"
        "Top(MadeUpFabric(5), 0.05, record=file).run(headless=True, size=(80, 24))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if path.exists() and path.read_bytes().count(b"\n") >= 3:
                break
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    looks = read_recording(path)
    assert len(looks) >= 3
    assert all(isinstance(look, Sighting) and look.gateway is not None for look in looks)


def test_a_snapshot_needs_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    assert main(["top", "--demo", "--snapshot", "--screen", "models"]) == 0
    out = capsys.readouterr().out
    assert "made-up ── view from the gateway" in out
    assert "llama-70b" in out
    assert max(map(len, out.splitlines())) <= 100
    assert main(["top", "http://127.0.0.1:9", "--snapshot"]) != 0
    assert "FT5201" in capsys.readouterr().err
    assert main(["top", "--demo", "--record", "x"]) != 0
    assert "no URL, --ssh, --key or --record" in capsys.readouterr().err
