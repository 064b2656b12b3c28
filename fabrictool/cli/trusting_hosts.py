"""``trust host``: what a host shows, what the inventory pins, and the lines to paste."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.cli.answers import HostKeyRow, HostKeys
from fabrictool.cli.hosts import known_endpoints, split_target
from fabrictool.cli.output import data, json_data, paint, say
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.connections.pins import HostKeyPin
    from fabrictool.clusters.connections.protocol import Endpoint
    from fabrictool.domain.inventory import Inventory


def show_host(target: str, jumps: Sequence[str], source: Source, *, as_json: bool) -> int:
    """Exit 1 when a key that the inventory pins for this host is not among those that it shows."""
    from fabrictool.clusters.connections.hostkeys import shown_keys

    inventory = _inventory(source)
    known = known_endpoints(inventory)
    cluster = inventory.clusters.get(target) if inventory is not None else None
    if cluster is not None and cluster.login:  # by the name of a cluster: its first login node
        host, port = cluster.login[0].host, cluster.login[0].port
    else:
        _, host, port = split_target(target)
    same = [(cluster, endpoint) for cluster, endpoint in known if (endpoint.host, endpoint.port) == (host, port)]
    shown = shown_keys(_endpoint(host, port, jumps, known, same))
    pinned = _pinned(same)
    missing = [pin for pin in pinned if not pin.authority and pin not in shown]
    if as_json:
        json_data(_document(host, port, shown, pinned, missing))
    else:
        _print(host, port, shown, pinned, missing)
    return 1 if missing else 0


def _inventory(source: Source) -> Inventory | None:
    """Without options, the one here if there is a sound one: a new cluster's keys are not in it yet."""
    try:
        return source.inventory_alone()
    except FabrictoolError as error:
        if source != Source():
            raise
        if error.problems[0].code != "FT9004":
            say(
                f"the blueprint here has mistakes ({error.problems[0].code}), so nothing is compared with its inventory"
            )
        return None


def _endpoint(
    host: str, port: int, jumps: Sequence[str], known: list[tuple[str, Endpoint]], same: list[tuple[str, Endpoint]]
) -> Endpoint:
    from fabrictool.clusters.connections.protocol import Endpoint

    # The user's name is never sent: there is no login.
    if not jumps:
        return replace(same[0][1], host_keys=()) if same else Endpoint(host, port, "nobody", ())
    return Endpoint(host, port, "nobody", (), tuple(_jump(text, known) for text in jumps))


def _jump(text: str, known: list[tuple[str, Endpoint]]) -> Endpoint:
    user, host, port = split_target(text)
    endpoint = next((endpoint for _, endpoint in known if (endpoint.host, endpoint.port) == (host, port)), None)
    if endpoint is None:
        message = f"the inventory pins no host key for the jump host {host}:{port}"
        raise UsageError.of("FT5304", message, hint=f"`fabrictool trust host {text}` first; then give it with -i")
    return replace(endpoint, user=user or endpoint.user, jumps=())


def _pinned(same: list[tuple[str, Endpoint]]) -> dict[HostKeyPin, list[str]]:
    from fabrictool.clusters.connections.pins import pins

    clusters: dict[HostKeyPin, list[str]] = {}
    for cluster, endpoint in same:
        for pin in pins(endpoint):
            names = clusters.setdefault(pin, [])
            if cluster not in names:
                names.append(cluster)
    return clusters


def _print(
    host: str, port: int, shown: list[HostKeyPin], pinned: dict[HostKeyPin, list[str]], missing: list[HostKeyPin]
) -> None:
    say(f"{host}:{port} shows {len(shown)} host keys; nothing was trusted and nobody logged in")
    for pin in shown:
        verdict = ""
        if pin in pinned:
            verdict = "  " + paint(f"pinned by {', '.join(pinned[pin])}", "good")
        elif pinned:
            verdict = "  not pinned"
        data(f"# {pin.fingerprint} {pin.kind}{verdict}")
    data("host_keys:")
    for pin in shown:
        data(f"  - {pin.line()}")
    for pin, clusters in pinned.items():
        if pin.authority:
            say(f"pinned by {', '.join(clusters)}: {pin}, which vouches for keys and is not compared here")
    for pin in missing:
        say(paint(f"pinned by {', '.join(pinned[pin])} and NOT shown: {pin}", "error"))
    say("compare the fingerprints with what the site publishes, over another way than this network, before you paste")


def _document(
    host: str, port: int, shown: list[HostKeyPin], pinned: dict[HostKeyPin, list[str]], missing: list[HostKeyPin]
) -> HostKeys:
    def rows(pins: list[HostKeyPin]) -> list[HostKeyRow]:
        return [
            HostKeyRow(type=pin.kind, fingerprint=pin.fingerprint, key=pin.line(), pinned_by=pinned.get(pin, []))
            for pin in pins
        ]

    return HostKeys(host=host, port=port, shown=rows(shown), pinned_and_not_shown=rows(missing))
