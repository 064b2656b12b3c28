"""Where placements are played: in this process, or in a copy of it that loads what that needs while this one searches.

The event loop's compiler takes over half a second to load, in which a search of the same process stands still. Of a
small fabric that is much of what a search takes; of a large one a placement is too much to be handed over. This module
loads nothing, so that a copy can begin before its process has loaded the planner.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from fabrictool.planner.process_copy import ProcessCopy, may_copy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection
    from typing import Self

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement
    from fabrictool.planner.played import Played, PlayedLoss
    from fabrictool.planner.problem import OptionKey, PlacementProblem
    from fabrictool.planner.weights import GroupRates

MOST_OPTIONS = 5_000
"""Of a problem that is handed over: some 10 ms."""
PATIENCE_S = 180.0
"""For what takes some tenths of a second, or a minute where the event loop was never compiled before: a copy that was
stopped, or that waits for nothing, is done without."""
PLAYERS = "fabrictool.planner.loss_replay"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be played, all of it: the same is played from it anywhere."""

    blueprint: Blueprint
    inventory: Inventory
    seed: int
    problem: PlacementProblem
    placement: Placement
    rates: Mapping[OptionKey, float]
    """Requests/s of one replica each."""
    models: Sequence[str]
    surviving: Sequence[str]
    """Models that are played after their worst loss, too, where they are to survive any."""
    flows: GroupRates = field(default_factory=dict)
    """As `rates`, by model and consumer group, of models whose demand is divided."""


@dataclass(frozen=True, slots=True)
class Result:
    """What models did, by name."""

    played: dict[str, Played]
    after: dict[str, PlayedLoss]


def play(asked: Asked) -> Result:
    """What comes of it, found out in this process."""
    from fabrictool.planner.loss_replay import played_losses  # noqa: PLC0415 - see above
    from fabrictool.planner.replay import replay  # noqa: PLC0415 - see above

    blueprint, inventory, seed = asked.blueprint, asked.inventory, asked.seed
    placement, rates, flows = asked.placement, asked.rates, asked.flows
    played = replay(blueprint, inventory, placement, rates, seed, asked.models, flows)
    after = played_losses(blueprint, inventory, asked.problem, placement, rates, seed, asked.surviving, flows)
    return Result(played, after)


class Rehearsal:
    """Plays placements; who plays them changes nothing."""

    def __init__(self) -> None:
        self._ours: Connection | None = None
        self._copy: ProcessCopy | None = None
        self._sending: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()  # with it ends what is still being sent
        if self._sending is not None:
            self._sending.join()
        if self._ours is not None:
            self._ours.close()
        self._ours = self._copy = self._sending = None

    def begin(self) -> None:
        """Have a copy load what will be needed, where one is safe; the sooner, the less this process has loaded."""
        if self._ours is None and may_copy():
            with suppress(OSError):  # no descriptor is left for a pipe
                self._begin()

    def prepare(self, blueprint: Blueprint, inventory: Inventory, problem: PlacementProblem) -> None:
        """Have a copy be ready for what will be played of `problem`, or this process; of a large one see `load`."""
        if len(problem.options) > MOST_OPTIONS:
            self.close()
            return
        self.begin()
        if self._ours is None:
            self.load()
        elif (least := _least_asked(blueprint, inventory, problem)) is not None:
            # What numba has compiled is read from the disk when it is first called.
            self._send((least, False))

    def load(self) -> None:
        """Have this process load what plays, where no copy does: that takes from whatever else it does meanwhile."""
        if self._ours is None:
            Thread(target=import_module, args=[PLAYERS]).start()

    def play(self, asked: Asked) -> Result:
        result = self._elsewhere(asked)
        return play(asked) if result is None else result

    def _elsewhere(self, asked: Asked) -> Result | None:
        """None where there is no copy, it is gone, or it takes nothing and says nothing for long: then it is closed."""
        result: Result | None = None
        try:
            if self._ours is not None and self._is_sent():
                self._send((asked, True))
                if self._is_sent() and self._ours.poll(PATIENCE_S):
                    result = self._ours.recv()
        except (EOFError, OSError):
            pass
        finally:
            if result is None:  # also at Ctrl-C: an answer that came later would be taken for another's
                self.close()
        return result

    def _send(self, message: tuple[Asked, bool]) -> None:
        """In a thread: a pipe that is full waits for its reader."""
        if self._ours is not None:
            self._sending = Thread(target=_sent, args=[self._ours, message], daemon=True)
            self._sending.start()

    def _is_sent(self) -> bool:
        if self._sending is not None:
            self._sending.join(PATIENCE_S)
        return self._sending is None or not self._sending.is_alive()

    def _begin(self) -> None:
        from multiprocessing.connection import Pipe  # noqa: PLC0415 - --help must not pay for it

        ours, theirs = Pipe()

        def answering() -> None:
            ours.close()
            import_module(PLAYERS)
            while True:
                asked, wanted = theirs.recv()
                result = play(asked)
                if wanted:
                    theirs.send(result)

        try:
            self._copy, self._ours = ProcessCopy(answering), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()


def _sent(pipe: Connection, message: tuple[Asked, bool]) -> None:
    with suppress(OSError):  # the copy is gone, as will be seen
        pipe.send(message)


def _least_asked(blueprint: Blueprint, inventory: Inventory, problem: PlacementProblem) -> Asked | None:
    """One replica of the first model that has one, if any has."""
    from fabrictool.planner.assign import assign  # noqa: PLC0415 - see above
    from fabrictool.planner.problem import Solution  # noqa: PLC0415 - see above

    i = next((i for i, its in enumerate(problem.options) if its.phase == "unified" and its.levels), None)
    if i is None:
        return None
    option = problem.options[i]
    rate = option.levels[0].rate
    placement = assign(problem, Solution({i: 1}, {i: rate}, (), "", optimal=False), {})
    return Asked(blueprint, inventory, 0, problem, placement, {option.key: rate}, [option.model], [])
