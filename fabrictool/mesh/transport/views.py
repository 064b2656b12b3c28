"""What a running node shows of the mesh, for the loopback pages of agents and gateways."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.mesh.fleet import fleet_head, fleet_of, members_of, records_head, rows_of
from fabrictool.status.fleet import FleetLink, read_query

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.mesh.transport.tunnel import Tunnel
    from fabrictool.status.fleet import FleetQuery, FleetStatus
    from fabrictool.status.pages import View

SLICE = 50
"""Entries that are made in one turn of the loop, about a millisecond: tokens and beats go between."""


def views_of(node: MeshNode) -> Mapping[str, View]:
    """Path → what is to be answered there; ``/fleet`` may be asked for some of the members."""
    return {"/fleet": lambda words: _fleet(node, read_query(words)), "/records": lambda _: _records(node)}


async def _fleet(node: MeshNode, query: FleetQuery) -> bytes:
    view, linked = node.view, node.neighbours
    head = fleet_head(view, links=links_of(node), refused_records=node.refused_records, vain_repairs=node.vain_repairs)
    return await _filled(
        msgspec.json.encode(head), b'"members":', (row for row in members_of(view, linked) if query.wants(row))
    )


async def _records(node: MeshNode) -> bytes:
    view = node.view
    return await _filled(msgspec.json.encode(records_head(view)), b'"rows":', rows_of(view))


async def _filled(head: bytes, field: bytes, entries: Iterable[msgspec.Struct]) -> bytes:
    """`head` with the entries in its empty list `field`, whose name no text in JSON can contain with its quotes."""
    parts, rest = [], iter(entries)
    while encoded := [msgspec.json.encode(entry) for entry in islice(rest, SLICE)]:
        parts.append(b",".join(encoded))
        await asyncio.sleep(0)
    before, _, after = head.partition(field + b"[]")
    return b"".join((before, field, b"[", b",".join(parts), b"]", after))


def fleet_status(node: MeshNode) -> FleetStatus:
    """The mesh as this node sees it now."""
    return fleet_of(
        node.view,
        linked=node.neighbours,
        links=links_of(node),
        refused_records=node.refused_records,
        vain_repairs=node.vain_repairs,
    )


def links_of(node: MeshNode) -> list[FleetLink]:
    """The hubs that it dials, connected or not; its site; who dialled it; and whom it reaches by a hub."""
    rows = []
    for address, route in sorted(node.hub_links.routes.items()):
        last = node.hub_links.tunnels.get(address)
        peer = last.peer.session if last is not None and last.peer is not None else b""
        tunnel = node.tunnel(peer)
        rows.append(
            FleetLink(
                peer=peer.hex(),
                address=address,
                up=tunnel is not None,
                path=route.used or "",
                failures={str(kind): why for kind, why in route.failures.items()},
                error=node.hub_links.errors.get(address, ""),
                **_figures(tunnel),
            )
        )
    rows += [
        FleetLink(peer=peer.hex(), address=str(address), up=True, path="direct", **_figures(node.tunnel(peer)))
        for peer, address in sorted(node.site_addresses.items())
        if node.tunnel(peer) is not None
    ]
    dialled = {row.peer for row in rows}
    others = [peer for peer in node.neighbours if peer.hex() not in dialled]
    rows += [FleetLink(peer=peer.hex(), up=True, **_figures(node.tunnel(peer))) for peer in others]
    return rows + [
        FleetLink(peer=peer.hex(), up=True, path="relay", by=hub.hex(), **_figures(tunnel))
        for peer, hub, tunnel in node.relays.opened
    ]


def _figures(tunnel: Tunnel | None) -> dict[str, Any]:
    """Of a live connection; of none, nothing is known."""
    return {} if tunnel is None else {"sent_octets": tunnel.sent_octets, "silent_s": tunnel.silent_s}
