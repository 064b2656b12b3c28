"""``shell``: a terminal on a login node, reached as the inventory says."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption
from fabrictool.cli.source import Source


def register(app: typer.Typer) -> None:
    app.command("shell")(shell)


def shell(
    cluster: Annotated[str, typer.Argument(help="Name of the cluster; its first login node is used.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Run this instead of a shell.")
    ] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> int:
    """Open a shell on a cluster's login node, with the host keys, user and jump hosts of the inventory."""
    from fabrictool.clusters.connections.factory import endpoint_of, keyboard, login_of

    login = login_of(Source(blueprint, inventory).inventory_alone(), cluster)
    with keyboard(endpoint_of(login)) as connection:
        return connection.interact(command or ())
