"""From what an agent was told to what its engine is started with; and what of it depends on the node."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.specs import DEFAULT_LOADER, EngineInstall
from fabrictool.engines.adapter import EngineLaunch
from fabrictool.engines.artifacts import resolve
from fabrictool.engines.protocol import NodeOfSeveral

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.agent.engine_address import EngineAddress
    from fabrictool.agent.ports import PortBlock
    from fabrictool.domain.specs import AgentSpec, HostPort
    from fabrictool.engines.protocol import CacheHandover

_SIOCGIFADDR = 0x8915


# Wide: what a spec says, and what only its node knows.
def launch_of(
    spec: AgentSpec,
    *,
    model: str,
    at: EngineAddress,
    ports: PortBlock,
    python: str,
    cache: Path,
    compiled: Path,
    node: NodeOfSeveral | None = None,
    handover: CacheHandover | None = None,
    command: tuple[str, ...] = (),
    by_priority: bool = False,
) -> EngineLaunch:
    """The engine process of a replica, or its part on one of several nodes."""
    shared = None if isinstance(spec.shared, msgspec.UnsetType) else spec.shared
    return EngineLaunch(
        engine=spec.engine,
        model=model,
        served_name=spec.model,
        host="127.0.0.1",
        port=at.port or ports.api,
        socket=at.socket,
        inner_port=ports.inner,
        tp=spec.tp,
        pp=spec.pp,
        dp=spec.dp,
        context=spec.context or None,
        max_num_seqs=spec.max_num_seqs,
        precision=spec.precision or None,
        kv_precision=None if isinstance(spec.kv_precision, msgspec.UnsetType) else spec.kv_precision,
        python=python,
        install=EngineInstall() if isinstance(spec.install, msgspec.UnsetType) else spec.install,
        cache_dir=str(cache),
        compile_dir=str(compiled),
        adapters={name: resolve(its.source) for name, its in spec.served_adapters.items()},
        adapter_rank=max((its.rank for its in spec.served_adapters.values()), default=0),
        companions={name: resolve(its.source) for name, its in spec.companions.items()},
        memory=0 if shared is None else shared.memory,
        ttft_s=None if shared is None else shared.ttft_s,
        tpot_s=None if shared is None else shared.tpot_s,
        loader="" if spec.loads_by == DEFAULT_LOADER else spec.loads_by,
        options=spec.options,
        by_priority=by_priority,
        node=node,
        handover=handover,
        command=command,
    )


def first_node(nodes: int, leader: HostPort) -> NodeOfSeveral:
    """The part of the node on which the others find it."""
    return NodeOfSeveral(nodes, 0, leader, leader.host, interface_of(leader.host))


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; "" where none has, or its name cannot be asked for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
