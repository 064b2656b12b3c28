"""``prune``: what fabrics left on a site and none of them uses."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, YesOption
from fabrictool.cli.source import Source

WORDS = {
    "run": "ended unit", "adopted": "ended agent of an adopted server", "environment": "environment",
    "upload": "broken upload", "cache": "cache",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("prune")(prune)


def prune(
    cluster: Annotated[str, typer.Argument(help="Name of the cluster; its first login node is used.")],
    keep: Annotated[
        int, typer.Option(min=0, max=3650, metavar="DAYS", help="Keep what changed in the last DAYS, such as logs.")
    ] = 7,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List it and change nothing.")] = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """List what no fabric on a site uses any more, and remove it: ended units, environments, cached weights."""
    from dataclasses import asdict

    from fabrictool.cli.applying import ask
    from fabrictool.cli.output import data, json_data, say, table
    from fabrictool.clusters.connections.factory import at_keyboard, login_of
    from fabrictool.clusters.kinds import scheduler_of
    from fabrictool.clusters.leftovers import leftovers

    inventory_read = Source(blueprint, inventory).inventory_alone()
    login, described = login_of(inventory_read, cluster), inventory_read.clusters[cluster]
    scheduler = scheduler_of(described.kind)
    with at_keyboard(login) as connection:
        there = leftovers(cluster, described.folder, connection, scheduler, keep_days=keep)
        if not there and not as_json:
            say(f"{cluster}: nothing is left behind")
        elif not as_json:
            rows = [[WORDS[i.kind], _mebibytes(i.octets), f"{i.days} d", i.path] for i in there]
            data(table(["WHAT", "SIZE", "UNCHANGED", f"IN {described.folder}"], rows))
        if there and not dry_run:
            ask(
                f"Remove {len(there)} item{'s'[: len(there) != 1]} from {cluster}?",
                yes=yes,
                first="`--dry-run` lists them",
            )
            there = leftovers(cluster, described.folder, connection, scheduler, keep_days=keep, remove=there)
            say(f"{cluster}: {_mebibytes(sum(item.octets for item in there))} freed")
    if as_json:
        from fabrictool.cli.answers import LeftoverRow, Leftovers

        items = [LeftoverRow(**asdict(item)) for item in there]
        json_data(Leftovers(cluster=cluster, removed=not dry_run, items=items))
    return 0


def _mebibytes(octets: int) -> str:
    return f"{octets / 2**20:,.0f} MiB"
