"""The fleet in the eyes of one node → the cells of tables. What the node does not know is ``?``, never 0."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fabrictool.status.fleet import NEEDS_SOMEBODY, OVER, engine_text, engines_shown, link_text, role_text
from fabrictool.tui.rows import problems_first, table_row, until_text

if TYPE_CHECKING:
    from fabrictool.status.fleet import FleetMember, FleetService, FleetStatus
    from fabrictool.tui.rows import Level, TableRow

UNKNOWN = "?"
"""Requests and loads are known to gateways alone."""


def fleet_headline(view: FleetStatus, age: str) -> str:
    """Whose view, how old, who is there."""
    own = next((member for member in view.members if member.session == view.session), None)
    place = f" on {own.cluster}/{own.node}" if own is not None else ""
    agents = [member for member in view.members if member.role == "agent" and member.state not in OVER]
    counts = Counter("idle" if member.idle else member.state for member in agents)
    nodes = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
    hubs = [member for member in shown(view) if member.role == "gateway"]
    return (
        f"{view.fabric} ── view from the {view.role} {view.session[:8]}{place} · {age} ── read-only\n"
        f"nodes {nodes}   gateways {sum(hub.linked for hub in hubs)}/{len(hubs)} linked   records {view.records}"
        "   requests: ask a gateway"
    )


def shown(view: FleetStatus) -> list[FleetMember]:
    """Without those that nothing is expected of any more."""
    return [member for member in view.members if member.state not in (*OVER, "evicted")]


def fleet_cluster_rows(view: FleetStatus) -> list[TableRow]:
    """One row for each cluster, without gateways."""
    groups: dict[str, list[FleetMember]] = {}
    for member in shown(view):
        if member.role != "gateway":
            groups.setdefault(member.cluster or member.provider, []).append(member)
    rows: list[TableRow] = []
    for cluster, members in sorted(groups.items()):
        sick = Counter(member.state for member in members if member.state in NEEDS_SOMEBODY)
        well = len(members) - sick.total()
        state = ", ".join(f"{count} {name}" for name, count in sorted(sick.items())) or "ok"
        level: Level = "well" if not sick else "worth a look" if well else "bad"
        ends = [member.ends_at for member in members if member.ends_at is not None]
        devices = sum(member.devices for member in members)
        cells = (
            cluster,
            state,
            members[0].provider,
            f"{well}/{len(members)}",
            f"{devices}×{members[0].device}" if members[0].device else "–",
            str(sum(_serves(member, service) for member in members for service in member.services)),
            UNKNOWN,
            until_text(min(ends), view.at) if ends else "–",
        )
        rows.append(table_row(cluster, cells, level))
    return problems_first(rows)


def fleet_model_rows(view: FleetStatus) -> list[TableRow]:
    """One row for each model that somebody serves or loads."""
    models: dict[str, list[tuple[FleetMember, FleetService]]] = {}
    for member in shown(view):
        for service in engines_shown(member):
            models.setdefault(service.model, []).append((member, service))
    rows = []
    for model, replicas in sorted(models.items()):
        ready = [member.provider for member, service in replicas if _serves(member, service)]
        level: Level = "well" if len(ready) == len(replicas) else "worth a look" if ready else "bad"
        state = {"well": "ok", "worth a look": "degraded", "bad": "not served"}[level]
        count = f"{len(ready)}/{len(replicas)}"
        cells = (model, state, count, *[UNKNOWN] * 9, ", ".join(sorted(set(ready))) or "–", UNKNOWN)
        rows.append(table_row(model, cells, level))
    return problems_first(rows)


def fleet_node_rows(view: FleetStatus) -> list[TableRow]:
    """One row for each service, and one for a node without any."""
    rows: list[TableRow] = []
    for member in shown(view):
        level: Level = (
            "bad" if member.state in NEEDS_SOMEBODY else "worth a look" if member.state == "joining" else "well"
        )
        services: list[FleetService | None] = [*engines_shown(member)]
        for service in services or [None]:
            key = member.session + (service.service if service is not None else "")
            rows.append(table_row(key, _node_cells(view, member, service), level))
    return problems_first(rows)


def _node_cells(view: FleetStatus, member: FleetMember, service: FleetService | None) -> tuple[str, ...]:
    link = link_text(view, member)
    walltime = "–" if member.ends_at is None else until_text(member.ends_at, view.at)
    engine = (service.replica, engine_text(service)) if service is not None else ("–", "–")
    figures = [UNKNOWN if service is not None else "–"] * 4
    state = "idle" if member.idle else member.state
    return (member.node or "–", state, link, *engine, *figures, walltime, member.cluster or "–", role_text(member))


def _serves(member: FleetMember, service: FleetService) -> bool:
    """Whether requests may go there, by the records."""
    return member.state == "serving" and service.lifecycle == "SERVING" and service.accepting
