"""Which ways there are from an agent to a hub, in the order in which they are tried; no sockets here.

=======  ==============================================================================================
direct   a TCP connection to the hub
proxy    HTTP CONNECT through the site's proxy: the inventory's, or that of the job's environment
ssh      a host where our key may run nothing but ``bridge.py``, a pipe to the hub
login    a host that forwards one connection (``ssh -W``), such as the site's login node
=======  ==============================================================================================

Whatever the way, the mesh's TLS runs from end to end inside it: a proxy or a login node sees octets that it cannot read
or change. It may drop them, and so is a way like any other, never trusted.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.specs import EgressSpec, HostPort, ProxySpec, SshHostSpec
from fabrictool.mesh.transport.bridge import COMMAND, READY

if TYPE_CHECKING:
    from collections.abc import Mapping

PathKind = Literal["direct", "proxy", "ssh", "login"]

ANSWER_OCTETS = 16 * 1024
"""Of a proxy's answer, or of what a host prints before the bridge speaks; more is no answer."""
_HEAD_END = b"\r\n\r\n"


class PathError(FabrictoolError):
    """This way does not lead to the hub (FT6206 to FT6209); another may."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Straight to the hub."""

    kind: PathKind = "direct"


@dataclass(frozen=True, slots=True)
class ViaProxy:
    """By HTTP CONNECT, which asks a proxy for a plain pipe to the hub."""

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    """As the environment's address of the proxy has it, or ``secret://…``."""
    kind: PathKind = "proxy"

    def request(self, hub: HostPort, password: str) -> bytes:
        """The request for a pipe to this hub, with the proof of who asks if there is a user."""
        target = f"[{hub.host}]:{hub.port}" if ":" in hub.host else str(hub)
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.user:
            token = base64.b64encode(f"{self.user}:{password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(frozen=True, slots=True)
class ViaSsh:
    """By the program ssh: the bridge's standard streams, or one connection that the host forwards."""

    to: SshHostSpec
    kind: PathKind

    def argv(self, hub: HostPort, known_hosts: str) -> list[str]:
        """The command line; no configuration of the account's counts, and there is no trust on first use."""
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "HostKeyAlias": self.to.host,
            "UserKnownHostsFile": f'"{known_hosts}"',
            "GlobalKnownHostsFile": "/dev/null",
            "UpdateHostKeys": "no",
            "ForwardAgent": "no",
            "PermitLocalCommand": "no",
            "ControlPath": "none",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
        }
        if self.to.identity:
            options["IdentitiesOnly"] = "yes"
        words = ["ssh", "-F", "none", "-T", "-p", str(self.to.port), "-l", self.to.user]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        words += ["-i", self.to.identity] if self.to.identity else []
        if self.kind == "login":
            return [*words, "-W", f"[{hub.host}]:{hub.port}", "--", self.to.host]
        return [*words, "--", self.to.host, f"{COMMAND} {shlex.quote(str(hub))}"]

    def known_hosts(self) -> str:
        """The file against which ssh checks the host's key."""
        marked = (key.partition(" ") if key.startswith("@") else ("", "", key) for key in self.to.host_keys)
        return "".join(f"{mark} {self.to.host} {key}".lstrip() + "\n" for mark, _, key in marked)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A way that somebody asked for and that cannot be tried."""

    kind: PathKind
    error: FabrictoolError


HubPath = Direct | ViaProxy | ViaSsh | Unusable


def paths_of(
    egress: EgressSpec | msgspec.UnsetType, environment: Mapping[str, str], hub: HostPort
) -> tuple[HubPath, ...]:
    """The ways to this hub, the cheapest first; what the inventory says counts for more than the environment."""
    ways = EgressSpec() if isinstance(egress, msgspec.UnsetType) else egress
    paths: list[HubPath] = [Direct()]
    proxy = _of_inventory(ways.proxy) if ways.proxy is not None else _of_environment(environment, hub)
    if proxy is not None:
        paths.append(proxy)
    if ways.ssh is not None:
        paths.append(ViaSsh(ways.ssh, "ssh"))
    if ways.login is not None:
        paths.append(ViaSsh(ways.login, "login"))
    return tuple(paths)


def _of_inventory(proxy: ProxySpec) -> HubPath:
    return ViaProxy(proxy.host, proxy.port, proxy.user, proxy.password)


def _of_environment(environment: Mapping[str, str], hub: HostPort) -> HubPath | None:
    """``https_proxy`` as curl reads it: small letters first, ``all_proxy`` last, ``no_proxy`` above all."""
    names = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    name = next((name for name in names if environment.get(name)), None)
    if name is None or excepted(environment.get("no_proxy") or environment.get("NO_PROXY") or "", hub):
        return None
    address = environment[name]
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http":
        # The address may hold a password, so it is not repeated.
        message = f"the job's {name} is not the address of an HTTP proxy"
        hint = "write http://HOST:PORT, or set `egress.proxy` of the cluster in the inventory"
        return Unusable("proxy", PathError.of("FT6206", message, hint=hint))
    return ViaProxy(host, port, unquote(parts.username or ""), unquote(parts.password or ""))


def excepted(no_proxy: str, hub: HostPort) -> bool:
    """Whether a ``NO_PROXY`` names this hub: ``*``, a domain and all below it, an address, or a network."""
    host = hub.host.lower().strip("[]")
    for entry in re.split(r"[\s,]+", no_proxy.lower()):
        name, _, port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
        if port and port != str(hub.port):
            continue
        name = name.strip("[]").removeprefix("*").lstrip(".")
        if entry == "*" or (name and (host == name or host.endswith(f".{name}"))) or _in_network(host, name):
            return True
    return False


def _in_network(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


class ProxyAnswer:
    """What a proxy says to CONNECT, sans I/O."""

    def __init__(self, path: ViaProxy, hub: HostPort) -> None:
        self._path = path
        self._hub = hub
        self._data = b""

    def receive(self, data: bytes) -> bool:
        """Whether it lets us through; False: more is to come, and none (b"") means that none will. Raises FT6206."""
        self._data += data
        head, end, beyond = self._data.partition(_HEAD_END)
        if not b"HTTP/1.".startswith(self._data[:7]) or (end and len(head) < len("HTTP/1.1 200")):
            raise self.refusal("what listens there does not speak HTTP", "check its host and port")
        if not end:
            if len(self._data) > ANSWER_OCTETS:
                raise self.refusal(f"its answer has more than {ANSWER_OCTETS} octets of headers", "tell its owner")
            if not data:
                raise self.refusal("it closed the connection without an answer", "ask its owner what it allows")
            return False
        status, reason = self._status(head)
        if 200 <= status < 300:
            if beyond:
                raise self.refusal("it sent data of its own into the connection", "tell its owner")
            return True
        raise self._refused(status, reason)

    def _status(self, head: bytes) -> tuple[int, str]:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        if len(words) < 2 or not re.fullmatch(r"[1-5]\d\d", words[1]):
            raise self.refusal("what listens there does not speak HTTP", "check its host and port")
        return int(words[1]), _plain(" ".join(words[1:]))

    def _refused(self, status: int, reason: str) -> FabrictoolError:
        if status == 407 and self._path.user:
            message, hint = f"it does not accept the user and the password ({reason})", "check both with its owner"
        elif status == 407:
            message, hint = f"it wants a user and a password ({reason})", "set `egress.proxy.user` and `password`"
        elif status == 403:
            message = f"it refuses connections to {self._hub} ({reason})"
            hint = "ask its owner to allow CONNECT to it; many proxies allow port 443 only"
        else:
            message, hint = f"it answers {reason}", "check its log"
        return self.refusal(message, hint)

    def refusal(self, message: str, hint: str) -> FabrictoolError:
        """FT6206, at this proxy."""
        at = f"{self._path.host}:{self._path.port}"
        return PathError.of("FT6206", f"the proxy {at}: {message}", thing=at, hint=hint)


def after_banner(data: bytes, path: ViaSsh) -> bool:
    """Whether the bridge is ready, of all that came so far; raises FT6208 when this is no bridge."""
    at = data.find(READY)
    if at < 0 and len(data) <= ANSWER_OCTETS:
        return False
    if at < 0 or data[at + len(READY) :]:
        raise no_bridge(data, path)
    return True


def no_bridge(data: bytes, path: ViaSsh) -> FabrictoolError:
    """FT6208: ssh came in, and something else than the bridge answers."""
    seen = f", but printed: {_plain(data.decode('utf-8', 'replace'))}" if data else ""
    message = f"ssh to {path.to.host} worked, but the bridge did not answer there{seen}"
    hint = "the key's line in authorized_keys has to run the bridge (docs/how-to/leave-a-closed-site.md)"
    return PathError.of("FT6208", message, thing=path.to.host, hint=hint)


_SSH_WORDS = (
    (
        r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|No \S+ host key is known",
        "its host key is not one that the inventory pins",
        "compare `ssh-keyscan {host}` with what the site publishes, and put the right key into `egress`",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "it does not accept the key",
        "check `identity` and the user, and authorized_keys on {host}",
    ),
    (
        r"administratively prohibited|forwarding failed|open failed",
        "it does not connect us to {hub}",
        "forwarding is off there, or it cannot reach the gateway; a key that runs the bridge needs no forwarding",
    ),
)


def ssh_failure(log: str, path: ViaSsh, hub: HostPort) -> FabrictoolError:
    """FT6207: what ssh's own log says, in words."""
    host = path.to.host
    for pattern, message, hint in _SSH_WORDS:
        if re.search(pattern, log):
            why = message.format(host=host, hub=hub)
            return PathError.of("FT6207", f"ssh to {host}: {why}", thing=host, hint=hint.format(host=host))
    lines = [line for line in log.splitlines() if line.strip()]
    last = _plain(lines[-1]) if lines else "it ended without a message"
    return PathError.of("FT6207", f"ssh to {host}: {last}", thing=host, hint=f"try `ssh {host}` on a node of the site")


def _plain(text: str) -> str:
    """A little of what a stranger wrote, on one line, with nothing in it that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:120]
