"""An engine on several nodes: the first node's agent leads, those of the others start and stop their part at its word.

The job runs one agent on each node. That of rank 0 is the replica's agent: it alone has a session in the mesh, and its
engine process alone has an API. The others (`fabrictool.agent.member`) join no mesh; each keeps one connection to the
leader and does what it is told:

1. The leader listens, and leaves its address in the run folder, which all nodes of a job share. Both sides prove with
   the session's key that they are of the same run.
2. When all members have come, each start of the engine has a number and a port where its processes find each other.
3. A member whose process ends says so: the engine is broken, all parts of it are stopped, and it is started anew.
4. A member that is silent is gone, with its node: no start will help, and the replica leaves in order. A member whose
   leader is gone stops its process and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.files import write_atomic
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.transport.tls import server_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.mesh.transport.tls import IdentityFiles

LEADER = "leader.json"
"""In the run folder: where the leader listens."""
BEAT_S = 2.0
SILENCE_S = 15.0
"""Seven beats: a node that says nothing for this long is gone. Slurm itself waits for minutes (SlurmdTimeout)."""
END_S = 15.0
"""For the members to stop their processes, which have ten seconds after TERM."""
LINE_OCTETS = 64 * 1024


class Arrival(msgspec.Struct, frozen=True, tag="hello", tag_field="say"):
    """The first word of a member."""

    rank: int
    host: str
    """Its node's name, for people."""


class StartPart(msgspec.Struct, frozen=True, tag="start", tag_field="say"):
    """The leader wants a part of the engine started."""

    number: int
    leader: HostPort


class StopPart(msgspec.Struct, frozen=True, tag="stop", tag_field="say"):
    """The leader wants it stopped; answered by `PartEnded`."""

    number: int


class PartEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="say"):
    """The part of that start is over."""

    number: int
    why: str
    line: str = ""
    """The last of its log."""


class StillThere(msgspec.Struct, frozen=True, tag="beat", tag_field="say"):
    """Nothing new, and no silence either."""


Message = Arrival | StartPart | StopPart | PartEnded | StillThere
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Wire:
    """Messages of one connection, a line of JSON each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message:
        """The next one; raises EOFError, TimeoutError after a silence, OSError, and ValueError for what is none."""
        async with asyncio.timeout(SILENCE_S):
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return _decoder.decode(line)

    async def beat(self) -> None:
        """Break our silence, again and again."""
        while True:
            self.send(StillThere())
            await asyncio.sleep(BEAT_S)

    def shut(self) -> None:
        """Whoever receives hears that it is over."""
        self._writer.close()

    async def close(self) -> None:
        """Returns when it is closed."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()


def same_session(writer: asyncio.StreamWriter, files: IdentityFiles) -> bool:
    """Whether the other side has proved itself with this run's own certificate."""
    tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    theirs = tls.getpeercert(binary_form=True) if tls is not None else None
    credential, _ = files.read()
    return theirs is not None and theirs == credential.chain[0]


class FurtherNode:
    """What the leader knows of one."""

    def __init__(self, wire: Wire, host: str) -> None:
        self.wire = wire
        self.host = host
        self.ended = asyncio.Event()
        """It has no process."""
        self.ended.set()


class Leader:
    """Rank 0's side: a `Crew` for the supervisor."""

    # Wide: who and where it is, and whom to tell.
    def __init__(
        self,
        nodes: int,
        files: IdentityFiles,
        notice: Path,
        note: Callable[[str, str, str], None],
        *,
        come_s: float,
    ) -> None:
        """`notice`: the file by which the members find us; `come_s`: how long the last of them may take to come."""
        self.nodes = nodes
        self._files, self._notice = files, notice
        self._note = note
        self._come_s = come_s
        self._closing = False
        self._members: dict[int, FurtherNode] = {}
        self._come = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[Any], Wire] = {}
        self._number = 0
        self.meets_at = HostPort("", 0)
        """Where the processes of this start find each other."""
        self.broken = ""
        self.lost = False

    async def listen(self, host: str) -> None:
        """At this node's address for the others; raises OSError."""
        context = server_context(self._files)
        self._server = await asyncio.start_server(self._greet, host, 0, ssl=context, limit=LINE_OCTETS)
        port = self._server.sockets[0].getsockname()[1]
        self.meets_at = HostPort(host, port)
        await asyncio.to_thread(write_atomic, self._notice, msgspec.json.encode(self.meets_at), mode=0o600)

    async def begin(self, port: int) -> str | None:
        """Have the members start, to meet at our `port`; why that failed, if it did."""
        if self.lost:
            return self.broken
        try:
            async with asyncio.timeout(self._come_s):
                await self._come.wait()
        except TimeoutError:
            absent = ", ".join(map(str, self._absent))
            self._lose(f"no agent came from rank {absent} of {self.nodes} nodes within {self._come_s:.0f} s")
            return self.broken
        self._number += 1
        self.broken = ""
        self.meets_at = HostPort(self.meets_at.host, port)
        for member in self._members.values():
            member.ended.clear()
            member.wire.send(StartPart(self._number, self.meets_at))
        return self.broken or None

    async def end(self) -> None:
        """Have their processes stopped; those that are gone took them along."""
        members = list(self._members.values())
        for member in members:
            if not member.ended.is_set():
                member.wire.send(StopPart(self._number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(member.ended.wait() for member in members))

    async def close(self) -> None:
        """The members end when nobody leads them."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        handlers = list(self._open)
        for wire in self._open.values():
            wire.shut()
        await asyncio.gather(*handlers, return_exceptions=True)

    # -- internals --------------------------------------------------------------------------------------------

    @property
    def _absent(self) -> list[int]:
        """Ranks of which no agent has come yet."""
        return [rank for rank in range(1, self.nodes) if rank not in self._members]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire, task = Wire(reader, writer), asyncio.current_task()
        if task is not None:
            self._open[task] = wire
            task.add_done_callback(self._open.pop)
        try:
            hello = await wire.receive()
            awaited = isinstance(hello, Arrival) and hello.rank in self._absent
            if isinstance(hello, Arrival) and awaited and await asyncio.to_thread(same_session, writer, self._files):
                await self._hear(hello, FurtherNode(wire, hello.host))
        except (EOFError, OSError, ValueError, TimeoutError):
            pass  # a stranger, or one that went away before it said who it is
        finally:
            await wire.close()

    async def _hear(self, hello: Arrival, member: FurtherNode) -> None:
        """Until it is gone."""
        self._members[hello.rank] = member
        self._note("node-came", member.host, f"rank {hello.rank} of {self.nodes} nodes")
        if not self._absent:
            self._come.set()
        beating = asyncio.create_task(member.wire.beat())
        why = "its connection ended"
        try:
            while True:
                message = await member.wire.receive()
                if isinstance(message, PartEnded) and message.number == self._number:
                    member.ended.set()
                    self._break(f"node {member.host}: {message.why}", message.line)
        except TimeoutError:
            why = f"nothing was heard of it for {SILENCE_S:.0f} s"
        except (EOFError, OSError, ValueError) as error:
            why = f"its connection ended: {error}" if str(error) else why
        finally:
            beating.cancel()
            member.ended.set()
            self._lose(f"node {member.host} is lost: {why}")

    def _break(self, why: str, line: str) -> None:
        self.broken = self.broken or (f"{why}; its last line: {line}" if line else why)

    def _lose(self, why: str) -> None:
        if self._closing:
            return
        self.lost = True
        self.broken = self.broken or why
        self._note("node-lost", "", why)
