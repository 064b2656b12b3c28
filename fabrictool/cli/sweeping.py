"""``simulate`` over several seeds, traces and scenarios: every play by itself, on whatever executor there is."""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.cli.executors import as_done, chosen_executor, executor_named, lost_workers_named
from fabrictool.cli.interpreted import say_if_interpreted
from fabrictool.cli.interrupts import Interrupts
from fabrictool.cli.output import say
from fabrictool.cli.simulating import ScenarioPlay, invented, placement_of, progress, recorded
from fabrictool.simulator.play import INVENTED, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fabrictool.cli.simulating import PlayInputs, ShownPlay
    from fabrictool.cli.source import Source
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.play import PlayOptions, Recording

FEW_REQUESTS = 500_000
"""Of all plays together: from so many on processes gain, for they take a second or two to begin."""


@dataclass(frozen=True, slots=True)
class PlaySweep:
    """What is played several times, and who does it."""

    traces: Sequence[Path] = ()
    seeds: int | None = None
    """So many from `PlayOptions.seed` on; None: that one, and nothing is averaged."""
    executor: str = ""
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class PlayTask:
    """One play with all that it needs, to be sent to whoever does it."""

    scenario: str
    trace: str
    blueprint: Blueprint
    inventory: Inventory
    replicas: Sequence[ReplicaPlacement]
    recording: Recording | None
    workload: str | None
    """Instead of the recording; it is drawn where it is played."""
    options: PlayOptions

    @property
    def requests(self) -> int:
        """About how many are played: what the task takes is in proportion to them."""
        models = len(self.options.models or self.blueprint.models)
        if self.recording is not None:
            return min(len(self.recording.trace), self.options.requests or len(self.recording.trace))
        return (self.options.requests or INVENTED) * models


@dataclass(slots=True)
class NoteKeeper:
    """A watcher that looks for nobody: what is to be known is kept."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextlib.contextmanager
    def playing(self, model: str, *, last: bool) -> Iterator[Callable[[int, int], None]]:
        yield lambda _done, _total: None


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """One figure over the seeds."""

    mean: float
    deviation: float
    """Of single plays: the standard deviation; of the mean itself it is less by the root of their number."""
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """How far the plays of one model differ from seed to seed."""

    first: ShownPlay
    seeds: int
    figures: Mapping[str, FigureSpread]
    """Without those that no play has, such as the time per token of answers of one token."""


def played(task: PlayTask) -> tuple[list[ShownPlay], list[str]]:
    """The figures of each model, and what is to be known. Raises as `play`."""
    keeper = NoteKeeper()
    recording = task.recording or invented(task.workload, task.options)
    plays = play(task.blueprint, task.inventory, task.replicas, recording, task.options, keeper)
    seed = task.options.seed
    return [ScenarioPlay(task.scenario, model, seed, task.trace).shown for model in plays], keeper.notes


def play_all(sources: Sequence[Source], inputs: PlayInputs, options: PlayOptions, swept: PlaySweep) -> list[ShownPlay]:
    """Scenario by scenario, trace by trace, seed by seed, whoever plays them and in whatever order they end.

    A placement is that of the first seed: what differs from seed to seed is who sends what when. Ctrl-C ends all.
    Raises as `play` and `executor_named`.
    """
    tasks = _tasks(sources, inputs, options, swept)
    say_if_interpreted()
    large = len(tasks) > 1 and sum(task.requests for task in tasks) >= FEW_REQUESTS
    chosen = chosen_executor(swept.executor, swept.workers, large=large)
    done: dict[int, tuple[list[ShownPlay], list[str]]] = {}
    tell = progress("plays")
    with (
        Interrupts(at_once=True) as stop,
        lost_workers_named("plays"),
        executor_named(chosen, len(tasks), swept.workers) as doer,
    ):
        for number, outcome in as_done(doer, played, [(task,) for task in tasks]):
            stop.check()
            done[number] = outcome
            tell(len(done), len(tasks))
    outcomes = [done[number] for number in range(len(tasks))]
    for note in dict.fromkeys(note for _, notes in outcomes for note in notes):
        say(note)
    return [shown for plays, _ in outcomes for shown in plays]


def _tasks(sources: Sequence[Source], inputs: PlayInputs, options: PlayOptions, swept: PlaySweep) -> list[PlayTask]:
    named = {str(path) if len(swept.traces) > 1 else "": recorded(path) for path in swept.traces}
    recordings: Mapping[str, Recording | None] = named or {"": None}
    tasks = []
    for source in sources:
        loaded, replicas = source.loaded, placement_of(source, inputs, options.seed)
        for trace, recording in recordings.items():
            for seed in range(options.seed, options.seed + (swept.seeds or 1)):
                mine = replace(options, seed=seed)
                tasks.append(
                    PlayTask(
                        source.scenario or "", trace, loaded.blueprint, loaded.inventory, replicas, recording,
                        inputs.workload, mine,
                    )
                )  # fmt: skip
    return tasks


def spreads_of(runs: Sequence[ShownPlay]) -> list[SeedSpread]:
    """One for each model of each trace and scenario."""
    together: dict[str, list[ShownPlay]] = {}
    for run in runs:
        together.setdefault(run.title, []).append(run)
    return [SeedSpread(plays[0], len(plays), _spread(plays)) for plays in together.values()]


def figures_of(run: ShownPlay) -> dict[str, float]:
    """What is compared from seed to seed."""
    report = run.report
    latencies = {
        f"{metric}_{quantile}_s": report.latency[metric][quantile]
        for metric in ("ttft", "tpot", "e2e")
        for quantile in ("p50", "p95", "p99")
    }
    return latencies | {
        "attainment": report.attainment,
        "goodput": report.goodput,
        "output_tokens_per_s": report.output_tokens_per_s,
        "utilisation": max(report.utilisation),
        "kv_use": max(report.kv_use),
        "cost_per_million_tokens": report.cost_per_million_tokens,
        "joules_per_token": report.joules_per_token,
        "refused": report.refused,
        "lost": report.lost,
        "unserved": run.unserved or 0,
    }


def _spread(plays: Sequence[ShownPlay]) -> dict[str, FigureSpread]:
    every = [figures_of(run) for run in plays]
    spread = {}
    for name in every[0]:
        values = [figures[name] for figures in every if math.isfinite(figures[name])]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            spread[name] = FigureSpread(statistics.fmean(values), deviation, min(values), max(values))
    return spread
