"""The screens that are tables: their columns, and how a view fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.text import visible
from fabrictool.status.documents import AgentStatus, GatewayStatus
from fabrictool.status.fleet import FleetStatus, link_text, role_text
from fabrictool.tui.fleet_rows import fleet_cluster_rows, fleet_model_rows, fleet_node_rows
from fabrictool.tui.problems import OVER, WAITING_STATES, apply_state, beyond_forecast, missed_targets
from fabrictool.tui.rows import (
    APPLY,
    CLUSTER_COLUMNS,
    DRIFT,
    MODEL_COLUMNS,
    NODE_COLUMNS,
    PART,
    agent_rows,
    cluster_rows,
    model_cells,
    model_level,
    natural,
    node_rows,
    passed_text,
    problems_first,
    seconds_text,
    stamp,
    table_row,
    told_apart,
    until_text,
)
from fabrictool.tui.view import rate_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.domain.state import ModelPromise
    from fabrictool.status.sightings import UnitView
    from fabrictool.tui.rows import Level, TableRow
    from fabrictool.tui.view import ScreenView

NO_OPERATOR = "only who has the blueprint knows: start `fabrictool top` beside it, without a URL"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A screen that is a table."""

    name: str
    """What `:` and the keys call it."""
    columns: tuple[str, ...]
    rows: Callable[[ScreenView], list[TableRow]]
    empty: Callable[[ScreenView], str]
    """What stands there instead of no rows."""


# -- overview ---------------------------------------------------------------------------------------------------------

TROUBLE_COLUMNS = ("WHO", "WHAT", "SINCE", "WHY", "TYPE")


def trouble_rows(view: ScreenView) -> list[TableRow]:
    """What needs somebody, the worst first; then each cluster that is well."""
    rows = []
    for trouble in view.troubles:
        since = "–" if trouble.since is None else passed_text(view.there - trouble.since)
        cells = (trouble.subject, trouble.what, since, trouble.why, trouble.command)
        rows.append(table_row(trouble.key, cells, trouble.level))
    return rows


def clusters(view: ScreenView) -> list[TableRow]:
    live = view.moment.live
    if isinstance(live, GatewayStatus):
        rows = cluster_rows(live)
        return problems_first([*rows, *_without_nodes(view, {row.key for row in rows})])
    return fleet_cluster_rows(live) if isinstance(live, FleetStatus) else []


def _without_nodes(view: ScreenView, there: set[str]) -> list[TableRow]:
    """Clusters on which units are, and from which no node is known: such as where the only one was killed."""
    operator = view.moment.operator
    units: dict[str, list[UnitView]] = {}
    for unit in operator.units if operator is not None else ():
        if unit.address.startswith("replica/") and unit.cluster not in there and unit.state != "dormant":
            units.setdefault(unit.cluster, []).append(unit)
    rows = []
    for cluster, mine in units.items():
        level: Level = "worth a look" if all(unit.state in WAITING_STATES for unit in mine) else "bad"
        rows.append(table_row(cluster, (cluster, "no node", "–", f"0/{len(mine)}", "–", "0", "0", "–"), level))
    return rows


# -- models, nodes ----------------------------------------------------------------------------------------------------


def models(view: ScreenView) -> list[TableRow]:
    live = view.moment.live
    if isinstance(live, FleetStatus):
        return fleet_model_rows(live)
    if not isinstance(live, GatewayStatus):
        return []
    operator = view.moment.operator
    targets = operator.targets if operator is not None else {}
    forecasts = operator.forecasts if operator is not None else {}
    rows = []
    for model in live.models:
        promise = forecasts.get(model.model)
        late = beyond_forecast(model, promise)
        wanted = targets.get(model.model)
        missed = missed_targets(model, wanted) if wanted is not None else []
        slo = "–" if wanted is None else "no streams yet" if model.ttft_p95_s is None else "met"
        slo = "missed" if missed else slo
        figures = {
            "SLO": slo,
            "FORECAST": _forecast_text(promise, missed=any(late)),
            "REQ/S": rate_text(view.history.rate("requests", model.model)),
            "TOK/S": rate_text(view.history.rate("tokens", model.model)),
            "TREND": view.history.trend("requests", model.model),
        }
        level = model_level(model)
        level = "worth a look" if (missed or any(late)) and level == "well" else level
        rows.append(table_row(model.model, model_cells(model, figures, late), level))
    return problems_first(rows)


def _forecast_text(promise: ModelPromise | None, *, missed: bool) -> str:
    """TTFT / TPOT, and a word where what is measured is above the band."""
    if promise is None:
        return "–"
    times = (seconds_text(band.value) for band in (promise.ttft_p95_s, promise.tpot_p95_s))
    return " / ".join(times) + ("  miss" if missed else "")


def nodes(view: ScreenView) -> list[TableRow]:
    live = view.moment.live
    if isinstance(live, GatewayStatus):
        return node_rows(live)
    if isinstance(live, FleetStatus):
        return fleet_node_rows(live)
    return agent_rows(live) if isinstance(live, AgentStatus) else []


# -- jobs -------------------------------------------------------------------------------------------------------------

JOB_COLUMNS = ("UNIT", "STATE", "WHY", "JOB", "STARTS", "ENDS", "CLUSTER", "OPERATION")


def jobs(view: ScreenView) -> list[TableRow]:
    """Units in the words of their schedulers; what waits or failed comes first."""
    operator = view.moment.operator
    return problems_first([_job_row(unit, view.now) for unit in operator.units]) if operator is not None else []


def _job_row(unit: UnitView, now: float) -> TableRow:
    well = unit.state == "dormant" or (unit.state == "running" and unit.ready)
    level: Level = "well" if well else "worth a look" if unit.state in ("pending", "running", "starting") else "bad"
    begins = "–" if unit.begins_at is None or unit.state not in WAITING_STATES else until_text(unit.begins_at, now)
    ends = "–" if unit.ends_at is None or unit.state in OVER else until_text(unit.ends_at, now)
    state = unit.state if unit.ready or unit.state != "running" else "not ready"
    cells = (unit.address, state, unit.detail or "–", unit.job or "–", begins, ends, unit.cluster, unit.operation)
    return table_row(unit.address, cells, level)


# -- mesh -------------------------------------------------------------------------------------------------------------

MESH_COLUMNS = ("MEMBER", "STATE", "LINK", "SINCE", "SUSPECTED BY", "CERTIFICATE", "CLUSTER", "ROLE", "RELEASE")


def mesh(view: ScreenView) -> list[TableRow]:
    fleet = view.moment.mesh
    members = fleet.members if fleet is not None else []
    called = told_apart((member.cluster, member.node or member.session[:8]) for member in members)
    names = {member.session: name for member, name in zip(members, called, strict=True)}
    rows = []
    for member in members:
        since = "–" if member.lost_at is None else passed_text(view.there - member.lost_at)
        hubs = ", ".join(names.get(told.hub, told.hub[:8]) for told in member.accusations if told.stands) or "–"
        ends = member.certificate_ends_at
        level: Level = "well"
        if member.state in ("lost", "down", "evicted", "revoked"):
            level = "bad"
        elif member.state != "serving" and member.state not in ("left", "expired"):
            level = "worth a look"
        cells = (
            names[member.session],
            member.state,
            "–" if fleet is None else link_text(fleet, member),
            since,
            hubs,
            "–" if ends is None else until_text(ends, view.there),
            member.cluster or "–",
            role_text(member),
            member.release or "–",
        )
        rows.append(table_row(member.session, cells, level))
    return problems_first(sorted(rows, key=lambda row: natural(row.cells[0])))


NO_MESH = "who answers shows nothing of the mesh: give the status address of a gateway's or an agent's own page"


# -- events, plan -----------------------------------------------------------------------------------------------------

EVENT_COLUMNS = ("AT", "SOURCE", "KIND", "SUBJECT", "TEXT")
ALARMING = ("lost", "failed", "down", "unhealthy", "evicted", "stopping")
"""Parts of an event's kind that give its row a colour."""


def events(view: ScreenView) -> list[TableRow]:
    """What happened, by gateway, agent and apply; newest first."""
    lines = [(event.at, source, event.kind, event.subject, event.text) for source, event in view.events]
    operator = view.moment.operator
    lines += [
        (line.at, "apply", line.kind, line.address or line.plan[:8], line.text or line.action)
        for line in (operator.journal if operator is not None else ())
    ]
    rows = []
    for at, *words in sorted(lines, reverse=True):
        level: Level = "bad" if any(word in words[1] for word in ALARMING) else "well"
        rows.append(table_row(PART.join((str(at), *words)), (stamp(at), *words), level))
    return rows


PLAN_COLUMNS = ("UNIT", "STATE", "ACTION", "AT", "TEXT")
_STEP_STATES = {"intent": "under way", "started": "under way", "done": "done", "failed": "failed", "capped": "given up"}


def last_apply(view: ScreenView) -> list[TableRow]:
    """What the last apply came to, with each unit, and where it has drifted from since."""
    operator = view.moment.operator
    if operator is None:
        return []
    steps = {line.address: line for line in operator.journal if line.address}
    rows, whole_of_it = [], []
    for address, line in steps.items():
        state = _STEP_STATES.get(line.kind, line.kind)
        level: Level = "bad" if state in ("failed", "given up") else "worth a look" if state == "under way" else "well"
        rows.append(table_row(address, (address, state, line.action or "–", stamp(line.at), line.text or "–"), level))
    if (whole := apply_state(operator)) is not None:
        begin = operator.journal[0]
        level = "well" if whole in ("done", "under way") else "bad" if whole == "in part" else "worth a look"
        cells = (f"apply {begin.plan[:8]}", whole, "–", stamp(begin.at), begin.text or "–")
        whole_of_it = [table_row(APPLY, cells, level)]
    drifted = ("drift", "since then", "–", "–")
    rows += [table_row(f"{DRIFT}{text}", (*drifted, text), "worth a look") for text in operator.drift]
    return [*whole_of_it, *problems_first(sorted(rows, key=lambda row: natural(row.key)))]


def _jobs_text(view: ScreenView) -> str:
    operator = view.moment.operator
    if operator is None:
        return NO_OPERATOR
    why = [operator.trouble] if operator.trouble else operator.warnings
    return f"the clusters cannot be asked: {visible(why[0])}" if why else "nothing was started"


def _apply_text(view: ScreenView) -> str:
    return NO_OPERATOR if view.moment.operator is None else "nothing was applied from here yet: `fabrictool apply`"


def _says(text: str) -> Callable[[ScreenView], str]:
    """Where there is an answer: without one nothing is known."""
    return lambda view: "no answer yet" if view.moment.live is None else text


TABLES = (
    TableSpec("overview", TROUBLE_COLUMNS, trouble_rows, _says("nothing needs you")),
    TableSpec("models", MODEL_COLUMNS, models, _says("no model is served yet")),
    TableSpec("nodes", NODE_COLUMNS, nodes, _says("no node has joined yet")),
    TableSpec("jobs", JOB_COLUMNS, jobs, _jobs_text),
    TableSpec("mesh", MESH_COLUMNS, mesh, _says(NO_MESH)),
    TableSpec("events", EVENT_COLUMNS, events, _says("nothing happened yet")),
    TableSpec("plan", PLAN_COLUMNS, last_apply, _apply_text),
)
CLUSTERS = TableSpec("clusters", CLUSTER_COLUMNS, clusters, _says("no node has joined yet"))
"""Stands under the overview, on no screen of its own."""
