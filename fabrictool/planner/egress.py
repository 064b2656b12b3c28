"""From the inventory's ways out of a site to what a unit is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.specs import EgressSpec, ProxySpec, SshHostSpec

if TYPE_CHECKING:
    from fabrictool.domain.egress import Egress, Proxy, SshHost


def egress_of(egress: Egress | None) -> EgressSpec | msgspec.UnsetType:
    """Unset where the inventory says nothing, so that specs stay what they were."""
    if egress is None:
        return msgspec.UNSET
    return EgressSpec(proxy=_proxy(egress.proxy), ssh=_host(egress.ssh), login=_host(egress.login))


def _proxy(proxy: Proxy | None) -> ProxySpec | None:
    if proxy is None:
        return None
    password = "" if proxy.password is None else str(proxy.password)
    return ProxySpec(host=proxy.address.host, port=proxy.address.port, user=proxy.user or "", password=password)


def _host(host: SshHost | None) -> SshHostSpec | None:
    if host is None:
        return None
    return SshHostSpec(
        host=host.host, port=host.port, user=host.user, identity=host.identity or "", host_keys=host.host_keys
    )
