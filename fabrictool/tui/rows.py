"""Status documents → the cells of tables: the half of the terminal UI that needs no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.text import visible
from fabrictool.status.documents import GatewayStatus
from fabrictool.status.elastic import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.status.documents import AgentStatus, ModelRow, NodeRow, ServiceRow

STALE_S = 5.0
"""A view older than this is marked with a word, not with colour alone."""

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
MODEL_COLUMNS = ("MODEL", "STATE", "READY", "PROVIDERS", "OPEN", "REQUESTS", "FAILED", "TTFT p95", "TPOT p95", "TOKENS")
NODE_COLUMNS = (
    "NODE", "STATE", "LINK", "REPLICA", "ENGINE", "RUN", "WAIT", "KV", "REQUESTS", "WALLTIME", "CLUSTER", "ROLE",
)  # fmt: skip
SPARED = (
    "ROLE", "TOKENS", "KV", "REQUESTS", "WAIT", "PROVIDER", "PROVIDERS", "DEVICES", "WALLTIME", "CLUSTER", "OPEN",
    "RUN", "ENGINE", "NEXT WALLTIME", "REPLICAS", "TPOT p95", "NODES",
)  # fmt: skip
"""What a narrow terminal does without, first to last; names, states, links and failures stay."""


def problems_first(rows: Sequence[TableRow]) -> list[TableRow]:
    """In their order otherwise."""
    return sorted(rows, key=lambda row: LEVELS.index(row.level))


def columns_that_fit(columns: tuple[str, ...], rows: Sequence[TableRow], width: int) -> tuple[str, ...]:
    """Those of `columns` that stand in `width` whole, each with a space on both sides."""
    widths = {
        column: max(len(column), *(len(row.cells[index]) for row in rows)) + 2 if rows else len(column) + 2
        for index, column in enumerate(columns)
    }
    left = list(columns)
    for column in SPARED:
        if sum(widths[name] for name in left) <= width:
            break
        if column in left and column != columns[0]:
            left.remove(column)
    return tuple(left)


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
    for cluster, nodes in sorted(groups.items()):
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


def model_rows(document: GatewayStatus) -> list[TableRow]:
    return problems_first([_model_row(model) for model in document.models])


def node_rows(document: GatewayStatus) -> list[TableRow]:
    """One row for each service, for a node without any, and for a planned replica that no node has."""
    rows: list[TableRow] = []
    for node in document.nodes:
        services: list[ServiceRow | None] = [s for s in node.services if s.lifecycle in ("JOIN", "SERVING")]
        for service in services or [None]:
            key = node.session + (service.service if service is not None else "")
            level: Level = "well" if node.connected and node.lifecycle == "SERVING" else "worth a look"
            if not node.connected and node.role != "gateway":
                level = "bad"
            rows.append(table_row(key, _node_cells(node, service, document.at), level))
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
    """Whether a row passes the filter: every word occurs, a word after ``!`` does not."""
    text = " ".join(cells).lower()
    return all((word[1:] not in text) if word.startswith("!") else (word in text) for word in wanted.lower().split())


def table_row(key: str, cells: tuple[str, ...], level: Level) -> TableRow:
    return TableRow(key, tuple(visible(cell) for cell in cells), level)


def _model_row(model: ModelRow) -> TableRow:
    level: Level = "well" if model.ready and model.ready == model.wanted else "worth a look" if model.ready else "bad"
    state = {"well": "ok", "worth a look": "degraded", "bad": "not served"}[level]
    if not model.wanted and model.dormant:
        level, state = "well", f"starting for {model.held}" if model.held else "on request"
    few = f" (n={model.samples})" if 0 < model.samples < FEW else ""
    cells = (
        model.model,
        state,
        f"{model.ready}/{model.wanted}",
        ", ".join(model.providers) or "–",
        str(model.in_flight),
        str(model.requests),
        str(model.failures),
        _seconds(model.ttft_p95_s) + few,
        _seconds(model.tpot_p95_s),
        str(model.tokens),
    )
    return table_row(model.model, cells, level)


def _node_cells(node: NodeRow, service: ServiceRow | None, now: float) -> tuple[str, ...]:
    if node.connected:
        link = f"by {node.by[:8]}" if node.by else "up"
    else:
        link = "lost" + (f" {now - node.disconnected_at:.0f} s" if node.disconnected_at else "")
    walltime = "–" if node.ends_at is None else until_text(node.ends_at, now)
    head = (node.node or "–", "idle" if node.idle else node.lifecycle, link)
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


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def until_text(end: float, now: float) -> str:
    left = max(0, int(end - now))
    return f"in {left // 3600} h {left % 3600 // 60:02} m" if left >= 3600 else f"in {left // 60} m {left % 60:02} s"
