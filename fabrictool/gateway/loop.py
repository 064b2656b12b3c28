"""The event loop of a gateway's process: uvloop where it is installed, asyncio's own otherwise."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import signal
from typing import TYPE_CHECKING, Any, TypeVar

from fabrictool.base.openfiles import raise_open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
DRAIN_S = 20.0
"""For requests that are open when it ends."""
YOUNG_OBJECTS = 20_000
"""Before the collector looks at them (Python: 700). What thousands of open requests hold is no garbage, and to look
for it took a twelfth of a busy gateway's time."""


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    raise_open_files()
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop  # noqa: PLC0415 - an optional extra

        factory = uvloop.new_event_loop
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def stop_event() -> Callable[[], asyncio.Future[str]]:
    """What to wait for: TERM or Ctrl-C, of which the future says the name."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(name: str) -> None:
        if not stopped.done():
            stopped.set_result(f"signal {name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    return lambda: stopped
