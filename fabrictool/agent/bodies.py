"""What an agent says of itself and of its engine, as records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool import __version__
from fabrictool.engines.adapter import adapter
from fabrictool.mesh.records import MAX_VERSION, Lifecycle, NodeBody, NodeHardware, ServiceBody, decode, seal

if TYPE_CHECKING:
    from fabrictool.domain.specs import AgentSpec

LONGEST_BUILD = 200
"""Octets of a signed build: a name, a digest, a key and a signature."""


# Wide: what the record says that the spec does not.
def node_body(
    spec: AgentSpec,
    federation: str,
    session: bytes,
    lifecycle: Lifecycle,
    ends_at: float | None,
    hardware: NodeHardware | None = None,
) -> NodeBody:
    """Its version is the mesh's to choose; `hardware` as it was found, else as the spec says."""
    return NodeBody(
        federation=federation,
        session=session,
        lifecycle=lifecycle,
        version=1,
        role="agent",
        fabric=spec.fabric,
        provider=spec.provider,
        site=spec.site,
        cluster=spec.cluster,
        node=spec.partition,
        hardware=hardware or NodeHardware(spec.device, spec.devices, spec.memory),
        ends_at=ends_at,
        release=__version__,
        assignable=not isinstance(spec.idle, msgspec.UnsetType),
    )


def service_body(
    spec: AgentSpec, federation: str, session: bytes, service: bytes, lifecycle: Lifecycle, model: str
) -> ServiceBody:
    """`model`: what the engine says that it serves."""
    return ServiceBody(
        federation=federation,
        session=session,
        service=service,
        lifecycle=lifecycle,
        version=1,
        replica=spec.replica,
        model=model,
        engine=spec.engine,
        precision=spec.precision,
        context=spec.context,
        tp=spec.tp,
        dp=spec.dp,
        max_num_seqs=spec.max_num_seqs * spec.dp,
        phase=spec.phase,
        pairing="relayed" if spec.phase == "unified" else adapter(spec.engine).capabilities.pairing,
        adapters=spec.served_names[1:],
    )


def check_sayable(spec: AgentSpec, federation: str, hardware: NodeHardware | None = None) -> None:
    """Whether such an agent could speak at all: names have a longest length, and records a size.

    Raises
    ------
    RecordError
        FT6101, FT6102 as every replica of the registry would refuse it.
    """
    session = bytes(16)
    node = node_body(spec, federation, session, Lifecycle.LEFT, 0.0, hardware)
    node = msgspec.structs.replace(node, addresses=(f"{'f' * 39}:65535",), build=bytes(LONGEST_BUILD))
    service = service_body(spec, federation, session, session, Lifecycle.DOWN, spec.model)
    service = msgspec.structs.replace(service, meets_at=None if spec.phase == "unified" else f"{'f' * 39}:65535")
    for body in (node, service):
        longest = msgspec.structs.replace(body, version=MAX_VERSION)
        decode(seal(longest, lambda _: bytes(64)).envelope)
