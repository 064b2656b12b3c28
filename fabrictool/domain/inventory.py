"""What exists: providers, sites, clusters, partitions and the links between sites. One YAML document."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, PrivateAttr, model_validator

from fabrictool.base import units
from fabrictool.domain.egress import Egress  # noqa: TC001 - pydantic needs it at run time
from fabrictool.domain.hours import HourlyAmounts  # noqa: TC001 - pydantic needs it at run time
from fabrictool.domain.limits import Limit  # noqa: TC001 - pydantic needs it at run time
from fabrictool.domain.quantities import (
    Bandwidth,
    Carbon,
    Document,
    Duration,
    HostKey,
    Instant,
    Latency,
    Memory,
    Name,
    Power,
    Price,
    Text,
    UserName,
    WeightsFolder,
    problem,
)
from fabrictool.domain.secrets import NAMED_LIKE_ONE

__all__ = [
    "ClusterSpec",
    "Install",
    "Inventory",
    "Jump",
    "KeptLogs",
    "Kubernetes",
    "Link",
    "Login",
    "NodeEnvironment",
    "Partition",
    "Provider",
    "Site",
    "Software",
    "Window",
]

Tier = Literal["owned", "scavenger"]
TIERS = frozenset(get_args(Tier))
ClusterKind = Literal["local", "ssh", "slurm", "gridengine", "pbs", "flux", "lsf", "kubernetes", "joined"]
UNVERIFIED = frozenset({"pbs", "flux", "lsf", "kubernetes"})
"""Kinds that were written after documentation alone, and never tried on a real one."""


class Provider(Document):
    """An institution that contributes sites; trust is granted to providers."""

    title: Text | None = None
    """Its name for people."""


class Site(Document):
    """An administrative domain of one provider."""

    provider: Name
    """One of `providers`."""
    title: Text | None = None
    """Its name for people."""
    carbon: Carbon | None = None
    """What its electricity emits in the mean, such as ``45 g/kWh`` of CO2 equivalent; for the objective `carbon`."""
    carbon_hours: HourlyAmounts | None = None
    """How `carbon` differs by hour, for ``plan --horizon``; absent: it is the same in all."""
    labels: tuple[Name, ...] = ()
    """What requests may ask for by ``x-fabric-labels``, such as where data may be; the tier of a partition is one, too.
    """


class Jump(Document):
    """A host on the way to a login node."""

    host: Text
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """SSH port."""
    user: UserName | None = None
    """A name, or a reference such as ``secret://env/ALPHA_USER``; absent: the login node's user."""
    host_keys: Annotated[tuple[HostKey, ...], Field(min_length=1)]
    """Pinned public keys; any other key is refused."""


class Login(Document):
    """A login node, and how to get in."""

    host: Text
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """SSH port."""
    user: UserName
    """A name, or a reference such as ``secret://env/ALPHA_USER``."""
    host_keys: Annotated[tuple[HostKey, ...], Field(min_length=1)]
    """Pinned public keys; any other key is refused, there is no trust on first use."""
    jump: tuple[Jump, ...] = ()
    """Hosts to go through, in order."""
    transport: Literal["asyncssh", "openssh"] = "asyncssh"
    """``openssh``: through the program ``ssh`` of this machine, for sites that want a second factor, Kerberos or a
    hardware key."""
    identity: Text | None = None
    """File of the private key to log in with, never the key itself; ``~`` is your home. A certificate beside it
    (``FILE-cert.pub``) is used. Absent: the SSH agent's keys and ``~/.ssh/id_*``."""
    control_path: Text | None = None
    """Socket of a connection that you open by hand with ``ssh -M``; only with ``transport: openssh``. It is used, and
    never ended."""
    ssh_config: bool = False
    """``true``: your ``~/.ssh/config`` counts for what the inventory does not say; only with ``transport: openssh``."""

    @property
    def opened_by_hand(self) -> bool:
        """Whether a person opens the connection, which then has been let in already."""
        return self.transport == "openssh" and self.control_path is not None

    @model_validator(mode="after")
    def _openssh_only(self) -> Login:
        if self.transport != "openssh" and (self.control_path is not None or self.ssh_config):
            name = "control_path" if self.control_path is not None else "ssh_config"
            raise problem("FT1150", f"`{name}` is for the program ssh only", "add `transport: openssh`")
        return self


class Install(Document):
    """How a program gets there: one of the ways, or none for what is already on the path."""

    venv: Text | None = None
    """Folder of a Python virtual environment."""
    module: Text | None = None
    """Environment module to load, such as ``python/3.11``."""
    container: Text | None = None
    """Image reference."""
    path: Text | None = None
    """The executable itself."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of the fields that are set; at most one in a valid inventory."""
        return tuple(name for name in ("venv", "module", "container", "path") if getattr(self, name) is not None)


class Software(Document):
    """How Python and the engines get to the nodes of a cluster."""

    python: Install = Install()
    """Empty: on a local cluster the Python that runs fabrictool, elsewhere ``python3``."""
    engines: dict[Name, Install] = Field(default_factory=dict)
    """Engines that can run here, and how each gets there; ``{}``: in the environment of `python`. An agent starts its
    engine from there, and says at once where it is not there."""
    runtime: Literal["apptainer", "singularity"] = "apptainer"
    """What runs the images of `container`, as the site's users have it on their path."""


_OWN = frozenset({"HOME", "PATH", "PWD"})
"""What job scripts set by themselves."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/:@-]*")


class NodeEnvironment(Document):
    """What the scripts of this cluster's jobs do before they start an agent; its engine inherits it."""

    purge: bool = False
    """``true``: environment modules that a node loads by itself are unloaded first."""
    modules: tuple[Text, ...] = ()
    """To load, in order; one that cannot be loaded ends the job."""
    set: dict[Text, Text] = Field(default_factory=dict)
    """Variables, such as ``NCCL_SOCKET_IFNAME: hsn0``; never a secret, for others can read job scripts."""
    unset: tuple[Text, ...] = ()
    """Variables that are not to be there, such as ``http_proxy``."""

    @property
    def given(self) -> bool:
        return self != NodeEnvironment()

    @model_validator(mode="after")
    def _sound(self) -> NodeEnvironment:
        for module in self.modules:
            if not _MODULE.fullmatch(module):
                raise problem("FT1264", f"`{module}` is not a module's name", "such as `cuda/12.6`")
        for name in (*self.set, *self.unset):
            if not _VARIABLE.fullmatch(name):
                raise problem("FT1264", f"`{name}` is not a variable's name", "such as `NCCL_SOCKET_IFNAME`")
        for name in self.set:
            if NAMED_LIKE_ONE.fullmatch(name):
                hint = "put it into a file that only you can read, and name that"
                raise problem("FT1264", f"`{name}` is named like a secret, and others can read job scripts", hint)
        for name in (*self.set, *self.unset):
            if name in _OWN or name.startswith("FABRICTOOL_"):
                raise problem("FT1264", f"`{name}` is what job scripts set by themselves", "leave it out")
        return self


class Window(Document):
    """A time in which a partition is away."""

    begin: Instant
    """From then on nothing runs on it."""
    end: Instant
    """Until then."""
    title: Text | None = None
    """What for."""

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if not float(self.begin) < float(self.end):
            raise problem("FT1124", f"the window ends at {self.end}, before it begins", "`begin` comes first")
        return self


PROTECTED = frozenset({
    "array", "begin", "chdir", "cluster-constraint", "clusters", "comment", "dependency", "error", "export", "gid",
    "hold", "job-name", "no-requeue", "nodes", "ntasks", "output", "parsable", "partition", "requeue", "signal",
    "test-only", "time", "time-min", "uid", "wait", "wrap",
})  # fmt: skip
"""Options of a submission that decide whether a job is ours and runs once: never passed through."""

STEP_OWN = frozenset({"cpus-per-task", "input", "jobid", "nodes", "ntasks", "quiet"})
"""Those of a job's one step that are ours; it has the node to itself."""


def _protected(name: str) -> bool:
    """Also for the beginning of such a name, which option parsers take for the whole; letters alone are others'."""
    return name in PROTECTED or (len(name) > 2 and any(option.startswith(name) for option in PROTECTED))


class JobRequest(Document):
    """What a replica's job asks of the scheduler beyond its accelerators."""

    cpus_per_device: Annotated[int, Field(ge=1, le=4096)] | None = None
    """CPU cores for each accelerator; on a CPU partition for the replica; absent: the scheduler's default."""
    memory_per_device: Memory | None = None
    """Main memory, alike; absent: the scheduler's default."""
    devices_as: Literal["gres", "gpus-per-node", "gpus"] = "gres"
    """The option of Slurm by which a site counts accelerators, where it refuses ``--gres``."""
    options: dict[Text, str] = Field(default_factory=dict)
    """Options passed through to the submission, without their dashes, such as ``account: proj01``."""
    step_options: dict[Text, str] = Field(default_factory=dict)
    """The same for Slurm's ``srun`` in the job, such as ``environment: /capstor/vllm.toml``."""
    successors: Annotated[int, Field(ge=0, le=7)] = 0
    """How many jobs may follow a replica's, each submitted by the one before from its node, while nobody reconciles.
    The nodes must be allowed to submit, and the partition needs a walltime."""

    @property
    def account(self) -> str:
        """Whose share of the machine jobs use, by the option that schedulers have for it; "": the user's usual one."""
        return next((self.options[name] for name in ("account", "A", "P", "project") if name in self.options), "")

    @property
    def names_nodes(self) -> bool:
        """Whether its own options say which nodes jobs have, so that we cannot; what ``exclude`` names in so many words
        is just left out by us, too.
        """
        named = any(
            len(name) > 2 and option.startswith(name) and name != "exclude"
            for name in self.options
            for option in ("nodelist", "nodefile", "exclude")
        )
        return named or "/" in self.options.get("exclude", "")

    @model_validator(mode="after")
    def _unprotected(self) -> JobRequest:
        for name in (*self.options, *self.step_options):
            if _protected(name) or not name[:1].isalpha():
                hint = "what decides whether a job is ours and runs once is not passed through"
                raise problem("FT1149", f"`{name}` cannot be given as an option of jobs", hint)
        for name in self.step_options:
            if any(own.startswith(name) for own in STEP_OWN):
                raise problem("FT1149", f"`{name}` cannot be given as an option of steps", "it is ours, or `options`'")
        return self


class Partition(Document):
    """Equal nodes behind one name of the batch scheduler, or of ours on a local cluster."""

    device: Name
    """Accelerator id of the catalogue; ``cpu`` for none."""
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many of them each node has."""
    nodes: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many nodes the fabric may use."""
    node_type: Text | None = None
    """What the site calls this kind of node."""
    memory_per_node: Memory | None = None
    """Main memory; on CPU partitions this is what replicas share."""
    walltime: Duration | None = None
    """Longest allocation; absent: none ends by itself."""
    whole_nodes: bool = False
    """``true``: the scheduler gives nodes to one job only, and a replica has all devices of its nodes."""
    job: JobRequest = JobRequest()
    """What jobs ask for; for clusters with a scheduler."""
    maintenance: tuple[Window, ...] = ()
    """When it is away: the minimum of replicas is then held by others."""
    queue: Text | None = None
    """The batch scheduler's own name for it, where that is another, such as one with capitals."""
    queue_wait: Latency | None = None
    """How long a job waits in its queue; ``0s``: not at all. Schedules go by it, and a successor is asked for so much
    earlier. Absent: what 95 of 100 of our last jobs waited there at most."""
    tier: Tier = "owned"
    """``scavenger`` capacity may be taken away at any time."""
    price: Price | None = None
    """Of one node."""
    price_hours: HourlyAmounts | None = None
    """How `price` differs by hour, for ``plan --horizon``; absent: it is the same in all."""
    power: Power | None = None
    """Of one node under load; absent: the catalogue's figure for its devices."""
    link: Name | None = None
    """Link between devices of one node, an id of the catalogue; absent: the accelerator's usual one."""
    network: Name | None = None
    """Link between nodes, an id of the catalogue."""

    def held(self, tp: int) -> int:
        """Devices that `tp` of them keep from others; more than a node has are whole nodes."""
        return max(self.devices_per_node, tp) if self.whole_nodes else tp

    def is_alone(self, tp: int) -> bool:
        """Whether no two replicas that take `tp` devices of a node each have room on one."""
        return 2 * self.held(tp) > self.devices_per_node


class Kubernetes(Document):
    """A namespace, as ``kubectl`` reaches it."""

    context: Text
    """Of your kubeconfig."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    """Best one that nothing else uses."""


class KeptLogs(Document):
    """What is kept of units that were stopped and removed."""

    keep: Duration
    """Logs are removed that long after their unit, when the next unit is."""
    folder: Text | None = None
    """Where, on the cluster; absent: ``logs`` in the folder of the units."""


class ClusterSpec(Document):
    """Partitions that are reached in one way."""

    site: Name
    """One of `sites`."""
    kind: ClusterKind
    """``local`` (processes on this machine), ``ssh`` (hosts), ``slurm`` or ``gridengine`` (batch schedulers),
    ``joined`` (nodes that joined without a model and named this cluster); ``pbs``, ``flux``, ``lsf`` and
    ``kubernetes`` (a namespace, through ``kubectl``) were never tried on a real one."""
    enabled: bool = True
    """``false``: nothing is placed here and nothing here is touched."""
    login: tuple[Login, ...] = ()
    """Login nodes, tried in order; not for ``local``."""
    kubernetes: Kubernetes | None = None
    """Which namespace; for ``kubernetes``, and needed there."""
    status: Text | None = None
    """Of a ``joined`` cluster: status address of a gateway or an agent that shows the mesh, such as
    ``http://127.0.0.1:40123``. Absent: the fabric's own units are asked."""
    partitions: Annotated[dict[Name, Partition], Field(min_length=1)]
    """Groups of equal nodes. Of a ``joined`` cluster: what its nodes must have, and how many of them may be used."""
    folder: Text = ".fabrictool"
    """Where units and their environment lie, on a file system that login and compute nodes share; relative: to the
    home."""
    weights: WeightsFolder | None = None
    """Folder in which models' weights are staged, on a file system that its nodes see; absent: none are."""
    weights_from: Literal["here", "login", "job"] | None = None
    """Where weights of a hub or an address are fetched: ``login`` (the default) by the login node, ``job`` by a job for
    sites that forbid long work there, ``here`` by the operator's machine, which sends them on."""
    weights_partition: Name | None = None
    """Of the job that fetches them; absent: one without accelerators if there is any."""
    poll: Duration = units.Duration(30)
    """Seconds between two questions to the login node while something is awaited."""
    software: Software = Software()
    """How Python and engines get there."""
    environment: NodeEnvironment = NodeEnvironment()
    """Modules and variables that its jobs begin with; for batch schedulers and ``ssh``."""
    after_reboot: Literal["cron", "site"] | None = None
    """What starts this host's gateways again after a reboot: ``cron``, a line ``@reboot`` in the crontab of the user
    who logs in, or ``site``, something of your own that calls ``FOLDER/on-boot``. Absent: only ``fabrictool reconcile``
    does. For ``ssh``."""
    logs: KeptLogs | None = None
    """How long the logs of units that are gone are kept; absent: they go with their unit."""
    egress: Egress | None = None
    """How its nodes get out to a gateway that they cannot reach directly."""
    site_links: bool = True
    """Its agents listen on a port of their node for the agents of their site, so that these know of each other without
    any gateway. ``false``: they only dial gateways."""

    @model_validator(mode="after")
    def _fetches(self) -> ClusterSpec:
        given = [name for name in ("weights_from", "weights_partition") if getattr(self, name) is not None]
        if given and self.weights is None:
            raise problem("FT1274", f"`{given[0]}` without a folder for weights", "add `weights: /FOLDER`")
        if self.weights_from == "job" and not self.login:
            raise problem("FT1274", f"a cluster of kind {self.kind} runs no job that fetches", "leave it out")
        if self.weights_partition is not None and self.weights_partition not in self.partitions:
            hint = f"one of {', '.join(self.partitions)}"
            raise problem("FT1274", f"there is no partition `{self.weights_partition}` here", hint)
        return self

    @property
    def here(self) -> bool:
        """Whether its units are processes of the machine that runs fabrictool."""
        return self.kind == "local"

    @property
    def queues(self) -> bool:
        """Whether its units are jobs of a batch scheduler: they wait, and run on other machines than the login node."""
        return not self.bare and self.kind not in ("kubernetes", "joined")

    @property
    def stated_waits(self) -> dict[str, float]:
        """Partition → seconds that a job waits in its queue; where `queue_wait` says so."""
        stated = {name: partition.queue_wait for name, partition in self.partitions.items()}
        return {name: float(wait) for name, wait in stated.items() if wait is not None}

    @property
    def joined(self) -> bool:
        """Whether its nodes come by themselves, and are told what to serve: nothing is started on them."""
        return self.kind == "joined"

    @property
    def tells_anew(self) -> bool:
        """Whether a unit that runs can be given another spec; what a pod was given stays as it is, and of a node that
        joined its owner says whom it serves.
        """
        return self.kind not in ("kubernetes", "joined")

    @property
    def leaves_out_nodes(self) -> bool:
        """Whether a job can say on which nodes it must not be, and the scheduler names all nodes."""
        return self.kind == "slurm"

    @property
    def bare(self) -> bool:
        """Whether its units are plain processes: nobody else gives them devices."""
        return self.kind in ("local", "ssh")


class Link(Document):
    """Bandwidth and latency between two sites."""

    between: tuple[Name, Name]
    """The two sites."""
    bandwidth: Bandwidth
    """In each direction."""
    latency: Latency
    """One way."""


class Inventory(Document):
    """What exists: providers, their sites and clusters, and the links between the sites."""

    apiVersion: Literal["fabrictool/v1"]  # noqa: N815 - the name that YAML users know
    """Version of this format."""
    kind: Literal["Inventory"]
    """What this file is."""
    providers: Annotated[dict[Name, Provider], Field(min_length=1)]
    """Institutions, by name."""
    sites: Annotated[dict[Name, Site], Field(min_length=1)]
    """Administrative domains, by name."""
    clusters: Annotated[dict[Name, ClusterSpec], Field(min_length=1)]
    """Clusters, by name."""
    links: tuple[Link, ...] = ()
    """Networks between sites."""
    limits: dict[Name, Limit] = Field(default_factory=dict)
    """What providers grant the fabric at most, by a name of yours."""
    calibrations: tuple[Text, ...] = ()
    """Files that ``fabrictool calibrate`` wrote, or folders of them, relative to this file. Plans and forecasts take
    them before those that come with fabrictool."""
    _calibrated: tuple[str, ...] = PrivateAttr(default=())

    @property
    def calibrated(self) -> tuple[str, ...]:
        """What is written in `calibrations`, as far as it was read."""
        return self._calibrated

    def with_calibrated(self, texts: tuple[str, ...]) -> Inventory:
        """The same with what its `calibrations` hold."""
        read = self.model_copy()
        read._calibrated = texts  # noqa: SLF001 - of its own class
        return read

    def provider_of(self, cluster: str) -> str:
        return self.sites[self.clusters[cluster].site].provider
