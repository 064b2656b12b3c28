"""The whole fabric at one look: what the clusters, the units and the gateways say, joined."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fabrictool.base.clock import duration_text, minute_text
from fabrictool.domain.address import Address
from fabrictool.domain.specs import AgentSpec
from fabrictool.planner.drift import clock_warnings, drift_of, out_of_reach
from fabrictool.planner.healing import cannot_stay
from fabrictool.planner.loads import loads_of
from fabrictool.status.client import StatusUnavailableError, fetch
from fabrictool.status.documents import AgentStatus, GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.base.errors import Problem
    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.domain.state import Applied, ModelPromise, State
    from fabrictool.state.fabric import Fabric


NO_UNIT: Mapping[str, Any] = {
    "operation": "", "state": "missing", "pid": None, "engine": "", "detail": "", "status_url": "", "job": "",
    "ready": False, "spec": "", "begins_at": None, "ends_at": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Overview:
    """What `status` shows of a fabric."""

    fabric: str
    units: list[dict[str, Any]]
    """One row a unit."""
    unknown: dict[str, str]
    """Cluster that does not answer → why."""
    unreached: list[Problem]
    drift: list[str]
    """Sentences."""
    warnings: list[str]
    """Sentences; what decides nothing."""
    desired: dict[str, int]
    """Model → replicas that were applied last."""
    gateways: dict[str, GatewayStatus]
    """By name, what each gateway that answers says."""
    forecast: Mapping[str, ModelPromise]
    """Model → what the last plan forecasts of it."""
    starts: list[dict[str, Any]]
    """What the last starts took: a row for each model, cluster and loader."""

    @property
    def good(self) -> bool:
        """Whether all that runs is well, and something does."""
        well = all(unit["state"] == "dormant" or (unit["state"] == "running" and unit["ready"]) for unit in self.units)
        return bool(self.units) and well and not any(problem.severity == "error" for problem in self.unreached)


def overview_of(fabric: Fabric, blueprint_digest: str, *, now: float, patient: bool = True) -> Overview:
    """Look at the fabric, whose blueprint has that digest now; `now` in wall seconds, `patient` as in `gather`."""
    evidence = fabric.gather(now=now, patient=patient)
    observed, applied = evidence.observed, evidence.state.applied_units
    drift = [drift.text for drift in drift_of(evidence, cannot_stay(evidence, now)) if drift.kind != "unreachable"]
    if evidence.state.applied_blueprint not in ("", blueprint_digest):
        drift.append("the blueprint is not the one that was applied last, or that was with an overlay or a scenario")
    return Overview(
        fabric.name,
        sorted(
            [
                *(_unit_row(cluster, unit) for cluster, unit in latest_units(observed)),
                *_missing_rows(applied, observed),
            ],
            key=lambda row: str(row["address"]),
        ),
        {name: facts.reason for name, facts in observed.clusters.items() if not facts.known},
        out_of_reach(evidence),
        drift,
        clock_warnings(evidence),
        dict(
            Counter(s.model for s in (u.spec for u in applied.values()) if isinstance(s, AgentSpec) and not s.is_extra)
        ),
        _gateway_documents(fabric, observed),
        evidence.state.forecast or {},
        _start_rows(evidence.state),
    )


def _start_rows(state: State) -> list[dict[str, Any]]:
    """Of what was applied last."""
    specs = [unit.spec for unit in state.applied_units.values() if isinstance(unit.spec, AgentSpec)]
    return [
        {
            "model": model,
            "cluster": cluster,
            "loader": loader,
            "median_s": round(median(seconds), 1),
            "starts": len(seconds),
        }
        for model, cluster in sorted({(spec.model, spec.cluster) for spec in specs})
        for loader, seconds in loads_of(state.loads, model, cluster).items()
    ]


def latest_units(observed: Observed) -> list[tuple[str, ObservedUnit]]:
    """Of each address the living unit, or the last one that died."""
    units = []
    for cluster, facts in sorted(observed.clusters.items()):
        for address in sorted({unit.address for unit in facts.units}):
            unit = facts.unit(address)
            if unit is not None:
                units.append((cluster, unit))
    return sorted(units, key=lambda pair: pair[1].address)


def _missing_rows(applied: Mapping[str, Applied], observed: Observed) -> list[dict[str, Any]]:
    """What was applied and is nowhere to be seen."""
    rows = []
    there = {unit.address for facts in observed.clusters.values() for unit in facts.units}
    for address, want in applied.items():
        if address not in there and not want.spec.is_extra:
            facts = observed.clusters.get(want.cluster)
            known = facts is not None and facts.known
            text = "applied, and not there" if known else "its cluster does not answer"
            rows.append({"address": address, "cluster": want.cluster, **NO_UNIT, "detail": text})
            rows[-1]["state"] = "missing" if known else "unknown"
    return rows


def _unit_row(cluster: str, unit: ObservedUnit) -> dict[str, Any]:
    row: dict[str, Any] = {
        "address": unit.address,
        "cluster": cluster,
        "operation": unit.operation,
        "state": "dormant" if unit.dormant else unit.state,
        "pid": unit.pid,
        "engine": "",
        "detail": unit.reason or unit.detail,
        "status_url": unit.status_url,
        "job": unit.job,
        "ready": unit.ready,
        "spec": unit.in_force,
        "begins_at": unit.begins_at,
        "ends_at": unit.ends_at,
    }
    if unit.state == "running" and not unit.status_url and Address.parse(unit.address).kind == "replica":
        row["engine"] = "ready" if unit.ready else "not ready"
    times = [f"job {unit.job}"] if unit.job else []
    if unit.state == "pending" and unit.begins_at is not None:
        times.append(f"expected to start {minute_text(unit.begins_at)}")
    if unit.state == "running" and unit.ends_at is not None:
        times.append(f"ends {minute_text(unit.ends_at)}")
    row["detail"] = "; ".join([*times, *([row["detail"]] if row["detail"] else [])])
    if unit.dormant:
        row["detail"] = f"starts when somebody asks: {unit.reason}"
    if unit.state == "running" and unit.status_url:
        try:
            document = fetch(unit.status_url, timeout_s=2.0)
        except StatusUnavailableError:
            row["detail"] = "does not answer" if unit.ready else row["detail"]
            row["ready"] = False
        else:
            if isinstance(document, AgentStatus):
                row["engine"] = document.engine.state
                row["detail"] = document.engine.progress or f"up {duration_text(document.at - document.started_at)}"
                if unit.ready and unit.detail:  # it serves, and has something to say all the same
                    row["detail"] += f"; {unit.detail}"
                row["in_flight"] = document.in_flight
                row["links"] = len(document.links)
                row["ends_at"] = document.ends_at or unit.ends_at
            else:
                clients = f"clients {document.listen}" if document.listen else "a hub"
                row["detail"] = f"{clients}, agents {document.mesh}"
                if unit.in_force == "former":
                    row["detail"] += f"; goes on by a former spec: {unit.detail}"
    return row


def _gateway_documents(fabric: Fabric, observed: Observed) -> dict[str, GatewayStatus]:
    documents = {}
    for address, (cluster, unit) in sorted(observed.running().items()):
        if Address.parse(address).kind == "gateway":
            document = fabric.clusters[cluster].document(unit.operation)
            if isinstance(document, GatewayStatus) and document.listen:  # of a hub the table says enough
                documents[Address.parse(address).name] = document
    return documents
