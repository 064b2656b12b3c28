"""Requests for models whose replicas ended because nobody asked: they wait while one is started again.

Who starts it is the operator's `reconcile --watch`, which reads in each gateway's health what is wanted there. A
gateway that submitted jobs would need the right to do so, and be worth attacking for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import WakeRule
    from fabrictool.gateway.directory import Directory

_log = logging.getLogger("fabrictool.gateway")

HELD_MOST: Final = 1024
"""Requests for one model; their bodies are in memory."""
WANTED_S: Final = 900.0
"""After the last request a model is wanted for so long, though nobody waits: its clients were told to come again."""
SHORT_S: Final = 10.0
"""Requests that wait so long for room at the replicas that serve want one more."""
UNKNOWN_S: Final = 30.0
"""Until a client is to come again, where nothing is known."""
LONGEST_AGAIN_S: Final = 3600.0
EXPECTED_LOOK_S: Final = 2.0

_expected = msgspec.json.Decoder(dict[str, float])


class Sleeper(Protocol):
    """A request that waits for a replica to be started."""

    @property
    def model(self) -> str: ...

    def awake(self) -> None:
        """There is a replica."""

    def still_asleep(self, again_s: float) -> None:
        """It waits no longer; it may come again after so long."""


class Waking:
    """What one gateway wants started, and who waits for it."""

    def __init__(self, clock: Clock, directory: Directory) -> None:
        self._clock = clock
        self._directory = directory
        self.wanted_changed: Callable[[], None] = lambda: None
        """Told when a model becomes wanted: the sooner it is seen, the sooner it is started."""
        self.rules: Mapping[str, WakeRule] = MappingProxyType({})
        """By model; of others no replica ends for want of requests."""
        self.expected: Mapping[str, float] = MappingProxyType({})
        """Model → wall seconds at which it is to serve."""
        self._held: dict[str, dict[Sleeper, float]] = {}
        """By model, in the order in which they came, with until when they wait (monotonic)."""
        self._asked: dict[str, tuple[float, float]] = {}
        """Model that nobody serves → when it was asked for first, and last (monotonic)."""
        self._took: dict[str, float] = {}
        """Model → seconds from the first request for it until it was served, the last time."""
        self._short: dict[str, float] = {}
        """Model whose replicas are full → since when requests wait (monotonic)."""

    def waiting(self, model: str) -> int:
        """Requests for it that wait."""
        return len(self._held.get(model, ()))

    def hold(self, request: Sleeper, began: float, longest_s: float | None) -> float | None:
        """Let it wait; one that `began` at that second (monotonic) for `longest_s` at most, if that is given.

        Returns None, or after how many seconds to come again: then it does not wait.
        """
        model, now = request.model, self._clock.monotonic()
        first, _ = self._asked.get(model, (now, now))
        new = model not in self._asked
        self._asked[model] = (first, now)
        if new:
            self.wanted_changed()
        hold_s = self.rules[model].hold_s if model in self.rules else 0.0
        until = began + min(hold_s, math.inf if longest_s is None else longest_s)
        if until <= now or len(self._held.get(model, ())) >= HELD_MOST:
            return self._again_s(model)
        self._held.setdefault(model, {})[request] = until
        return None

    def leave(self, request: Sleeper) -> None:
        """It ended; perhaps it waited."""
        held = self._held.get(request.model) if self._held else None
        if held is not None:
            held.pop(request, None)

    def came(self, model: str) -> None:
        """A replica serves: send on who waits."""
        if model in self._asked:
            self._took[model] = self._clock.monotonic() - self._asked.pop(model)[0]
        for request in self._held.pop(model, ()):
            request.awake()

    def tick(self, full: Container[str]) -> None:
        """Once a second: who waited for too long is told so, and what nobody wants any more is forgotten.

        `full` are models for which requests wait although replicas serve.
        """
        now = self._clock.monotonic()
        for model, held in list(self._held.items()):
            for request in [request for request, until in held.items() if until <= now]:
                del held[request]
                request.still_asleep(self._again_s(model))
            if not held:
                self._held.pop(model, None)
        for model, (_, last) in list(self._asked.items()):
            if now - last > WANTED_S and model not in self._held:
                del self._asked[model]
        self._short = {model: self._short.get(model, now) for model in self.rules if model in full}

    def wanted(self) -> dict[str, int]:
        """Model → replicas that there should be: one where nobody serves, one more where requests wait for room."""
        now, wanted = self._clock.monotonic(), dict.fromkeys(self._asked, 1)
        for model, since in self._short.items():
            if now - since >= SHORT_S:
                wanted[model] = len(self._directory.of_model(model)) + 1
        return wanted

    async def hear_expected(self, path: Path) -> NoReturn:
        """Read what `reconcile` says of queues, while anything is wanted."""
        while True:
            if self._asked:
                self.expected = await asyncio.to_thread(_read_expected, path)
            await asyncio.sleep(EXPECTED_LOOK_S)

    def _again_s(self, model: str) -> float:
        """Seconds after which it is worth to come again: what the scheduler expects, else what it took last."""
        told, wall = self.expected.get(model, 0.0), self._clock.wall()
        if told > wall:
            return min(told - wall, LONGEST_AGAIN_S)
        now = self._clock.monotonic()
        since = self._asked.get(model, (now, now))[0]
        took = self._took.get(model)
        return UNKNOWN_S if took is None else max(1.0, min(took - (now - since), LONGEST_AGAIN_S))


def _read_expected(path: Path) -> dict[str, float]:
    try:
        return _expected.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("what is expected cannot be read: %s", error)
        return {}
