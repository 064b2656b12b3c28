"""The usual adapter: asyncssh on an event loop of its own thread, one TCP connection to each login node."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncssh

from fabrictool.clusters.connections import commands, errors, identities, pins
from fabrictool.clusters.connections.loopthread import LoopThread
from fabrictool.clusters.connections.settings import ConnectionLimits
from fabrictool.clusters.connections.shell_verbs import ShellOutcome, ShellVerbs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.clusters.connections.protocol import Endpoint

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_CLOSE_SECONDS = 2.0


class AsyncsshConnection(ShellVerbs):
    """One connection with at most `ConnectionLimits.channels` commands at a time; opened when used and after a break.

    Streams and forwards hold no place among the commands, so that long ones cannot starve short ones.
    """

    def __init__(
        self, endpoint: Endpoint, *, limits: ConnectionLimits | None = None, loop: LoopThread | None = None
    ) -> None:
        super().__init__(endpoint)
        self._limits = limits or ConnectionLimits()
        self._own_loop = loop is None
        self._loop = loop or LoopThread()
        self._link = _Link(endpoint, self._limits)

    def close(self) -> None:
        if not self._loop.running:
            return
        self._loop.call(self._link.close())
        if self._own_loop:
            self._loop.close()
            self._link = _Link(self._endpoint, self._limits)

    def _carry(self, text: str, stdin: bytes, timeout_s: float, *, urgent: bool = False) -> ShellOutcome:
        return self._loop.call(self._link.carry(text, stdin, timeout_s, urgent=urgent))

    @contextmanager
    def forward(self, host: str, port: int) -> Iterator[tuple[str, int]]:
        listener = self._loop.call(self._link.listen(host, port))
        try:
            yield "127.0.0.1", listener.get_port()
        finally:
            self._loop.call(_closed(listener))

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[Iterator[bytes]]:
        wrapped = commands.wrap_stream(argv)
        process = self._loop.call(self._link.start(wrapped.text))
        try:
            yield self._lines(process, wrapped, errors.named(argv))
        finally:
            self._loop.call(_ended(process))

    def _lines(self, process: Any, wrapped: commands.Wrapped, what: str) -> Iterator[bytes]:
        noise = True
        while line := self._loop.call(self._next_line(process, what)):
            if noise:
                noise = wrapped.begun(line) is None
            else:
                yield line.removesuffix(b"\n")

    async def _next_line(self, process: Any, what: str) -> bytes:
        try:
            line: bytes = await process.stdout.readline()
        except (OSError, asyncssh.Error) as error:
            raise errors.lost(self._endpoint, what, str(error)) from error
        if not line:
            await process.wait_closed()
            if process.returncode is None:
                raise errors.lost(self._endpoint, what, "the connection is gone")
        return line


class _Watch(asyncssh.SSHClient):  # type: ignore[misc]
    """What one host showed and asked for during its login."""

    def __init__(self, limits: ConnectionLimits, deadline: asyncio.Timeout) -> None:
        self.key = ""
        self.authority = ""
        self.offered: list[str] = []
        self.connected = False
        self._limits = limits
        self._deadline = deadline

    def connection_made(self, conn: Any) -> None:
        self.connected = True
        self._deadline.reschedule(asyncio.get_running_loop().time() + self._limits.login_s)

    def validate_host_public_key(self, host: str, addr: str, port: int, key: Any) -> bool:
        """Asked for a key that is none of the pinned ones: it is kept for the message and refused."""
        self.key = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: Any) -> bool:
        """Asked for an authority that is none of the pinned ones: alike."""
        self.key = f"certificate of {key.get_algorithm()} {key.get_fingerprint()}"
        return False

    def kbdint_auth_requested(self) -> None:
        self.offered.append("keyboard-interactive")

    def password_auth_requested(self) -> None:
        self.offered.append("password")


class _Collector(asyncssh.SSHClientSession):  # type: ignore[misc]
    """Keeps what a command says."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.err = bytearray()
        self.status: int | None = None
        self.gone: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        (self.out if datatype is None else self.err).extend(data)

    def exit_status_received(self, status: int) -> None:
        self.status = status

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(exc)


class _Link:
    """The part that lives on the loop: hosts on the way, and who may open a channel when."""

    def __init__(self, endpoint: Endpoint, limits: ConnectionLimits) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(limits.channels)
        self._hosts: list[Any] = []

    @property
    def broken(self) -> bool:
        return any(host.is_closed() for host in self._hosts)

    async def carry(self, text: str, stdin: bytes, timeout_s: float, *, urgent: bool) -> ShellOutcome:
        if urgent:
            return await self._carry(text, stdin, timeout_s)
        async with self._slots:
            return await self._carry(text, stdin, timeout_s)

    async def _carry(self, text: str, stdin: bytes, timeout_s: float) -> ShellOutcome:
        try:
            channel, seen = await self._opened(lambda host: host.create_session(_Collector, text, encoding=None))
        except (OSError, asyncssh.Error) as error:
            return ShellOutcome("lost", why=str(error))
        try:
            # The channel keeps what the window does not take yet, and drops it when the command ends without reading.
            with suppress(OSError):
                channel.write(stdin)
                channel.write_eof()
            async with asyncio.timeout(timeout_s):
                why = await seen.gone
        except TimeoutError:
            return ShellOutcome("timeout", bytes(seen.out), bytes(seen.err))
        finally:
            channel.abort()
        # A connection that ended in order may have cut the command off, too: only a status says that it ended.
        status = channel.get_returncode()
        if status is None:
            return ShellOutcome("lost", bytes(seen.out), bytes(seen.err), why=str(why or "closed by the login node"))
        return ShellOutcome("ended", bytes(seen.out), bytes(seen.err), status if status >= 0 else 128 - status)

    async def start(self, text: str) -> Any:
        try:
            return await self._opened(
                lambda host: host.create_process(text, encoding=None, stderr=asyncssh.DEVNULL)  # nothing is sent there
            )
        except (OSError, asyncssh.Error) as error:
            raise errors.lost(self._endpoint, "opening a session", str(error)) from error

    async def listen(self, host: str, port: int) -> Any:
        last = await self._connected()
        try:
            return await last.forward_local_port("127.0.0.1", 0, host, port)
        except (OSError, asyncssh.Error) as error:
            raise errors.of_connecting(self._endpoint, error) from error

    async def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in reversed(hosts):
            host.close()
            with suppress(OSError, asyncssh.Error, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await host.wait_closed()
            host.abort()

    async def _opened(self, opening: Any) -> Any:
        """A channel; refused ones are asked for again, for nothing has run."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._limits.refused_s, _FIRST_PAUSE
        while True:
            last = await self._connected()
            try:
                return await opening(last)
            except asyncssh.ChannelOpenError as error:
                if last.is_closed():
                    raise
                if loop.time() + pause > until:
                    raise errors.channel_refused(self._endpoint, error.reason) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connected(self) -> Any:
        """The connection to the last host, made if need be."""
        async with self._lock:
            if not self._hosts or self.broken:
                await self.close()
                try:
                    for hop in (*self._endpoint.jumps, self._endpoint):
                        self._hosts.append(await log_in(hop, self._hosts[-1] if self._hosts else None, self._limits))
                except BaseException:
                    await self.close()
                    raise
            return self._hosts[-1]


async def log_in(hop: Endpoint, tunnel: Any, limits: ConnectionLimits) -> Any:
    """A connection to one host, through another connection if there is one.

    Raises
    ------
    FabrictoolError
        FT5301 to FT5310.
    """
    pinned = pins.pins(hop)
    offered = identities.keys(hop)
    files: Any = [str(path) for path in offered.files if not path.name.endswith("_sk")]
    options: dict[str, Any] = {}
    if offered.only:
        options["agent_identities"] = [str(path) for path in offered.only]
    seen: _Watch | None = None
    try:
        async with asyncio.timeout(limits.connect_s) as deadline:
            seen = _Watch(limits, deadline)
            return await asyncssh.connect(
                hop.host,
                hop.port,
                tunnel=tunnel,
                username=hop.user,
                config=None,
                known_hosts=known_hosts(pinned),
                server_host_key_algs=pins.algorithms(pinned),
                client_keys=files or (() if offered.agent else None),
                agent_path=offered.agent or None,
                agent_forwarding=False,
                preferred_auth="publickey,keyboard-interactive,password",
                gss_host=None,
                compression_algs=None,
                connect_timeout=None,
                login_timeout=0,
                keepalive_interval=limits.keepalive_s,
                keepalive_count_max=limits.keepalive_count,
                client_factory=lambda: seen,
                **options,
            )
    except TimeoutError as error:
        if seen is not None and seen.connected:
            raise errors.no_answer(hop, "no login", limits.login_s) from error
        raise errors.no_answer(hop, "no connection", limits.connect_s) from error
    except asyncssh.PermissionDenied as error:
        identities.check_certificate(errors.alone(hop), time.time(), 0.0)
        raise errors.refused(hop, str(offered), ", ".join(seen.offered) if seen else "") from error
    except asyncssh.HostKeyNotVerifiable as error:
        shown = seen.key if seen else ""
        raise errors.wrong_host_key(hop, shown, [str(pin) for pin in pinned], error.reason) from error
    except (OSError, asyncssh.Error, ValueError) as error:
        raise errors.of_connecting(hop, error) from error


def known_hosts(pinned: tuple[pins.HostKeyPin, ...]) -> tuple[list[Any], list[Any], list[Any]]:
    """Trusted keys, trusted authorities, revoked keys (none)."""
    trusted = [asyncssh.import_public_key(pin.line()) for pin in pinned if not pin.authority]
    return trusted, [asyncssh.import_public_key(pin.line()) for pin in pinned if pin.authority], []


async def _closed(listener: Any) -> None:
    listener.close()
    await listener.wait_closed()


async def _ended(process: Any) -> None:
    """Closing the channel ends its stdin, the life line of a streaming command."""
    process.channel.abort()
