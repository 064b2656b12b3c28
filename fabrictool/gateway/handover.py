"""Replacing a gateway without a client's or an agent's noticing: its successor takes over the listening sockets.

========= ============================================================== =============================================
step      the successor                                                  the gateway that is replaced
========= ============================================================== =============================================
1         finds its folder beside its own, and asks it                   gives its sockets; accepts no agents any more,
                                                                         and asks those that it has to dial once more
2         accepts agents, until it reaches what the other one reached    serves its clients
3         accepts clients, and says so                                   accepts none any more, lets their requests end
4         goes on                                                        is stopped by ``apply`` when they have
========= ============================================================== =============================================

If the successor ends before the other one has, the latter takes everything back. They speak through a socket in the
run folder, which only the account of both can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.base.clock import Clock
    from fabrictool.base.listening import Listening
    from fabrictool.gateway.gateway import GatewayServer
    from fabrictool.mesh.transport.node import MeshNode

_log = logging.getLogger("fabrictool.gateway")

SOCKET = "handover.sock"
SERVING = b"serving\n"
ANSWER_S = 5.0
SYNC_S = 20.0
"""Agents that do not come over in this time are not waited for; `apply` waits 30 s for a gateway."""
LOOK_S = 0.05
MOST_SOCKETS = 16


class _Offer(msgspec.Struct, frozen=True):
    """What goes with the sockets."""

    mesh: int
    """The first so many are for agents, the others for clients."""
    agents: int
    """Tunnels that the gateway has."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a successor got."""

    mesh: tuple[socket.socket, ...]
    clients: tuple[socket.socket, ...]
    agents: int
    """Tunnels that the other gateway has."""
    line: socket.socket
    """To the other gateway, as long as we live."""

    async def reached(self, mesh: MeshNode, clock: Clock) -> None:
        """Wait until as many agents have come over, and all replicas that serve can be reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_S):
                while True:
                    if len(mesh.neighbours) >= self.agents and self._all_reached(mesh, clock.wall()):
                        return
                    await asyncio.sleep(LOOK_S)

    def serving(self) -> None:
        """Tell it that clients are accepted here, so that it may stop."""
        with contextlib.suppress(OSError):  # it is gone already
            self.line.sendall(SERVING)

    def close(self) -> None:
        self.line.close()

    @staticmethod
    def _all_reached(mesh: MeshNode, wall: float) -> bool:
        return all(mesh.reaches(entry.service.session) for entry in mesh.registry.serving(wall=wall))


def take_over(spec: GatewaySpec, folder: RunFolder) -> Takeover | None:
    """The sockets of the gateway that this one replaces, if one lives here that has the same addresses."""
    for other, same_clients in _others(spec, folder):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            offer, sockets = _asked(other, line)
        except (OSError, msgspec.DecodeError) as error:
            _log.debug("%s does not hand over: %s", other.path.name, error)
            line.close()
            continue
        _log.info("takes over the sockets of %s", other.path.name)
        mesh, clients = sockets[: offer.mesh], sockets[offer.mesh :]
        if not same_clients:
            for unused in clients:
                unused.close()
        return Takeover(mesh, clients if same_clients else (), offer.agents, line)
    return None


def _asked(other: RunFolder, line: socket.socket) -> tuple[_Offer, tuple[socket.socket, ...]]:
    """What another gateway gives. Raises OSError and DecodeError where that is nothing."""
    line.settimeout(ANSWER_S)
    with _reachable(other) as address:
        line.connect(address)
    data, descriptors, _, _ = socket.recv_fds(line, 4096, MOST_SOCKETS)
    sockets = tuple(socket.socket(fileno=descriptor) for descriptor in descriptors)
    return msgspec.json.decode(data, type=_Offer), sockets


class Handover:
    """Of a gateway that may be replaced."""

    def __init__(self, gateway: GatewayServer, mesh: MeshNode, folder: RunFolder) -> None:
        self._gateway = gateway
        self._mesh = mesh
        self.folder = folder
        self._server: asyncio.Server | None = None
        self._line: _Line | None = None
        self.offered = False
        """Whether successors can ask."""
        self._stopping = False
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def succeeded(self) -> bool:
        """Whether another process accepts our clients."""
        return self._line is not None and self._line.serving

    async def offer(self) -> None:
        """Be there for a successor; without a socket it starts after we have ended."""
        path = self.folder.path / SOCKET
        path.unlink(missing_ok=True)
        try:
            with _reachable(self.folder) as address:
                self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Line(self), address)
            path.chmod(0o600)
        except OSError as error:
            _log.warning("a successor of this gateway cannot take over its sockets: %s", error)
            return
        self.offered = True

    def stop(self) -> None:
        """We end; what becomes of the successor is not our business any more."""
        self._stopping = True

    def close(self) -> None:
        """A process that ended orderly leaves no socket behind."""
        if self._server is not None:
            self._server.close()
            (self.folder.path / SOCKET).unlink(missing_ok=True)

    # -- for lines --------------------------------------------------------------------------------------------

    def asked(self, line: _Line) -> None:
        """Give it our sockets; one successor at a time."""
        if self._line is not None or self._gateway.draining:
            line.close()
            return
        self._line = line
        agents = len(self._mesh.neighbours)
        listening: list[Listening] = [self._mesh.listening, self._gateway.listening]
        offer = _Offer(len(listening[0].sockets), agents)
        try:
            line.give(msgspec.json.encode(offer), [own.fileno() for there in listening for own in there.sockets])
        except OSError:  # it is gone already
            return
        self._mesh.step_aside()
        self._gateway.note("hands-over", "this gateway", f"another process takes over its {agents} tunnels")

    def taken(self) -> None:
        self._gateway.step_aside()
        self._gateway.note("handed-over", "this gateway", "another process accepts its clients")

    def lost(self, line: _Line) -> None:
        """The successor is gone: we are all that is left."""
        if line is not self._line:
            return
        self._line = None
        if not self._stopping:
            task = asyncio.create_task(self._return())
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _return(self) -> None:
        self._gateway.note("takes-back", "this gateway", "the process that took over has ended")
        try:
            await self._mesh.come_back()
            await self._gateway.come_back()
        except OSError as error:
            _log.error("cannot accept again: %s", error)


class _Line(asyncio.Protocol):
    """The line on which a successor asks, says that it serves, and by its end that it has ended."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self._transport: asyncio.Transport | None = None
        self._heard = b""
        self.serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._handover.asked(self)

    def data_received(self, data: bytes) -> None:
        self._heard = (self._heard + data)[: len(SERVING)]
        if self._heard == SERVING and not self.serving:
            self.serving = True
            self._handover.taken()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handover.lost(self)

    def give(self, text: bytes, descriptors: list[int]) -> None:
        """At once: so little always goes into an empty socket."""
        if self._transport is not None:
            with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as own:
                socket.send_fds(own, [text], descriptors)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _others(spec: GatewaySpec, folder: RunFolder) -> Iterator[tuple[RunFolder, bool]]:
    """Run folders beside ours of gateways with our name and address for agents, and whether clients find us where they
    found them.
    """
    for path in sorted(folder.path.parent.iterdir()):
        other = RunFolder(path)
        if path == folder.path or not (path / SOCKET).exists():
            continue
        try:
            theirs = msgspec.json.decode(other.spec.read_bytes(), type=GatewaySpec)
        except (OSError, msgspec.DecodeError):
            continue
        if (theirs.fabric, theirs.name, theirs.mesh) == (spec.fabric, spec.name, spec.mesh):
            yield other, theirs.listen == spec.listen


@contextlib.contextmanager
def _reachable(folder: RunFolder) -> Iterator[str]:
    """A short name of its socket: the kernel takes 107 octets, and folders are deep."""
    descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
