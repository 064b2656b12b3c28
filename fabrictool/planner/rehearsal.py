"""Where placements are played: in this process, or in a copy of it that loads what that needs while this one searches.

The event loop's compiler takes a third of a second to load, in which a search of the same process stands still. Of a
small fabric that is much of what a search takes; of a large one a placement is too much to be handed over.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from fabrictool.planner.assign import assign
from fabrictool.planner.problem import Solution
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
    """What is to be played."""

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


class Rehearsal:
    """Plays placements of one fabric by one seed; who plays them changes nothing."""

    def __init__(self, blueprint: Blueprint, inventory: Inventory, seed: int) -> None:
        self._blueprint, self._inventory, self._seed = blueprint, inventory, seed
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

    def prepare(self, problem: PlacementProblem) -> None:
        """Load what will be needed, beside what comes meanwhile."""
        if len(problem.options) <= MOST_OPTIONS and may_copy():
            with suppress(OSError):  # no descriptor is left for a pipe
                self._begin(problem)
        else:
            Thread(target=import_module, args=[PLAYERS]).start()

    def play(self, asked: Asked) -> Result:
        result = self._elsewhere(asked) if self._ours is not None else None
        return self._play(asked) if result is None else result

    def _elsewhere(self, asked: Asked) -> Result | None:
        """None where the copy is gone, or says nothing for long: then there is none any more."""
        with suppress(EOFError, OSError):
            if self._ours is not None:
                self._ours.send(asked)
                if self._ours.poll(PATIENCE_S):
                    result: Result = self._ours.recv()
                    return result
        self.__exit__()
        return None

    def _play(self, asked: Asked) -> Result:
        from fabrictool.planner.loss_replay import played_losses  # noqa: PLC0415 - see above
        from fabrictool.planner.replay import replay  # noqa: PLC0415 - see above

        blueprint, inventory = self._blueprint, self._inventory
        played = replay(blueprint, inventory, asked.placement, asked.rates, self._seed, asked.models, asked.flows)
        after = played_losses(
            blueprint, inventory, asked.problem, asked.placement, asked.rates, self._seed, asked.surviving, asked.flows
        )
        return Result(played, after)

    def _begin(self, problem: PlacementProblem) -> None:
        from multiprocessing.connection import Pipe  # noqa: PLC0415 - --help must not pay for it

        ours, theirs = Pipe()
        self._ours = ours

        def answering() -> None:
            ours.close()
            if (least := _least_asked(problem)) is not None:
                self._play(least)  # what numba has compiled is read from the disk when it is first called
            while True:
                theirs.send(self._play(theirs.recv()))

        try:
            self._copy = ProcessCopy(answering)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()


def _least_asked(problem: PlacementProblem) -> Asked | None:
    """One replica of the first model that has one, if any has."""
    i = next((i for i, its in enumerate(problem.options) if its.phase == "unified" and its.levels), None)
    if i is None:
        return None
    option = problem.options[i]
    rate = option.levels[0].rate
    placement = assign(problem, Solution({i: 1}, {i: rate}, (), "", optimal=False), {})
    return Asked(problem, placement, {option.key: rate}, [option.model], [])
