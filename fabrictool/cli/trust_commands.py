"""``trust init``, ``issue``, ``revoke``, ``show``, ``token``, ``issuer``, ``accept``, ``controller``, ``host`` and
``sign-build``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, YesOption, seconds
from fabrictool.cli.source import Source

TokenRole = Literal["agent", "gateway"]
TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust", help="Folder with root.crt and the provider's pair in providers/; default: the fabric's own."
    ),
]


def register(app: typer.Typer) -> None:
    trust = typer.Typer(
        help="The federation's root, its providers' certificates, join tokens, and login nodes' host keys.",
        no_args_is_help=True,
    )
    trust.command("init")(init)
    trust.command("issue")(issue)
    trust.command("revoke")(revoke)
    trust.command("show")(show)
    trust.command("token")(token)
    trust.command("issuer")(issuer)
    trust.command("accept")(accept)
    trust.command("controller")(controller)
    trust.command("host")(host)
    trust.command("sign-build")(sign_build_command)
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


def sign_build_command(
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private Ed25519 key, as ssh-keygen writes it.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: beside this installation's modules."),
    ] = None,
) -> None:
    """Sign the files of this installation, for gateways whose blueprint wants `trust.builds`."""
    from fabrictool import __version__
    from fabrictool.agent.measured import measured_build, package_folder
    from fabrictool.base.files import file_error, write_atomic
    from fabrictool.cli.output import say
    from fabrictool.mesh.attestation import BUILD_FILE, read_signing_key, sign_build

    try:
        private = read_signing_key(key.read_bytes(), str(key))
    except OSError as error:
        raise file_error(error, key) from error
    digest = measured_build(package_folder())
    path = output or package_folder() / BUILD_FILE
    write_atomic(path, sign_build(__version__, digest, private))
    say(f"fabrictool {__version__}, files {digest.hex()[:16]}…, signed: {path}")


def show(blueprint: BlueprintOption = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List the certificates and when they end, and what was revoked."""
    import time

    from fabrictool.cli.output import data, json_data, table

    store = Source(blueprint, inventory).fabric().trust
    rows, revoked = store.certificates(), store.revoked(now=time.time())
    if as_json:
        from fabrictool.cli.answers import CertificateRow, RevokedRow, TrustAnswer

        json_data(
            TrustAnswer(
                certificates=[CertificateRow(**row) for row in rows], revoked=[RevokedRow(**row) for row in revoked]
            )
        )
        return
    data(table(["NAME", "FEDERATION", "VALID UNTIL"], [[r["name"], r["federation"][:8], r["not_after"]] for r in rows]))
    if revoked:
        data("")
        data(table(["REVOKED", "PROVIDER", "UNTIL"], [[r["id"], r["provider"] or "-", r["until"]] for r in revoked]))


def token(
    provider: Annotated[str, typer.Argument(help="Name of the provider that signs it.")],
    issuer: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where `trust issuer` of this provider listens.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, mode 600.")],
    uses: Annotated[int, typer.Option(min=1, max=10_000, help="How many sessions it may start.")] = 1,
    expires: Annotated[
        float,
        typer.Option(
            parser=seconds(60, 30 * 86400), metavar="DURATION", show_default="1h", help="How long it is valid."
        ),
    ] = 3600.0,
    renewable: Annotated[
        float,
        typer.Option(
            parser=seconds(0, 30 * 86400),
            metavar="DURATION",
            show_default="7d",
            help="How long after its end its sessions' certificates are renewed, none beyond a week of age; 0s: never.",
        ),
    ] = 7 * 86400.0,
    role: Annotated[TokenRole, typer.Option(help="What they are; `gateway`: for `trust accept`.")] = "agent",
    models: Annotated[str, typer.Option(metavar="NAME,…", help="Models that they may serve; default: any.")] = "",
    bind: Annotated[str, typer.Option(metavar="TEXT", help="What its bearer must show, such as a job's id.")] = "",
    gateway: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Mesh address of a gateway; may be repeated; default: the blueprint's."),
    ] = None,
    trust: TrustOption = None,
    fabric: Annotated[str, typer.Option(help="Name of the fabric; default: the blueprint's.")] = "",
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Make a join token: who has it may start sessions of the provider by `agent join`."""
    import time

    from fabrictool.base.clock import duration_text
    from fabrictool.base.files import check_output, write_atomic
    from fabrictool.cli.joining import gateways_of, new_token, trust_store
    from fabrictool.cli.output import say

    source = Source(blueprint, inventory)
    check_output(out)
    written, text = new_token(
        trust_store(trust, source),
        provider,
        fabric=fabric or source.blueprint.fabric,
        issuer=issuer,
        gateways=gateways_of(source, gateway or ()),
        uses=uses,
        lasts=expires,
        renewable=renewable,
        role=role,
        models=models,
        bind=bind,
        now=time.time(),
    )
    write_atomic(out.absolute(), text.encode() + b"\n", mode=0o600)
    say(f"token {written.id[:8]} of {provider} in federation {written.claims.federation[:8]}: {out} (mode 0600)")
    say(f"good for {uses} session{'s' if uses > 1 else ''} in the next {duration_text(expires)}")


def issuer(
    provider: Annotated[str, typer.Option(help="Whose sessions it signs.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="HOST:PORT where joining nodes reach it.")
    ] = "127.0.0.1:8444",
    trust: TrustOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Sign sessions for who brings a join token; runs where the provider's key lies, until Ctrl-C."""
    from fabrictool.cli.joining import run_issuer, trust_store

    run_issuer(trust_store(trust, Source(blueprint, inventory)), provider, listen)


def accept(
    token: Annotated[
        str,
        typer.Argument(
            metavar="TOKENFILE|FOLDER",
            help="File with the join token, mode 600, - is stdin; or what `trust controller` made.",
        ),
    ],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Keep another provider's join token: `apply` starts that provider's units with it, and needs no key of theirs.

    Of a folder, keep the controller's identity in it: with that, `apply` assigns models to that provider's idle nodes.

    Each start asks the token's issuer and counts as one use, also a start that fails. A newer token takes the place of
    the former one. Make it with `--uses` and `--expires` for as many starts, successors included, as you will need.
    """
    import time

    from fabrictool.agent.admission import private_text
    from fabrictool.base.clock import duration_text
    from fabrictool.cli.output import say

    now = time.time()
    source = Source(blueprint, inventory)
    if Path(token).is_dir():
        from fabrictool.state.controllers import accept_controller

        provider = accept_controller(source.fabric().trust, Path(token), now=now)
        say(f"controller of {provider} kept; `apply` assigns models to its idle nodes with it")
        return
    kept = source.fabric().trust.accept(private_text(token, "token"), source.blueprint.fabric, now=now)
    say(f"token {kept.id[:8]} of {kept.claims.provider}: {kept.uses} {kept.role} sessions, asked for at {kept.issuer}")
    say(f"valid for {duration_text(kept.expires - now)}; next: `fabrictool apply`")


def controller(
    provider: Annotated[str, typer.Argument(help="Name of the provider whose key is here.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to make, mode 700.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long it is valid, within its provider's time.")] = 30,
    trust: TrustOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> None:
    """Make an identity that may assign models to the provider's idle sessions, for `agent assign`, and nothing else."""
    from fabrictool.cli.assigning import new_controller
    from fabrictool.cli.joining import trust_store

    new_controller(trust_store(trust, Source(blueprint, inventory)), provider, out.absolute(), days)


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
