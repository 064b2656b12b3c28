"""Status documents → the cells of tables: the half of the terminal UI that needs no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.status.documents import GatewayStatus

if TYPE_CHECKING:
    from fabrictool.status.documents import AgentStatus, ModelRow, NodeRow, ServiceRow

STALE_S = 5.0
"""A view older than this is marked with a word, not with colour alone."""

Row = tuple[str, tuple[str, ...]]
"""Key and cells."""

CLUSTER_COLUMNS = ("CLUSTER", "PROVIDER", "NODES", "DEVICES", "REPLICAS", "OPEN", "NEXT WALLTIME", "STATE")
MODEL_COLUMNS = ("MODEL", "READY", "PROVIDERS", "OPEN", "REQUESTS", "FAILED", "TOKENS", "TTFT p95", "TPOT p95", "STATE")
NODE_COLUMNS = (
    "NODE", "CLUSTER", "ROLE", "LINK", "STATE", "REPLICA", "ENGINE", "RUN", "WAIT", "KV", "REQUESTS", "WALLTIME",
)  # fmt: skip


def headline(document: GatewayStatus | AgentStatus, *, age_s: float) -> str:
    """Whose view, how old, how much of it is well."""
    stale = "  STALE" if age_s > STALE_S else ""
    if isinstance(document, GatewayStatus):
        agents = [node for node in document.nodes if node.role != "gateway"]
        linked = sum(node.connected for node in agents)
        totals = document.totals
        return (
            f"{document.fabric} ── view from the gateway {document.listen} · {age_s:.1f} s old{stale} ── read-only\n"
            f"nodes {linked}/{len(agents)} linked   open {totals.in_flight}   requests {totals.requests}"
            f"   failed {totals.failures}   retried {totals.retries}   tokens {totals.tokens}"
        )
    return (
        f"{document.fabric} ── view from the agent of {document.replica} · {age_s:.1f} s old{stale} ── read-only\n"
        f"engine {document.engine.engine} {document.engine.state}   open {document.in_flight}"
        f"   gateways {len(document.links)}"
    )


def cluster_rows(document: GatewayStatus) -> list[Row]:
    """One row for each cluster, without gateways."""
    groups: dict[str, list[NodeRow]] = {}
    for node in document.nodes:
        if node.role != "gateway":
            groups.setdefault(node.cluster or node.provider, []).append(node)
    rows: list[Row] = []
    for cluster, nodes in sorted(groups.items()):
        linked = sum(node.connected for node in nodes)
        services = [service for node in nodes if node.connected for service in node.services]
        ends = [node.ends_at for node in nodes if node.connected and node.ends_at is not None]
        devices = sum(node.devices for node in nodes)
        state = "ok" if linked == len(nodes) else "lost" if linked == 0 else f"{len(nodes) - linked} lost"
        cells = (
            cluster,
            nodes[0].provider,
            f"{linked}/{len(nodes)}",
            f"{devices}×{nodes[0].device}" if nodes[0].device else "–",
            str(sum(service.lifecycle == "SERVING" for service in services)),
            str(sum(service.in_flight for service in services)),
            _until(min(ends), document.at) if ends else "–",
            state,
        )
        rows.append((cluster, cells))
    return rows


def model_rows(document: GatewayStatus) -> list[Row]:
    return [(model.model, _model_cells(model)) for model in document.models]


def node_rows(document: GatewayStatus) -> list[Row]:
    """One row for each service, and one for a node without any."""
    rows: list[Row] = []
    for node in document.nodes:
        services: list[ServiceRow | None] = [s for s in node.services if s.lifecycle in ("JOIN", "SERVING")]
        for service in services or [None]:
            key = node.session + (service.service if service is not None else "")
            rows.append((key, _node_cells(node, service, document.at)))
    return rows


def agent_rows(document: AgentStatus) -> list[Row]:
    """The single row of an agent's own view."""
    engine = document.engine
    cells = (
        document.node,
        document.cluster,
        "agent",
        f"{len(document.links)} up" if document.links else "none",
        document.lifecycle,
        document.replica,
        f"{engine.engine} {engine.state}",
        str(engine.running),
        str(engine.waiting),
        f"{engine.kv_use:.0%}",
        str(document.in_flight),
        "–" if document.ends_at is None else _until(document.ends_at, document.at),
    )
    return [(document.session, cells)]


def matches(cells: tuple[str, ...], wanted: str) -> bool:
    """Whether a row passes the filter: every word occurs, a word after ``!`` does not."""
    text = " ".join(cells).lower()
    return all((word[1:] not in text) if word.startswith("!") else (word in text) for word in wanted.lower().split())


def _model_cells(model: ModelRow) -> tuple[str, ...]:
    state = "ok" if model.ready and model.ready == model.replicas else "degraded" if model.ready else "not served"
    return (
        model.model,
        f"{model.ready}/{model.replicas}",
        ", ".join(model.providers) or "–",
        str(model.in_flight),
        str(model.requests),
        str(model.failures),
        str(model.tokens),
        _seconds(model.ttft_p95_s),
        _seconds(model.tpot_p95_s),
        state,
    )


def _node_cells(node: NodeRow, service: ServiceRow | None, now: float) -> tuple[str, ...]:
    link = "up" if node.connected else "lost" + (f" {now - node.disconnected_at:.0f} s" if node.disconnected_at else "")
    walltime = "–" if node.ends_at is None else _until(node.ends_at, now)
    head = (node.node or "–", node.cluster or "–", node.role, link, node.lifecycle)
    if service is None:
        return (*head, "–", "–", "–", "–", "–", "–", walltime)
    return (
        *head,
        service.replica,
        " ".join(filter(None, (service.engine, service.precision, "" if service.accepting else "draining"))) or "–",
        str(service.running),
        str(service.waiting),
        f"{service.kv_use:.0%}",
        str(service.requests),
        walltime,
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _until(end: float, now: float) -> str:
    left = max(0, int(end - now))
    return f"in {left // 3600} h {left % 3600 // 60:02} m" if left >= 3600 else f"in {left // 60} m {left % 60:02} s"
