"""How nodes of a cluster get out of their site to a gateway, as the inventory writes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from fabrictool.domain.quantities import Document, Endpoint, HostKey, SecretRef, Text, problem

__all__ = ["Egress", "Proxy", "SshHost"]

_HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$", strict=True)]
_Account = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$", strict=True)]


class Proxy(Document):
    """The site's HTTP proxy, if it allows CONNECT to a gateway's mesh port."""

    address: Endpoint
    """Host and port."""
    user: Text | None = None
    """For basic authentication."""
    password: SecretRef | None = None
    """Where a node reads the password: ``secret://file/…``, a file on the site with mode 600, or ``secret://env/…``, a
    variable of the job."""

    @model_validator(mode="after")
    def _readable_on_a_node(self) -> Proxy:
        if self.password is not None and self.password.scheme not in ("env", "file"):
            hint = "write secret://file/PATH, a file on the site, or secret://env/NAME, a variable of the job"
            raise problem("FT1119", f"a node has no `{self.password.scheme}` to read a password from", hint)
        return self


class SshHost(Document):
    """A host that nodes reach by the program ssh."""

    host: _HostName
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """SSH port."""
    user: _Account
    """The account there."""
    identity: Text | None = None
    """File of the private key, on the nodes; absent: the keys that ssh finds in the account's home."""
    host_keys: Annotated[tuple[HostKey, ...], Field(min_length=1)]
    """Pinned public keys; any other key is refused."""


class Egress(Document):
    """Ways out beside the direct one, tried in this order."""

    proxy: Proxy | None = None
    """Absent: the ``https_proxy`` of the job's environment, if there is one."""
    ssh: SshHost | None = None
    """A host where the key may run nothing but the bridge to a gateway."""
    login: SshHost | None = None
    """A host that forwards connections, such as the site's login node."""
