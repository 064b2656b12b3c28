"""``fabrictool top``: what a fabric looks like, again and again; no key changes anything of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import select
import sys
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rich.console import Console
from textual.app import App, SystemCommand
from textual.binding import Binding

from fabrictool.base.aside import begun
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.text import visible
from fabrictool.status.sightings import Sighting, encode_sighting
from fabrictool.tui.details import Subject, lines_about, subject_of
from fabrictool.tui.feeds import Playback
from fabrictool.tui.history import KEPT_S, History
from fabrictool.tui.keys import PREFIX, key_lines, key_words, keys_of
from fabrictool.tui.rows import broken, stamp
from fabrictool.tui.screens.table import TableScreen
from fabrictool.tui.screens.text import LogScreen, TextScreen
from fabrictool.tui.tables import TABLES
from fabrictool.tui.view import ScreenView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import BinaryIO

    from textual.binding import BindingType
    from textual.screen import Screen

    from fabrictool.tui.feeds import Feed

AGE_S = 1.2
"""So long nothing new may come before the age of what is shown is told again."""
NO_ROW = "no row is chosen"
LOG_S = 2.0
"""Between two looks at a log."""
OF_THE_OPERATOR = ("jobs", "plan")
"""Screens that show what the clusters and the journal say."""
NAMES = [spec.name for spec in TABLES]
SCREENS = [*NAMES, "logs"]
Awaited = TypeVar("Awaited")
NO_KEYMAP: Mapping[str, str] = MappingProxyType({})


class Top(App[None]):
    """The whole terminal UI."""

    ALLOW_SELECT = False
    """Else Ctrl-C copies what a drag has chosen, instead of ending; terminals choose text by themselves, with shift."""

    CSS = """
    #headline { height: auto; max-height: 6; padding: 0 1; background: $panel; }
    #tabs { height: 1; padding: 0 1; color: $text-muted; }
    #empty { padding: 1 2; color: $text-muted; }
    #table, #clusters { height: auto; max-height: 100%; }
    #clusters { margin-top: 1; max-height: 40%; }
    #text { padding: 0 2; }
    .compact #tabs { display: none; }
    .compact #headline { max-height: 1; }
    .stale LiveTable { opacity: 60%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{name}')", name, id=f"top.{name}", show=False)
            for number, name in enumerate(SCREENS, 1)
        ),
        Binding("d", "describe", "describe", id="top.describe"),
        Binding("l", "logs", "logs", id="top.logs-of"),
        Binding("y", "yank", "copy command", id="top.yank"),
        Binding("z", "compact", "compact", id="top.compact", show=False),
        Binding("question_mark", "keys", "keys", id="top.keys"),
        Binding("comma", "step(-1)", show=False, id="top.back-one"),
        Binding("full_stop", "step(1)", show=False, id="top.on-one"),
        Binding("less_than_sign", "step(-30)", show=False, id="top.back-many"),
        Binding("greater_than_sign", "step(30)", show=False, id="top.on-many"),
        Binding("0", "jump(0.0)", show=False, id="top.begin"),
        Binding("dollar_sign", "jump(1.0)", show=False, id="top.end"),
        Binding("q", "quit", "quit", id="top.quit"),
        Binding("ctrl+c", "quit", show=False, id="top.interrupt"),
    ]

    # Wide: where looks come from and go to, and how often.
    def __init__(
        self,
        feed: Feed | Playback,
        interval_s: float,
        *,
        clock: Callable[[], float] = time.time,
        record: BinaryIO | None = None,
        shown: str = "overview",
        keymap: Mapping[str, str] = NO_KEYMAP,
    ) -> None:
        super().__init__()
        self._keys = keys_of(Top, TableScreen, LogScreen) | dict(keymap)
        """Action → its keys."""
        self.set_keymap({f"{PREFIX}{name}": keys for name, keys in keymap.items()})
        self._feed, self._interval, self._clock, self._record = feed, interval_s, clock, record
        self._history = History()
        self._moment = Sighting(at=clock(), asked="…")
        self._shown = shown
        self._subject = Subject("")
        self._described: tuple[TextScreen, Subject] | None = None
        self.looked = asyncio.Event()
        """There was an answer, or a word why there is none."""
        self.unrecorded: OSError | None = None
        """Why the recording ended before its time."""

    @property
    def view(self) -> ScreenView:
        """What is drawn now; of a recording at the time of its sighting."""
        now = self._moment.at if isinstance(self._feed, Playback) else self._clock()
        return ScreenView(self._moment, now, self._history)

    def on_mount(self) -> None:
        for spec in TABLES:
            self.install_screen(TableScreen(spec, self.go, self.redraw), spec.name)
        self.push_screen(self._shown)
        if isinstance(self._feed, Playback):
            self._rewind(self._feed)
        else:
            self.run_worker(self._keep_asking(self._feed), exclusive=True)

    # -- looks -----------------------------------------------------------------------------------------------------

    async def _keep_asking(self, feed: Feed) -> None:
        while True:
            try:
                look = await self._ageing(asyncio.wrap_future(begun(feed.look)))
            except Exception as error:  # noqa: BLE001 - the next look may come to more, and the screen stays
                look = Sighting(at=self._clock(), trouble=f"{type(error).__name__}: {error}", asked=self._moment.asked)
            self._moment = look = look.after(self._moment)
            with contextlib.suppress(ArithmeticError, ValueError):  # of figures that cannot be reckoned with
                self._history.add(look)
            self.looked.set()
            self.redraw()
            if self._record is not None and self.unrecorded is None:
                await self._keep(encode_sighting(look))
            if not self.is_headless and hung_up():
                self.exit(return_code=1)
            await self._ageing(asyncio.ensure_future(asyncio.sleep(self._interval)))

    async def _ageing(self, awaited: asyncio.Future[Awaited]) -> Awaited:
        """What it comes to; while nothing comes, what stands there grows old."""
        while not (await asyncio.wait((awaited,), timeout=AGE_S))[0]:
            self.redraw()
        return await awaited

    async def _keep(self, line: bytes) -> None:
        try:
            await self._ageing(asyncio.wrap_future(begun(lambda: self._write(line))))
        except OSError as error:  # the screen is worth more than its recording
            self.unrecorded = error

    def _write(self, line: bytes) -> None:
        if self._record is not None:
            self._record.write(line)
            self._record.flush()

    def _rewind(self, replay: Playback) -> None:
        """Stand at its look, with what went before it."""
        self._history = History()
        first = replay.moment.at - KEPT_S
        for look in replay.looks[: replay.at + 1]:
            if look.at >= first:
                with contextlib.suppress(ArithmeticError, ValueError):
                    self._history.add(look)
        self._moment = replay.moment
        self.looked.set()
        self.redraw()

    def redraw(self) -> None:
        """Show the newest look on the current screen."""
        if not self.screen_stack:
            return
        try:
            self._draw()
        except (
            ArithmeticError,
            ValueError,
        ) as error:  # of figures that nobody thought of; the next look may have others
            if isinstance(self.screen, TableScreen) and self.screen.query("#headline"):
                self.screen.say(f"! this view cannot be drawn: {visible(str(error))}")

    def _draw(self) -> None:
        view, screen = self.view, self.screen
        if isinstance(screen, TableScreen) and screen.ready and screen.query("#headline"):  # else it is on its way out
            lines = [
                view.trouble_line() or view.moved_line(),
                self._recording_line(),
                broken(visible(view.headline()), self.size.width - 2),
            ]
            lines.append(self._place(view))
            if screen.spec.name in OF_THE_OPERATOR:
                lines.insert(0, view.operator_line())
            screen.set_class(view.stale, "stale")
            screen.show(view, "\n".join(filter(None, lines)), self._tabs())
        elif self._described is not None and screen is self._described[0]:
            self._described[0].update(lines_about(view, self._described[1]))

    def _recording_line(self) -> str:
        return "" if self.unrecorded is None else f"! recording stopped: {self.unrecorded.strerror or self.unrecorded}"

    def _place(self, view: ScreenView) -> str:
        """Where in a recording it is."""
        if not isinstance(self._feed, Playback):
            return ""
        then = stamp(view.now, "%Y-%m-%d %H:%M:%SZ")
        move = " ".join(key_words(self._keys[name]) for name in ("back-one", "on-one", "back-many", "on-many"))
        return f"replay {self._feed.at + 1}/{len(self._feed.looks)}, {then}   {move} move"

    def _tabs(self) -> str:
        names = [f"{number} {name}" for number, name in enumerate(SCREENS, 1)]
        at = NAMES.index(self._shown)
        names[at] = f"[reverse] {names[at]} [/reverse]"
        return "  ".join(names)

    # -- keys -------------------------------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        while len(self.screen_stack) > 2:  # Textual's own, and the table under what lies on it
            self.pop_screen()
        if name == "logs":
            self.action_logs()
            return
        self._shown = name
        self.switch_screen(name)
        self.redraw()

    def action_return(self) -> None:
        self.pop_screen()
        self.redraw()

    def action_keys(self) -> None:
        """Those that are in force."""
        self.push_screen(TextScreen("keys", key_lines(self._keys, replay=isinstance(self._feed, Playback))))

    def action_describe(self) -> None:
        if not isinstance(self.screen, TableScreen):  # it is on the page already
            return
        subject = self._under_cursor()
        if subject.name:
            page = TextScreen(visible(subject.name), lines_about(self.view, subject))
            self._described = page, subject
            self.push_screen(page)
        else:
            self.notify(NO_ROW, severity="warning")

    def action_logs(self) -> None:
        """Of the row's replica or unit."""
        if isinstance(self.screen, LogScreen):
            return
        subject = self._under_cursor()
        address = subject.unit.address if subject.unit is not None else ""
        address = address or (f"replica/{subject.replica}" if subject.replica else "")
        if not address:
            what = f"{subject.name} has no log" if subject.name else "no row is chosen"
            self.notify(visible(f"{what}: replicas and units do, on screens 3 and 4"), severity="warning", markup=False)
            return
        page = LogScreen(address)
        self.push_screen(page)
        self.run_worker(self._keep_reading(page), group="log", exclusive=True)

    async def _keep_reading(self, page: LogScreen) -> None:
        while page in self.screen_stack:
            page.give(await asyncio.wrap_future(begun(lambda: self._tail_of(page.address))))
            await asyncio.sleep(LOG_S)

    def _tail_of(self, address: str) -> list[str]:
        if isinstance(self._feed, Playback):
            return ["a recording has no logs"]
        try:
            return self._feed.log(address)
        except FabrictoolError as error:
            return [f"! {problem.message}" for problem in error.problems]
        except Exception as error:  # noqa: BLE001 - a log that cannot be had ends nothing
            return [f"! {type(error).__name__}: {error}"]

    def action_yank(self) -> None:
        screen = self.screen
        if not isinstance(screen, TableScreen):
            subjects = [self._subject]
        else:
            subjects = [subject_of(self.view, screen.about, key) for key in screen.in_focus.keys_meant]
        commands = [subject.commands[0] for subject in subjects if subject.commands]
        if commands:
            self.copy_to_clipboard("\n".join(commands))
            self.notify(visible("\n".join(commands)), title="sent to the terminal's clipboard", markup=False)
        else:
            self.notify("no command goes with that row" if subjects else NO_ROW, severity="warning")

    def action_compact(self) -> None:
        self.toggle_class("compact")
        for spec in TABLES:
            self.get_screen(spec.name).toggle_class("compact")

    def action_step(self, looks: int) -> None:
        if isinstance(self._feed, Playback):
            self._feed.step(looks)
            self._rewind(self._feed)

    def action_jump(self, share: float) -> None:
        if isinstance(self._feed, Playback):
            self._feed.jump(share)
            self._rewind(self._feed)

    def go(self, where: str) -> None:
        """To a screen by the begin of its name, or to a model."""
        names = [name for name in SCREENS if where and name.startswith(where)]
        if where in ("q", "quit"):
            self.exit()
        elif names:
            self.action_show(names[0])
        else:
            self.action_show("models")
            self.call_after_refresh(self._filter, where)

    def _filter(self, words: str) -> None:
        if isinstance(self.screen, TableScreen):
            self.screen.filter_by(words)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: Textual's own, and every screen."""
        yield from super().get_system_commands(screen)
        for name in SCREENS:
            yield SystemCommand(name, f"Show {name}", lambda name=name: self.action_show(name))

    def _under_cursor(self) -> Subject:
        screen = self.screen
        if isinstance(screen, TableScreen):
            key = screen.in_focus.key_under_cursor
            self._subject = Subject("") if key is None else subject_of(self.view, screen.about, key)
        return self._subject

    # -- pictures ---------------------------------------------------------------------------------------------------

    def as_text(self) -> str:
        """The screen as it stands, in letters."""
        width, height = self.size
        console = Console(width=width, height=height, file=io.StringIO(), record=True, color_system=None)
        console.print(self.screen._compositor.render_update(full=True))  # noqa: SLF001 - export_screenshot's way
        return "\n".join(line.rstrip() for line in console.export_text().splitlines()).rstrip()


def hung_up() -> bool:
    """Whether the terminal is gone, as when a window was closed: nobody hears of that who has it from elsewhere."""
    poll = select.poll()
    try:
        poll.register(sys.__stdin__ or 0, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))
    except (OSError, ValueError):  # there is none
        return False


# Wide: what is shown, and how the operator wants it.
def run(
    feed: Feed | Playback,
    interval_s: float,
    *,
    record: BinaryIO | None = None,
    screen: str = "overview",
    keymap: Mapping[str, str] = NO_KEYMAP,
) -> None:
    """Show what `feed` says until somebody quits. Raises OSError, then, where the recording ended before that."""
    app = Top(feed, interval_s, record=record, shown=screen, keymap=keymap)
    app.run()
    if app.unrecorded is not None:
        raise app.unrecorded


def snapshot(feed: Feed | Playback, size: tuple[int, int], screen: str = "overview") -> str:
    """One screen in letters, after the first look."""

    async def picture() -> str:
        app = Top(feed, 3600.0, shown=screen)
        async with app.run_test(size=size) as pilot:
            await app.looked.wait()
            await pilot.pause()
            await pilot.pause()
            return app.as_text()

    return asyncio.run(picture())
