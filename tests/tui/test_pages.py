"""Pages that lie on a table: a log that goes on, and a row in full; and how `top` starts."""

import pytest
from textual.widgets import RichLog

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.cli import live, top_command
from fabrictool.cli.main import main
from fabrictool.cli.top_command import TopOptions, show_top
from fabrictool.status.sightings import encode_sighting
from fabrictool.tui.feeds import MadeUpFabric
from fabrictool.tui.screens.text import LogScreen, remainder
from tests.tui.test_top import NOW, OPERATOR, gateway, settled, top


def test_what_a_tail_has_that_the_one_before_had_not():
    assert remainder([], ["a"]) == ["a"]
    assert remainder(["a", "b", "c"], ["b", "c", "d"]) == ["d"]
    assert remainder(["a", "a"], ["a", "a", "a"]) == ["a"]
    assert remainder(["a", "b"], ["a", "b"]) == []
    assert remainder(["a", "b"], ["x", "y"]) == ["x", "y"], "all between was missed"


def shown(page):
    return [strip.text.rstrip() for strip in page.query_one("#log", RichLog).lines]


@pytest.mark.asyncio
async def test_a_long_log_goes_on_below_and_who_reads_further_up_stays_there():
    lines = [f"line {number}" for number in range(2000)]
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(100, 24)) as pilot:
        page = LogScreen("replica/llama/1")
        app.push_screen(page)
        await settled(pilot)
        assert shown(page) == ["nothing was written yet"]
        page.give(lines[:500])
        await settled(pilot)
        log = page.query_one("#log", RichLog)
        assert shown(page) == lines[:500]
        assert log.is_vertical_scroll_end, "followed"
        cleared = []
        log.clear = lambda: cleared.append(True)
        page.give(lines[10:510])
        await settled(pilot)
        assert shown(page) == lines[:510]
        assert log.is_vertical_scroll_end
        log.scroll_to(y=100, animate=False)
        await settled(pilot)
        page.give(lines[200:700])
        await settled(pilot)
        assert log.scroll_y == 100, "somebody reads there"
        await pilot.press("f", "f")
        await settled(pilot)
        assert log.is_vertical_scroll_end
        await pilot.press("f")
        page.give(lines[300:800])
        await settled(pilot)
        assert not log.is_vertical_scroll_end, "not followed"
        assert shown(page) == lines[:800]
        assert cleared == [], "nothing was drawn twice"


@pytest.mark.asyncio
async def test_a_page_lies_there_once():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("4")
        await settled(pilot)
        await pilot.press("d")
        await settled(pilot)
        depth = len(app.screen_stack)
        await pilot.press("d", "d")
        await settled(pilot)
        assert len(app.screen_stack) == depth
        app._feed.logs["replica/llama/1"] = ["a line"]
        await pilot.press("escape", "l")
        await settled(pilot)
        depth = len(app.screen_stack)
        await pilot.press("l", "d")
        await settled(pilot)
        assert len(app.screen_stack) == depth


def test_a_snapshot_of_a_recording_is_of_its_end(tmp_path, capsys):
    feed, path = MadeUpFabric(3, begun=NOW), tmp_path / "seen.ndjson"
    path.write_bytes(b"".join(encode_sighting(feed.look()) for _ in range(5)))
    assert main(["top", "--replay", str(path), "--snapshot"]) == 0
    assert "replay 5/5" in capsys.readouterr().out


def test_without_a_terminal_it_draws_nothing(capsys):
    assert main(["top", "--demo"]) == 64
    out, err = capsys.readouterr()
    assert "FT9011" in err
    assert "--snapshot" in err
    assert "\x1b" not in out + err


class Blueprint:
    """One whose gateway waits in a queue."""

    def read(self):
        pass


@pytest.fixture
def no_gateway(monkeypatch):
    """What is shown, where there is no gateway; all streams are a terminal's."""

    def way(_source):
        raise UnreachableError.of("FT5202", "no gateway of this fabric runs here")

    begun = []
    monkeypatch.setattr(live, "gateway_url", way)
    monkeypatch.setattr(live, "operator_view", lambda _source: OPERATOR)
    monkeypatch.setattr("fabrictool.tui.app.run", lambda feed, *_, **__: begun.append(feed.look()))
    monkeypatch.setattr(top_command, "on_a_terminal", lambda: True)
    return begun


def options(**changes):
    usual = {"url": "", "ssh": (), "key": "", "interval_s": 1.0, "screen": "overview", "record": None, "replay": None}
    return TopOptions(**(usual | {"made_up": False, "snapshot": False} | changes))


def test_it_starts_beside_a_blueprint_whose_gateway_does_not_run_yet(no_gateway):
    assert show_top(Blueprint(), options()) == 0
    (look,) = no_gateway
    assert look.trouble == "no gateway of this fabric runs here"
    with pytest.raises(FabrictoolError, match="FT5202"):
        show_top(Blueprint(), options(snapshot=True))
    with pytest.raises(FabrictoolError, match="FT5201"):
        show_top(Blueprint(), options(url="http://127.0.0.1:9"))
    assert main(["top", "http://127.0.0.1:9", "--snapshot"]) == 69, "as its help says"
