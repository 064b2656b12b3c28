"""Cables, addresses and firewalls of the testbed, with ip and nft."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.testbed.topology import CLUSTERS, SWITCH, MachineSpec, routes

NAMED = Path("/run/netns")
FIREWALL = """
table inet ft {
  chain forward_ft { type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname eth1 oifname eth0 accept
    iifname eth0 counter reject with icmpx type admin-prohibited
  }
  chain nat_ft { type nat hook postrouting priority 100; oifname eth0 masquerade
  }
}
"""


def _ip(*argv: str, check: bool = True, stdin: str | None = None) -> str:
    done = subprocess.run(["ip", *argv], input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _batch(namespace: str, lines: Iterable[str]) -> None:
    _ip("-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")


def exists(namespace: str) -> bool:
    return (NAMED / namespace).exists()


def create_switch() -> None:
    _ip("netns", "add", SWITCH)
    lines = []
    for bridge in ("pub", *CLUSTERS):
        lines += [f"link add br-{bridge} type bridge", f"link set br-{bridge} up"]
    _batch(SWITCH, lines)


def plug_in(specs: Iterable[MachineSpec]) -> None:
    """Makes the machines' network namespaces, with cables to the switch and, on routers, the firewall."""
    specs = list(specs)
    cables = []
    for spec in specs:
        _ip("netns", "add", spec.namespace)
        for k, interface in enumerate(spec.interfaces):
            peer = f"peer name eth{k} address {interface.mac} netns {spec.namespace}"
            cables.append(f"link add {spec.link(k)} type veth {peer}")
            cables.append(f"link set {spec.link(k)} master br-{interface.bridge} up")
    _batch(SWITCH, cables)
    for spec in specs:
        lines = ["link set lo up"]
        for k, interface in enumerate(spec.interfaces):
            lines += [f"addr add {interface.address}/24 dev eth{k}", f"link set eth{k} up"]
        lines += [f"route add {destination} via {via}" for destination, via in routes(spec)]
        _batch(spec.namespace, lines)
        if spec.role == "router":
            inside(spec, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            inside(spec, "nft", "-f", "-", stdin=FIREWALL)


def unplug(spec: MachineSpec) -> None:
    """Takes the cables away for good: not one packet of what dies next gets out."""
    for k in range(len(spec.interfaces)):
        _ip("-n", SWITCH, "link", "del", spec.link(k), check=False)


def remove(spec: MachineSpec) -> None:
    unplug(spec)
    _ip("netns", "del", spec.namespace, check=False)


def remove_all(specs: Iterable[MachineSpec]) -> None:
    _ip("netns", "del", SWITCH, check=False)
    for spec in specs:
        if exists(spec.namespace):
            _ip("netns", "del", spec.namespace, check=False)


def set_link(spec: MachineSpec, index: int, *, up: bool) -> None:
    _ip("-n", SWITCH, "link", "set", spec.link(index), "up" if up else "down")


def pids(namespace: str) -> list[int]:
    """Every process that lives in the namespace."""
    return [int(pid) for pid in _ip("netns", "pids", namespace, check=False).split()] if exists(namespace) else []


def inside(spec: MachineSpec, *argv: str, stdin: str | None = None, check: bool = True) -> str:
    """Runs a program of this machine in the other machine's network."""
    command = ["nsenter", f"--net={NAMED / spec.namespace}", "--", *argv]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)} in {spec.name}: {done.stderr.strip()}")
    return done.stdout


def drop(spec: MachineSpec, port: int) -> None:
    """From now on the machine neither hears nor says anything on the TCP port; connections stay half-open."""
    table = f"ftdrop{port}"
    rules = f"""
table inet {table} {{
  chain in_ft {{ type filter hook input priority 0; tcp dport {port} counter drop
  }}
  chain out_ft {{ type filter hook output priority 0; tcp sport {port} counter drop
  }}
}}
"""
    inside(spec, "nft", "-f", "-", stdin=rules)


def undrop(spec: MachineSpec, port: int) -> None:
    inside(spec, "nft", "delete", "table", "inet", f"ftdrop{port}", check=False)
