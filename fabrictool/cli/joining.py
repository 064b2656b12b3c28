"""``trust token`` and ``trust issuer``, behind their arguments."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.base.errors import UsageError
from fabrictool.cli.gateway_commands import split_address
from fabrictool.cli.output import say
from fabrictool.domain.specs import HostPort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.cli.source import Source
    from fabrictool.mesh.jointoken import JoinToken
    from fabrictool.state.truststore import TrustStore


def trust_store(folder: Path | None, source: Source) -> TrustStore:
    """Of the folder that is given, else of the fabric."""
    from fabrictool.state.truststore import TrustStore

    return TrustStore(folder) if folder is not None else source.fabric().trust


# Wide: what a token says.
def new_token(
    store: TrustStore,
    provider: str,
    *,
    fabric: str,
    issuer: str,
    gateways: Sequence[HostPort],
    uses: int,
    lasts: float,
    renewable: float,
    role: Literal["agent", "gateway"],
    models: str,
    bind: str,
    now: float,
) -> tuple[JoinToken, str]:
    """The token and its line of text, signed by `provider`; raises FT9002, FT6407 and what the trust store does."""
    from fabrictool.base.ids import random_id
    from fabrictool.mesh.jointoken import JoinToken, binding, write_token

    credential, name = store.signer(provider), random_id(16)
    token = JoinToken(
        id=name,
        fabric=fabric,
        root=store.root_certificate(),
        signer=credential.chain[0],
        issuer=HostPort(*split_address(issuer)),
        gateways=tuple(gateways),
        uses=uses,
        created=now,
        expires=now + lasts,
        renewable_until=now + lasts + renewable if renewable else msgspec.UNSET,
        role=role,
        models=tuple(model.strip() for model in models.split(",") if model.strip()),
        bound=binding(name, bind) if bind else "",
    )
    return token, write_token(token, credential)


def gateways_of(source: Source, given: Sequence[str]) -> tuple[HostPort, ...]:
    """Where agents dial: what is given, else the blueprint's gateways; raises FT9002, also for none."""
    hubs = tuple(HostPort(*split_address(text)) for text in given)
    if not hubs:
        hubs = tuple(
            HostPort(gateway.hub.host, gateway.hub.port) for gateway in source.blueprint.every_gateway.values()
        )
    if not hubs:
        raise UsageError.of("FT9002", "the blueprint has no gateway", hint="name one with --gateway HOST:PORT")
    return hubs


def run_issuer(store: TrustStore, provider: str, listen: str) -> None:
    """Answer until the program is told to end."""
    import asyncio
    import signal

    from fabrictool.base.clock import SystemClock
    from fabrictool.base.logs import configure_logging
    from fabrictool.mesh.identity import IdentityVerifier
    from fabrictool.state.issuer import Issuer
    from fabrictool.state.tokenuses import TokenUses

    host, port = split_address(listen)
    credential = store.signer(provider)
    IdentityVerifier(store.root_certificate()).provider_key(credential.chain[0])  # else nobody would believe it
    uses = TokenUses(store.folder / f"providers/{provider}.uses.sqlite")
    configure_logging("info")
    issuer = Issuer(credential, uses, SystemClock(), store.root_certificate(), store.session_revoked)

    async def serve() -> None:
        task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel if task else bool)
        with suppress(asyncio.CancelledError):
            await issuer.serve(host, port, lambda address: say(f"issuer of {provider} at {address}; Ctrl-C ends"))

    asyncio.run(serve())
