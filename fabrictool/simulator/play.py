"""Playing a workload on a whole placement, one model after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.routing.policies import routing_policy, targets_of
from fabrictool.simulator.demanded import parts_of
from fabrictool.simulator.deployment import consumer_groups, declared_stream, of_model, trace_stream, with_groups
from fabrictool.simulator.fleet import simulate
from fabrictool.simulator.report import report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.deployment import ModelSimulation, ReplicaEvent
    from fabrictool.simulator.fleet import Outcome, Stream
    from fabrictool.simulator.report import Report
    from fabrictool.workload.trace import Trace

INVENTED = 10_000
"""Requests of each model when neither their number nor a trace says how many."""
MOST_NAMED = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """What is played, and how."""

    models: tuple[str, ...] = ()
    """Only these of the blueprint; empty: all."""
    requests: int | None = None
    """Of each model; None: all of a trace, 10,000 invented ones."""
    rate: float | None = None
    """Requests/s instead of the declared or recorded ones."""
    seed: int = 0
    calibrations: Sequence[Calibration] = ()
    """Before the shipped ones."""
    events: tuple[ReplicaEvent, ...] = ()
    host_cache: float = 0.0
    """Octets of the host's memory that each replica has for prefixes which its cache drops."""
    samples: int = 200
    """Points of the timeline."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A workload that is not the declared demand."""

    trace: Trace
    title: str
    """For messages."""
    invented: bool
    """Without names of models it is played on each model; a recorded one only where one model can be meant."""


@dataclass(frozen=True, slots=True)
class ModelPlay:
    """What the simulation of one model showed."""

    simulation: ModelSimulation
    outcome: Outcome
    report: Report
    events: tuple[ReplicaEvent, ...] = ()

    @property
    def unserved(self) -> int | None:
        """Requests of which nothing became, neither an answer nor a refusal; None when it was stopped early."""
        figures = self.report
        return figures.requests - figures.finished - figures.refused - figures.lost if figures.complete else None

    def happened(self, event: ReplicaEvent) -> bool:
        """Whether the simulation got that far."""
        return event.at <= self.outcome.end


class Watcher(Protocol):
    """Hears how a play goes on, and may end it."""

    def note(self, text: str) -> None:
        """Something that one must know to read the result."""

    def playing(self, model: str, *, last: bool) -> AbstractContextManager[Callable[[int, int], None]]:
        """Around one model's play: what is given back hears (requests over, in all), and KeyboardInterrupt from it
        ends that play with what it has; from the context's end, the whole.
        """


def play(
    blueprint: Blueprint,
    inventory: Inventory,
    replicas: Sequence[ReplicaPlacement],
    recording: Recording | None,
    options: PlayOptions,
    watcher: Watcher,
) -> list[ModelPlay]:
    """Every model that has replicas and requests; one that is ended early is the last.

    Raises
    ------
    InvalidInputError
        FT2143 and FT2149 for models that are not there, FT2153 where a trace could be for several, FT2144 when nothing
        is left; and as `deployment.of_model`.
    """
    names = _named(blueprint, options)
    shares = None if recording is None else _shared_out(recording, names, blueprint, options, watcher)
    _note_groups(names, blueprint, watcher)
    plays = []
    for name in names:
        events = tuple(event for event in options.events if event.model == name)
        if not options.models and not events and not any(replica.model == name for replica in replicas):
            watcher.note(f"{name}: no replica in this placement; left out")
            continue
        if shares is not None and name not in shares:
            watcher.note(f"{name}: the trace has no requests for it; left out")
            continue
        simulation = of_model(name, blueprint, inventory, replicas, options.calibrations)
        _note_untrusted(simulation, watcher)
        block = recording.trace.block_tokens if recording is not None else 0
        if options.host_cache and not (block and simulation.caches_prefixes):
            what = "its engine keeps no prefixes" if block else "nothing says which prompts begin alike"
            watcher.note(f"{name}: {what}, so the host's memory has nothing to keep")
        simulation = simulation.with_prefixes(block).with_host_cache(options.host_cache).with_events(events)
        stream = _stream(options, simulation, None if shares is None else shares[name], watcher)
        if stream is None:
            continue
        rest = names[names.index(name) + 1 :]
        targets = targets_of(blueprint.latency_targets)
        pick = routing_policy(blueprint.routing.policy, random.Random(options.seed), targets, watcher.note)
        with watcher.playing(name, last=not rest) as progress:
            outcome = simulate(simulation.specs, stream, pick, samples=options.samples, progress=progress)
        # Bands differ for models that a calibration has seen, and it knows them by their architecture.
        seen_as = simulation.specs[0].model
        figures = report(
            outcome, simulation.specs, simulation.hardware, simulation.target, simulation.calibrations, seen_as
        )
        plays.append(ModelPlay(simulation, outcome, figures, events))
        if not outcome.complete:
            if rest:
                watcher.note(f"interrupted; not played: {', '.join(rest)}")
            break
    if not plays:
        raise InvalidInputError.of("FT2144", "nothing to simulate: no model has both replicas and a workload")
    return plays


def _note_groups(names: Sequence[str], blueprint: Blueprint, watcher: Watcher) -> None:
    """Of models whose demand does not say which group asks for how much of it."""
    groups = consumer_groups(blueprint)
    whole = [name for name in names if not parts_of(blueprint, blueprint.models[name])]
    if len(groups) > 1 and whole:
        where = "" if len(whole) == len(names) else f" for {_some(whole)}"
        watcher.note(f"groups ignored{where}: demand is not split by tenant ({_some(groups)})")


def _note_untrusted(simulation: ModelSimulation, watcher: Watcher) -> None:
    for replica in simulation.untrusted:
        watcher.note(f"{replica}: trust does not let it serve {simulation.name}; left out")
    for part in simulation.shut_out:
        who = f"group {part.group}" if part.group else "everybody else"
        what = f"its requests, {part.share * 100:.3g}% of the demand, are left out"
        watcher.note(f"{simulation.name}: no replica may serve {who}; {what}")


def _named(blueprint: Blueprint, options: PlayOptions) -> list[str]:
    names = [name for name in sorted(blueprint.models) if not options.models or name in options.models]
    unknown = sorted(set(options.models) - set(names))
    if unknown:
        raise InvalidInputError.of("FT2143", f"the blueprint has no model {', '.join(unknown)}")
    for event in options.events:
        if event.model not in names:
            message = f"{event.replica}: model {event.model!r} is not simulated"
            raise InvalidInputError.of("FT2149", message, hint=f"simulated models: {', '.join(names)}")
    return names


def _shared_out(
    recording: Recording, names: Sequence[str], blueprint: Blueprint, options: PlayOptions, watcher: Watcher
) -> Mapping[str, Trace]:
    """Model → its requests, of those `names` that get any.

    A trace goes to the models that it names, one that names none of them to the only model that it can be for; an
    invented workload without names to each.
    """
    trace, known = recording.trace.renamed(blueprint.adapted), sorted(blueprint.models)
    if not set(trace.models) & set(known):
        named = trace.models != ("",)
        if recording.invented and not named:
            return dict.fromkeys(names, trace)
        if len(names) == 1 and (options.models or not named):
            return {names[0]: trace}
        several = f"requests for {_some(trace.models)}" if named else "requests without a model"
        raise InvalidInputError.of(
            "FT2153",
            f"{recording.title} has {several}; the blueprint has {_some(known)}",
            hint="name the one that gets them all with --model",
        )
    strangers = {name: len(trace.of_model(name)) for name in trace.models if name not in known}
    if strangers:
        count = sum(strangers.values())
        verb = "request for {} is" if count == 1 else "requests for {} are"
        whose = _some([name or "no model" for name in strangers])
        watcher.note(f"{recording.title}: {count} {verb.format(whose)} not played")
    return {name: trace.of_model(name) for name in names if name in trace.models}


def _stream(options: PlayOptions, simulation: ModelSimulation, trace: Trace | None, watcher: Watcher) -> Stream | None:
    """None where nothing says what to play, or nobody may serve any of it; a note says so."""
    if options.rate is not None and not options.rate > 0:
        raise InvalidInputError.of("FT2202", f"a rate of {options.rate:g} requests/s cannot be played")
    if trace is not None:
        mine = trace.only(slice(options.requests))
        if len(mine) < len(trace):
            left_out = f"{len(trace) - len(mine)} of {len(trace)} requests are not played (--requests)"
            watcher.note(f"{simulation.name}: {left_out}")
        if options.rate is not None:
            mine = mine.at_rate(options.rate)
        return _of_groups(mine, simulation, options, watcher)
    if options.rate is not None:
        simulation = replace(simulation, rate=options.rate)
    if simulation.rate <= 0 and not options.models:
        watcher.note(f"{simulation.name}: no demand is declared; left out (give --trace or --workload)")
        return None
    if simulation.shut_out and simulation.rate > 0:
        played = simulation.rate * simulation.played
        watcher.note(f"{simulation.name}: {played:.3g} of {simulation.rate:.3g} requests/s are played")
    return declared_stream(simulation, options.requests or INVENTED, options.seed)


def _of_groups(trace: Trace, simulation: ModelSimulation, options: PlayOptions, watcher: Watcher) -> Stream | None:
    """Each request of a group that is drawn by its share, without those of groups that nobody may serve; None where
    these are all.
    """
    stream = trace_stream(trace, simulation.specs[0].model)
    every = (*simulation.parts, *simulation.shut_out)
    stream = with_groups(stream, every, np.random.default_rng(options.seed))
    if stream.group is None or not simulation.shut_out:
        return stream
    served = stream.group < len(simulation.parts)
    count, asked = int(served.sum()), len(trace)
    rates = f", {trace.rate * count / asked:.3g} of {trace.rate:.3g} requests/s" if trace.rate else ""
    watcher.note(f"{simulation.name}: {count} of {asked} requests are played{rates}")
    if not count:
        return None
    mine = trace_stream(trace.only(served), simulation.specs[0].model)
    # Time goes on as in the whole trace: events of replicas are told by it.
    return replace(mine, arrival=stream.arrival[served], group=stream.group[served], groups=simulation.parts)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
