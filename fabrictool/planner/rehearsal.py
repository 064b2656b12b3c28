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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours is not None:
            self._ours.close()
            self._ours = None
        if self._copy is not None:
            self._copy.close()

    def begin(self) -> None:
        """Have a copy load what will be needed, where one is safe; the sooner, the less this process has loaded."""
        if may_copy():
            with suppress(OSError):  # no descriptor is left for a pipe
                self._begin()

    def prepare(self, blueprint: Blueprint, inventory: Inventory, problem: PlacementProblem) -> None:
        """Have what will be played of `problem` be ready for it: in the copy that began, or in this process."""
        if self._ours is None or len(problem.options) > MOST_OPTIONS:
            self.__exit__()
            Thread(target=import_module, args=[PLAYERS]).start()
        elif (least := _least_asked(blueprint, inventory, problem)) is not None:
            with suppress(OSError):  # the copy is gone, as will be seen
                # What numba has compiled is read from the disk when it is first called.
                self._ours.send((least, False))

    def play(self, asked: Asked) -> Result:
        result = self._elsewhere(asked) if self._ours is not None else None
        return play(asked) if result is None else result

    def _elsewhere(self, asked: Asked) -> Result | None:
        """None where the copy is gone, or says nothing for long: then there is none any more."""
        with suppress(EOFError, OSError):
            if self._ours is not None:
                self._ours.send((asked, True))
                if self._ours.poll(PATIENCE_S):
                    result: Result = self._ours.recv()
                    return result
        self.__exit__()
        return None

    def _begin(self) -> None:
        from multiprocessing.connection import Pipe  # noqa: PLC0415 - --help must not pay for it

        ours, theirs = Pipe()
        self._ours = ours

        def answering() -> None:
            ours.close()
            import_module(PLAYERS)
            while True:
                asked, wanted = theirs.recv()
                result = play(asked)
                if wanted:
                    theirs.send(result)

        try:
            self._copy = ProcessCopy(answering)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()


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
