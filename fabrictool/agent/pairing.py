"""An engine's part in a prefill/decode pair: where the caches of its prompts are given out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.engines.protocol import CacheHandover
from fabrictool.mesh.transport.sitelinks import own_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.domain.specs import AgentSpec


async def handover_host(spec: AgentSpec, note: Callable[[str, str, str], None]) -> str:
    """This node's address for the other engine of a pair; loopback where no way leads out of it, which `note` hears."""
    if spec.phase != "unified":
        try:
            return await own_address(spec.hubs)
        except OSError as error:
            note("no-address", spec.replica, f"caches can be handed over inside this node only: {error}")
    return "127.0.0.1"


def handover(spec: AgentSpec, host: str, port: int) -> CacheHandover | None:
    """None for a replica that does both."""
    return None if spec.phase == "unified" else CacheHandover(spec.phase == "prefill", host, port, spec.device)
