"""What OpenSSH's client is told, and what its log says. Pure text.

Each host on the way has pinned keys in a ``known_hosts`` of its own; no file of the user's is read unless asked for.
Options on the command line win over every file, so an opted-in ``ssh_config`` cannot loosen them for the host itself. A
``ProxyJump`` that such a file says is OpenSSH's own affair: its jump host is checked as that file wants it.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections import errors, identities, pins

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabrictool.clusters.connections.protocol import Endpoint
    from fabrictool.clusters.connections.settings import ConnectionLimits

STRICT = {
    "IgnoreUnknown": "KnownHostsCommand,SessionType",
    "KnownHostsCommand": "none",
    "RemoteCommand": "none",
    "SessionType": "default",
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "CheckHostIP": "no",
    "UpdateHostKeys": "no",
    "VerifyHostKeyDNS": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "GSSAPIDelegateCredentials": "no",
    "GSSAPIAuthentication": "yes",
    "ClearAllForwardings": "no",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "Compression": "no",
    "ControlPersist": "no",
    "LogLevel": "DEBUG1",
}


def options(endpoint: Endpoint, known_hosts: Path, limits: ConnectionLimits) -> dict[str, str]:
    """All that concerns one host, without the way to it."""
    settings = STRICT | {
        "Port": str(endpoint.port),
        "User": endpoint.user,
        # The name that host keys and host certificates are checked against, whatever ssh_config makes of it.
        "HostKeyAlias": endpoint.host,
        "HostKeyAlgorithms": ",".join(pins.algorithms(pins.pins(endpoint))),
        "UserKnownHostsFile": _path(known_hosts),
        "ConnectTimeout": f"{max(1, round(limits.connect_s))}",
        "ServerAliveInterval": f"{max(1, round(limits.keepalive_s))}",
        "ServerAliveCountMax": f"{limits.keepalive_count}",
    }
    return settings | ({"IdentitiesOnly": "yes"} if endpoint.identity else {})


def identity_lines(endpoint: Endpoint) -> list[tuple[str, str]]:
    """The keys to offer; files are named because ssh looks in the account's home and not in ``$HOME``."""
    offered = identities.keys(endpoint)
    files = [path for path in (*offered.files, *offered.only) if not path.name.endswith("-cert.pub")]
    lines = [("IdentityFile", _path(path)) for path in files]
    # A key that only the agent can use is named by its public half; its certificate is not found beside it then.
    lines += [("CertificateFile", _path(path)) for path in offered.only if path.name.endswith("-cert.pub")]
    return lines or [("IdentityFile", "none")]


def hop_config(chain: Sequence[Endpoint], folder: Path, limits: ConnectionLimits) -> str:
    """An ``ssh_config`` with an entry for each jump host; `chain` is nearest first."""
    blocks = []
    for number, hop in enumerate(chain):
        lines = [*options(hop, folder / f"known{number}", limits).items(), *identity_lines(hop)]
        lines = [("HostName", hop.host.replace("%", "%%")), *lines]
        if number:
            lines.append(("ProxyCommand", proxy_command(folder, number - 1)))
        blocks.append(f"Host hop{number}\n" + "".join(f"  {key} {value}\n" for key, value in lines))
    return "\n".join(blocks)


def proxy_command(folder: Path, number: int) -> str:
    """Through jump host `number`."""
    words = [f"-F{folder}/config", f"-E{folder}/log{number}"]
    return "ssh " + " ".join(shlex.quote(word).replace("%", "%%") for word in words) + f" -W [%h]:%p hop{number}"


def known_hosts(endpoint: Endpoint) -> str:
    return "".join(pin.known_hosts(endpoint.host) + "\n" for pin in pins.pins(endpoint))


def by_hand(endpoint: Endpoint, path: str) -> str:
    """What a person types to open the connection that is then shared."""
    way = ",".join(f"{hop.user}@{hop.host}:{hop.port}" for hop in endpoint.jumps)
    words = ["-M", "-N", "-f", "-S", path, "-p", str(endpoint.port), *(["-J", way] if way else [])]
    words.append(f"{endpoint.user}@{endpoint.host}")
    return "ssh " + " ".join(word if word.startswith("~/") else shlex.quote(word) for word in words)


def _path(path: Path) -> str:
    """For ssh_config: quoted, with nothing left to expand."""
    return '"' + str(path).replace("%", "%%") + '"'


# -- what the log says -----------------------------------------------------------------------------------------

_WRONG_KEY = (
    r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|[Cc]ertificate invalid|Host key for .* revoked"
)
_SHOWN = r"Server host (?:key|certificate): (\S+ SHA256:[^\s,]+)(?:.* CA (\S+ SHA256:[^\s,]+))?"
_REFUSED = r"Permission denied \(|Too many authentication failures|No more authentication methods"
_SLOW = r"timed out"
_LOGGED_IN = r"Authenticated to |Authentication succeeded"


def diagnosis(chain: Sequence[Endpoint], logs: Sequence[str], now: float, limits: ConnectionLimits) -> FabrictoolError:
    """Why no connection came up; `chain` ends with the endpoint, `logs` are of the same hosts."""
    before = ""
    for hop, log in zip(chain, logs, strict=True):
        if not re.search(_LOGGED_IN, log):
            onward = re.search(r"open failed: (.*)", before)
            return errors.unreachable(hop, onward[1]) if onward else _host_error(hop, log, now, limits)
        before = log
    return _host_error(chain[-1], logs[-1], now, limits)


def _host_error(hop: Endpoint, log: str, now: float, limits: ConnectionLimits) -> FabrictoolError:
    if re.search(_WRONG_KEY, log):
        shown = re.search(_SHOWN, log)
        seen = (f"certificate of {shown[2]}" if shown[2] else shown[1]) if shown else ""
        why = re.search(r"[Cc]ertificate invalid: (.*)", log)
        return errors.wrong_host_key(hop, seen, [str(pin) for pin in pins.pins(hop)], why[1] if why else "")
    if re.search(_REFUSED, log):
        try:
            identities.check_certificate(errors.alone(hop), now, 0.0)
        except FabrictoolError as error:
            return error
        offered = re.search(r"Permission denied \((.*)\)", log)
        methods = (offered[1] if offered else "").replace(",", ", ")
        partial = ", after partial success" if "partial success" in log else ""
        return errors.refused(hop, str(identities.keys(hop)), methods + partial, by_hand(hop, f"~/.ssh/ft-{hop.host}"))
    if re.search(_SLOW, log) or not last_words(log):
        if re.search(r"Connection established|Local version string", log):
            return errors.no_answer(hop, "no login", limits.login_s)
        return errors.no_answer(hop, "no connection", limits.connect_s)
    return errors.of_connecting(hop, last_words(log))


def last_words(log: str) -> str:
    """The last line of a log that is no debugging; "": there is none."""
    lines = [line.strip() for line in log.splitlines()]
    return next(
        (line for line in reversed(lines) if line and not re.match(r"debug\d|OpenSSH_|Authenticated", line)), ""
    )
