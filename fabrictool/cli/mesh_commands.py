"""``mesh members``, ``paths``, ``records``, ``convergence``, ``observe`` and ``replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, memory, seconds
from fabrictool.cli.source import Source

UrlOption = Annotated[
    str,
    typer.Option(
        metavar="URL", help="Status address of any agent or gateway; default: whichever of the fabric answers."
    ),
]


def register(app: typer.Typer) -> None:
    mesh = typer.Typer(help="The mesh, as any of its nodes sees it; changes nothing.", no_args_is_help=True)
    for function in (members, paths, records, convergence, observe, replay):
        mesh.command(function.__name__)(function)
    app.add_typer(mesh, name="mesh")


def members(
    url: UrlOption = "",
    model: Annotated[str, typer.Option(help="Only those that serve or load this model.")] = "",
    provider: Annotated[str, typer.Option(help="Only those of this provider.")] = "",
    device: Annotated[str, typer.Option(help="Only those whose device's id begins so, such as a100.")] = "",
    free: Annotated[
        int,
        typer.Option(
            parser=memory, metavar="MEMORY", show_default="any", help="Only those with so much free on a device."
        ),
    ] = 0,
    devices: Annotated[int, typer.Option(min=1, max=4096, help="On so many devices at once.")] = 1,
    idle: Annotated[bool, typer.Option("--idle", help="Only those that wait to be assigned a model.")] = False,
    everybody: Annotated[bool, typer.Option("--all", help="Also those whose session is over.")] = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who is in the mesh, with what, and who is suspected, lost or evicted, by whom and why."""
    from fabrictool.cli.mesh_showing import show_members
    from fabrictool.status.fleet import FleetQuery

    source = Source(blueprint, inventory, lenient=True)
    wanted = FleetQuery(model=model, provider=provider, device=device, free=free, devices=devices, idle=idle)
    show_members(source, url, wanted, everybody=everybody, as_json=as_json)


def paths(
    url: UrlOption = "",
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """The links of one node: to whom, by which path, and why other paths failed."""
    from fabrictool.cli.mesh_showing import show_paths

    show_paths(Source(blueprint, inventory, lenient=True), url, as_json=as_json)


def records(
    key: Annotated[
        str, typer.Argument(help="First characters of a key or an owner, or a replica's name; default: all.")
    ] = "",
    url: UrlOption = "",
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """The signed records of one node: whose, of what, in which version, until when they count."""
    from fabrictool.cli.mesh_showing import show_records

    show_records(Source(blueprint, inventory, lenient=True), url, key, as_json=as_json)


def convergence(
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Ask this agent or gateway; repeatable. Default: all that can be reached."),
    ] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Whether all nodes hold the same records; exit 1 when they differ twice."""
    from fabrictool.cli.mesh_asking import show_convergence

    return show_convergence(Source(blueprint, inventory, lenient=True), url or (), as_json=as_json)


def observe(
    url: UrlOption = "",
    interval: Annotated[
        float,
        typer.Option(parser=seconds(0.2, 60), metavar="DURATION", show_default="1s", help="Time between two looks."),
    ] = 1.0,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow what changes in the mesh, a line an event, until Ctrl-C."""
    from fabrictool.cli.mesh_watching import follow_mesh

    follow_mesh(Source(blueprint, inventory, lenient=True), url, interval, as_json=as_json)


def replay(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="mesh.trace of a gateway's run folder, copied here.")],
    as_json: JsonOption = False,
) -> int:
    """Play a gateway's trace again, and say what happened and when; exit 1 if this release decides otherwise.

    Gateways with `trace: 64MiB` in the blueprint keep one from their start.
    """
    from fabrictool.cli.mesh_replay import show_replay

    return show_replay(trace, as_json=as_json)
