"""``agent join``; its siblings are in `assign_commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.assign_commands import register as register_assigning
from fabrictool.cli.options import seconds


def register(app: typer.Typer) -> None:
    agent = typer.Typer(
        help="Contribute a node yourself, from a job script; assign models to idle nodes.", no_args_is_help=True
    )
    agent.command("join", context_settings={"ignore_unknown_options": False})(join)
    register_assigning(agent)
    app.add_typer(agent, name="agent")


def join(
    token: Annotated[str, typer.Argument(metavar="TOKENFILE", help="File with the join token, mode 600; - is stdin.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Starts an OpenAI-compatible server on 127.0.0.1; {port} in it becomes a free port.",
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="http://127.0.0.1:PORT", help="A server that already runs, instead of COMMAND.")
    ] = "",
    model: Annotated[str, typer.Option(help="Which of its models; default: the only one that it lists.")] = "",
    provider: Annotated[str, typer.Option(help="Refuse a token of any other provider.")] = "",
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the token is bound to, if it is; default: the Slurm job's id. Others on this machine see it.",
        ),
    ] = None,
    bind_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with what the token is bound to, mode 600; nobody else sees it.")
    ] = "",
    groups: Annotated[
        str, typer.Option(metavar="NAMES", help="Consumer groups to serve, comma-separated; default: any.")
    ] = "",
    gateways_of: Annotated[
        str, typer.Option(metavar="PROVIDERS", help="Whose gateways may ask, comma-separated; default: anybody's.")
    ] = "",
    idle: Annotated[
        bool, typer.Option("--idle", help="Offer the node without a model; its provider's controller assigns one.")
    ] = False,
    engines: Annotated[
        str,
        typer.Option(metavar="NAMES", help="With --idle: engines that may be started, comma-separated; default: any."),
    ] = "",
    allow: Annotated[
        str,
        typer.Option(
            metavar="SOURCES",
            help="With --idle: sources of models that may be served, such as hf://Qwen/*; default: any.",
        ),
    ] = "",
    folder: Annotated[str, typer.Option(help="Folder for the key while it is in use; default: in memory.")] = "",
    site: Annotated[str, typer.Option(help="Name of the site; default: the provider's.")] = "",
    cluster: Annotated[str, typer.Option(help="Name of the cluster; default: Slurm's, or the machine's.")] = "",
    device: Annotated[str, typer.Option(help="Accelerator, by its id in the catalogue.")] = "",
    devices: Annotated[int, typer.Option(min=1, max=4096, help="How many accelerators the server uses.")] = 1,
    site_links: Annotated[
        bool,
        typer.Option(
            "--site-links/--no-site-links",
            help="Listen on a port of this node for agents of the same site, which then need no gateway to agree.",
        ),
    ] = True,
    drain: Annotated[
        float,
        typer.Option(
            parser=seconds(0, 7 * 86400),
            metavar="DURATION",
            show_default="20s",
            help="How long open requests get to finish before it leaves.",
        ),
    ] = 20.0,
    start_timeout: Annotated[
        float,
        typer.Option(
            parser=seconds(1, 7 * 86400),
            metavar="DURATION",
            show_default="10m",
            help="How long the server gets to start.",
        ),
    ] = 600.0,
) -> None:
    """Offer a server on this machine, or the machine itself, to a federation; SIGTERM leaves in order."""
    import os
    import sys

    named = {
        "--url": url,
        "--model": model,
        "--provider": provider,
        "--folder": folder,
        "--site": site,
        "--cluster": cluster,
        "--device": device,
        "--bind-file": bind_file,
        "--groups": groups,
        "--gateways-of": gateways_of,
        "--engines": engines,
        "--allow": allow,
    }
    words = [word for name, value in named.items() if value for word in (name, value)]
    words += ["--idle"] if idle else []
    words += ["--bind", bind] if bind is not None else []
    words += [] if site_links else ["--no-site-links"]
    words += ["--devices", str(devices), "--drain", str(drain), "--start-timeout", str(start_timeout), token]
    words += ["--", *command] if command else []
    # The agent's own program, so that what runs for days on a node has loaded nothing of the command line.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "fabrictool.agent.join", *words])  # noqa: S606 - no shell
