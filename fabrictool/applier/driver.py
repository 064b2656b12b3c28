"""Does what a wave asks for: clusters, threads and the clock on one side, `wave` on the other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from fabrictool.applier.events import (
    Ended,
    Look,
    Looked,
    Notify,
    ReadTail,
    Start,
    Started,
    TailRead,
    Tell,
    TellFailed,
    Ticked,
    Update,
    Updated,
)
from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.applier.course import Course
    from fabrictool.applier.events import Effect, Event
    from fabrictool.applier.wave import Wave
    from fabrictool.base.clock import Clock
    from fabrictool.clusters.protocol import Cluster, NewUnit
    from fabrictool.domain.plan import Action

E = TypeVar("E", Start, Look)
TICK_S = 0.1
WORKERS = 8
TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class Driver:
    """Runs waves on real clusters."""

    clusters: Mapping[str, Cluster]
    clock: Clock
    new_unit: Callable[[Action], NewUnit]
    """Identity included; asked for just before the start."""
    remember: Callable[[Sequence[Action]], None]
    """Called before anything is started: whatever runs is in the state."""
    guard: Callable[[], None]
    """Raises when another writer has the lease: nothing that runs is touched then."""
    report: Callable[[Notify], None]
    ended: Callable[[Course], None]
    """Called once for each course that is over."""
    presses: Callable[[], int]
    """How often Ctrl-C was pressed."""

    def run(self, wave: Wave) -> None:
        """Returns when all is over, or the user stopped waiting."""
        effects: list[Effect] = []
        while not wave.over:
            if not effects:
                effects = self._heard(wave.step(self.clock.monotonic(), Ticked(self.presses())))
                if not effects:
                    time.sleep(TICK_S)
            further: list[Effect] = []
            for event in self._done(effects):
                further += self._heard(wave.step(self.clock.monotonic(), event))
            effects = further

    def _heard(self, effects: Sequence[Effect]) -> list[Effect]:
        """Says at once what is to be said, whatever other clusters do, and returns the rest."""
        for effect in effects:
            if isinstance(effect, Notify):
                self.report(effect)
        return [effect for effect in effects if not isinstance(effect, Notify)]

    def _done(self, effects: Sequence[Effect]) -> Iterator[Event]:
        """What came of them; neighbours of one kind go on side by side."""
        for kind, group in groupby(effects, type):
            if kind is Start:
                starts = [effect for effect in group if isinstance(effect, Start)]
                self.remember([action for start in starts for action in start.actions])
                yield from _side_by_side(self._start, starts)
            elif kind is Look:
                yield from _side_by_side(self._look, [effect for effect in group if isinstance(effect, Look)])
            else:
                for effect in group:
                    yield from self._do(effect)

    def _do(self, effect: Effect) -> Iterator[Event]:
        match effect:
            case Tell():
                yield from self._tell(effect)
            case Update():
                yield self._update(effect)
            case ReadTail(cluster, operation):
                yield TailRead(operation, self._tail(cluster, operation))
            case Ended(course):
                self.ended(course)

    def _start(self, start: Start) -> Event:
        operations = tuple(action.operation for action in start.actions)
        try:
            failed = self.clusters[start.cluster].start([self.new_unit(action) for action in start.actions])
        except FabrictoolError as error:
            failed = dict.fromkeys(operations, error)
        return Started(start.cluster, operations, failed)

    def _update(self, update: Update) -> Event:
        operations = tuple(action.operation for action in update.actions)
        try:
            self.guard()
            failed = self.clusters[update.cluster].update([self.new_unit(action) for action in update.actions])
        except FabrictoolError as error:
            failed = dict.fromkeys(operations, error)
        return Updated(operations, failed)

    def _look(self, look: Look) -> Event:
        return Looked(self.clusters[look.cluster].observe(brief=True))

    def _tell(self, tell: Tell) -> Iterator[Event]:
        """Tells nothing when another writer has the lease; like any failure, that comes back as an event."""
        cluster = self.clusters[tell.cluster]
        try:
            self.guard()
            match tell.verb:
                case "stop":
                    cluster.stop(tell.operations)
                case "kill":
                    cluster.kill(tell.operations)
                case "forget":
                    cluster.forget(tell.operations)
        except FabrictoolError as error:
            yield TellFailed(tell.operations, error)

    def _tail(self, cluster: str, operation: str) -> str:
        try:
            lines = self.clusters[cluster].log_tail(operation, TAIL_LINES)
            return "".join(f"\n        {line.strip()}" for line in lines)
        except FabrictoolError as error:
            return str(error)


def _side_by_side(do: Callable[[E], Event], effects: Sequence[E]) -> Iterator[Event]:
    """What comes of each, as it comes; what one of them raises waits for the others."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(do, effect) for effect in effects]
        for future in as_completed(futures):
            if future.exception() is None:
                yield future.result()
    for future in futures:
        future.result()
