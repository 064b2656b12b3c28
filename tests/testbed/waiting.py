"""Waiting for a state, with a deadline: tests of the bed never just sleep."""

import time
from collections.abc import Callable

from tests.testbed.state import BedError


def wait_until(what: str, holds: Callable[[], object], *, within_s: float, every_s: float = 0.2) -> object:
    """The first true answer of `holds`; BedError with the last answer after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        answer = holds()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise BedError(f"{what}: not within {within_s} s (last answer: {answer!r})")
        time.sleep(every_s)
