"""A lost or damaged state made anew: the truth is in the clusters, the state is only a cache of it.

What they cannot say, such as the measured waits and the units of a cluster that does not answer, is taken from the
youngest version that can still be read, if there is one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError, Place, Problem, StaleError, UnreachableError
from fabrictool.base.files import write_atomic
from fabrictool.domain.observed import LIVING, Observed, generation
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.state import Applied, Placed, State, operation_id, same_lineage
from fabrictool.state.backends.document import decode_state
from fabrictool.state.fabric import without_foreign

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from fabrictool.domain.observed import ClusterFacts, ObservedUnit
    from fabrictool.state.fabric import Fabric

_SERIAL = re.compile(rb'"serial"\s*:\s*([0-9]{1,15})')


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What would be written."""

    state: State
    notes: tuple[str, ...]
    """What could not be found out."""


def rebuild(fabric: Fabric, *, lineage: str = "", partial: bool = False) -> Rebuilt:
    """The state that the clusters' units lead to; writes nothing.

    Raises
    ------
    UnreachableError
        FT4207 a cluster does not answer and no former state says what is on it, unless `partial`.
    InvalidInputError
        FT4208 the units do not say whose they are; `lineage` does.
    """
    facts = {answer.cluster: answer for answer in fabric.ask_clusters()}
    former, serial = _former(fabric)
    blind = _blind(facts, former, partial=partial)
    lineage = lineage or _lineage(fabric, facts, former)
    observed = Observed(clusters={name: without_foreign(here, lineage) for name, here in facts.items() if here.known})
    notes = [*blind, *_strangers(observed)]
    units: dict[str, Placed] = {}
    applied: dict[str, Applied] = {}
    for address, (cluster, unit) in observed.running().items():
        try:
            spec = fabric.clusters[cluster].spec(unit.operation)
        except FabrictoolError as error:
            notes.append(f"{address} on {cluster} is left out: {error}")
            continue
        units[address] = Placed.of(spec, cluster, unit.operation)
        summary = f"{cluster}/{spec.partition}" if isinstance(spec, AgentSpec) else cluster
        applied[address] = Applied(cluster=cluster, spec=spec, summary=summary)
    generations = _generations(observed)
    if former is not None:
        away = {name for name in (u.cluster for u in former.units.values()) if name not in observed.clusters}
        units = {a: u for a, u in former.units.items() if u.cluster in away and a not in units} | units
        applied = {a: u for a, u in former.applied_units.items() if u.cluster in away and a not in applied} | applied
        for address, number in former.generations.items():
            generations[address] = max(number, generations.get(address, 0))
    state = State(
        fabric=fabric.folder.path.name,
        lineage=lineage,
        serial=serial + 1,
        applied_units=dict(sorted(applied.items())),
        generations=dict(sorted(generations.items())),
        healed=former.healed if former is not None else {},
        waits=former.waits if former is not None else {},
        loads=former.loads if former is not None else {},
        failed_loaders=former.failed_loaders if former is not None else [],
        units=dict(sorted(units.items())),
    )
    return Rebuilt(state, tuple(notes))


def write_rebuilt(fabric: Fabric, shown: Rebuilt, *, lineage: str, partial: bool, now: float) -> Path | None:
    """Put it there under the lease; returns where a damaged former state was kept.

    Raises
    ------
    StaleError
        FT4003 another writer; FT4004 what runs is no longer what was `shown`.
    """
    store = fabric.folder.store
    with fabric.folder.lease("state rebuild", now=now):
        again = rebuild(fabric, lineage=lineage, partial=partial)
        if again.state != shown.state:
            hint = "run the command again and look at what it shows"
            raise StaleError.of("FT4004", "what runs has changed meanwhile; nothing was written", hint=hint)
        raw = store.raw()
        aside = None
        if raw is not None and not _readable(raw):
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
            aside = fabric.folder.path / f"state.damaged-{stamp}.json"
            write_atomic(aside, raw, mode=0o600)
        store.replace(again.state)
        return aside


def _former(fabric: Fabric) -> tuple[State | None, int]:
    """The youngest state that can be read, and the highest serial that is known of."""
    store = fabric.folder.store
    raw = store.raw()
    serials = [int(number) for number in _SERIAL.findall(raw or b"")]  # also of one that is damaged
    states = [version.state for version in store.history()]
    if raw is not None and _readable(raw):
        states.append(decode_state(raw, store.place))
    states = [state for state in states if state.fabric in ("", fabric.folder.path.name)]
    former = max(states, key=lambda state: state.serial, default=None)
    return former, max([0, *serials, *(state.serial for state in states)])


def _readable(raw: bytes) -> bool:
    try:
        decode_state(raw, "")
    except FabrictoolError:
        return False
    return True


def _blind(facts: Mapping[str, ClusterFacts], former: State | None, *, partial: bool) -> list[str]:
    unknown = [answer for answer in facts.values() if not answer.known]
    if unknown and former is None and not partial:
        raise UnreachableError(
            Problem(
                "FT4207",
                f"{answer.cluster} is unknown: {answer.reason}",
                Place(thing=f"cluster/{answer.cluster}"),
                "wait for it; --partial if nothing of this fabric runs there",
                transient=True,
            )
            for answer in unknown
        )
    what = "is as a former state says" if former is not None else "is left out"
    return [f"{answer.cluster} is unknown ({answer.reason}): what runs there {what}" for answer in unknown]


def _lineage(fabric: Fabric, facts: Mapping[str, ClusterFacts], former: State | None) -> str:
    """The former state's; else the trust root's, if the units bear it; else the one that all of them bear."""
    if former is not None and former.lineage:
        return former.lineage
    every = [unit for answer in facts.values() for unit in answer.units if unit.state != "damaged"]
    root = fabric.root_lineage
    marks = {unit.lineage for unit in every if unit.lineage}
    bearing = {mark for mark in {*marks, root} if mark and any(_bears(unit, mark) for unit in every)}
    bearing = {mark for mark in bearing if not any(other != mark and same_lineage(mark, other) for other in bearing)}
    if root in bearing or not bearing:
        return root
    if len(bearing) == 1 and len(mark := bearing.pop()) > 8:
        return mark
    names = ", ".join(sorted(marks))
    hint = "look at the units with `fabrictool status`, then --lineage ONE, in full"
    raise InvalidInputError.of(
        "FT4208", f"the units bear the lineages {names}, the trust root {root or 'none'}", hint=hint
    )


def _bears(unit: ObservedUnit, lineage: str) -> bool:
    """By its mark, or where the cluster holds nobody else's, by its operation's id."""
    if unit.lineage:
        return same_lineage(unit.lineage, lineage)
    return unit.operation == operation_id(lineage, unit.address, generation(unit.operation))


def _generations(observed: Observed) -> dict[str, int]:
    generations: dict[str, int] = {}
    for facts in observed.clusters.values():
        for unit in facts.units:
            if unit.state != "damaged":
                generations[unit.address] = max(generation(unit.operation), generations.get(unit.address, 0))
    return generations


def _strangers(observed: Observed) -> Iterable[str]:
    for name, facts in sorted(observed.clusters.items()):
        if facts.foreign:
            yield f"{name} holds units of another lineage, which stay as they are: {', '.join(facts.foreign)}"
        for unit in facts.units:
            if unit.state not in LIVING:
                yield f"{unit.address} on {name} does not run ({unit.state}); only its generation is remembered"
