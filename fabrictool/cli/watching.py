"""``status``, ``logs`` and ``events``: what the clusters and the gateway say, joined and printed."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import UnreachableError, UsageError
from fabrictool.cli.fabrics import load, open_fabric
from fabrictool.cli.output import data, duration, json_data, paint, say, seconds_text, table
from fabrictool.status.client import StatusUnavailableError, fetch
from fabrictool.status.documents import AgentStatus, GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabrictool.applier.fabric import Fabric
    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.status.documents import StatusDocument

WATCH_S = 2.0
FOLLOWED_LINES = 1000
"""As many lines may come between two looks of `logs --follow`."""


def show_status(blueprint: Path | None, inventory: Path | None, url: str, *, as_json: bool, watch: bool) -> int:
    """Print one look, or look after look; returns 0 when all that runs is well."""
    while True:
        document, text, good = _one_url(url) if url else _whole_fabric(blueprint, inventory)
        if as_json:
            json_data(document)
        else:
            data(text)
        if not watch:
            return 0 if good else 1
        time.sleep(WATCH_S)
        if not as_json:
            data("")


def _one_url(url: str) -> tuple[dict[str, Any], str, bool]:
    document = fetch(url)
    if isinstance(document, GatewayStatus):
        text, good = "\n".join(_gateway_lines(document)), True
    else:
        text, good = _agent_line(document), document.engine.state == "ready"
    return {"format_version": "1", "type": "status", "document": msgspec.to_builtins(document)}, text, good


def _whole_fabric(blueprint: Path | None, inventory: Path | None) -> tuple[dict[str, Any], str, bool]:
    from fabrictool.applier.drift import drift_of, out_of_reach
    from fabrictool.applier.readset import running_specs
    from fabrictool.applier.succession import successions

    loaded = load(blueprint, inventory)
    fabric = open_fabric(loaded)
    observed = fabric.observe()
    units = [_unit_row(cluster, unit) for cluster, unit in _latest_units(observed)]
    gateway = _gateway_document(fabric, observed)
    state = fabric.folder.read_state()
    unknown = {name: facts.reason for name, facts in observed.clusters.items() if not facts.known}
    expiring = successions(observed, running_specs(fabric, observed), state, time.time())
    unreached = out_of_reach(state, observed)
    drifts = [each.text for each in drift_of(state, observed, expiring) if each.kind != "unreachable"]
    if state.applied_blueprint not in ("", loaded.digest):
        drifts.append("the blueprint is not the one that was applied last, or that was with an overlay or a scenario")
    lines = [f"Fabric {fabric.name}: {sum(u['state'] == 'running' for u in units)} of {len(units)} units run"]
    lines += [f"! {problem.message}" for problem in unreached]
    lines += [f"~ {text}" for text in drifts]
    if units:
        rows = [[u["address"], u["cluster"], _painted(u["state"]), u["engine"], u["detail"]] for u in units]
        lines += ["", table(["UNIT", "CLUSTER", "STATE", "ENGINE", ""], rows)]
    if gateway is not None:
        lines += ["", *_gateway_lines(gateway)]
    well = all(u["state"] == "running" and (u["engine"] or "ready") == "ready" for u in units)
    good = bool(units) and well and not any(problem.severity == "error" for problem in unreached)
    document = {
        "format_version": "1",
        "type": "status",
        "fabric": fabric.name,
        "good": good,
        "unknown_clusters": unknown,
        "out_of_reach": [problem.message for problem in unreached],
        "drift": drifts,
        "units": units,
        "gateway": msgspec.to_builtins(gateway) if gateway is not None else None,
    }
    return document, "\n".join(lines), good


def _latest_units(observed: Observed) -> list[tuple[str, ObservedUnit]]:
    """Of each address the living unit, or the last one that died."""
    found = []
    for cluster, facts in sorted(observed.clusters.items()):
        for address in sorted({unit.address for unit in facts.units}):
            unit = facts.unit(address)
            if unit is not None:
                found.append((cluster, unit))
    return sorted(found, key=lambda pair: pair[1].address)


def _unit_row(cluster: str, unit: ObservedUnit) -> dict[str, Any]:
    row: dict[str, Any] = {
        "address": unit.address,
        "cluster": cluster,
        "operation": unit.operation,
        "state": unit.state,
        "pid": unit.pid,
        "engine": "",
        "detail": unit.reason or unit.detail,
        "status_url": unit.status_url,
        "job": unit.job,
        "ready": unit.ready,
        "begins_at": unit.begins_at,
        "ends_at": unit.ends_at,
    }
    if unit.state == "running" and not unit.status_url and unit.address.startswith("replica/"):
        row["engine"] = "ready" if unit.ready else "not ready"
    times = [f"job {unit.job}"] if unit.job else []
    if unit.state == "pending" and unit.begins_at is not None:
        times.append(f"expected to start {_clock(unit.begins_at)}")
    if unit.state == "running" and unit.ends_at is not None:
        times.append(f"ends {_clock(unit.ends_at)}")
    row["detail"] = "; ".join([*times, *([row["detail"]] if row["detail"] else [])])
    if unit.state == "running" and unit.status_url:
        try:
            document = fetch(unit.status_url, timeout_s=2.0)
        except StatusUnavailableError:
            row["detail"] = "does not answer"
        else:
            if isinstance(document, AgentStatus):
                row["engine"] = document.engine.state
                row["detail"] = document.engine.progress or f"up {duration(document.at - document.started_at)}"
                row["in_flight"] = document.in_flight
                row["links"] = len(document.links)
                row["ends_at"] = document.ends_at or unit.ends_at
            else:
                row["detail"] = f"clients {document.listen}, agents {document.mesh}"
    return row


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%MZ", time.gmtime(at))


def _gateway_document(fabric: Fabric, observed: Observed) -> GatewayStatus | None:
    for cluster, unit in observed.running().values():
        if unit.address.startswith("gateway/"):
            document = fabric.clusters[cluster].document(unit.operation)
            return document if isinstance(document, GatewayStatus) else None
    return None


def _gateway_lines(document: GatewayStatus) -> list[str]:
    rows = [
        [
            m.model,
            f"{m.ready}/{m.replicas}",
            ",".join(m.providers),
            str(m.in_flight),
            str(m.requests),
            str(m.failures),
            seconds_text(m.ttft_p95_s),
            seconds_text(m.tpot_p95_s),
        ]
        for m in document.models
    ]
    totals = document.totals
    return [
        (
            f"gateway http://{document.listen}/v1   {totals.requests} requests, {totals.failures} failed, "
            f"{totals.retries} retried   up {duration(document.at - document.started_at)}"
        ),
        table(["MODEL", "READY", "PROVIDERS", "OPEN", "REQUESTS", "FAILED", "TTFT p95", "TPOT p95"], rows),
    ]


def _agent_line(document: StatusDocument) -> str:
    if not isinstance(document, AgentStatus):
        return ""
    engine = document.engine
    return f"{document.replica} on {document.cluster}/{document.node}: {engine.engine} {engine.state} {engine.progress}"


def _painted(state: str) -> str:
    return state if state == "running" else paint(state, "error")


def show_logs(unit: str, blueprint: Path | None, inventory: Path | None, lines: int, *, follow: bool) -> None:
    """Print the tail; go on while following."""
    fabric = open_fabric(load(blueprint, inventory))
    cluster, operation = _find_unit(fabric, unit)
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


def _find_unit(fabric: Fabric, unit: str) -> tuple[str, str]:
    found = _latest_units(fabric.observe())
    for cluster, each in found:
        if unit in (each.address, each.address.split("/", 1)[1], each.operation):
            return cluster, each.operation
    known = ", ".join(each.address for _, each in found) or "none"
    raise UsageError.of("FT9005", f"there is no unit {unit!r}", hint=f"known units: {known}")


def show_events(blueprint: Path | None, inventory: Path | None, lines: int, *, as_json: bool) -> None:
    """Journal and unit events, oldest first."""
    from fabrictool.applier.journal import history

    fabric = open_fabric(load(blueprint, inventory))
    events = [
        {"at": e.at, "source": "apply", "kind": e.kind, "subject": e.address or e.plan[:8], "text": e.text or e.action}
        for e in history(fabric.folder.journal)
    ]
    for cluster, unit in fabric.observe().running().values():
        document = fabric.clusters[cluster].document(unit.operation) if unit.state == "running" else None
        if document is None and unit.state == "running":
            say(f"{unit.address} does not answer; its events are missing")
            continue
        if document is not None:
            events += [{"source": unit.address, **msgspec.to_builtins(event)} for event in document.events]
    events = sorted(events, key=lambda event: float(event["at"]))[-lines:]
    if as_json:
        json_data({"format_version": "1", "type": "events", "events": events})
        return
    for event in events:
        stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(float(event["at"])))
        data(f"{stamp}  {event['source']:<24} {event['kind']:<16} {event['subject']}  {event['text']}".rstrip())


@contextlib.contextmanager
def gateway_url(blueprint: Path | None, inventory: Path | None) -> Iterator[str]:
    """Status URL of the fabric's running gateway, through SSH where it runs elsewhere; FT5202 when there is none."""
    fabric = open_fabric(load(blueprint, inventory))
    for cluster, unit in fabric.observe().running().values():
        if unit.address.startswith("gateway/") and unit.state == "running":
            with fabric.clusters[cluster].page(unit.operation) as url:
                if url:
                    yield url
                    return
    raise UnreachableError.of("FT5202", "no gateway of this fabric runs here", hint="`fabrictool apply`, or give a URL")


def require_tui() -> Callable[[str, float], None]:
    """The terminal UI's entry; raises FT9006 when its extra is not installed."""
    if importlib.util.find_spec("textual") is None:
        raise UsageError.of("FT9006", "the terminal UI is not installed", hint="pip install 'fabrictool[tui]'")
    from fabrictool.tui.app import run

    return run
