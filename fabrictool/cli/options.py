"""Options that several commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fabrictool.cli import completing

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(least: float, most: float) -> Callable[[Any], float]:
    """Reads a duration as blueprints write it, ``60s`` or ``15m``; a number alone is seconds."""

    def parse(value: Any) -> float:
        from fabrictool.base.units import Duration, UnitError

        try:
            number = float(value)
        except ValueError:
            try:
                number = float(Duration.parse(str(value)))
            except UnitError as error:
                raise typer.BadParameter(f"{error.message}: {error.hint}") from error
        if not least <= number <= most:  # nan, too, is in no range
            raise typer.BadParameter(f"{value} is not between {Duration(least)} and {Duration(most)}")
        return number

    return parse


def memory(value: Any) -> int:
    """Reads an amount of memory as blueprints write it, ``40GiB``; 0 is none."""
    from fabrictool.base.units import Memory, UnitError

    try:
        return int(Memory.parse(str(value))) if str(value) != "0" else 0
    except UnitError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from error


BlueprintOption = Annotated[
    Path | None,
    typer.Option("--blueprint", "-b", help="Blueprint file; default: blueprint.yaml, or the only one in blueprints/."),
]
InventoryOption = Annotated[
    Path | None, typer.Option("--inventory", "-i", help="Inventory file; default: the one named in the blueprint.")
]
OverlayOption = Annotated[str | None, typer.Option(help="Overlay from the blueprint's overlays/ folder.")]
ScenarioOption = Annotated[str | None, typer.Option(help="Scenario of the blueprint.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
KeyOption = Annotated[
    str, typer.Option(metavar="REFERENCE", help="Key for a gateway that has keys, such as secret://env/NAME.")
]
SshOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLUSTER|[USER@]HOST[:PORT]",
        help="Ask a gateway or an agent on that host, through SSH; a cluster of the inventory, or a host that your"
        " `ssh` knows. Repeated: the next one when nobody answers there.",
        autocompletion=completing.clusters,
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
PolicyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of review rules that the plan must keep; a denial exits with 6."),
]
ImproveOption = Annotated[
    bool,
    typer.Option("--improve", help="Search for a better placement also where nothing changed since the last apply."),
]
HorizonOption = Annotated[
    float | None,
    typer.Option(
        parser=seconds(900, 28 * 86400),
        metavar="DURATION",
        help="Show what would run in each step of so long, by hours of demand and price, instead of making a plan:"
        " 24h, 7d.",
    ),
]
StepOption = Annotated[
    float | None,
    typer.Option(
        parser=seconds(900, 7 * 86400), metavar="DURATION", help="Length of a step of --horizon; default: 1h."
    ),
]
AtOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="When --horizon begins, such as 2026-12-01T08:00:00Z; default: now."),
]


def refuse(why: str, given: object) -> None:
    """Raises BadParameter where options that exclude each other are given."""
    if given:
        raise typer.BadParameter(why)
