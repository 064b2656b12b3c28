"""What ``simulate`` reads and how it is watched; the playing itself is `simulator.play`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError, InvalidInputError, UsageError
from fabrictool.base.files import file_error, write_output
from fabrictool.base.units import Duration, Memory, UnitError
from fabrictool.blueprint.load import load_architectures
from fabrictool.cli import tracing
from fabrictool.cli.calibration_files import read_calibrations
from fabrictool.cli.describing import architecture_in
from fabrictool.cli.executors import as_done, chosen_executor, executor_named, lost_workers_named
from fabrictool.cli.interpreted import say_if_interpreted
from fabrictool.cli.interrupts import Interrupts
from fabrictool.cli.output import say
from fabrictool.cli.reading import read_requests
from fabrictool.simulator import sheet
from fabrictool.simulator.deployment import EVENT_KINDS, ReplicaEvent
from fabrictool.simulator.play import INVENTED, PlayOptions, Recording, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.cli.source import Source
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.play import ModelPlay
    from fabrictool.simulator.report import Report

PROGRESS_EVERY_S = 0.5
FEW_CASES = 2_000
"""From so many on processes gain: a case takes some 2 ms, and a process a second or two to begin."""
MOST_TOGETHER = 16
"""Cases that are sent together: what sending takes is little beside them, and Ctrl-C on a cluster waits for no more."""
EVENT_FORM = "KIND:MODEL/INDEX@TIME"
DESCRIPTIONS = (".json", ".yaml", ".yml")
"""How the names of files end that describe a model; no id of a model that we know ends so."""


@dataclass(frozen=True, slots=True)
class PlayInputs:
    """The files and texts that say what is played; `recording` does not depend on the scenario."""

    plan: Path | None
    status: Path | None
    trace: Path | None
    workload: str | None


@dataclass(frozen=True, slots=True)
class ShownPlay:
    """What is printed of one model's play; without its requests it is small enough to be sent."""

    scenario: str
    trace: str
    """"" unless several are compared."""
    seed: int
    model: str
    report: Report
    unserved: int | None
    events: tuple[tuple[ReplicaEvent, bool], ...]
    """Each with whether the simulation got that far."""

    @property
    def title(self) -> str:
        """For tables, notes and legends."""
        return " · ".join(part for part in (self.scenario, self.trace, self.model) if part)


@dataclass(frozen=True, slots=True)
class ScenarioPlay:
    """One model of one scenario, of one trace and one seed."""

    scenario: str
    play: ModelPlay
    seed: int
    trace: str = ""

    @property
    def shown(self) -> ShownPlay:
        """The same without its requests."""
        play = self.play
        events = tuple((event, play.happened(event)) for event in play.events)
        return ShownPlay(self.scenario, self.trace, self.seed, play.simulation.name, play.report, play.unserved, events)

    @property
    def title(self) -> str:
        return self.shown.title


class TerminalWatcher:
    """Says what is to be known, and shows how far a play is where somebody looks."""

    def note(self, text: str) -> None:
        say(text)

    @contextlib.contextmanager
    def playing(self, model: str, *, last: bool) -> Iterator[Callable[[int, int], None]]:
        """Ctrl-C ends the play of one model; as its last request ended, the whole."""
        with Interrupts(at_once=False) as stop:
            yield stoppable(progress(model), stop)
            if stop.pressed and not last:
                raise KeyboardInterrupt


def play_scenarios(sources: Sequence[Source], inputs: PlayInputs, options: PlayOptions) -> list[ScenarioPlay]:
    """Scenario by scenario; one that is ended early is the last."""
    runs: list[ScenarioPlay] = []
    for number, source in enumerate(sources, 1):
        runs += play_scenario(source, inputs, options)
        if not runs[-1].play.report.complete:
            if rest := [str(other.scenario) for other in sources[number:]]:
                say(f"interrupted; not played: {', '.join(rest)}")
            break
    return runs


def play_scenario(source: Source, inputs: PlayInputs, options: PlayOptions) -> list[ScenarioPlay]:
    """Every model of one scenario, one after the other."""
    loaded, watcher = source.loaded, TerminalWatcher()
    replicas = placement_of(source, inputs, options.seed)
    say_if_interpreted()
    recording = invented(inputs.workload, options) if inputs.trace is None else recorded(inputs.trace)
    plays = play(loaded.blueprint, loaded.inventory, replicas, recording, options, watcher)
    return [ScenarioPlay(source.scenario or "", model, options.seed) for model in plays]


def event(text: str) -> ReplicaEvent:
    """``down:llama/0@60s`` as an event. Raises UsageError FT9001 for another form, kind or time."""
    kind, colon, rest = text.partition(":")
    replica, at, when = rest.rpartition("@")
    replica = replica.strip().removeprefix("replica/")
    if not (colon and at and "/" in replica):
        hint = f"{EVENT_FORM}, such as `down:llama/0@60s`"
        raise UsageError.of("FT9001", f"--event {text!r} is not of the form {EVENT_FORM}", hint=hint)
    known = next((known for known in EVENT_KINDS if known == kind.strip()), None)
    if known is None:
        hint = f"one of: {', '.join(EVENT_KINDS)}"
        raise UsageError.of("FT9001", f"--event {text!r}: unknown kind {kind!r}", hint=hint)
    try:
        return ReplicaEvent(known, replica, float(Duration.parse(when)))
    except UnitError as error:
        raise UsageError.of("FT9001", f"--event {text!r}: {error.message}", hint=error.hint) from error


def host_cache(text: str) -> float:
    """Octets of ``--host-cache``. Raises UsageError FT9001 for what is no amount of memory."""
    try:
        return float(Memory.parse(text))
    except UnitError as error:
        raise UsageError.of("FT9001", f"--host-cache {text!r}: {error.message}", hint=error.hint) from error


def answer_cases(
    source: Path, output: Path | None, calibrations: Path | None = None, executor: str = "", workers: int | None = None
) -> int:
    """``--cases``: one forecast a row, errors in their own column; `calibrations` (a folder) go before the shipped.

    The rows are the same and in their order whoever answers them. Raises as `executor_named`.
    """
    own = read_calibrations(calibrations)
    columns, rows = sheet.read(_text(source))
    models = architectures({row.get("model", "") for row in rows})
    say_if_interpreted()
    chosen = chosen_executor(executor, workers, large=len(rows) >= FEW_CASES)
    pieces = list(_pieces(rows, own, models, 1 if chosen == "here" else MOST_TOGETHER))
    done: dict[int, list[dict[str, str]]] = {}
    tell, count = progress("cases"), 0
    with (
        Interrupts(at_once=True) as stop,
        lost_workers_named("cases"),
        executor_named(chosen, len(pieces), workers) as doer,
    ):
        for number, answers in as_done(doer, sheet.answered, pieces):
            stop.check()
            done[number] = answers
            count += len(answers)
            tell(count, len(rows))
    answered = [row for number in range(len(pieces)) for row in done[number]]
    text = sheet.write(columns, answered)
    if output is None:
        sys.stdout.write(text)
    else:
        write_output(output, text.encode())
    failed = sum(bool(row["error"]) for row in answered)
    say(f"{len(answered)} cases, {failed} with an error")
    return 0


def _pieces(
    rows: Sequence[dict[str, str]],
    own: Sequence[Calibration],
    models: Mapping[str, ModelArchitecture],
    most: int,
) -> Iterator[tuple[Sequence[dict[str, str]], Sequence[Calibration], Mapping[str, ModelArchitecture]]]:
    """Arguments of `sheet.answered` for `most` neighbours at a time; of a short sheet fewer, so that all have work."""
    size = max(1, min(most, len(rows) // MOST_TOGETHER))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        named = {row.get("model", "") for row in part}
        yield part, own, {name: model for name, model in models.items() if name in named}


def architectures(names: set[str]) -> dict[str, ModelArchitecture]:
    """The models that a sheet names by the path of a file, as `described` reads it; those it cannot are left out."""
    known = {}
    for name in sorted(names):
        if not name.endswith(DESCRIPTIONS):
            continue
        try:
            known[name] = described(name)
        except FabrictoolError as error:
            say(f"{name}: {error.problems[0].code}: {error.problems[0].message}")
    return known


def described(path: str) -> ModelArchitecture:
    """The model of a ``config.json``, or the only one of a part that ``catalogue add`` has written.

    Raises as `architecture_in` and `load_architectures` do, and FT1411 for a part with several models.
    """
    if not path.endswith(".json"):
        entries = load_architectures(Path(path), environment=os.environ)
        if len(entries) > 1:
            message = f"{path} describes {len(entries)} models: {', '.join(sorted(entries))}"
            raise InvalidInputError.of("FT1411", message, hint="name a file that describes one")
        return next(iter(entries.values()))
    return architecture_in(Path(path))


def placement_of(source: Source, inputs: PlayInputs, seed: int) -> Sequence[ReplicaPlacement]:
    """Of a saved plan or a status, else what `plan` would place."""
    from fabrictool.planner.placements import empty_placement, running_replicas
    from fabrictool.state.planfile import read_plan

    if inputs.plan is not None:
        planned = read_plan(inputs.plan).placement.replicas
        for replica in planned:
            cluster = source.inventory.clusters.get(replica.cluster)
            if cluster is None or replica.partition not in cluster.partitions:
                place = f"{replica.cluster}/{replica.partition}"
                raise InvalidInputError.of(
                    "FT2148", f"{inputs.plan} places {replica.replica} in {place}, which this inventory does not have"
                )
        return planned
    if inputs.status is None:
        return empty_placement(source.blueprint, source.inventory, seed=seed).replicas
    try:
        return running_replicas(json.loads(_text(inputs.status)), source.inventory, source.blueprint.models)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError.of(
            "FT2146", f"{inputs.status} is not what `status --json` prints: {error!r}"
        ) from error


def recorded(path: Path) -> Recording:
    """A trace, or a store of request records, for a play."""
    trace = read_requests(path)
    if trace.dropped:
        dropped = ", ".join(f"{count} {why}" for why, count in sorted(trace.dropped.items()))
        say(f"{path}: dropped {dropped}")
    return Recording(trace, str(path), invented=False)


def invented(workload: str | None, options: PlayOptions) -> Recording | None:
    """The requests that ``--workload`` describes, drawn by the seed; None without one."""
    if workload is None:
        return None
    trace = tracing.generated(workload, options.requests or INVENTED, options.seed, options.rate)
    return Recording(trace, f"--workload {workload}", invented=True)


def stoppable(tell: Callable[[int, int], None], stop: Interrupts) -> Callable[[int, int], None]:
    """`tell`, at which Ctrl-C ends the play unless all is over."""

    def tell_or_stop(done: int, total: int) -> None:
        tell(done, total)
        if done < total:
            stop.check()

    return tell_or_stop


def progress(what: str) -> Callable[[int, int], None]:
    """A line on a terminal's stderr, with the time that is left; nothing where nobody looks."""
    if not sys.stderr.isatty():
        return lambda _done, _total: None
    began = last = time.monotonic()
    over = False

    def tell(done: int, total: int) -> None:
        nonlocal last, over
        now = time.monotonic()
        if over or (now - last < PROGRESS_EVERY_S and done < total):
            return
        last, over = now, done >= total
        if over:  # what took no time leaves nothing behind
            line = f"{what}: {total} in {duration_text(now - began)}\n" if now - began > PROGRESS_EVERY_S else ""
        else:
            left = f", {duration_text((now - began) / done * (total - done))} left" if done else ""
            line = f"{what}: {done} of {total}{left}\r"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    return tell


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error(error, path) from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT2130", f"{path} is not UTF-8 text: {error}") from error
