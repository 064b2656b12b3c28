"""``adopt``: a server that somebody started in a job of their own comes under the mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, seconds


def register(app: typer.Typer) -> None:
    app.command("adopt")(adopt)


# Wide: which server, and what is said of it.
def adopt(
    cluster: Annotated[str, typer.Argument(help="Name of the cluster; its first login node is used.")],
    job: Annotated[str, typer.Argument(help="Number of a job of yours that runs there.")],
    url: Annotated[
        str,
        typer.Option(
            metavar="http://127.0.0.1:PORT", help="Where the server listens on the job's first node, in its loopback."
        ),
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Which of its models; default: the only one that it lists.")] = "",
    partition: Annotated[
        str, typer.Option(help="Partition of the inventory whose devices it uses; default: the cluster's only one.")
    ] = "",
    devices: Annotated[int, typer.Option(min=1, max=4096, help="How many accelerators the server uses.")] = 1,
    release: Annotated[
        bool, typer.Option("--release", help="The other way: the agent leaves in order, server and job go on.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            parser=seconds(0, 86400), metavar="DURATION", show_default="2m", help="How long to wait until it serves."
        ),
    ] = 120.0,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a running engine under the mesh: an agent starts beside it, inside its job.

    Neither job nor engine is changed. The agent leaves before the job's walltime ends.
    """
    from fabrictool.cli.adopting import adopt_server, release_server
    from fabrictool.cli.source import Source

    source = Source(blueprint, inventory)
    if release:
        release_server(source, cluster, job, as_json=as_json)
    else:
        adopt_server(source, cluster, job, url, model, partition, devices, wait, as_json=as_json)
