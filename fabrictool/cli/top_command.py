"""`top`: whom it asks, what it records, and how it ends."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.settings import Settings
from fabrictool.cli.live import LiveFeed, LiveStatus, key_of
from fabrictool.cli.output import data, say
from fabrictool.cli.ssh_hosts import beside_a_blueprint, host_pages
from fabrictool.status.sightings import read_recording

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.cli.source import Source
    from fabrictool.tui.feeds import Feed, Playback

SIZE = (120, 36)
"""Columns and lines of a snapshot where there is no terminal."""
SNAPSHOT_WAIT_S = 20.0
"""For clusters and journal: a screen that is printed once is not seen again when they have answered."""


@dataclass(frozen=True, slots=True)
class TopOptions:
    """As the command line has them."""

    url: str
    ssh: tuple[str, ...]
    key: str
    interval_s: float
    screen: str
    record: Path | None
    replay: Path | None
    made_up: bool
    snapshot: bool


def show_top(source: Source, options: TopOptions) -> int:
    """Until somebody quits, or, of a snapshot, once.

    Raises
    ------
    FabrictoolError
        FT5201, FT5202 nobody answers, where there is nothing else to show; FT43xx a recording cannot be read or
        written, FT5206 it is none; FT5209 a keymap means nothing; FT9011 there
        is no terminal.
    """
    from fabrictool.tui.app import run, snapshot
    from fabrictool.tui.feeds import Playback
    from fabrictool.tui.keymap import read_keymap

    if not options.snapshot and not on_a_terminal():
        message = "`top` needs a terminal for its input and its output"
        raise UsageError.of("FT9011", message, hint="--snapshot prints one screen as text")
    path = None if options.snapshot else Settings.from_environment().keymap_path
    keymap = read_keymap(path) if path is not None else {}
    with ExitStack() as open_things:
        feed = _feed(source, options, open_things)
        if options.snapshot:
            size = shutil.get_terminal_size(SIZE)
            if isinstance(feed, Playback):
                feed.jump(1.0)
            elif isinstance(feed, LiveFeed):
                feed.await_operator(SNAPSHOT_WAIT_S)
            data(snapshot(feed, (size.columns, size.lines), options.screen))
            return 0
        if options.record is None:
            run(feed, options.interval_s, screen=options.screen, keymap=keymap)
            return 0
        try:
            with options.record.open("ab") as file:
                run(feed, options.interval_s, record=file, screen=options.screen, keymap=keymap)
        except OSError as error:
            raise file_error(error, options.record) from error
        say(f"recorded to {options.record}; `fabrictool top --replay {options.record}` shows it")
    return 0


def on_a_terminal() -> bool:
    """Whether all that it reads and writes is one."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def _feed(source: Source, options: TopOptions, open_things: ExitStack) -> Feed | Playback:
    from fabrictool.tui.feeds import MadeUpFabric, Playback

    if options.replay is not None:
        return Playback(read_recording(options.replay))
    if options.made_up:
        return MadeUpFabric(begun=time.time())
    hosts = host_pages(options.ssh, source) if options.ssh else []
    beside = None if options.url else beside_a_blueprint(source) if hosts else source
    ask = open_things.enter_context(LiveStatus(beside, options.url, key_of(options.key), hosts))
    try:
        ask()  # whoever cannot be reached at all is told so before the screen changes
    except FabrictoolError:
        if beside is None or options.snapshot:
            raise
        # the clusters and the journal are worth a look by themselves: a gateway's job may wait in a queue
    return open_things.enter_context(LiveFeed(ask, beside))
