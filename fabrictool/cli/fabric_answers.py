"""What commands about plans and about what runs print with ``--json``; see `answers`."""

from __future__ import annotations

from typing import Literal

import msgspec

from fabrictool.cli.answers import JsonDocument, JsonLine
from fabrictool.domain.plan import Certificate
from fabrictool.domain.state import Lease, State
from fabrictool.status.documents import AgentStatus, Event, GatewayStatus
from fabrictool.status.fleet import FleetStatus, RecordsStatus


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a review rule says of a plan."""

    effect: Literal["deny", "warn"]
    rule: str
    message: str
    place: str
    """Of the rule's limit, in its file."""


class TimedCertificate(Certificate, frozen=True, kw_only=True):
    """How good the plan is, and how long the search took."""

    seconds: float
    """No part of the plan, which is the same on any machine."""


class PlanAnswer(JsonDocument, frozen=True, kw_only=True, tag="plan"):
    """What `plan` made. The fields of a plan stand beside these."""

    id: str
    release: str
    """Of fabrictool, that made it."""
    certificate: TimedCertificate
    policy: list[PolicyRow] | msgspec.UnsetType = msgspec.UNSET
    """With `--policy` alone."""


class WrittenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as its file has it. The fields of a plan stand beside these."""

    id: str
    release: str


WITH_THE_FIELDS_OF_A_PLAN: frozenset[type[msgspec.Struct]] = frozenset({PlanAnswer, WrittenPlan})
"""They cannot inherit from `Plan`, where the id is a property; `answer_schemas` adds what is not theirs."""


class SavedPlan(JsonDocument, frozen=True, kw_only=True, tag="saved-plan"):
    """What `show PLAN` prints."""

    id: str
    no_op: bool
    """Whether it changes nothing."""
    counts: dict[str, int]
    """Kind of action → how many."""
    plan: WrittenPlan
    policy: list[PolicyRow] | msgspec.UnsetType = msgspec.UNSET
    """With `--policy` alone."""


class PolicyLine(JsonLine, frozen=True, kw_only=True, tag="policy"):
    """A finding of a review rule, before anything is done."""

    effect: Literal["deny", "warn"]
    rule: str
    message: str
    place: str


StepKind = Literal["intent", "started", "waiting", "done", "queued", "held", "failed"]


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """How far one action is."""

    type: StepKind
    action: str
    """Its kind, such as `create`."""
    address: str
    text: str


class DriftLine(JsonLine, frozen=True, kw_only=True, tag="drift"):
    """A way in which what runs is not what was applied."""

    kind: str
    address: str
    cluster: str
    text: str


class HealingLine(JsonLine, frozen=True, kw_only=True, tag="healing"):
    """An action that `reconcile` is going to take."""

    action: str
    address: str
    text: str


class NotHealedLine(JsonLine, frozen=True, kw_only=True, tag="not-healed"):
    """A unit that is missing and is not started again for now."""

    text: str


class EndLine(JsonLine, frozen=True, kw_only=True, tag="end"):
    """The last line, where all went well."""

    plan: str
    """Its id."""
    changed: bool


class UnitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of the fabric."""

    address: str
    cluster: str
    operation: str
    state: str
    pid: int | None
    engine: str
    detail: str
    status_url: str
    job: str
    ready: bool
    spec: str
    """`former`: it goes on by a spec that is not the last one."""
    begins_at: float | None
    """Seconds since 1970, when its job is expected to start."""
    ends_at: float | None
    in_flight: int | msgspec.UnsetType = msgspec.UNSET
    """Requests; of an agent that answers."""
    links: int | msgspec.UnsetType = msgspec.UNSET


class StartRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the last starts of a model on a cluster took."""

    model: str
    cluster: str
    loader: str
    median_s: float
    starts: int


class FabricStatus(JsonDocument, frozen=True, kw_only=True, tag="status"):
    """What `status` shows of the whole fabric."""

    fabric: str
    good: bool
    unknown_clusters: dict[str, str]
    """Cluster that does not answer → why."""
    out_of_reach: list[str]
    drift: list[str]
    warnings: list[str]
    desired: dict[str, int]
    """Model → replicas that were applied last."""
    units: list[UnitRow]
    starts: list[StartRow]
    gateway: GatewayStatus | None
    """The first that answers: what they say of replicas is the same."""
    gateways: dict[str, GatewayStatus]


class UnitStatus(JsonDocument, frozen=True, kw_only=True, tag="unit-status"):
    """What `status --url` reads from one gateway or agent."""

    document: GatewayStatus | AgentStatus
    fleet: FleetStatus | msgspec.UnsetType | None = msgspec.UNSET
    """Of an agent alone; null where it is of an earlier release."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at: float
    """Seconds since 1970."""
    source: str
    """`apply`, or the unit that saw it."""
    kind: str
    subject: str
    text: str


class Events(JsonDocument, frozen=True, kw_only=True, tag="events"):
    """What happened, oldest first."""

    events: list[EventRow]


class FleetAnswer(JsonDocument, frozen=True, kw_only=True, tag="fleet"):
    """Who is in the mesh, as one of them sees it."""

    document: FleetStatus


class RecordsAnswer(JsonDocument, frozen=True, kw_only=True, tag="records"):
    """What one unit holds of the registry."""

    document: RecordsStatus


class ViewRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one unit holds, in short."""

    unit: str
    session: str
    role: str
    at: float
    root: str
    """Digest of all its records."""
    records: int


class Convergence(JsonDocument, frozen=True, kw_only=True, tag="convergence"):
    """Whether all units hold the same."""

    agreed: bool
    looks: int
    views: list[ViewRow]
    differing: list[str]
    silent: dict[str, str]
    """Unit → why it said nothing."""


class MeshEventLine(JsonLine, frozen=True, kw_only=True, tag="mesh-event"):
    """Something that changed in the mesh."""

    at: float
    kind: str
    subject: str
    text: str

    @classmethod
    def of(cls, event: Event) -> MeshEventLine:
        return cls(at=event.at, kind=event.kind, subject=event.subject, text=event.text)


class ReplayedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that came of a replayed input."""

    at: float
    kind: str
    subject: str
    text: str


class MeshReplay(JsonDocument, frozen=True, kw_only=True, tag="replay"):
    """What came of a recorded trace."""

    inputs: int
    same: bool
    """Whether this release decides as the one did that recorded it."""
    differs_at: int | None
    """The first input with another outcome."""
    events: list[ReplayedRow]


class StateAnswer(JsonDocument, frozen=True, kw_only=True, tag="state"):
    """What this side remembers."""

    place: str
    lease: Lease | None
    state: State


class StateVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One of the former states."""

    serial: int
    at: float
    lineage: str
    applied_plan: str
    units: int


class StateHistory(JsonDocument, frozen=True, kw_only=True, tag="state-history"):
    """The former states, as far as they are kept."""

    place: str
    versions: list[StateVersion]


class StateRebuilt(JsonDocument, frozen=True, kw_only=True, tag="state-rebuilt"):
    """A state that was made anew."""

    aside: str | None
    """Where a damaged one is kept."""
    notes: list[str]
    state: State


class UsageAnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that have something in common: of these words those that `--by` names."""

    hour: str | msgspec.UnsetType = msgspec.UNSET
    day: str | msgspec.UnsetType = msgspec.UNSET
    fabric: str | msgspec.UnsetType = msgspec.UNSET
    gateway: str | msgspec.UnsetType = msgspec.UNSET
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    provider: str | msgspec.UnsetType = msgspec.UNSET
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    uncounted: int
    """Requests whose answer broke off before the engine said how many tokens it had."""
    e2e_s: float | None
    ttft_s: float | None


class UsageAnswer(JsonDocument, frozen=True, kw_only=True, tag="usage"):
    """What was asked of the gateways."""

    since: str
    until: str
    by: list[str]
    rows: list[UsageAnswerRow]
