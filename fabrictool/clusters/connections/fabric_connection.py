"""The adapter for verbs that a person types: `bootstrap`, `doctor`, `shell`. Fabric, and paramiko only through it.

Never imported where plans are made or carried out: it costs threads, and takes one command at a time.
"""

from __future__ import annotations

import base64
import select
import shlex
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import fabric
import invoke
import paramiko
from invoke.terminals import character_buffered

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections import commands, errors, host_certificates, identities, pins
from fabrictool.clusters.connections.fabric_forward import PortForward
from fabrictool.clusters.connections.fabric_watch import KeepaliveWatch
from fabrictool.clusters.connections.settings import ConnectionLimits
from fabrictool.clusters.connections.shell_verbs import ShellOutcome, ShellVerbs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.clusters.connections.protocol import Endpoint

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_CHUNK = 1 << 16
_BROKEN = (OSError, EOFError, paramiko.SSHException)


class FabricConnection(ShellVerbs):
    """One connection; commands run one after another."""

    def __init__(self, endpoint: Endpoint, *, limits: ConnectionLimits | None = None) -> None:
        super().__init__(endpoint)
        self._limits = limits or ConnectionLimits()
        self._lock = threading.Lock()
        self._hosts: list[fabric.Connection] = []
        self._watch: KeepaliveWatch | None = None

    def close(self) -> None:
        with self._lock:
            self._close()

    def interact(self, argv: Sequence[str] = ()) -> int:
        """Give the terminal to a login shell, or to a command, until it ends; its status."""
        with self._lock:
            last = self._connected()
        try:
            # Before the channel opens: invoke's own switch comes after the first output, and it drops what was typed
            # until then.
            with character_buffered(sys.stdin):
                ended = last.run(commands.portable("exec " + shlex.join(argv)), pty=True) if argv else last.shell()
        except invoke.UnexpectedExit as status:
            ended = status.result
        except _BROKEN as error:
            raise errors.lost(self._endpoint, errors.named(argv) if argv else "the shell", str(error)) from error
        return int(ended.exited)

    def _carry(self, text: str, stdin: bytes, timeout_s: float, *, urgent: bool = False) -> ShellOutcome:
        with self._lock:
            try:
                channel = self._opened(text)
            except _BROKEN as error:
                return ShellOutcome("lost", why=str(error))
            feeder = threading.Thread(target=_feed, args=(channel, stdin), daemon=True)
            feeder.start()
            try:
                return _collected(channel, time.monotonic() + timeout_s)
            finally:
                channel.close()
                feeder.join()

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[Iterator[bytes]]:
        wrapped, what = commands.wrap_stream(argv), errors.named(argv)
        with self._lock:
            try:
                channel = self._opened(wrapped.text)
            except _BROKEN as error:
                raise errors.lost(self._endpoint, what, str(error)) from error
        try:
            yield self._lines(channel, wrapped, what)
        finally:
            channel.close()

    def _lines(self, channel: Any, wrapped: commands.Wrapped, what: str) -> Iterator[bytes]:
        noise = True
        with suppress(OSError), channel.makefile("rb") as lines:
            for line in lines:
                if noise:
                    noise = wrapped.begun(line) is None
                else:
                    yield line.removesuffix(b"\n")
        if channel.recv_exit_status() < 0:
            raise errors.lost(self._endpoint, what, "the connection is gone")

    @contextmanager
    def forward(self, host: str, port: int) -> Iterator[tuple[str, int]]:
        with self._lock:
            transport = self._connected().client.get_transport()
        with PortForward(transport, host, port) as address:
            yield address

    # -- the connection; the lock is held ------------------------------------------------------------------------

    def _opened(self, text: str) -> Any:
        """A channel on which the command has been sent; refused ones are asked for again, for nothing has run."""
        until, pause = time.monotonic() + self._limits.refused_s, _FIRST_PAUSE
        while True:
            transport = self._connected().client.get_transport()
            try:
                channel = transport.open_session(timeout=self._limits.login_s)
            except paramiko.ChannelException as error:
                if time.monotonic() + pause > until:
                    raise errors.channel_refused(self._endpoint, error.text) from error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            try:
                channel.exec_command(text.encode())
            except BaseException:
                channel.close()
                raise
            return channel

    def _connected(self) -> fabric.Connection:
        if not self._hosts or not all(host.is_connected for host in self._hosts):
            self._close()
            try:
                for hop in (*self._endpoint.jumps, self._endpoint):
                    self._hosts.append(self._login(hop))
            except BaseException:
                self._close()
                raise
            self._watch = KeepaliveWatch(self._hosts[-1].client.get_transport(), self._limits)
        return self._hosts[-1]

    def _close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in reversed(hosts):
            _hang_up(host)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _login(self, hop: Endpoint) -> fabric.Connection:
        pinned, offered = pins.pins(hop), identities.keys(hop)
        agent = paramiko.Agent() if offered.only else None
        host = fabric.Connection(
            hop.host,
            user=hop.user,
            port=hop.port,
            # Lazy: no file of Fabric's; an empty ssh_config: none of the user's.
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            forward_agent=False,
            connect_kwargs={
                "key_filename": [str(path) for path in offered.files if not path.name.endswith("_sk")],
                "pkey": _held(agent, offered),
                "allow_agent": bool(offered.agent) and not offered.only,
                "look_for_keys": False,
                "timeout": self._limits.login_s,
                "banner_timeout": self._limits.login_s,
                "auth_timeout": self._limits.login_s,
                "transport_factory": lambda sock, **_: _transport(sock, pinned),
                "sock": self._socket(hop),
            },
        )
        host.client.set_missing_host_key_policy(_Pinned(hop, pinned))
        try:
            host.open()
        except BaseException as error:
            _hang_up(host)
            if isinstance(error, _BROKEN) and not isinstance(error, FabrictoolError):
                raise _login_error(hop, error, offered, self._limits) from error
            raise
        finally:
            if agent is not None:
                agent.close()
        return host

    def _socket(self, hop: Endpoint) -> Any:
        if self._hosts:
            transport = self._hosts[-1].client.get_transport()
            try:
                return transport.open_channel(
                    "direct-tcpip", (hop.host, hop.port), ("127.0.0.1", 0), timeout=self._limits.connect_s
                )
            except paramiko.ChannelException as error:
                raise errors.unreachable(hop, error.text) from error
            except _BROKEN as error:
                raise errors.no_answer(hop, "no connection", self._limits.connect_s) from error
        try:
            sock = socket.create_connection((hop.host, hop.port), self._limits.connect_s)
        except TimeoutError as error:
            raise errors.no_answer(hop, "no connection", self._limits.connect_s) from error
        except OSError as error:
            raise errors.unreachable(hop, str(error)) from error
        # Without this, each command waits some 40 ms for a delayed acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


class _Pinned(paramiko.RejectPolicy):  # type: ignore[misc]
    """The only judge of host keys: paramiko's own list knows one key of a kind and no authorities."""

    def __init__(self, hop: Endpoint, pinned: tuple[pins.HostKeyPin, ...]) -> None:
        self._hop = hop
        self._pins = pinned

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """Returns for a pinned key, raises FT5303 otherwise."""
        kind = key.get_name()
        if key.public_blob is None:
            if (False, key.asbytes()) in {(pin.authority, pin.blob) for pin in self._pins}:
                return
            raise self._refusal(f"{kind} {pins.fingerprint(key.asbytes())}", "")
        certificate = key.public_blob.key_blob
        authority = host_certificates.authority_of(certificate)
        seen = f"certificate of {pins.fingerprint(authority)}"
        if (True, authority) not in {(pin.authority, pin.blob) for pin in self._pins}:
            raise self._refusal(seen, "its signing authority is not pinned")
        if why := host_certificates.complaint(certificate, self._hop.host, time.time()):
            raise self._refusal(seen, why)

    def _refusal(self, seen: str, why: str) -> FabrictoolError:
        return errors.wrong_host_key(self._hop, seen, [str(pin) for pin in self._pins], why)


def _transport(sock: Any, pinned: tuple[pins.HostKeyPin, ...]) -> Any:
    transport = paramiko.Transport(sock)
    wanted = transport.get_security_options()
    wanted.key_types = [name for name in pins.algorithms(pinned) if name in transport._key_info]  # noqa: SLF001
    return transport


def _held(agent: Any, offered: identities.Keys) -> Any:
    """The agent's key for a private key that is locked; its certificate before the bare key."""
    if agent is None:
        return None
    wanted = [base64.b64decode(path.read_text().split()[1]) for path in reversed(offered.only)]
    held = {key.asbytes(): key for key in agent.get_keys()}
    return next((held[blob] for blob in wanted if blob in held), None)


def _login_error(
    hop: Endpoint, error: BaseException, offered: identities.Keys, limits: ConnectionLimits
) -> FabrictoolError:
    message = str(error)
    if isinstance(error, paramiko.IncompatiblePeer):
        return errors.no_protocol(hop, message)
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in message:
        if "timeout" in message.lower():
            return errors.no_answer(hop, "no login", limits.login_s)
        try:
            identities.check_certificate(errors.alone(hop), time.time(), 0.0)
        except FabrictoolError as unusable:
            return unusable
        return errors.refused(hop, str(offered), ", ".join(getattr(error, "allowed_types", ())))
    # start_client ends without a word when its time is over; what a banner's reader met is the error's context.
    met = error.__context__ if "protocol banner" in message else error
    if isinstance(met, TimeoutError) or "No existing session" in message or "timeout" in message.lower():
        return errors.no_answer(hop, "no login", limits.login_s)
    if isinstance(met, EOFError | OSError):
        return errors.unreachable(hop, str(met) or "connection closed before a login")
    return errors.of_connecting(hop, message)


def _hang_up(host: fabric.Connection) -> None:
    with suppress(*_BROKEN):
        transport = host.client.get_transport()
        host.client.close()
        if transport is not None:
            transport.sock.close()
            transport.join()
    sock = host.connect_kwargs.get("sock")
    if sock is not None:
        sock.close()


def _feed(channel: Any, stdin: bytes) -> None:
    """A command may end without reading its stdin."""
    with suppress(*_BROKEN):
        channel.sendall(stdin)
        channel.shutdown_write()


def _collected(channel: Any, until: float) -> ShellOutcome:
    out, err = bytearray(), bytearray()
    while True:
        while channel.recv_ready():
            out += channel.recv(_CHUNK)
        while channel.recv_stderr_ready():
            err += channel.recv_stderr(_CHUNK)
        over = channel.closed or (channel.eof_received and channel.exit_status_ready())
        if over and not channel.recv_ready() and not channel.recv_stderr_ready():
            break
        left = until - time.monotonic()
        if left <= 0:
            return ShellOutcome("timeout", bytes(out), bytes(err))
        if channel.eof_received:  # readable for ever: only the status is awaited
            channel.status_event.wait(min(left, 0.1))
        else:
            select.select([channel], [], [], min(left, 1.0))
    if channel.exit_status < 0:
        return ShellOutcome("lost", bytes(out), bytes(err), why="closed by the login node")
    return ShellOutcome("ended", bytes(out), bytes(err), channel.exit_status)
