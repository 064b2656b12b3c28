"""What exists: providers, sites, clusters with their partitions and login nodes, links. Read from an inventory file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fabrictool.domain.quantities import (
    Bandwidth,
    Count,
    Duration,
    Name,
    Part,
    Power,
    PriceText,
    Secret,
    Size,
)

ClusterKind = Literal["local", "ssh", "slurm"]
Tier = Literal["owned", "scavenger"]

HostKey = Annotated[str, Field(pattern=r"^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/=]+( .*)?$")]


class Provider(Part):
    """An institution that contributes sites; trust is granted to providers."""

    title: str = ""
    """Its full name, for people."""
    contact: str = ""
    """Whom to ask."""


class Site(Part):
    """An administrative domain of one provider."""

    provider: Name
    """Name of a provider."""
    title: str = ""
    """For people."""


class JumpHost(Part):
    """A host on the way to a login node."""

    host: str
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """SSH port."""
    user: str = ""
    """Account there; empty: the login node's."""
    host_keys: tuple[HostKey, ...] = Field(min_length=1)
    """Pinned public host keys, reviewed like code."""


class LoginNode(Part):
    """Where to reach a cluster by SSH."""

    host: str
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """SSH port."""
    user: str
    """Account; `${VAR:?…}` keeps personal accounts out of the file."""
    host_keys: tuple[HostKey, ...] = Field(min_length=1)
    """Pinned public host keys, such as `ssh-ed25519 AAAA…`; there is no trust on first use."""
    jump: tuple[JumpHost, ...] = ()
    """Hosts to go through, in order."""
    key: Secret | None = None
    """Reference to a private key; absent: the SSH agent."""


class Partition(Part):
    """Equal nodes behind one queue."""

    device: str
    """Accelerator or CPU, by its id in the catalogue."""
    devices_per_node: Count = 1
    """Devices of one node."""
    nodes: Count = 1
    """How many nodes we may use."""
    memory_per_node: Size | None = None
    """Host memory; bounds CPU replicas."""
    walltime: Duration | None = None
    """Longest run; absent: unlimited."""
    tier: Tier = "owned"
    """`scavenger` capacity may vanish and never counts towards a minimum."""
    price: PriceText | None = None
    """Per node."""
    power: Power | None = None
    """Of a node under load; absent: the devices' rated power."""
    link: str = ""
    """Link between the devices of a node, by its id in the catalogue; empty: the device's own."""


class Python(Part):
    """How an interpreter with the agent's packages gets to a node; exactly one of the three."""

    module: str = ""
    """Environment module to load."""
    venv: str = ""
    """Path of a virtual environment on the cluster."""
    container: str = ""
    """Image with everything in it."""


class EngineInstall(Part):
    """How an engine gets to a node."""

    module: str = ""
    """Environment module to load."""
    venv: str = ""
    """Virtual environment that holds it."""
    container: str = ""
    """Image that holds it."""
    options: dict[str, str] = Field(default_factory=dict)
    """Flags that every replica on this cluster gets."""


class Software(Part):
    """What is installed on a cluster."""

    python: Python = Python()
    """Interpreter; nothing given: the one that runs the tool (local clusters)."""
    engines: dict[str, EngineInstall] = Field(default_factory=dict)
    """Engines that may run here; empty: any that a blueprint names."""


class Cluster(Part):
    """Machines behind one scheduler, or one machine."""

    site: Name
    """Name of a site."""
    kind: ClusterKind
    """`local`: processes of this machine; `ssh`: plain hosts; `slurm`: jobs."""
    enabled: bool = True
    """False: as if it were not there."""
    host: str = ""
    """For `local`: the machine's host name; empty: whichever machine runs the tool."""
    login: tuple[LoginNode, ...] = ()
    """For `ssh` and `slurm`: login nodes, tried in order."""
    partitions: dict[Name, Partition] = Field(min_length=1)
    """What can be allocated."""
    software: Software = Software()
    """What is installed."""


class Link(Part):
    """Bandwidth and latency between two sites."""

    between: tuple[Name, Name]
    """Two sites."""
    bandwidth: Bandwidth
    """One direction."""
    latency: Duration
    """One way."""


class Inventory(Part):
    """Everything that may be used."""

    apiVersion: Literal["fabrictool/v1"]  # noqa: N815 - the field's name in every such file
    """Version of this file's form."""
    kind: Literal["Inventory"]
    """What this file is."""
    providers: dict[Name, Provider]
    """Institutions by name."""
    sites: dict[Name, Site]
    """Sites by name."""
    clusters: dict[Name, Cluster]
    """Clusters by name."""
    links: tuple[Link, ...] = ()
    """Between sites."""

    def provider_of(self, cluster: str) -> str:
        """The provider that a cluster belongs to."""
        return self.sites[self.clusters[cluster].site].provider
