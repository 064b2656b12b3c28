"""``status``, ``logs`` and ``events``: what the clusters and the gateways say, joined and printed."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import UnreachableError, UsageError
from fabrictool.cli.fabric_answers import EventRow, Events, FabricStatus, StartRow, UnitRow, UnitStatus
from fabrictool.cli.mesh_text import fleet_lines
from fabrictool.cli.output import data, json_data, octets_text, paint, say, seconds_text, table
from fabrictool.domain.address import Address
from fabrictool.status.client import NoFleetError, StatusUnavailableError, fetch, fetch_fleet
from fabrictool.status.documents import GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.cli.source import Source
    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.state.fabric import Fabric
    from fabrictool.state.overview import Overview
    from fabrictool.status.documents import AgentStatus, ModelRow
    from fabrictool.status.fleet import FleetStatus

WATCH_S = 2.0
ASK_S = 3.0
"""How long a gateway has to answer before another is asked."""
FEW_SAMPLES = 20
"""The 95th percentile of fewer is their largest: it is said of how many."""
OPERATION = re.compile(r".+-g[0-9]+-[0-9a-f]{8}")
FOLLOWED_LINES = 1000
"""As many lines may come between two looks of `logs --follow`."""


def show_status(source: Source, url: str, *, as_json: bool, watch: bool, key: str = "") -> int:
    """Print one look, or look after look; returns 0 when all that runs is well."""
    with (
        contextlib.nullcontext(None) if url else source.fabric() as fabric
    ):  # one for all looks: who lives shows between two
        answer: FabricStatus | UnitStatus
        while True:
            if fabric is None:
                answer, text, good = _one_url(url, key)
            else:
                answer, text, good = _whole_fabric(fabric, replace(source).identity.digest, patient=not watch)
            if as_json:
                json_data(answer)
            else:
                data(text)
            if not watch:
                return 0 if good else 1
            time.sleep(WATCH_S)
            if not as_json:
                data("")


def _one_url(url: str, key: str) -> tuple[UnitStatus, str, bool]:
    document = fetch(url, key=key)
    if isinstance(document, GatewayStatus):
        text, good = "\n".join(_gateway_lines(document, {})), not _missing(document)
        return UnitStatus(document=document), text, good
    fleet = _fleet_of_agent(url)
    lines = [_agent_line(document), "", *fleet_lines(fleet, time.time())] if fleet else [_agent_line(document)]
    printed = UnitStatus(document=document, fleet=fleet)
    return printed, "\n".join(lines), document.engine.state == "ready"


def _fleet_of_agent(url: str) -> FleetStatus | None:
    """None of an agent of an earlier release."""
    try:
        return fetch_fleet(url)
    except NoFleetError:
        return None


def _whole_fabric(fabric: Fabric, blueprint_digest: str, *, patient: bool) -> tuple[FabricStatus, str, bool]:
    from fabrictool.state.overview import overview_of

    overview = overview_of(fabric, blueprint_digest, now=time.time(), patient=patient)
    units = overview.units
    asleep = sum(u["state"] == "dormant" for u in units)
    lines = [f"Fabric {overview.fabric}: {sum(u['state'] == 'running' for u in units)} of {len(units)} units run"]
    lines[0] += f", {asleep} start{'s'[asleep > 1 :]} when somebody asks" if asleep else ""
    lines += [f"! {problem.message}" for problem in overview.unreached]
    lines += [f"~ {text}" for text in overview.drift]
    lines += [f"! {text}" for text in overview.warnings]
    if not units and not overview.unreached:
        lines.append("nothing was applied, or all of it was stopped; next: fabrictool plan")
    if units:
        rows = [[u["address"], u["cluster"], _painted(u["state"]), u["engine"], _detail(u)] for u in units]
        lines += ["", table(["UNIT", "CLUSTER", "STATE", "ENGINE", ""], rows)]
    lines += _start_lines(overview.starts)
    for name, gateway in overview.gateways.items():
        lines += ["", *_gateway_lines(gateway, overview.desired, name)]
    return _status_of(overview), "\n".join(lines), overview.good


def _status_of(overview: Overview) -> FabricStatus:
    return FabricStatus(
        fabric=overview.fabric,
        good=overview.good,
        unknown_clusters=overview.unknown,
        out_of_reach=[problem.message for problem in overview.unreached],
        drift=overview.drift,
        warnings=overview.warnings,
        desired=overview.desired,
        units=[UnitRow(**row) for row in overview.units],
        starts=[StartRow(**row) for row in overview.starts],
        gateway=next(iter(overview.gateways.values()), None),
        gateways=overview.gateways,
    )


def _start_lines(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One of each model and cluster, with its loaders."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in starts:
        mine = lines.setdefault((row["model"], row["cluster"]), [])
        number = f"{row['starts']} start{'s'[: row['starts'] != 1]}"
        mine.append(f"{row['median_s']:.3g} s ({number}, loader {row['loader']})")
    return [f"{model} on {cluster} serves after {', '.join(mine)}" for (model, cluster), mine in lines.items()]


def _gateway_lines(document: GatewayStatus, desired: Mapping[str, int], name: str = "") -> list[str]:
    """`desired` replicas by model; of a model that is not in it, as many as the gateway was told of or knows."""
    rows = [
        [
            m.model,
            _readiness(m, desired.get(m.model, m.wanted + m.dormant) - m.dormant),
            ",".join(m.providers),
            str(m.in_flight),
            str(m.requests),
            str(m.failures),
            seconds_text(m.ttft_p95_s) + (f" (n={m.samples})" if 0 < m.samples < FEW_SAMPLES else ""),
            seconds_text(m.tpot_p95_s),
        ]
        for m in document.models
    ]
    totals = document.totals
    return [
        (
            f"{' '.join(filter(None, ('gateway', name)))} {document.url}/v1   "
            f"{totals.requests} request{'s'[: totals.requests != 1]}, {totals.failures} failed, "
            f"{totals.retries} retried   up {duration_text(document.at - document.started_at)}"
        ),
        table(["MODEL", "READY", "PROVIDERS", "OPEN", "REQUESTS", "FAILED", "TTFT p95", "TPOT p95"], rows),
        *_phase_lines(document),
        *(f"! {replica} is planned, and no node serves or loads it" for replica in _missing(document)),
    ]


def _phase_lines(document: GatewayStatus) -> Iterator[str]:
    """Of pairs: what each phase takes, and what went from one to the other."""
    services = [s for node in document.nodes for s in node.services if s.lifecycle == "SERVING"]
    for model, phase in sorted({(s.model, s.phase) for s in services if s.phase != "unified"}, key=_prefill_first):
        mine = [s for s in services if (s.model, s.phase) == (model, phase)]
        ttft = [s.ttft_s for s in mine if s.ttft_s is not None]
        tpot = [s.tpot_s for s in mine if s.tpot_s is not None]
        took = f"TTFT {seconds_text(sum(ttft) / len(ttft) if ttft else None)}"
        if phase == "decode":
            took += f" from then on, TPOT {seconds_text(sum(tpot) / len(tpot) if tpot else None)}"
        yield f"  {model} {phase} ({len(mine)}): {took}"
    for row in document.handed:
        where = f"inside {row.sender}" if row.sender == row.receiver else f"{row.sender} → {row.receiver}"
        yield f"  {row.model} caches {where}: {row.prompts:,} prompts, {row.tokens:,} tokens, {octets_text(row.octets)}"


def _prefill_first(part: tuple[str, str]) -> tuple[str, bool]:
    return part[0], part[1] != "prefill"


def _readiness(model: ModelRow, wanted: int) -> str:
    if wanted or not model.dormant:
        return f"{model.ready}/{wanted}"
    return f"starting for {model.held}" if model.held else "on request"


def _missing(document: GatewayStatus) -> list[str]:
    return [replica for model in document.models for replica in model.missing]


def _agent_line(document: AgentStatus) -> str:
    engine = document.engine
    return f"{document.replica} on {document.cluster}/{document.node}: {engine.engine} {engine.state} {engine.progress}"


def _detail(unit: Mapping[str, Any]) -> str:
    """Of a unit whose cluster does not answer nothing: the line above says that, and why."""
    return "" if unit["state"] == "unknown" else str(unit["detail"])


def _painted(state: str) -> str:
    return state if state in ("running", "dormant") else paint(state, "error")


def show_logs(unit: str, source: Source, lines: int, *, follow: bool) -> None:
    """Print the tail; go on while following."""
    with source.fabric() as fabric:
        observed = fabric.observe()
        place = _find_unit(observed, unit)
        if place is None:
            _show_former_log(fabric, observed, unit, lines)
            return
        cluster, operation = place
        tail = fabric.clusters[cluster].log_tail(operation, max(lines, FOLLOWED_LINES))
        data("\n".join(tail[-lines:]))
        while follow:
            time.sleep(0.5)
            fresh = fabric.clusters[cluster].log_tail(operation, FOLLOWED_LINES)
            new = _after(tail, fresh)
            if new:
                data("\n".join(new))
            tail = fresh


def _after(before: list[str], now: list[str]) -> list[str]:
    """The lines of `now` that come after those of `before`."""
    for end in range(len(now), 0, -1):
        both = min(end, len(before))
        if both and now[end - both : end] == before[-both:]:
            return now[end:]
    return now


def _find_unit(observed: Observed, name: str) -> tuple[str, str] | None:
    from fabrictool.state.overview import latest_units

    for cluster, unit in latest_units(observed):
        if name in (unit.address, Address.parse(unit.address).name, unit.operation):
            return cluster, unit.operation
    return None


def _show_former_log(fabric: Fabric, observed: Observed, name: str, lines: int) -> None:
    """Of a unit that is gone, where logs are kept."""
    from fabrictool.state.overview import latest_units

    flat = name.replace("/", "-")
    starts = [flat] if OPERATION.fullmatch(flat) else [f"{flat}-g", f"replica-{flat}-g", f"gateway-{flat}-g"]
    silent = [cluster for cluster, facts in observed.clusters.items() if not facts.known]
    for cluster in fabric.clusters.values():
        for start in starts if cluster.name not in silent else ():
            tail = cluster.former_log(start, lines)
            if tail:
                gone = f"was not seen ({', '.join(silent)} did not answer)" if silent else "is gone"
                say(f"{name} {gone}; this is the log that {cluster.name} kept of a former one")
                data("\n".join(tail))
                return
    known = ", ".join(unit.address for _, unit in latest_units(observed)) or "none"
    raise UsageError.of("FT9005", f"there is no unit {name!r}", hint=f"known units: {known}")


def show_events(source: Source, lines: int, *, as_json: bool) -> None:
    """Journal and unit events, oldest first."""
    from fabrictool.applier.journal import history

    with source.fabric() as fabric:
        events = [
            EventRow(
                at=entry.at,
                source="apply",
                kind=entry.kind,
                subject=entry.address or entry.plan[:8],
                text=entry.text or entry.action,
            )
            for entry in history(fabric.folder.journal)
        ]
        for cluster, unit in fabric.observe().running().values():
            document = fabric.clusters[cluster].document(unit.operation) if unit.state == "running" else None
            if document is None and unit.state == "running":
                say(f"{unit.address} does not answer; its events are missing")
            elif document is not None:
                events += [EventRow(source=unit.address, **msgspec.structs.asdict(event)) for event in document.events]
    events = sorted(events, key=lambda event: event.at)[-lines:]
    if as_json:
        json_data(Events(events=events))
        return
    if not events:
        say("nothing has happened yet")
    for event in events:
        stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.at))
        data(f"{stamp}  {event.source:<24} {event.kind:<16} {event.subject}  {event.text}".rstrip())


@contextlib.contextmanager
def gateway_url(source: Source) -> Iterator[str]:
    """Status URL of a running gateway that answers, through SSH where it runs elsewhere; FT5202 when none does."""
    with source.fabric() as fabric:
        for hubs_too, (cluster, unit) in product((False, True), _running_gateways(fabric)):
            with fabric.clusters[cluster].page(unit.operation) as url:
                if url and _answers(url, hubs_too=hubs_too):
                    yield url
                    return
    raise UnreachableError.of("FT5202", "no gateway of this fabric runs here", hint="`fabrictool apply`, or give a URL")


def _running_gateways(fabric: Fabric) -> list[tuple[str, ObservedUnit]]:
    """The next to be asked when one does not answer; by address."""
    running = sorted(fabric.observe().running().items())
    units = [place for address, place in running if Address.parse(address).kind == "gateway"]
    return [(cluster, unit) for cluster, unit in units if unit.state == "running"]


def _answers(url: str, *, hubs_too: bool) -> bool:
    try:
        document = fetch(url, timeout_s=ASK_S)
    except StatusUnavailableError:
        return False
    return hubs_too or (isinstance(document, GatewayStatus) and bool(document.listen))


def require_tui() -> None:
    """Raises FT9006 when the extra of the terminal UI is not installed."""
    if importlib.util.find_spec("textual") is None:
        raise UsageError.of("FT9006", "the terminal UI is not installed", hint="pip install 'fabrictool[tui]'")
