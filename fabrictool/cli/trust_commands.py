"""``trust init``, ``trust issue``, ``trust revoke``, ``trust show`` and ``trust host``."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, YesOption
from fabrictool.cli.source import Source


def register(app: typer.Typer) -> None:
    trust = typer.Typer(
        help="The federation's root, its providers' certificates, and login nodes' host keys.", no_args_is_help=True
    )
    trust.command("init")(init)
    trust.command("issue")(issue)
    trust.command("revoke")(revoke)
    trust.command("show")(show)
    trust.command("host")(host)
    app.add_typer(trust, name="trust")


def init(blueprint: BlueprintOption = None, inventory: InventoryOption = None) -> None:
    """Make the federation's root, once, and a certificate for each provider of the inventory."""
    import time

    from fabrictool.cli.output import say

    source = Source(blueprint, inventory)
    store = source.fabric().trust
    root = store.init(source.blueprint.fabric, now=time.time())
    for provider in source.inventory.providers:
        store.issue(provider, now=time.time())
    say(f"federation {root.claims.federation[:8]} of {source.blueprint.fabric}, keys in {store.folder} (mode 0700)")
    say(f"providers: {', '.join(source.inventory.providers)}, valid for 90 days")


def issue(
    provider: Annotated[str, typer.Argument(help="Name of the provider.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long it is valid.")] = 90,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Sign a provider's certificate, or renew it."""
    import time

    from fabrictool.cli.output import say

    credential = Source(blueprint, inventory).fabric().trust.issue(provider, now=time.time(), days=days)
    say(f"{credential.claims.uri()}, valid for {days} days; running sessions are not affected")


def revoke(
    name: Annotated[str, typer.Argument(metavar="PROVIDER|SESSION", help="A provider's name, or a session's id.")],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
) -> None:
    """Take back a provider's certificate, or one session's; `apply` tells the gateways, which tell all nodes.

    Nobody links to such a node any more, and nothing that it signs counts. It cannot be undone: a provider that may
    come back gets a new certificate by `trust issue`, and its jobs start anew.
    """
    import time

    from fabrictool.cli.output import say
    from fabrictool.cli.state_commands import ask

    store = Source(blueprint, inventory).fabric().trust
    kind = "all sessions of provider" if store.has_provider(name) else "session"
    ask(f"Revoke {kind} {name}? Its nodes are cut off for good.", yes=yes)
    store.revoke(name, now=time.time())
    say(f"revoked {name}; next: `fabrictool apply` tells the gateways while they serve")


def show(blueprint: BlueprintOption = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List the certificates and when they end, and what was revoked."""
    import time

    from fabrictool.cli.output import data, json_data, table

    store = Source(blueprint, inventory).fabric().trust
    rows, revoked = store.certificates(), store.revoked(now=time.time())
    if as_json:
        json_data({"format_version": "1", "type": "trust", "certificates": rows, "revoked": revoked})
        return
    data(table(["NAME", "FEDERATION", "VALID UNTIL"], [[r["name"], r["federation"][:8], r["not_after"]] for r in rows]))
    if revoked:
        data("")
        data(table(["REVOKED", "PROVIDER", "UNTIL"], [[r["id"], r["provider"] or "-", r["until"]] for r in revoked]))


def host(
    target: Annotated[
        str,
        typer.Argument(metavar="CLUSTER|HOST[:PORT]", help="A cluster of the inventory, a login node or a jump host."),
    ],
    jump: Annotated[
        list[str] | None,
        typer.Option(metavar="[USER@]HOST[:PORT]", help="Go through this host of the inventory; may be repeated."),
    ] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Print the keys that a host shows, for `host_keys`; trusts nothing. Exit 1: a pinned key is not among them."""
    from fabrictool.cli.trusting_hosts import show_host

    return show_host(target, jump or (), Source(blueprint, inventory), as_json=as_json)
