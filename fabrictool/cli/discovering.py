"""Where ``discover`` goes: a cluster of an inventory, or a host with keys from the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.ids import is_name
from fabrictool.cli.hosts import split_target
from fabrictool.cli.source import Source
from fabrictool.clusters.discovery import DiscoveryTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.domain.inventory import Jump, Login

_KEY = re.compile(r"(?:@cert-authority )?(?:ssh-|ecdsa-)[a-z0-9-]+ [A-Za-z0-9+/]+=*")


@dataclass(frozen=True, slots=True)
class HostAccess:
    """How a host that no inventory describes is entered."""

    user: str = ""
    keys: Sequence[str] = ()
    """Its public host keys."""
    pin: Path | None = None
    """A file of them."""
    identity: str = ""


def site_named(
    text: str, access: HostAccess, names: tuple[str, str, str], kind: str, source: Source
) -> tuple[DiscoveryTarget, Callable[[], Connection]]:
    """What is to be described, and how it is reached; `names` are those of cluster, site and provider, or "".

    Raises UsageError FT9001 for a name that is none, FT5304 for a host without a pinned key.
    """
    for name in names:
        if name and not is_name(name):
            hint = "small letters, digits, `.`, `_` and `-`"
            raise UsageError.of("FT9001", f"`{name}` is not a valid name", hint=hint)
    entered = replace(access, identity="") != HostAccess()
    described = "@" not in text and not entered and (source != Source() or _named_here(text, source))
    target, connect = _cluster(text, names, source) if described else _host(text, access, names)
    return replace(target, kind=kind or target.kind), connect


def _named_here(text: str, source: Source) -> bool:
    """Whether the blueprint that is meant by default is sound and its inventory has this cluster."""
    try:
        return text in source.inventory_alone().clusters
    except FabrictoolError:
        return False


def _cluster(
    text: str, names: tuple[str, str, str], source: Source
) -> tuple[DiscoveryTarget, Callable[[], Connection]]:
    from fabrictool.clusters.connections.factory import connect_login, login_of

    inventory = source.inventory_alone()
    login = login_of(inventory, text)
    cluster = inventory.clusters[text]
    provider = inventory.sites[cluster.site].provider if cluster.site in inventory.sites else ""
    name, site, given = names
    target = DiscoveryTarget(
        cluster=name or text,
        site=site or cluster.site,
        provider=given or provider,
        login=_fields(login),
        kind=cluster.kind,
        folder=cluster.folder if "folder" in cluster.model_fields_set else "",
    )
    return target, lambda: connect_login(login)


def _host(
    text: str, access: HostAccess, names: tuple[str, str, str]
) -> tuple[DiscoveryTarget, Callable[[], Connection]]:
    from pydantic import ValidationError

    from fabrictool.clusters.connections.factory import connect_login
    from fabrictool.domain.inventory import Login

    before, host, port = split_target(text)
    pinned = [*access.keys, *(_pinned(access.pin, host, port) if access.pin is not None else ())]
    user = access.user or before
    shown = host if port == 22 else f"{host}:{port}"
    if not pinned:
        message = f"no host key of {shown} is pinned, and there is no trust on first use"
        hint = f"`fabrictool trust host {shown}` prints its keys; compare them, then give one with --host-key or --pin"
        raise UsageError.of("FT5304", message, hint=hint)
    if not user:
        raise UsageError.of("FT9001", f"no user name given for {shown}", hint="--user NAME")
    fields = {"host": host, "port": port, "user": user, "host_keys": pinned, "identity": access.identity or None}
    try:
        login = Login.model_validate({key: value for key, value in fields.items() if value is not None}, strict=False)
    except ValidationError as error:
        complaint = error.errors()[0]
        raise UsageError.of(
            "FT5305", f"{complaint['msg']}", hint="TYPE BASE64, as `fabrictool trust host` prints it"
        ) from error
    name, site, provider = names
    return DiscoveryTarget(name, site, provider, _fields(login)), lambda: connect_login(login)


def _pinned(path: Path, host: str, port: int) -> list[str]:
    """The keys in a file: lines of ``TYPE BASE64`` (also as ``- …`` under ``host_keys:``), or of a known_hosts."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise file_error(error, path) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT5305", f"{path} is not text", file=str(path)) from error
    keys = []
    named = {host, f"[{host}]:{port}"} if port == 22 else {f"[{host}]:{port}"}
    for line in lines:
        words = line.strip().removeprefix("- ").strip()
        match = _KEY.match(words)
        if match:
            keys.append(match.group())
            continue
        authority, _, rest = words.rpartition("@cert-authority ")
        hosts, _, key = rest.partition(" ")
        if (match := _KEY.match(key)) and named & set(hosts.split(",")):
            keys.append(("@cert-authority " if authority or words.startswith("@cert") else "") + match.group())
    if not keys:
        message = f"{path} holds no key of {host}:{port}"
        raise InvalidInputError.of(
            "FT5305", message, file=str(path), hint="it must have lines `TYPE BASE64`, or be an unhashed known_hosts"
        )
    return keys


def _fields(login: Login) -> tuple[tuple[str, object], ...]:
    """Only what differs from the defaults."""
    rows: list[tuple[str, object]] = [*_address(login)]
    rows += [("identity", login.identity)] if login.identity else []
    rows += [("transport", login.transport)] if login.transport != "asyncssh" else []
    rows += [("control_path", login.control_path)] if login.control_path else []
    rows += [("ssh_config", True)] if login.ssh_config else []
    rows.append(("host_keys", login.host_keys))
    if login.jump:
        rows.append(("jump", tuple((*_address(hop), ("host_keys", hop.host_keys)) for hop in login.jump)))
    return tuple(rows)


def _address(hop: Login | Jump) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("host", hop.host)]
    rows += [("port", hop.port)] if hop.port != 22 else []
    rows += [("user", str(hop.user))] if hop.user else []
    return rows
