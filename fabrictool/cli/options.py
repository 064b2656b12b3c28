"""Options that several commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BlueprintOption = Annotated[
    Path | None,
    typer.Option("--blueprint", "-b", help="Blueprint file; default: blueprint.yaml, or the only one in blueprints/."),
]
InventoryOption = Annotated[
    Path | None, typer.Option("--inventory", "-i", help="Inventory file; default: the one that the blueprint names.")
]
OverlayOption = Annotated[str | None, typer.Option(help="Overlay of the blueprint's overlays/ folder.")]
ScenarioOption = Annotated[str | None, typer.Option(help="Scenario of the blueprint.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
KeyOption = Annotated[
    str, typer.Option(metavar="REFERENCE", help="Key for a gateway that has keys, such as secret://env/NAME.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
PolicyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of review rules that the plan must keep; a denial exits with 6."),
]
