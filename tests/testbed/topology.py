"""What the testbed consists of: machines, users, addresses. Pure.

All addresses lie in 198.18.0.0/15 (RFC 2544) and exist in our network namespaces alone: no link leads out of them.
"""

from dataclasses import dataclass

PUBLIC = "198.18.0"
NODES = 2
GPUS = 4
SWITCH = "ft-net"  # the network namespace of the bridges


@dataclass(frozen=True)
class User:
    name: str
    uid: int


@dataclass(frozen=True)
class Cluster:
    """One Slurm cluster behind its own firewall; the first user is the operator's account there."""

    name: str
    inside: str  # the first three parts of its inner network
    public: int  # its login node is PUBLIC.public+1, its gateway's outer side +2
    users: tuple[User, ...]
    gpu: str
    accounting: str  # "slurmdbd" or "filetxt"

    @property
    def user(self) -> str:
        return self.users[0].name


@dataclass(frozen=True)
class Interface:
    bridge: str
    address: str

    @property
    def mac(self) -> str:
        """Fixed, so that a machine that boots again is not unknown to its neighbours' ARP tables."""
        return "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))


@dataclass(frozen=True)
class MachineSpec:
    name: str
    role: str  # operator, host, router, login, controller, node
    interfaces: tuple[Interface, ...]
    cluster: str = ""
    gateway: str = ""
    users: tuple[User, ...] = ()
    ssh_ports: tuple[int, ...] = ()

    @property
    def namespace(self) -> str:
        return f"ft-{self.name}"

    def link(self, index: int) -> str:
        """The switch's end of the cable."""
        return f"{self.name}-{index}"


CLUSTERS = {
    "a": Cluster("a", "198.18.1", 10, (User("alice", 2001), User("noisy", 2002)), "a100", "slurmdbd"),
    "b": Cluster("b", "198.18.2", 20, (User("u7781", 3001),), "h100", "filetxt"),
}
DEFAULT_PORT, NOISY_PORT = 2222, 2223  # of a-login: OpenSSH's defaults; a banner and a shell that talks


def _cluster_machines(cluster: Cluster) -> list[MachineSpec]:
    name, inside, users = cluster.name, cluster.inside, cluster.users
    ports = (22, DEFAULT_PORT, NOISY_PORT) if name == "a" else (22,)

    def inner(last: int) -> Interface:
        return Interface(name, f"{inside}.{last}")

    def outer(last: int) -> Interface:
        return Interface("pub", f"{PUBLIC}.{cluster.public + last}")

    def within(machine: str, role: str, last: int) -> MachineSpec:
        return MachineSpec(machine, role, (inner(last),), name, f"{inside}.254", users)

    return [
        MachineSpec(f"{name}-gw", "router", (outer(2), inner(254))),
        within(f"{name}-ctl", "controller", 2),
        *(within(f"{name}-n{i}", "node", 10 + i) for i in range(1, NODES + 1)),
        MachineSpec(f"{name}-login", "login", (outer(1), inner(1)), cluster=name, users=users, ssh_ports=ports),
    ]


def machines() -> dict[str, MachineSpec]:
    """All machines, in the order in which they are started."""
    specs = [machine for cluster in CLUSTERS.values() for machine in _cluster_machines(cluster)]
    specs += [
        MachineSpec("op", "operator", (Interface("pub", f"{PUBLIC}.10"),)),
        MachineSpec("ing", "host", (Interface("pub", f"{PUBLIC}.80"),), users=(User("web", 4001),), ssh_ports=(22,)),
        MachineSpec(
            "host", "host", (Interface("pub", f"{PUBLIC}.90"),), users=(User("hostuser", 4002),), ssh_ports=(22,)
        ),
    ]
    return {spec.name: spec for spec in specs}


def routes(spec: MachineSpec) -> list[tuple[str, str]]:
    """(destination, via). The operator has a route to the inside, so that a refusal is the firewall's."""
    if spec.gateway:
        return [("default", spec.gateway)]
    if spec.role == "operator":
        return [(f"{c.inside}.0/24", f"{PUBLIC}.{c.public + 2}") for c in CLUSTERS.values()]
    return []


def address(spec: MachineSpec, bridge: str = "pub") -> str:
    """The address on that bridge, or the only one."""
    return next((i.address for i in spec.interfaces if i.bridge == bridge), spec.interfaces[0].address)


def hosts_file(view: str) -> str:
    """/etc/hosts as seen from the public network ("pub") or from inside of a cluster."""
    lines = ["127.0.0.1 localhost"]
    for spec in machines().values():
        seen = {interface.bridge: interface.address for interface in spec.interfaces}
        here = seen.get(view) or seen.get("pub")
        if here:
            lines.append(f"{here} {spec.name}")
    return "\n".join(lines) + "\n"
