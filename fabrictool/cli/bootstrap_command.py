"""``bootstrap``: the agents' environment, placed on a site's shared file system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption
from fabrictool.cli.source import Source


def register(app: typer.Typer) -> None:
    app.command("bootstrap")(bootstrap)


def bootstrap(
    cluster: Annotated[str, typer.Argument(help="Name of the cluster; its first login node is used.")],
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Path of the site's Python; default: one found there that fits.")
    ] = "",
    platform: Annotated[
        Literal["x86_64", "aarch64"] | None,
        typer.Option(help="Platform of the compute nodes, if it differs from the login node's."),
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="requirements.lock; needed when the site's Python or platform differs from this machine's.",
        ),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, max=100, help="How many releases to keep there.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and change nothing.")] = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place the Python environment of agents on a cluster, checked file by file; a second time changes nothing."""
    from dataclasses import asdict

    from fabrictool.cli.output import json_data, say
    from fabrictool.clusters.connections.factory import at_keyboard, login_of
    from fabrictool.clusters.environment.bootstrap import Wishes
    from fabrictool.clusters.environment.bootstrap import bootstrap as carry_out

    described = Source(blueprint, inventory).inventory_alone()
    login = login_of(described, cluster)
    wishes = Wishes(python=python, machine=platform or "", lock=lock, keep=keep, dry_run=dry_run)
    with at_keyboard(login) as connection:
        placed = carry_out(cluster, described.clusters[cluster], connection, wishes, say)
    if as_json:
        from fabrictool.cli.answers import Environment

        json_data(Environment(cluster=cluster, **asdict(placed)))
    elif not dry_run:
        verb = "is in use now" if placed.changed else "was in use already"
        ran = f"fabrictool {placed.python}" if placed.python else "Python not tested: the nodes have another platform"
        say(f"{cluster}: env/rel/{placed.release} {verb}; {ran}")
