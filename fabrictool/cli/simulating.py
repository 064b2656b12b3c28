"""What ``simulate`` does between its options and its output: what to play, and playing it."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError, InvalidInputError, UsageError
from fabrictool.base.files import file_error, write_output
from fabrictool.base.units import Duration, UnitError
from fabrictool.cli import tracing
from fabrictool.cli.output import say
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator import deployment, sheet
from fabrictool.simulator.calibration import loads, shipped
from fabrictool.simulator.fleet import simulate
from fabrictool.simulator.report import report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fabrictool.blueprint import Loaded
    from fabrictool.catalog import ModelArchitecture
    from fabrictool.cli.source import Source
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.deployment import ModelSimulation, ReplicaEvent
    from fabrictool.simulator.fleet import Outcome, Stream
    from fabrictool.simulator.report import Report
    from fabrictool.workload.trace import Trace

PROGRESS_EVERY_S = 0.5
MADE_UP = 10_000
"""Requests of each model when neither their number nor a trace says how many."""
EVENT_FORM = "KIND:MODEL/INDEX@TIME"


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one simulation."""

    plan: Path | None
    source: Source
    status: Path | None
    trace: Path | None
    workload: str | None
    models: tuple[str, ...]
    requests: int | None
    """Of each model; None: all of a trace, 10,000 made-up ones."""
    rate: float | None
    seed: int
    calibrations: Path | None = None
    events: tuple[ReplicaEvent, ...] = ()


class Interrupts:
    """Ctrl-C that is not lost: compiled code calls Python while it looks at arrays, and drops what that raises.

    Within the context Ctrl-C is noted, and raised by `check`; `at_once` or the second time it is raised on the spot,
    too. A process that ignores SIGINT, such as a shell's background job, goes on ignoring it.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.pressed = False
        self._at_once = at_once

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        again, self.pressed = self.pressed, True
        if again or self._at_once:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt when Ctrl-C was pressed, once."""
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Run:
    """One model, simulated."""

    scenario: str
    simulation: ModelSimulation
    outcome: Outcome
    report: Report
    events: tuple[ReplicaEvent, ...] = ()

    @property
    def unserved(self) -> int | None:
        """Requests of which nothing became, neither an answer nor a refusal; None when it was stopped early."""
        found = self.report
        return found.requests - found.finished - found.refused - found.lost if found.complete else None

    def happened(self, event: ReplicaEvent) -> bool:
        """Whether the simulation got that far."""
        return event.at <= self.outcome.end

    @property
    def title(self) -> str:
        """For tables and legends."""
        return f"{self.scenario} · {self.simulation.name}" if self.scenario else self.simulation.name


def event(text: str) -> ReplicaEvent:
    """``down:llama/0@60s`` as an event. Raises UsageError FT9001 for another form, kind or time."""
    kind, colon, rest = text.partition(":")
    replica, at, when = rest.rpartition("@")
    replica = replica.strip().removeprefix("replica/")
    if not (colon and at and "/" in replica):
        hint = f"{EVENT_FORM}, such as `down:llama/0@60s`"
        raise UsageError.of("FT9001", f"--event {text!r} is not of the form {EVENT_FORM}", hint=hint)
    known = next((one for one in deployment.EVENT_KINDS if one == kind.strip()), None)
    if known is None:
        hint = f"one of: {', '.join(deployment.EVENT_KINDS)}"
        raise UsageError.of("FT9001", f"--event {text!r}: {kind!r} is not a kind of event", hint=hint)
    try:
        return deployment.ReplicaEvent(known, replica, float(Duration.parse(when)))
    except UnitError as error:
        raise UsageError.of("FT9001", f"--event {text!r}: {error.message}", hint=error.hint) from error


def answer_cases(source: Path, output: Path | None, calibrations: Path | None = None) -> int:
    """``--cases``: one forecast a row, errors in their own column; `calibrations` (a folder) go before the shipped."""
    known = [*_calibrations(calibrations), *shipped()]
    columns, rows = sheet.read(_text(source))
    models = architectures({row.get("model", "") for row in rows})
    done: list[dict[str, str]] = []
    tell = _progress("cases")
    with Interrupts(at_once=True) as stop:
        for row in sheet.answer(rows, known, models):
            stop.check()
            done.append(row)
            tell(len(done), len(rows))
    text = sheet.write(columns, done)
    if output is None:
        sys.stdout.write(text)
    else:
        write_output(output, text.encode())
    failed = sum(bool(row["error"]) for row in done)
    say(f"{len(done)} cases, {failed} with an error")
    return 0


def play(asked: Asked, *, samples: int) -> list[Run]:
    """Every model of one scenario, one after the other; Ctrl-C ends it with the model that is being played."""
    loaded = asked.source.loaded
    replicas = _placement(asked, loaded)
    own = _calibrations(asked.calibrations)
    trace = _workload(asked)
    names = [name for name in sorted(loaded.blueprint.models) if not asked.models or name in asked.models]
    unknown = sorted(set(asked.models) - set(names))
    if unknown:
        raise InvalidInputError.of("FT2143", f"the blueprint has no model {', '.join(unknown)}")
    _known_models(asked.events, names)
    traces = None if trace is None else _shared_out(trace, names, sorted(loaded.blueprint.models), asked)
    groups = deployment.consumer_groups(loaded.blueprint)
    if len(groups) > 1:
        say(f"a demand does not say whose requests it counts: what {_some(groups)} allow is not looked at")
    runs = []
    for name in names:
        events = tuple(one for one in asked.events if one.model == name)
        if asked.models == () and not events and not any(replica.model == name for replica in replicas):
            say(f"{name}: no replica in this placement; left out")
            continue
        if traces is not None and name not in traces:
            say(f"{name}: the trace has no request for it; left out")
            continue
        simulation = deployment.of_model(name, loaded.blueprint, loaded.inventory, replicas, own)
        for replica in simulation.untrusted:
            say(f"{replica}: trust does not let it serve {name}; left out")
        simulation = simulation.with_prefixes(trace.block_tokens if trace else 0).with_events(events)
        stream = _stream(asked, simulation, None if traces is None else traces[name])
        if stream is None:
            say(f"{name}: no demand is declared; left out (give --trace or --workload)")
            continue
        pick = routing_policy(loaded.blueprint.routing.policy, random.Random(asked.seed))
        with Interrupts(at_once=False) as stop:
            tell = stoppable(_progress(name), stop)
            outcome = simulate(simulation.specs, stream, pick, samples=samples, progress=tell)
        # Bands differ for models that a calibration has seen, and it knows them by their architecture.
        seen_as = simulation.specs[0].model
        found = report(
            outcome, simulation.specs, simulation.hardware, simulation.target, simulation.calibrations, seen_as
        )
        runs.append(Run(asked.source.scenario or "", simulation, outcome, found, events))
        rest = names[names.index(name) + 1 :]
        if stop.pressed and rest:  # as this model's last request ended
            raise KeyboardInterrupt
        if not outcome.complete:
            if rest:
                say(f"interrupted; not played: {', '.join(rest)}")
            break
    if not runs:
        raise InvalidInputError.of("FT2144", "there is nothing to simulate: no model has both replicas and a workload")
    return runs


def _calibrations(folder: Path | None) -> list[Calibration]:
    """The files that ``calibrate`` wrote. Raises InvalidInputError FT2120 when there is none, or one is none."""
    if folder is None:
        return []
    found = [loads(_text(path), str(path)) for path in sorted(folder.glob("*.toml"))]
    if not found:
        raise InvalidInputError.of("FT2120", f"{folder} holds no calibration", hint="fabrictool calibrate DATA.csv")
    return found


def _known_models(events: Sequence[ReplicaEvent], names: Sequence[str]) -> None:
    """Raises InvalidInputError FT2149 for an event of a model that is not simulated."""
    for one in events:
        if one.model not in names:
            raise InvalidInputError.of(
                "FT2149", f"{one.replica}: no model {one.model!r} is simulated", hint=f"these are: {', '.join(names)}"
            )


def architectures(names: set[str]) -> dict[str, ModelArchitecture]:
    """The models that a sheet names by the path of their ``config.json``; what cannot be read stays unknown."""
    from pathlib import Path

    from fabrictool.catalog.huggingface import architecture

    found = {}
    for name in sorted(names):
        if not name.endswith(".json"):
            continue
        try:
            found[name] = architecture(json.loads(_text(Path(name))), name)
        except (ValueError, RecursionError) as error:
            say(f"{name} is not JSON: {error}")
        except FabrictoolError as error:
            say(f"{name}: {error.problems[0].code}: {error.problems[0].message}")
    return found


def _placement(asked: Asked, loaded: Loaded) -> Sequence[ReplicaPlacement]:
    if asked.plan is not None:
        from fabrictool.state.planfile import read_plan

        planned = read_plan(asked.plan).placement.replicas
        for replica in planned:
            cluster = loaded.inventory.clusters.get(replica.cluster)
            if cluster is None or replica.partition not in cluster.partitions:
                place = f"{replica.cluster}/{replica.partition}"
                raise InvalidInputError.of("FT2148", f"{asked.plan} places {replica.replica} in {place}: unknown here")
        return planned
    if asked.status is not None:
        return _running(asked.status, loaded)
    from fabrictool.planner.assign import assign
    from fabrictool.planner.build import build_problem
    from fabrictool.planner.solvers.exact import ExactSolver

    usable = [name for name, cluster in loaded.inventory.clusters.items() if cluster.enabled]
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    *_, solution = ExactSolver().solve(problem, deadline_s=30.0, seed=asked.seed)
    return assign(problem, solution, {}).replicas


def _running(path: Path, loaded: Loaded) -> list[ReplicaPlacement]:
    """The replicas of a ``status --json`` document.

    Raises InvalidInputError FT2146 when it is none, FT2151 when it does not say what a replica stands on.
    """
    from fabrictool.domain.plan import ReplicaPlacement

    try:
        status = json.loads(_text(path))
        seen = _services(status.get("gateway") or {})
        found = []
        for unit in status["units"]:
            kind, _, rest = unit["address"].partition("/")
            if kind != "replica" or unit["state"] != "running":
                continue
            cluster = loaded.inventory.clusters[unit["cluster"]]
            partition, tp = _stands_on(unit["address"], unit["cluster"], cluster, seen)
            found.append(
                ReplicaPlacement(
                    replica=unit["address"],
                    model=rest.partition("/")[0],
                    provider=loaded.inventory.sites[cluster.site].provider,
                    site=cluster.site,
                    cluster=unit["cluster"],
                    partition=partition,
                    device=cluster.partitions[partition].device,
                    tp=tp,
                )
            )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError.of("FT2146", f"{path} is not what `status --json` prints: {error!r}") from error
    return found


def _stands_on(
    address: str, cluster_name: str, cluster: ClusterSpec, seen: dict[str, tuple[str, int]]
) -> tuple[str, int]:
    """Partition and tp of a running replica. Raises InvalidInputError FT2151 where they would have to be guessed."""
    if address in seen:
        device, tp = seen[address]
        alike = [name for name, one in cluster.partitions.items() if one.device == device]
        if not alike:
            raise InvalidInputError.of(
                "FT2151",
                f"{address} runs on {device}, which no partition of {cluster_name} has",
                hint="give the inventory of this fabric with -i",
            )
        return alike[0], tp
    only = list(cluster.partitions.items())
    if len(only) == 1 and only[0][1].devices_per_node == 1:
        return only[0][0], 1
    raise InvalidInputError.of(
        "FT2151",
        f"{address} runs, but the status does not say on how many devices: its gateway does not know the replica",
        hint="`fabrictool status --json` again while the gateway answers, or simulate the saved plan",
    )


def _services(gateway: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Replica → (device, tp), as the gateway knows them; without a gateway nothing is known."""
    return {
        service["replica"]: (str(node["device"]), int(service["tp"]))
        for node in gateway.get("nodes", ())
        for service in node["services"]
    }


def _workload(asked: Asked) -> Trace | None:
    if asked.trace is not None:
        found = tracing.load(asked.trace)
        if found.dropped:
            dropped = ", ".join(f"{count} {why}" for why, count in sorted(found.dropped.items()))
            say(f"{asked.trace}: dropped {dropped}")
        return found
    if asked.workload is not None:
        return tracing.generated(asked.workload, asked.requests or MADE_UP, asked.seed, asked.rate)
    return None


def _shared_out(trace: Trace, names: Sequence[str], known: Sequence[str], asked: Asked) -> dict[str, Trace]:
    """Model → its requests, of those `names` that get any; `known` are all models of the blueprint.

    A trace goes to the models that it names, one that names none of them to the only model that it can be for; a
    workload that is made up without names is made up for each. Raises InvalidInputError FT2153 where several could be
    meant, or none is.
    """
    what = asked.trace or f"--workload {asked.workload}"
    if not set(trace.models) & set(known):
        named = trace.models != ("",)
        if asked.trace is None and not named:
            return dict.fromkeys(names, trace)
        if len(names) == 1 and (asked.models or not named):
            return {names[0]: trace}
        several = f"requests for {_some(trace.models)}" if named else "requests without a model"
        raise InvalidInputError.of(
            "FT2153",
            f"{what} has {several}; the blueprint has {_some(known)}",
            hint="say with --model which one gets them all",
        )
    strangers = {name: len(trace.of_model(name)) for name in trace.models if name not in known}
    if strangers:
        count = sum(strangers.values())
        verb = "request for {} is" if count == 1 else "requests for {} are"
        say(f"{what}: {count} {verb.format(_some([name or 'no model' for name in strangers]))} not played")
    return {name: trace.of_model(name) for name in names if name in trace.models}


def _some(names: Sequence[str]) -> str:
    """The first few, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _stream(asked: Asked, simulation: ModelSimulation, trace: Trace | None) -> Stream | None:
    if asked.rate is not None and not asked.rate > 0:
        raise InvalidInputError.of("FT2202", f"a rate of {asked.rate:g} requests/s cannot be played")
    model_name = simulation.specs[0].model
    if trace is not None:
        mine = trace.only(slice(asked.requests))
        if len(mine) < len(trace):
            say(f"{simulation.name}: {len(trace) - len(mine)} of {len(trace)} requests are not played (--requests)")
        if asked.rate is not None:
            mine = mine.at_rate(asked.rate)
        return deployment.trace_stream(mine, model_name)
    if asked.rate is not None:
        from dataclasses import replace

        simulation = replace(simulation, rate=asked.rate)
    if simulation.rate <= 0 and not asked.models:
        return None
    return deployment.declared_stream(simulation, asked.requests or MADE_UP, asked.seed)


def stoppable(tell: Callable[[int, int], None], stop: Interrupts) -> Callable[[int, int], None]:
    """`tell`, at which Ctrl-C ends the play unless all is over."""

    def progress(done: int, total: int) -> None:
        tell(done, total)
        if done < total:
            stop.check()

    return progress


def _progress(what: str) -> Callable[[int, int], None]:
    """A line on a terminal's stderr, with the time that is left; nothing where nobody looks."""
    if not sys.stderr.isatty():
        return lambda _done, _total: None
    began = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PROGRESS_EVERY_S and done < total:
            return
        last = now
        left = (now - began) / max(done, 1) * (total - done)
        end = "\n" if done >= total and now - began > PROGRESS_EVERY_S else "\r"
        sys.stderr.write(f"{what}: {done} of {total}, {duration_text(left)} left \x1b[K{end}")
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
