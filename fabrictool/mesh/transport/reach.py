"""Reaches a hub by the first path that leads there, and keeps what the path needs for as long as it is used."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.tlswords import spoken
from fabrictool.domain.secrets import SecretRef
from fabrictool.mesh.transport.making import made
from fabrictool.mesh.transport.paths import (
    Direct,
    PathError,
    PathKind,
    ProxyAnswer,
    Unusable,
    ViaProxy,
    ViaSsh,
    after_banner,
    no_bridge,
    paths_of,
    ssh_failure,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping

    import msgspec

    from fabrictool.domain.specs import EgressSpec, HostPort
    from fabrictool.mesh.transport.paths import HubPath

_P = TypeVar("_P", bound=asyncio.Protocol)

CONNECT_SECONDS = 5.0
"""To a hub or a proxy. A firewall that drops costs that much at the first dial; later ones begin with what worked."""
PATH_SECONDS = 20.0
"""Until a proxy has answered, or ssh is through."""
TLS_SECONDS = 10.0
STABLE_SECONDS = 5.0
"""A connection that lasted less does not recommend its path."""
LAST_WORDS_SECONDS = 1.0
"""For ssh to say why it ended."""
LOG_OCTETS = 4096
PIPE_OCTETS = 32 * 1024
"""What may lie in the pipe to ssh, for the reason that `tunnel.py` keeps the socket's buffer short."""
STRANGER = "is of another federation"


class Route:
    """The paths to one hub: which is in use, and why others failed at the last attempt."""

    def __init__(self, hub: HostPort, egress: EgressSpec | msgspec.UnsetType, environment: Mapping[str, str]) -> None:
        self._hub = hub
        self._environment = environment
        self._paths = paths_of(egress, environment, hub)
        self._begin = 0
        self.used: PathKind | None = None
        """None: not connected."""
        self.failures: dict[PathKind, str] = {}
        """Path → why it was given up, in the order in which they were tried."""

    @property
    def by_ssh(self) -> bool:
        """Whether an attempt that fails may have logged in to a host."""
        return any(isinstance(path, ViaSsh) for path in self._paths)

    @asynccontextmanager
    async def connect(self, factory: Callable[[], _P], context: ssl.SSLContext) -> AsyncIterator[_P]:
        """A connection by the first path that works, beginning with the one that worked last.

        Raises
        ------
        OSError, FabrictoolError
            The path's own error if there is only one, else FT6209 with what each of them says.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as held:
            number, protocol = await self._first(held, factory, context)
            began = loop.time()
            self._begin, self.used = number, self._paths[number].kind
            try:
                yield protocol
            finally:
                self.used = None
                if loop.time() - began < STABLE_SECONDS:
                    self._begin = (number + 1) % len(self._paths)

    async def _first(self, held: AsyncExitStack, factory: Callable[[], _P], context: ssl.SSLContext) -> tuple[int, _P]:
        self.failures = {}
        errors: list[Exception] = []
        count = len(self._paths)
        for number in [(self._begin + step) % count for step in range(count)]:
            path = self._paths[number]
            try:
                way = _connected(path, factory, context, self._hub, self._environment)
                return number, await held.enter_async_context(way)
            except (OSError, FabrictoolError) as error:
                errors.append(error)
                own = error.problems[0].message if isinstance(error, FabrictoolError) else spoken(error, STRANGER)
                self.failures[path.kind] = own
        if count == 1:
            raise errors[0]
        told = "; ".join(f"{kind}: {why}" for kind, why in self.failures.items())
        hints = [error.problems[0].hint for error in errors if isinstance(error, FabrictoolError)]
        hint = "; ".join(text for text in hints if text) or "name the site's proxy or an ssh host under `egress`"
        raise PathError.of("FT6209", f"no path leads to {self._hub}: {told}", thing=str(self._hub), hint=hint)


@asynccontextmanager
async def _connected(
    path: HubPath,
    factory: Callable[[], _P],
    context: ssl.SSLContext,
    hub: HostPort,
    environment: Mapping[str, str],
) -> AsyncIterator[_P]:
    match path:
        case Unusable(_, error):
            raise error
        case Direct():
            yield await _tls(await _tcp(hub.host, hub.port), factory, context)
        case ViaProxy():
            sock = await _tcp(path.host, path.port)
            try:
                await _through_proxy(sock, path, hub, environment)
            except BaseException:
                sock.close()
                raise
            yield await _tls(sock, factory, context)
        case ViaSsh():
            async with _through_ssh(path, hub, factory, context) as protocol:
                yield protocol


async def _tcp(host: str, port: int) -> socket.socket:
    """Connected, by the first of the name's addresses that answers."""
    loop = asyncio.get_running_loop()
    last = ConnectionError("its name cannot be resolved")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        with ExitStack() as unless_connected:
            unless_connected.callback(sock.close)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await loop.sock_connect(sock, address)
            except TimeoutError:
                last = ConnectionError(f"no answer within {CONNECT_SECONDS:.0f} s")
            except OSError as error:
                last = ConnectionError(os.strerror(error.errno or 0).lower())
            else:
                unless_connected.pop_all()
                return sock
    raise last


async def _tls(sock: socket.socket, factory: Callable[[], _P], context: ssl.SSLContext) -> _P:
    """The mesh's own TLS, to the hub itself; the socket is the connection's from here on, which closes it."""
    loop = asyncio.get_running_loop()
    return await made(
        loop.create_connection(factory, sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=TLS_SECONDS)
    )


async def _through_proxy(sock: socket.socket, path: ViaProxy, hub: HostPort, environment: Mapping[str, str]) -> None:
    loop = asyncio.get_running_loop()
    request = path.request(hub, read_secret(path.password, environment))
    answer = ProxyAnswer(path, hub)
    try:
        async with asyncio.timeout(PATH_SECONDS):
            await loop.sock_sendall(sock, request)
            while not answer.receive(await loop.sock_recv(sock, 4096)):
                pass
    except TimeoutError:
        raise answer.refusal(f"it did not answer within {PATH_SECONDS:.0f} s", "check its log") from None
    except OSError as error:
        raise answer.refusal(f"it broke off: {spoken(error)}", "ask its owner what it allows") from error


def read_secret(given: str, environment: Mapping[str, str]) -> str:
    """As it stands, or what a reference to a variable or a file leads to. Raises FT1401 to FT1403."""
    if not given.startswith("secret://"):
        return given
    ref = SecretRef.parse(given)
    if ref.scheme == "env":
        if ref.name not in environment:
            message, hint = f"the variable {ref.name} is not set in the job", "set it, or use secret://file/PATH"
            raise PathError.of("FT1401", message, thing=given, hint=hint)
        return environment[ref.name]
    file = Path(ref.name).expanduser()
    try:
        if file.stat().st_mode & 0o077:
            raise PathError.of("FT1403", f"{file} can be read by others", thing=given, hint=f"chmod 600 {file}")
        return file.read_text("utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        message = f"cannot read {file}: {(getattr(error, 'strerror', None) or str(error)).lower()}"
        raise PathError.of("FT1402", message, thing=given, hint="create it on the site, with mode 600") from error


@asynccontextmanager
async def _through_ssh(
    path: ViaSsh, hub: HostPort, factory: Callable[[], _P], context: ssl.SSLContext
) -> AsyncIterator[_P]:
    """One end of a pair of sockets is the connection's; the other one is ssh's standard input and output."""
    async with AsyncExitStack() as stack:
        known = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabrictool-"))) / "known_hosts"
        known.write_text(path.known_hosts())
        ours, theirs = socket.socketpair()
        unless_connected = stack.enter_context(ExitStack())
        unless_connected.callback(ours.close)
        with theirs:
            process = await _started(path.argv(hub, str(known)), theirs)
        stack.push_async_callback(_ended, process)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_OCTETS)
        log = bytearray()
        reading = asyncio.create_task(_read_log(process, log))
        stack.callback(reading.cancel)
        try:
            if path.kind == "ssh":
                await _bridge_ready(ours, path)
            unless_connected.pop_all()
            protocol = await _tls(ours, factory, context)
        except (OSError, EOFError) as error:
            await asyncio.wait({reading}, timeout=LAST_WORDS_SECONDS)
            if process.returncode or isinstance(error, EOFError):
                raise ssh_failure(log.decode("utf-8", "replace"), path, hub) from None
            raise
        yield protocol


async def _started(argv: list[str], stdio: socket.socket) -> asyncio.subprocess.Process:
    try:  # in a session of its own: a signal to the job's group must not end it before the agent has said goodbye
        return await asyncio.create_subprocess_exec(
            *argv, stdin=stdio.fileno(), stdout=stdio.fileno(), stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
    except FileNotFoundError as error:
        message, hint = "ssh is not installed on this node", "ask the site for the OpenSSH client, or use a proxy"
        raise PathError.of("FT6207", message, hint=hint) from error


async def _read_log(process: asyncio.subprocess.Process, log: bytearray) -> None:
    """Keep the end of what ssh writes to stderr; over when ssh is."""
    while process.stderr is not None and (data := await process.stderr.read(LOG_OCTETS)):
        log += data
        del log[:-LOG_OCTETS]
    await process.wait()


async def _bridge_ready(sock: socket.socket, path: ViaSsh) -> None:
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(PATH_SECONDS):
            while not after_banner(data, path):
                more = await loop.sock_recv(sock, 4096)
                if not more:
                    raise EOFError
                data += more
    except TimeoutError:
        raise no_bridge(data, path) from None


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
