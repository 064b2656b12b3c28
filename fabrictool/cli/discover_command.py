"""``discover``: a site's own words about itself, as an inventory to review."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Connection


def register(app: typer.Typer) -> None:
    app.command("discover")(discover)


def discover(
    target: Annotated[
        str, typer.Argument(metavar="CLUSTER|[USER@]HOST[:PORT]", help="A cluster of the inventory, or a login node.")
    ],
    user: Annotated[str, typer.Option(help="Your name there; also a reference such as secret://env/ALPHA_USER.")] = "",
    host_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Its public host key, `TYPE BASE64`; may be repeated.")
    ] = None,
    pin: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of its host keys, or a known_hosts that names it.")
    ] = None,
    identity: Annotated[str, typer.Option(metavar="FILE", help="Private key to log in with.")] = "",
    name: Annotated[str, typer.Option(help="Name of the cluster; default: Slurm's own.")] = "",
    site: Annotated[str, typer.Option(help="Name of the site; default: the cluster's.")] = "",
    provider: Annotated[str, typer.Option(help="Name of the institution that runs it.")] = "",
    kind: Annotated[
        Literal["slurm", "ssh"] | None, typer.Option(help="Default: slurm where there is `sinfo`, else ssh.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there; never overwrites.")
    ] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Ask a site's Slurm, or a plain host, what it has, and print the inventory that says so. Changes nothing there.

    A host is spoken to only with a pinned key: `--host-key`, `--pin`, or a cluster that an inventory describes.
    """
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.base.files import write_output
    from fabrictool.cli.discovering import HostAccess, site_named
    from fabrictool.cli.output import data, paint, say
    from fabrictool.clusters.discovery import describe
    from fabrictool.clusters.schedulers.shell import program
    from fabrictool.clusters.site_facts import read_site

    if output is not None and output.is_file():
        raise InvalidInputError.of("FT9007", f"{output} exists", file=str(output), hint="choose another file")
    access = HostAccess(user, tuple(host_key or ()), pin, identity)
    source = Source(blueprint, inventory)
    wanted, connect = site_named(target, access, (name, site, provider), kind or "", source)
    with connect() as connection:
        text = _ask(connection, program("discover"))
    described = describe(read_site(text, thing=f"host/{connection.endpoint.host}"), wanted)
    if output is None:
        data(described.text.rstrip("\n"))
    else:
        write_output(output, described.text.encode())
        say(f"wrote {output}")
    for check in described.checks:
        say(f"{paint('check', 'warning')}  {check}")


def _ask(connection: Connection, program: str) -> str:
    done = connection.run(["sh", "-c", program, "ft-discover", ".fabrictool", "-"])
    return done.stdout.decode(errors="replace")
