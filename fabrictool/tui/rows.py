"""Status documents → the cells of tables: the half of the terminal UI that needs no terminal."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len, set_cell_size

from fabrictool.base.text import visible
from fabrictool.status.documents import GatewayStatus
from fabrictool.status.elastic import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.status.documents import AgentStatus, ModelRow, NodeRow, ServiceRow

GAP = "   "
"""Between the parts of a headline, which are never torn."""
STALE_S = 5.0
"""A view older than this is marked with a word, not with colour alone."""

MOST_S = 9999 * 3600.0
"""A time that is further off is a mistake or means never: as text it has no more digits."""

PART = "\x1f"
"""Between the parts of a row's key."""
DRIFT = f"drift{PART}"
"""How the keys of rows begin that say where a fabric has drifted."""
APPLY = f"apply{PART}"
"""Key of the row that says what all of an apply came to."""
EVENT_SUBJECT = 3
"""Which part of an event's key says whom it is about."""

Level = Literal["bad", "worth a look", "well"]
LEVELS: tuple[Level, ...] = ("bad", "worth a look", "well")
"""In the order of a table: what needs somebody comes first."""
FEW = 20
"""Samples; the 95th percentile of fewer is their largest, and it is said of how many."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of a table."""

    key: str
    cells: tuple[str, ...]
    level: Level = "well"


CLUSTER_COLUMNS = ("CLUSTER", "STATE", "PROVIDER", "NODES", "DEVICES", "REPLICAS", "OPEN", "NEXT WALLTIME")
MODEL_COLUMNS = (
    "MODEL", "STATE", "READY", "TTFT p95", "TPOT p95", "SLO", "FORECAST", "REQ/S", "TOK/S", "OPEN", "FAILED",
    "REQUESTS", "PROVIDERS", "TREND",
)  # fmt: skip
NODE_COLUMNS = (
    "NODE", "STATE", "LINK", "REPLICA", "ENGINE", "RUN", "WAIT", "KV", "REQUESTS", "WALLTIME", "CLUSTER", "ROLE",
)  # fmt: skip
SPARED = (
    "ROLE", "OPERATION", "PROVIDERS", "RELEASE", "KV", "REQUESTS", "WAIT", "PROVIDER", "DEVICES", "TREND", "WALLTIME",
    "CLUSTER", "OPEN", "TOK/S", "RUN", "ENGINE", "NEXT WALLTIME", "REPLICAS", "FORECAST", "TPOT p95", "NODES",
    "SUSPECTED BY", "CERTIFICATE", "TYPE", "SOURCE", "STARTS", "ENDS", "JOB", "REQ/S", "SLO",
)  # fmt: skip
"""What a narrow terminal does without, first to last; names, states, links and failures stay."""
ELASTIC = {"TYPE": 20, "SUBJECT": 16, "TEXT": 24, "WHY": 34}
"""Columns of words, and how many letters they keep where there is no room; the row's own page has all of them."""


def problems_first(rows: Sequence[TableRow]) -> list[TableRow]:
    """In their order otherwise."""
    return sorted(rows, key=lambda row: LEVELS.index(row.level))


def columns_that_fit(
    columns: tuple[str, ...], rows: Sequence[TableRow], width: int, headings: Sequence[str]
) -> dict[str, int]:
    """Those of `columns` that stand in `width`, each with a space on both sides, and how wide they are, with `headings`
    above them.

    Whole columns go first, as far as text cannot be cut (`ELASTIC`).
    """
    widths = {
        column: max(len(heading), *(cell_len(row.cells[index]) for row in rows)) if rows else len(heading)
        for index, (column, heading) in enumerate(zip(columns, headings, strict=True))
    }

    least = {column: min(widths[column], ELASTIC.get(column, widths[column])) for column in widths}
    for column in SPARED:
        if sum(least[name] + 2 for name in widths) <= width:
            break
        if column in widths and column != columns[0]:
            del widths[column]
    for column in ELASTIC:
        over = sum(letters + 2 for letters in widths.values()) - width
        if column in widths and over > 0:
            widths[column] = max(least[column], widths[column] - over)
    return widths


def cut(text: str, width: int) -> str:
    """With a mark where something is left out."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def broken(text: str, width: int) -> str:
    """So that its lines stand in `width`, where its parts do."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for part in line.split(GAP):
            longer = GAP.join(filter(None, (lines[-1], part)))
            if cell_len(longer) <= width or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(part)
    return "\n".join(lines)


def age_text(age_s: float) -> str:
    """With a word when it is too old."""
    return f"{age_s:.1f} s old" + ("  STALE" if age_s > STALE_S else "")


def headline(document: GatewayStatus | AgentStatus, age: str) -> str:
    if isinstance(document, GatewayStatus):
        agents = [node for node in document.nodes if node.role != "gateway"]
        linked = sum(node.connected for node in agents)
        totals = document.totals
        return (
            f"{document.fabric} ── view from the {_gateway_text(document)} · {age} ── read-only\n"
            f"nodes {linked}/{len(agents)} linked   open {totals.in_flight}   requests {totals.requests}"
            f"   failed {totals.failures}   retried {totals.retries}   tokens {totals.tokens}"
        )
    return (
        f"{document.fabric} ── view from the agent of {document.replica} · {age} ── read-only\n"
        f"engine {_engine_text(document)}   open {document.in_flight}"
        f"   gateways {len(document.links)}"
    )


def _gateway_text(document: GatewayStatus) -> str:
    return f"gateway {document.listen}" if document.listen else f"hub {document.mesh}"


def cluster_rows(document: GatewayStatus) -> list[TableRow]:
    """One row for each cluster, without gateways."""
    groups: dict[str, list[NodeRow]] = {}
    for node in document.nodes:
        if node.role != "gateway":
            groups.setdefault(node.cluster or node.provider, []).append(node)
    rows: list[TableRow] = []
    for cluster, nodes in sorted(groups.items(), key=lambda group: natural(group[0])):
        linked = sum(node.connected for node in nodes)
        services = [service for node in nodes if node.connected for service in node.services]
        ends = [node.ends_at for node in nodes if node.connected and node.ends_at is not None]
        devices = sum(node.devices for node in nodes)
        state = "ok" if linked == len(nodes) else "lost" if linked == 0 else f"{len(nodes) - linked} lost"
        level: Level = "well" if linked == len(nodes) else "bad" if linked == 0 else "worth a look"
        cells = (
            cluster,
            state,
            nodes[0].provider,
            f"{linked}/{len(nodes)}",
            f"{devices}×{nodes[0].device}" if nodes[0].device else "–",
            str(sum(service.lifecycle == "SERVING" for service in services)),
            str(sum(service.in_flight for service in services)),
            until_text(min(ends), document.at) if ends else "–",
        )
        rows.append(table_row(cluster, cells, level))
    return problems_first(rows)


def node_rows(document: GatewayStatus) -> list[TableRow]:
    """One row for each service, for a node without any, and for a planned replica that no node has."""
    rows: list[TableRow] = []
    names = told_apart((node.cluster, node.node) for node in document.nodes)
    for node, name in zip(document.nodes, names, strict=True):
        services: list[ServiceRow | None] = [s for s in node.services if s.lifecycle in ("JOIN", "SERVING")]
        for service in services or [None]:
            key = node.session + (service.service if service is not None else "")
            level: Level = "well" if node.connected and node.lifecycle == "SERVING" else "worth a look"
            if not node.connected and node.role != "gateway":
                level = "bad"
            rows.append(table_row(key, _node_cells(node, name, service, document.at), level))
    missing = [replica for model in document.models for replica in model.missing]
    rows += [table_row(replica, ("–", "missing", "–", replica, *["–"] * 8), "bad") for replica in missing]
    return problems_first(rows)


def agent_rows(document: AgentStatus) -> list[TableRow]:
    """The single row of an agent's own view."""
    engine = document.engine
    cells = (
        document.node,
        document.lifecycle,
        f"{len(document.links)} up" if document.links else "none",
        document.replica,
        _engine_text(document),
        str(engine.running),
        str(engine.waiting),
        f"{engine.kv_use:.0%}",
        str(document.in_flight),
        "–" if document.ends_at is None else until_text(document.ends_at, document.at),
        document.cluster,
        "agent",
    )
    return [
        table_row(
            document.session, cells, "well" if document.links and (document.idle or engine.state == "ready") else "bad"
        )
    ]


def _engine_text(document: AgentStatus) -> str:
    engine = document.engine
    if document.idle:
        return "idle"
    return f"{engine.engine} {engine.state}" + ("" if engine.elastic is None else f", {in_words(engine.elastic)}")


def matches(cells: tuple[str, ...], wanted: str) -> bool:
    """Whether a row passes the filter: every word occurs, a word after ``!`` does not, and of one after ``~`` the
    letters occur in this order in one cell.
    """
    text = " ".join(cells).lower()

    def passes(word: str) -> bool:
        if word.startswith("!"):
            return len(word) == 1 or word[1:] not in text
        if word.startswith("~"):
            return any(_in_order(word[1:], cell.lower()) for cell in cells)
        return word in text

    return all(passes(word) for word in wanted.lower().split())


def _in_order(letters: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in letters)


def table_row(key: str, cells: tuple[str, ...], level: Level) -> TableRow:
    return TableRow(key, tuple(visible(cell) for cell in cells), level)


def model_level(model: ModelRow) -> Level:
    if not model.wanted and model.dormant:
        return "well"
    return "well" if model.ready and model.ready == model.wanted else "worth a look" if model.ready else "bad"


SLOW = " ▲"
"""After what is measured above the forecast's band; a narrow screen has no column that says so."""


def model_cells(
    model: ModelRow, figures: Mapping[str, str], late: tuple[bool, bool] = (False, False)
) -> tuple[str, ...]:
    """`figures`: the columns that the document does not say; `late`: whether TTFT and TPOT are above their forecast."""
    state = {"well": "ok", "worth a look": "degraded", "bad": "not served"}[model_level(model)]
    if not model.wanted and model.dormant:
        state = f"starting for {model.held}" if model.held else "on request"
    few = f" (n={model.samples})" if 0 < model.samples < FEW else ""
    return (
        model.model,
        state,
        f"{model.ready}/{model.wanted}",
        seconds_text(model.ttft_p95_s) + few + SLOW * late[0],
        seconds_text(model.tpot_p95_s) + SLOW * late[1],
        figures["SLO"],
        figures["FORECAST"],
        figures["REQ/S"],
        figures["TOK/S"],
        str(model.in_flight),
        str(model.failures),
        str(model.requests),
        ", ".join(model.providers) or "–",
        figures["TREND"],
    )


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """By which cluster-2 comes before cluster-10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", text) if part)


def told_apart(nodes: Iterable[tuple[str, str]]) -> list[str]:
    """Names of nodes, given with their clusters; with its cluster one that another cluster has a node of, too."""
    pairs = list(nodes)
    clusters: dict[str, set[str]] = {}
    for cluster, node in pairs:
        clusters.setdefault(node, set()).add(cluster)
    return [f"{cluster}/{node}" if cluster and node and len(clusters[node]) > 1 else node for cluster, node in pairs]


def _node_cells(node: NodeRow, name: str, service: ServiceRow | None, now: float) -> tuple[str, ...]:
    if node.connected:
        link = f"by {node.by[:8]}" if node.by else "up"
    else:
        link = "lost" + (f" {min(max(0.0, now - node.disconnected_at), MOST_S):.0f} s" if node.disconnected_at else "")
    walltime = "–" if node.ends_at is None else until_text(node.ends_at, now)
    head = (name or "–", "idle" if node.idle else node.lifecycle, link)
    where = (walltime, node.cluster or "–", node.role)
    if service is None:
        return (*head, "–", "–", "–", "–", "–", "–", *where)
    return (
        *head,
        service.replica,
        " ".join(filter(None, (service.engine, service.precision, "" if service.accepting else "draining"))) or "–",
        str(service.running),
        str(service.waiting),
        f"{service.kv_use:.0%}",
        str(service.requests),
        *where,
    )


def seconds_text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def passed_text(seconds: float) -> str:
    seconds = min(max(0.0, seconds), MOST_S)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def stamp(at: float, form: str = "%m-%d %H:%M:%SZ") -> str:
    """A time that somebody wrote, who may be far off."""
    try:
        return time.strftime(form, time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"


def until_text(end: float, now: float) -> str:
    left = int(min(max(0.0, end - now), MOST_S))
    return f"in {left // 3600} h {left % 3600 // 60:02} m" if left >= 3600 else f"in {left // 60} m {left % 60:02} s"
