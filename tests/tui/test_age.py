"""How old what stands on a screen is, by whose clock, and what is still shown when somebody stops answering."""

import io
import threading

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.cli import live
from fabrictool.cli.live import LiveFeed, LiveStatus, in_time
from fabrictool.status.documents import Event
from fabrictool.status.sightings import Moved, OperatorView, Sighting
from fabrictool.tui.app import Top
from fabrictool.tui.feeds import Playback
from fabrictool.tui.history import History
from fabrictool.tui.view import ScreenView
from tests.tui.test_top import NOW, OPERATOR, cells, column, gateway, node, settled, text


class Looks:
    """A feed of looks; an exception among them is raised."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def look(self):
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    def log(self, address):
        raise OSError(f"no log of {address}")


SEEN = Sighting(at=NOW, live=gateway(), operator=OPERATOR, asked="h:1")
FAILED = Sighting(at=NOW + 3, trouble="connection refused", asked="h:1")


async def until(pilot, app, words):
    for _ in range(200):
        await pilot.pause(0.02)
        if words in text(app, "#headline"):
            return
    pytest.fail(text(app, "#headline"))


@pytest.mark.asyncio
async def test_jobs_and_plan_stay_when_the_gateway_dies_and_new_ones_are_shown():
    newer = OperatorView(at=NOW + 2, units=OPERATOR.units[2:])
    app = Top(Looks(SEEN, FAILED), 0.05, clock=lambda: NOW + 4, shown="jobs")
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "NO ANSWER for 4 s")
        assert len(cells(app)) == 3, "of the look before"
        app._feed.looks = [msgspec.structs.replace(FAILED, operator=newer)]
        for _ in range(200):
            await pilot.pause(0.02)
            if len(cells(app)) == 1:
                break
        assert column(app, "UNIT") == ["replica/qwen/1"], "the operator's side goes on alone"


@pytest.mark.asyncio
async def test_without_any_gateway_the_operators_side_is_shown():
    app = Top(Looks(msgspec.structs.replace(FAILED, operator=OPERATOR)), 0.05, clock=lambda: NOW + 4)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "NO ANSWER: connection refused")
        assert ["qwen/1", "pending"] in [row[:2] for row in cells(app)]
        await pilot.press("2")
        await settled(pilot)
        assert text(app, "#empty") == "no answer yet"


def test_an_age_is_by_the_clock_of_who_looks_and_never_negative():
    ahead = Sighting(at=NOW, live=gateway(at=NOW + 500))
    assert "1.0 s old ──" in ScreenView(ahead, NOW + 1).headline()
    assert "0.0 s old ──" in ScreenView(ahead, NOW - 9).headline()
    assert ScreenView(ahead, NOW + 1).there == NOW + 501, "its own times are by its own clock"
    later = FAILED.after(ahead)
    assert ScreenView(later, NOW + 7).age_s == 7.0
    assert FAILED.after(later).heard_at == NOW, "of the last answer, however many failed since"


@pytest.mark.asyncio
async def test_while_a_look_hangs_its_screen_ages_and_turns_grey():
    hangs, now = threading.Event(), [NOW]

    class Hanging(Looks):
        def look(self):
            if len(self.looks) == 1:
                hangs.wait(60)
            return super().look()

    app = Top(Hanging(SEEN, SEEN), 0.05, clock=lambda: now[0])
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "0.0 s old")
        assert not app.screen.has_class("stale")
        now[0] = NOW + 30
        await until(pilot, app, "30.0 s old  STALE")
        assert app.screen.has_class("stale")
    hangs.set()


@pytest.mark.asyncio
async def test_while_the_recordings_disk_hangs_the_screen_ages():
    hangs, now = threading.Event(), [NOW]

    class HangingDisk(io.BytesIO):
        def write(self, line):
            hangs.wait(60)
            return super().write(line)

    app = Top(Looks(SEEN), 0.05, clock=lambda: now[0], record=HangingDisk())
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "0.0 s old")
        now[0] = NOW + 30
        await until(pilot, app, "30.0 s old  STALE")
    hangs.set()


@pytest.mark.asyncio
async def test_ctrl_c_ends_it_whatever_a_mouse_was_dragged_over():
    app = Top(Looks(SEEN), 3600.0, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "0.0 s old")
        await pilot.mouse_down("#table", offset=(3, 1))
        await pilot.hover("#table", offset=(30, 1))
        await pilot.mouse_up("#table", offset=(30, 1))
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert app._exit


def test_an_answer_that_never_ends_is_no_answer(monkeypatch):
    monkeypatch.setattr(live, "WHOLE_ANSWER_S", 0.05)
    over = threading.Event()
    with pytest.raises(UnreachableError, match="not whole"):
        in_time(lambda: over.wait(60), "http://h:1")
    over.set()
    assert in_time(lambda: 7, "http://h:1") == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("screen", ["jobs", "plan"])
async def test_the_operators_side_says_how_old_it_is_and_why(screen):
    now = [NOW + 10]
    app = Top(Looks(SEEN), 0.05, clock=lambda: now[0], shown=screen)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "swiss-ai")
        assert "clusters and journal" not in text(app, "#headline")
        now[0] = NOW + 60
        await until(pilot, app, "clusters and journal: 60 s old  STALE")
        failed = msgspec.structs.replace(OPERATOR, trouble="clariden: no route to host")
        app._feed.looks = [msgspec.structs.replace(SEEN, operator=failed)]
        await until(pilot, app, "! clusters and journal: 60 s old: clariden: no route to host; asking again")


def test_what_fails_beside_the_screen_is_said_and_tried_again(monkeypatch):
    wrongs = [OPERATOR, KeyError("nobody thought of this"), UnreachableError.of("FT5201", "no way there"), OPERATOR]
    told, taken = [], threading.Semaphore(0)

    def looked(_source):
        wrong = wrongs.pop(0)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    class Source:
        def read(self):
            pass

    feed = LiveFeed(None, Source())

    def waited(_seconds):
        told.append(feed._operator)
        taken.release()
        if not wrongs:
            feed._over.set()

    monkeypatch.setattr(live, "operator_view", looked)
    monkeypatch.setattr(feed._over, "wait", waited)
    with feed:
        for _ in range(4):
            assert taken.acquire(timeout=60)
    assert [view.trouble for view in told] == ["", "KeyError: 'nobody thought of this'", "no way there", ""]
    assert all(view.units == OPERATOR.units for view in told), "what was seen before stays"


@pytest.mark.asyncio
async def test_no_exception_ends_it():
    app = Top(Looks(RuntimeError("nobody thought of this"), SEEN), 0.05, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "swiss-ai")
    app = Top(Looks(SEEN, RuntimeError("nobody thought of this")), 0.05, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "RuntimeError: nobody thought of this")
        assert cells(app, "#clusters")
        await pilot.press("4", "l")
        for _ in range(100):
            await pilot.pause(0.02)
            if "OSError" in app.as_text():
                break
        assert "! OSError: no log of replica/llama/1" in app.as_text()


FAR = 1e300
ODD = Sighting(
    at=NOW,
    live=gateway(
        events=[
            Event(at=FAR, kind="odd", subject="n", text="far"),
            Event(at=-FAR, kind="odd", subject="n", text="far"),
        ],
        nodes=[
            msgspec.structs.replace(
                node, ends_at=FAR, certificate_ends_at=FAR, disconnected_at=-FAR, connected=number > 0
            )
            for number, node in enumerate(gateway().nodes)
        ],
        models=[msgspec.structs.replace(gateway().models[0], requests=10**400, ttft_p95_s=FAR)],
    ),
    operator=msgspec.structs.replace(OPERATOR, units=[msgspec.structs.replace(OPERATOR.units[2], begins_at=FAR)]),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "feed",
    [
        Looks(ODD),
        Playback([SEEN, ODD]),
        Playback([msgspec.structs.replace(ODD, at=FAR), SEEN, msgspec.structs.replace(ODD, at=-FAR)]),
    ],
    ids=["live", "replay", "replay of such times"],
)
async def test_times_that_no_calendar_has_are_shown_as_something(feed):
    app = Top(feed, 3600.0, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        for key in ("1", "2", "3", "4", "5", "6", "7", "3", "d", "escape", "dollar_sign", "comma", "0", "full_stop"):
            await pilot.press(key)
            await settled(pilot)
        for keys in (("2", "full_stop", "d"), ("escape", "1", "y", "d", "escape")):
            for key in keys:
                await pilot.press(key)
                await settled(pilot)
                assert "cannot be drawn" not in app.as_text()
        await pilot.press("6", "dollar_sign")
        await settled(pilot)
        assert "?" in column(app, "AT")
        assert app.is_running
        assert "cannot be drawn" not in text(app, "#headline")


class FullDisk:
    def __init__(self):
        self.asked = 0

    def write(self, _):
        self.asked += 1
        raise OSError(28, "No space left on device")

    def flush(self):
        pass


@pytest.mark.asyncio
async def test_a_full_disk_ends_the_recording_and_not_the_screen():
    file = FullDisk()
    app = Top(Looks(SEEN), 0.05, clock=lambda: NOW, record=file)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, app, "! recording stopped: No space left on device")
        assert "swiss-ai" in text(app, "#headline")
        await settled(pilot)
    assert file.asked == 1
    assert app.unrecorded is not None, "whoever started it is told at the end"


def test_a_live_look_that_fails_keeps_the_operators_side():
    feed = LiveFeed(LiveStatus(None, "http://127.0.0.1:9", ""), None)
    feed._operator = OPERATOR
    look = feed.look()
    assert look.operator is OPERATOR
    assert "127.0.0.1:9" in look.trouble
    with pytest.raises(FabrictoolError):
        feed.log("replica/llama/0")


@pytest.mark.asyncio
async def test_who_was_asked_before_stands_on_every_screen_for_an_hour():
    moved = Moved(before="the gateway h:9", since=NOW - 60, why="no status from http://127.0.0.1:1: refused\x1b[2J")
    now = [NOW + 1]
    app = Top(Looks(msgspec.structs.replace(SEEN, moved=moved)), 0.05, clock=lambda: now[0])
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, app, "~ the gateway h:9 does not answer since ")
        assert "refused\ufffd[2J" in text(app, "#headline")
        assert "view from the gateway h:1" in app.as_text(), "80 columns have room for both"
        assert cells(app), "and for what needs somebody"
        now[0] = NOW + 3600
        for _ in range(200):
            await pilot.pause(0.02)
            if "h:9" not in text(app, "#headline"):
                break
        assert "h:9" not in text(app, "#headline")


def test_a_warning_of_the_operators_side_is_what_needs_somebody():
    """Not on its own screen alone: who looks first looks at the first."""
    words = ["the clock of a's login node is 300 s ahead of here's", "12 KiB free where the state is"]
    look = msgspec.structs.replace(SEEN, operator=msgspec.structs.replace(OPERATOR, warnings=words))
    mine = [trouble for trouble in ScreenView(look, NOW).troubles if trouble.what == "warning"]
    assert sorted(trouble.why for trouble in mine) == sorted(words)
    assert len({trouble.key for trouble in mine}) == 2


def test_a_full_disk_under_the_state_is_said(tmp_path, monkeypatch):
    assert live._full_disk(tmp_path) == []
    assert live._full_disk(tmp_path / "none") == []
    monkeypatch.setattr(live, "LEAST_FREE", 1 << 60)
    (said,) = live._full_disk(tmp_path)
    assert f"free where the state is ({tmp_path}): no apply can write there" in said


def test_of_a_replica_that_is_missing_the_older_word_of_its_cluster_is_said_as_such():
    llama = msgspec.structs.replace(gateway().models[0], missing=["llama/0", "llama/9"])
    look = msgspec.structs.replace(SEEN, live=gateway(models=[llama]))
    whys = {trouble.subject: trouble.why for trouble in ScreenView(look, NOW).troubles if trouble.what == "missing"}
    assert whys["llama/0"].startswith("no node serves it; its cluster said last: running")
    assert whys["llama/9"] == "planned, and no node serves or loads it"


def test_a_killed_agent_is_no_trouble_once_another_serves_its_replica_and_is_told_anew_when_that_goes():
    """The gateway knows of the dead one for minutes."""
    dead = node("n1", "clariden", "cscs", connected=False, disconnected_at=NOW, replica="llama/1")
    heir = node("n2", "clariden", "cscs", replica="llama/1")
    alone, both = gateway(nodes=[dead]), gateway(nodes=[dead, heir])
    history, told = History(), []
    for at, document in enumerate((gateway(nodes=[heir]), alone, both, both, alone)):
        look = Sighting(at=NOW + at, live=msgspec.structs.replace(document, at=NOW + at))
        history.add(look)
        lost = [its for its in ScreenView(look, look.at, history).troubles if its.what == "lost"]
        told.append([(its.subject, its.since - NOW) for its in lost])
    assert told == [[], [("llama/1", 1.0)], [], [], [("llama/1", 4.0)]]
