"""What an engine adapter is told and what it answers. Values only: an adapter never starts or asks anything."""

from __future__ import annotations

from typing import Protocol

import msgspec

from fabrictool.domain.specs import EngineInstall, HostPort, Pairing

FULL_HEADER = "x-fabric-full"
"""With a 503: the engine cannot begin this request in time, and another one may; nothing is wrong with it."""


class CacheHandover(msgspec.Struct, frozen=True):
    """An engine's part in a prefill/decode pair. Whoever reaches the address can fetch the caches of prompts."""

    prefill: bool
    """It computes prompts for others; else it fetches them."""
    host: str
    """This node's address for the other one."""
    port: int
    """Where an engine that is asked first gives its caches out; where one that shares at once is found, at loopback."""
    device: str
    """Where the cache lies: ``cpu``, or an accelerator."""


class NodeOfSeveral(msgspec.Struct, frozen=True):
    """One node's part of an engine that stands on several: a process on each, and only that of rank 0 has an API."""

    nodes: int
    rank: int
    leader: HostPort
    """Where the processes find each other: an address of rank 0's node, and a port that is free there."""
    host: str
    """This node's address for the others. What passes between the nodes is neither encrypted nor authenticated."""
    interface: str = ""
    """Network interface with that address; empty: the engine finds one."""


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process to be: everything that its command line follows from."""

    engine: str
    model: str
    """Path of a model file or folder, or a Hugging Face id."""
    served_name: str
    """The model's name in the engine's API."""
    host: str
    port: int
    socket: str = ""
    """Path of a Unix socket that takes the place of the port; empty: it listens at the port."""
    inner_port: int = 0
    """First of some ports that it may use inside; 0: it looks for some by itself."""
    tp: int = 1
    """Tensor-parallel degree, in devices."""
    pp: int = 1
    """Pipeline stages of `tp` devices each."""
    dp: int = 1
    """Base engines of `tp` devices each, side by side, that merge and split while they answer; 1: nothing merges."""
    context: int | None = None
    """Tokens that one request may hold; None: the model's own limit, as far as the engine goes."""
    max_num_seqs: int | None = None
    """Requests in one batch, of each base engine; None: the engine's default."""
    precision: str | None = None
    """Of the weights, such as ``bf16``, ``fp8`` or ``q4_1``; None: as the model file says."""
    kv_precision: str | None = None
    """Of the key-value cache; None: the engine's default."""
    python: str = "python3"
    """The agent's own interpreter, in whose environment the engine is if `install` names no other."""
    install: EngineInstall = EngineInstall()
    cache_dir: str = ""
    """Where the engine may keep what it can make again; empty: its default."""
    compile_dir: str = ""
    """The same for what it compiles, of this node alone: nodes that compile into one folder of a shared file system
    spoil each other's work (vLLM issue 24601). Empty: its default."""
    adapters: dict[str, str] = {}
    """Name in the engine's API → folder of a LoRA adapter that is served beside the model."""
    adapter_rank: int = 0
    """The largest of theirs."""
    companions: dict[str, str] = {}
    """Name in the engine's API → path of another model that is served out of the same memory."""
    memory: int = 0
    """Octets for weights and caches of all models, where it serves several; 0: room for all of them."""
    ttft_s: float | None = None
    """By which a request of several models' has its first token; None: the engine's default, and so on."""
    tpot_s: float | None = None
    """By which it has each further token after the one before."""
    loader: str = ""
    """How weights are read; empty: the engine's own way."""
    options: dict[str, str] = {}
    """Flags passed through: ``{"enable-prefix-caching": ""}``. A name in capitals is an environment variable."""
    by_priority: bool = False
    """Its requests come first by their ``priority``, the smallest before the others, and not by when they came."""
    node: NodeOfSeveral | None = None
    """None: the whole engine is on one node."""
    handover: CacheHandover | None = None
    """None: it computes prompts and answers by itself."""
    command: tuple[str, ...] = ()
    """Of an engine that a job brings along: what to start, with ``{port}`` where the port belongs."""


class EngineCommand(msgspec.Struct, frozen=True):
    """What to execute: never a shell line, and never a secret in it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """Set on top of the environment that the engine inherits; secrets reach an engine by inheritance alone."""
    unset: tuple[str, ...] = ()
    """Variables that the engine does not inherit."""
    probe: tuple[str, ...] = ()
    """Ends with 0 where the engine is installed; empty: only a start can tell."""
    unless_set: dict[str, str] = {}
    """Set where the engine inherits no other value: the site knows better."""


class Readiness(msgspec.Struct, frozen=True):
    """How to learn that an engine serves: GET `path` answers 200."""

    path: str
    timeout_s: float
    """How long a start may take before it counts as failed."""
    interval_s: float
    """Between two probes."""


class MetricNames(msgspec.Struct, frozen=True):
    """The engine's own Prometheus names; an empty name means that it does not report this."""

    running: str
    """Requests in the batch."""
    waiting: str
    """Requests in the queue."""
    kv_use: str
    """Share of the key-value cache in use, 0 to 1."""
    advances: tuple[str, ...] = ()
    """Counters of which one grows, or else `kv_use`, with each step; none: it does not say how far its requests are."""


class Capabilities(msgspec.Struct, frozen=True):
    """What the engine can be asked for. Whoever decides asks for a capability, never for an engine by name."""

    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    live_tp_switch: frozenset[int] = frozenset()
    """Numbers of its engines that can stand side by side and merge: so many times the tensor parallelism for some
    requests, and each by itself for others, without a restart. None: it cannot."""
    hub_models: bool = False
    """Takes a Hugging Face id and fetches it; otherwise only a file or folder."""
    gguf: bool = False
    """Takes a GGUF file."""
    precisions: frozenset[str] = frozenset()
    kv_precisions: frozenset[str] = frozenset()
    several_nodes: bool = False
    """One replica can stand on several nodes."""
    hands_over: bool = False
    """Two of it can share a request: one computes the prompt, the other answers."""
    pairing: Pairing = "relayed"
    """How they do, if they can."""
    meeting_routes: frozenset[tuple[str, str]] = frozenset()
    """Methods and paths that the one asks of the other where they find each other, if they share ``together``."""
    sockets: bool = False
    """Its API can be at a Unix socket, whose path ends with ``.sock``."""
    loaders: frozenset[str] = frozenset()
    """Ways to read weights that it can be told, beside its own."""
    serves_adapters: bool = False
    """It serves LoRA adapters beside its model, each by a name of its own."""
    shares_memory: bool = False
    """It serves several models out of one memory, each with turns and a cache as its requests need them."""
    elastic_state: str = ""
    """Path where one that changes while it answers says how (`fabrictool.status.elastic`)."""
    extra: str = ""
    """The extra of this package that the engine comes with; "": it is installed on its own."""
    priority_option: str = ""
    """Which says ``priority`` where of its requests the one with the smallest ``priority`` comes first; "": of no
    engine of its kind."""
    version_path: str = ""
    """Where it says its release, as ``{"version": …}``; "": it does not."""
    count_path: str = ""
    """Where the body of a chat or of a completion is answered ``{"count": …}``, the tokens of its prompt; "":
    nowhere."""
    brought: bool = False
    """Its command comes from a job script: no blueprint may name it."""


class EngineAdapter(Protocol):
    """Knows one engine from outside."""

    @property
    def name(self) -> str:
        """As written in blueprints."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can be asked for."""

    @property
    def readiness(self) -> Readiness:
        """How to learn that it serves."""

    @property
    def metrics(self) -> MetricNames:
        """What it calls the load figures."""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The command line and environment of one process.

        Raises
        ------
        InvalidInputError
            FT7002 to FT7007, all problems at once.
        """
