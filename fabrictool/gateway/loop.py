"""The event loop of a gateway's process: uvloop where it is installed, asyncio's own otherwise."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop  # noqa: PLC0415 - an optional extra

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
