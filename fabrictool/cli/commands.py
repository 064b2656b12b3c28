"""The command tree. Commands import what they need when they run, so that ``fabrictool --help`` stays fast."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.main import get_command_name
from typer.models import CommandInfo, TyperInfo

from fabrictool.cli import (
    adopt_command,
    agent_commands,
    blueprint_commands,
    bootstrap_command,
    catalogue_commands,
    discover_command,
    fabric_commands,
    gateway_commands,
    help_commands,
    instance_commands,
    mesh_commands,
    observe_command,
    prune_command,
    recommend_command,
    shell_command,
    show_command,
    simulate_commands,
    state_commands,
    trust_commands,
    usage_command,
    watch_commands,
    weights_commands,
)
from fabrictool.cli.help_groups import GroupedCommands
from fabrictool.cli.paging import without_pager


def build(wanted: str | None = None) -> typer.Typer:
    """The whole command tree; of a command that is `wanted` only what belongs to it, if there is such a one.

    The parser looks at every parameter of every command that it is given, which takes a tenth of a second.
    """
    app = typer.Typer(
        name="fabrictool",
        cls=GroupedCommands,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for room in (
        blueprint_commands,
        show_command,
        fabric_commands,
        watch_commands,
        observe_command,
        simulate_commands,
        recommend_command,
        instance_commands,
        catalogue_commands,
        gateway_commands,
        usage_command,
        agent_commands,
        adopt_command,
        mesh_commands,
        state_commands,
        trust_commands,
        discover_command,
        bootstrap_command,
        prune_command,
        weights_commands,
        shell_command,
        help_commands,
    ):
        room.register(app)
    if wanted == "schema":  # it writes the pages of all commands
        return app
    commands = [info for info in app.registered_commands if _name(info) == wanted]
    groups = [info for info in app.registered_groups if _name(info) == wanted]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups
    return app


def _name(info: CommandInfo | TyperInfo) -> str:
    """As it is typed."""
    if isinstance(info.name, str):
        return info.name
    named = info.typer_instance.info.name if isinstance(info, TyperInfo) and info.typer_instance else None
    return named if isinstance(named, str) else get_command_name(getattr(info.callback, "__name__", ""))


def _version(wanted: bool) -> None:
    if wanted:
        help_commands.version()
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    no_pager: Annotated[
        bool,
        typer.Option(
            "--no-pager", callback=without_pager, is_eager=True, help="Print long text at once, as PAGER=cat does."
        ),
    ] = False,
) -> None:
    """Serve LLMs on a federation of clusters: reviewed YAML in, OpenAI-compatible serving out."""
