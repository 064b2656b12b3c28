"""What ``/status`` answers: one JSON document an agent, one a gateway. Never a secret, never a mutation.

Minor additions keep `API`; a change that breaks readers raises it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fabrictool.domain.observed import Awaited
from fabrictool.domain.specs import Phase
from fabrictool.status.elastic import ElasticState

API = "fabrictool/status/v1"

EngineState = Literal["starting", "loading", "ready", "unhealthy", "failed", "stopped"]
LifecycleName = str
"""JOIN, SERVING, DOWN or LEFT; a reader must expect others from a later release."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, newest last in a document."""

    at: float
    """Wall time, seconds since the epoch."""
    kind: str
    """A short stable word, such as ``link-down`` or ``engine-ready``."""
    subject: str
    text: str = ""


class StepsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine's steps take, as its agent measured before it served."""

    prompts: dict[str, float]
    """Tokens of a prompt → seconds to its first token, alone."""
    batches: dict[str, float]
    """Requests → seconds for a token for each."""
    took_s: float
    """What measuring took, at this start."""
    was_kept: bool
    """Whether the figures are of an earlier start."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The engine beside an agent."""

    engine: str
    state: EngineState
    pid: int | None = None
    port: int | None = None
    socket: str = ""
    """The Unix socket of its API, where it has that in place of a port."""
    restarts: int = 0
    progress: str = ""
    """What a starting engine says of itself."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """0 to 1."""
    last_lines: list[str] = []
    """The tail of its log."""
    elastic: ElasticState | None = None
    """Of an engine that changes while it answers: its groups of replicas, or what its memory holds."""
    by_priority: bool = False
    """Whether it serves requests by the priority that gateways give them."""
    steps: StepsStatus | None = None
    """Of a replica that measured them before it served."""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True, tag="agent", tag_field="kind"):
    """One agent's own view."""

    api: str = API
    release: str
    at: float
    started_at: float
    fabric: str
    provider: str
    site: str
    cluster: str
    node: str
    replica: str
    model: str
    session: str
    lifecycle: LifecycleName
    accepting: bool
    in_flight: int
    ends_at: float | None
    certificate_ends_at: float
    engine: EngineStatus
    links: list[str]
    """Sessions that it holds tunnels with."""
    dial_errors: dict[str, str]
    registry_root: str
    requests_of: dict[str, int] = {}
    """``GROUP/PSEUDONYM`` → how many requests of this tenant were let through, of the last 256 tenants that asked."""
    idle: bool = False
    """It waits to be assigned a model: there is no engine to speak of."""
    refused: int = 0
    """Requests that its own trust rules refused."""
    events: list[Event] = []


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine start as the gateway sees it."""

    service: str
    replica: str
    model: str
    engine: str
    precision: str = ""
    context: int = 0
    tp: int = 1
    dp: int = 1
    """Base engines of `tp` devices each that merge while they answer."""
    lifecycle: LifecycleName
    accepting: bool
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    in_flight: int = 0
    """Requests that this gateway has open on it."""
    requests: int = 0
    failures: int = 0
    phase: Phase = "unified"
    adapters: list[str] = []
    """What it serves beside its model: LoRA adapters, or other models out of the same memory."""
    ttft_s: float | None = None
    """What this gateway's last streams took to their first token there, a moving mean; of a prefill replica what its
    last prompts took, and of a decode replica from then on."""
    tpot_s: float | None = None
    note: str = ""


class HandedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Caches of prompts that one site's replicas computed for another's, since the gateway started."""

    model: str
    sender: str
    """Site of the prefill replicas."""
    receiver: str
    prompts: int
    tokens: int
    """Of these prompts. What a receiver had in its own cache was not sent, and is counted all the same."""
    octets: int
    """Of these tokens' caches."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One session as the gateway sees it."""

    session: str
    role: str
    provider: str
    site: str
    cluster: str
    node: str
    lifecycle: LifecycleName
    connected: bool
    """Whether this gateway reaches it: requests flow only then."""
    by: str = ""
    """Hub that relays, where this gateway holds no tunnel with it itself."""
    disconnected_at: float | None = None
    device: str = ""
    devices: int = 0
    memory: int = 0
    """Octets over all devices; 0: it did not say."""
    free: list[int] = []
    """Octets that were free on each device when its agent looked last; empty: it does not say."""
    idle: bool = False
    """It could be assigned a model, and has none."""
    ends_at: float | None = None
    certificate_ends_at: float | None = None
    """Wall time at which its tunnel will be closed."""
    release: str = ""
    services: list[ServiceRow] = []


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model over all replicas."""

    model: str
    ready: int
    """Replicas that requests can be sent to now."""
    replicas: int
    """Replicas that the registry knows of and that have not left."""
    providers: list[str]
    in_flight: int
    requests: int
    failures: int
    tokens: int
    """Completion tokens of finished requests."""
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    samples: int = 0
    """Answers that these percentiles are of."""
    planned: int | None = None
    """Replicas that the plan has; null when the gateway was not told."""
    missing: list[str] = []
    """Planned replicas that the registry does not know: queued, dead or cut off."""
    dormant: int = 0
    """Planned replicas that it does not know either, and that may have ended because nobody asked for them."""
    held: int = 0
    """Requests that wait for one of these to be started."""
    reasons: bool | None = None
    """Whether it is given the time of models that reason, as declared or learned; null: that is not known yet."""

    @property
    def wanted(self) -> int:
        """Replicas that should serve: those of the plan that are asked for, and while one follows another both."""
        return max((self.planned or 0) - self.dormant, self.replicas)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Since the gateway started."""

    requests: int = 0
    failures: int = 0
    """Answers with a status of 500 or more, and streams that broke."""
    retries: int = 0
    in_flight: int = 0
    tokens: int = 0


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True, tag="gateway", tag_field="kind"):
    """A gateway's view of the whole fabric."""

    api: str = API
    release: str
    at: float
    started_at: float
    fabric: str
    session: str
    listen: str
    tls: bool = False
    """Whether clients speak TLS there."""
    mesh: str
    policy: str
    spec: str = ""
    """Mark of the spec that is in force; another than the written one's while that is refused."""
    nodes: list[NodeRow]
    models: list[ModelRow]
    totals: Totals
    registry_records: int
    registry_root: str
    handed: list[HandedRow] = []
    events: list[Event] = []

    @property
    def url(self) -> str:
        """What clients ask, without the API's path."""
        return f"http{'s' if self.tls else ''}://{self.listen}"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a unit's run folder, for surveys of many."""

    at: float
    """Wall time of the unit's own clock."""
    ready: bool
    """It serves, and a gateway reaches it."""
    waits_for: Awaited = ""
    """What it does not serve for yet, or any more."""
    text: str = ""
    """The same for people."""
    ends_at: float | None = None
    """Wall time at which its allocation ends."""
    spec: str = ""
    """Mark of the spec that is in force, of a unit that takes over another one while it runs."""
    certificate_ends_at: float | None = None
    """Wall time, of the certificate that is in force, of a unit that takes another one for its key while it runs."""
    hands_over: bool = False
    """Of a gateway: a successor on the same machine can take over its addresses while it runs."""
    wanted: dict[str, int] = {}
    """Of a gateway: model → replicas that requests wait for, with those that serve."""


StatusDocument = AgentStatus | GatewayStatus

_decoder = msgspec.json.Decoder(StatusDocument)


def encode(document: StatusDocument) -> bytes:
    return msgspec.json.encode(document)


def decode(data: bytes) -> StatusDocument:
    """The document in `data`; raises msgspec.DecodeError when it is something else."""
    document: StatusDocument = _decoder.decode(data)
    return document
