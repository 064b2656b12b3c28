"""``status``, ``logs``, ``events`` and ``top``: what is there, and what happens."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fabrictool.cli import completing
from fabrictool.cli.options import (
    BlueprintOption,
    InventoryOption,
    JsonOption,
    KeyOption,
    SshOption,
    refuse,
    seconds,
)
from fabrictool.cli.source import Source


class ScreenName(StrEnum):
    """A screen that `top` can begin with."""

    OVERVIEW = "overview"
    MODELS = "models"
    NODES = "nodes"
    JOBS = "jobs"
    MESH = "mesh"
    EVENTS = "events"
    PLAN = "plan"


def register(app: typer.Typer) -> None:
    for function in (status, logs, events, top):
        app.command(function.__name__)(function)


def status(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    url: Annotated[str, typer.Option(help="Read this gateway or agent instead of the blueprint's.")] = "",
    key: KeyOption = "",
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option(help="Repeat every two seconds until Ctrl-C.")] = False,
) -> int:
    """One look at the fabric: units, replicas, models, drift."""
    from fabrictool.cli.live import key_of
    from fabrictool.cli.watching import show_status

    refuse("--key is for --url: the fabric's own pages need none", key and not url)
    return show_status(Source(blueprint, inventory, lenient=True), url, as_json=as_json, watch=watch, key=key_of(key))


def logs(
    unit: Annotated[
        str,
        typer.Argument(
            help="replica/MODEL/N or gateway/NAME; `fabrictool status` lists them.", autocompletion=completing.units
        ),
    ],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=5000, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
) -> None:
    """The log of a unit and its engine, also after it ended."""
    from fabrictool.cli.watching import show_logs

    show_logs(unit, Source(blueprint, inventory, lenient=True), lines, follow=follow)


def events(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last events.")] = 50,
) -> None:
    """What happened: steps of apply from the journal, and what the running units saw."""
    from fabrictool.cli.watching import show_events

    show_events(Source(blueprint, inventory, lenient=True), lines, as_json=as_json)


# Wide: each is an option.
def top(
    url: Annotated[str, typer.Argument(help="URL of a gateway or an agent; default: the blueprint's gateway.")] = "",
    ssh: SshOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    key: KeyOption = "",
    interval: Annotated[
        float,
        typer.Option(parser=seconds(0.2, 60), metavar="DURATION", show_default="1s", help="Time between two looks."),
    ] = 1.0,
    screen: Annotated[
        ScreenName, typer.Option(help="The screen to begin with, or to print with --snapshot.")
    ] = ScreenName.OVERVIEW,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot", help="Print one screen as text and end, of a recording its last; exit 69 when nobody answers."
        ),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also append all that is seen to FILE, a look a line.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show what was recorded, with , . < > to move in time.")
    ] = None,
    made_up: Annotated[bool, typer.Option("--demo", help="Show a fabric that does not exist.")] = False,
) -> int:
    """Live status in the terminal; read-only. `?` lists the keys."""
    from fabrictool.cli.top_command import TopOptions, show_top
    from fabrictool.cli.watching import require_tui

    refuse(
        "--replay and --demo show no fabric: no URL, --ssh, --key or --record with them",
        (replay or made_up) and (url or ssh or key or record),
    )
    refuse("either a URL or --ssh", url and ssh)
    refuse("--ssh takes no --key: others may listen on that host", ssh and key)
    refuse("either --replay or --demo", replay and made_up)
    refuse("--snapshot ends after a look: nothing to record", snapshot and record)
    require_tui()
    hosts = tuple(ssh or ())
    options = TopOptions(url, hosts, key, interval, screen.value, record, replay, made_up=made_up, snapshot=snapshot)
    return show_top(Source(blueprint, inventory, lenient=True), options)
