"""Calls beside the caller, in threads that nobody waits for at the end of the program."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def begun(call: Callable[[], _T]) -> Future[_T]:
    """What `call` comes to; one that hangs keeps no program from its end."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # else who stops waiting cancels it, and its result has nowhere to go

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="aside", daemon=True).start()
    return future
