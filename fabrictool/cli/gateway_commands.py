"""``gateway run`` and ``keys create``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    gateway = typer.Typer(help="The OpenAI-compatible ingress.", no_args_is_help=True)
    gateway.command("run")(run)
    app.add_typer(gateway, name="gateway")
    keys = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
    keys.command("create")(create)
    app.add_typer(keys, name="keys")


def run(
    registry: Annotated[Path, typer.Option(help="YAML or JSON list of nodes: url, models, provider, device, …")],
    listen: Annotated[str, typer.Option(help="HOST:PORT for clients.")] = "127.0.0.1:8080",
    keys: Annotated[Path | None, typer.Option(help="Key file; without it the gateway is open.")] = None,
    policy: Annotated[str, typer.Option(help="Routing policy, such as least-loaded or power-of-two.")] = "least-loaded",
    retries: Annotated[
        int, typer.Option(min=0, max=10, help="Attempts after slow failures, before the first byte.")
    ] = 2,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file with a certificate and its chain: speak TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Folder for a record of each request, and for budgets; `usage FOLDER/records.db` sums up."),
    ] = None,
) -> None:
    """Route to a static list of OpenAI-compatible servers, without a mesh."""
    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("give --tls-certificate and --tls-key together")
    from fabrictool.cli.alone import AloneGateway

    host, port = split_address(listen)
    tls = (str(tls_certificate), str(tls_key)) if tls_certificate and tls_key else None
    AloneGateway(
        str(registry), host, port, str(keys) if keys else None, policy, retries, tls, str(records) if records else None
    ).run()


def create(
    file: Annotated[Path, typer.Argument(help="The key file to add to; created when it does not exist.")],
    tenant: Annotated[str, typer.Option(help="Whose key it is.")],
    group: Annotated[str | None, typer.Option(help="Consumer group; without one, every provider may serve it.")] = None,
) -> None:
    """Make a new API key: printed once on stdout, stored as a hash."""
    import msgspec

    from fabrictool.base.files import write_atomic
    from fabrictool.cli.output import data, say
    from fabrictool.gateway.keyfile import KeyRow, encode_keys, read_rows
    from fabrictool.gateway.keys import hash_key, new_key

    rows = read_rows(file) if file.exists() else []
    key = new_key()
    rows = [*rows, KeyRow(tenant, hash_key(key), group)]
    write_atomic(file, msgspec.json.format(encode_keys(rows), indent=1) + b"\n", mode=0o600)
    say(f"added a key of {tenant} to {file}; it is shown only once:")
    data(key)


def split_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``; raises FT9002 otherwise."""
    from fabrictool.base.errors import UsageError

    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError.of("FT9002", f"{text!r} is not HOST:PORT", hint="such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)
