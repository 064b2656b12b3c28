"""What commands print with ``--json``: each document and each line of a stream is one of these types.

The published schemas are made from them (`answer_schemas`). The larger ones are in `fabric_answers` and
`forecast_answers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec

if TYPE_CHECKING:
    from fabrictool.base.errors import Problem

FORMAT_VERSION = "1.0"
"""Minor: something was added, and readers of an earlier one need not care. Major: something means another thing."""
FormatVersion = Annotated[str, msgspec.Meta(pattern=rf"^{FORMAT_VERSION.partition('.')[0]}\.[0-9]+$")]


class JsonDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One document on stdout."""

    format_version: FormatVersion = FORMAT_VERSION


class JsonLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One object of a stream, of which each is on a line of its own; the first line has the version."""


class StreamVersion(JsonDocument, frozen=True, kw_only=True, tag="version"):
    """The first line of a stream."""


class ProblemRow(msgspec.Struct, frozen=True, kw_only=True):
    """One error or warning."""

    code: str
    """`fabrictool explain CODE` says more."""
    severity: Literal["error", "warning"]
    message: str
    file: str | None
    line: int | None
    column: int | None
    thing: str | None
    """What it is about, where that is no place in a file, such as `cluster/alpha`."""
    hint: str | None
    transient: bool
    """Whether the same command may succeed later."""
    also: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Other places that it is about."""

    @classmethod
    def of(cls, problem: Problem) -> Self:
        return cls(**problem.to_json())


class Problems(JsonDocument, frozen=True, kw_only=True, tag="problems"):
    """Why a command failed; of `validate` its findings. One line, also at the end of a stream."""

    problems: list[ProblemRow]
    valid: bool | msgspec.UnsetType = msgspec.UNSET
    """Of `validate` alone."""


class Explanation(JsonDocument, frozen=True, kw_only=True, tag="explanation"):
    """What an error code means."""

    code: str
    title: str
    text: str
    hint: str


class FieldRow(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a file."""

    key: str
    value: str
    """What may stand there, in words."""
    default: str | None
    required: bool
    text: str


class FieldExplanation(JsonDocument, frozen=True, kw_only=True, tag="field"):
    """What a key of a file means."""

    file: str
    """`blueprint`, `inventory` or `policy`."""
    path: str
    """With `NAME` where one chooses the key."""
    value: str
    default: str | None
    required: bool
    text: str
    keys: list[FieldRow]
    """Keys that stand below it in the file."""


class Decision(JsonDocument, frozen=True, kw_only=True, tag="decision"):
    """Why a model stands where it stands, or does not stand somewhere."""

    question: str
    sentences: list[str]


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that `doctor` looked at."""

    name: str
    good: bool
    warning: bool
    text: str
    hint: str
    """Empty where nothing is to be done."""


class Checks(JsonDocument, frozen=True, kw_only=True, tag="checks"):
    """All that `doctor` looked at."""

    checks: list[CheckRow]


class ValueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value of the blueprint or the inventory."""

    path: str
    value: str
    """As written, or the default in the same notation."""
    origin: str
    """`FILE:LINE:COLUMN`, or `default`."""


class Values(JsonDocument, frozen=True, kw_only=True, tag="values"):
    """Every value after merging."""

    values: list[ValueRow]


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that plans know."""

    id: str
    aliases: tuple[str, ...]
    parameters: float
    active_parameters: float
    layers: int
    kv_octets_per_token: float
    max_context: int


class CatalogueModels(JsonDocument, frozen=True, kw_only=True, tag="catalogue-models"):
    """The models of the catalogue."""

    models: list[CatalogueModel]


class CatalogueDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that inventories may name."""

    id: str
    title: str
    memory: float
    """Octets."""
    memory_bandwidth: float
    """Octets per second."""
    flops: dict[str, float]
    """Precision → dense peak, operations per second."""
    link: str | None
    tdp_w: float


class CatalogueDevices(JsonDocument, frozen=True, kw_only=True, tag="catalogue-devices"):
    """The devices of the catalogue."""

    devices: list[CatalogueDevice]


class Architecture(JsonDocument, frozen=True, kw_only=True, tag="architecture"):
    """What `catalogue add` read from a model's configuration."""

    id: str
    known: bool
    """Whether the catalogue has it already, with these numbers."""
    written: str | None
    """The file; null where none was written."""
    parameters: float
    active_parameters: float
    kv_octets_per_token: float
    architecture: dict[str, int | bool]
    """As a blueprint's `architectures` has it."""


class WeightsLock(JsonDocument, frozen=True, kw_only=True, tag="weights-lock"):
    """The list of a model's files."""

    name: str
    sha256: str
    """Of the list."""
    source: str
    list: str
    """The file."""
    files: int


class WeightsOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster has of one set of weights."""

    cluster: str
    name: str
    condition: str
    octets: int
    """0: the list does not say."""
    missing: int
    """Octets."""
    free: int
    """Octets; 0: unknown."""
    source: str
    origin: str = msgspec.field(name="from")
    """Who would fetch what is missing."""


class WeightsPlan(JsonDocument, frozen=True, kw_only=True, tag="weights-plan"):
    """What `weights stage` would do."""

    sets: list[WeightsOutlook]


class StagedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One set on one cluster."""

    cluster: str
    name: str
    new: bool
    """Whether it was not there before."""


class WeightsStage(JsonDocument, frozen=True, kw_only=True, tag="weights-stage"):
    """What `weights stage` did."""

    sets: list[StagedRow]


class VerifiedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One set on one cluster, beside its list."""

    cluster: str
    weights: str
    name: str
    condition: str
    files: tuple[str, ...]
    """That are damaged or missing; some of them."""


class WeightsVerify(JsonDocument, frozen=True, kw_only=True, tag="weights-verify"):
    """What `weights verify` found."""

    sets: list[VerifiedRow]


class SetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One set that lies on a cluster."""

    cluster: str
    weights: str
    """As the blueprint names it; empty where it does not."""
    name: str
    octets: int
    complete: bool
    units: int
    """That name it."""


class WeightsList(JsonDocument, frozen=True, kw_only=True, tag="weights-list"):
    """The sets that lie on clusters."""

    sets: list[SetRow]


class RemovedSet(msgspec.Struct, frozen=True, kw_only=True):
    """One set that is gone."""

    cluster: str
    name: str
    octets: int


class WeightsPrune(JsonDocument, frozen=True, kw_only=True, tag="weights-prune"):
    """What `weights prune` removed."""

    removed: list[RemovedSet]


class LeftoverRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no fabric on a site uses."""

    kind: str
    octets: int
    days: int
    """Since it was changed last."""
    path: str
    """Below the site's folder."""


class Leftovers(JsonDocument, frozen=True, kw_only=True, tag="leftovers"):
    """What `prune` found, or removed."""

    cluster: str
    removed: bool
    items: list[LeftoverRow]


class Environment(JsonDocument, frozen=True, kw_only=True, tag="environment"):
    """The agents' environment that `bootstrap` placed."""

    cluster: str
    release: str
    changed: bool
    """Whether something was sent or the link was switched."""
    uploaded: bool
    files: int
    size: int
    """Octets."""
    python: str
    """What the new Python said of itself; empty where it was not run."""
    packages: int
    source: str
    """`installed` or `lock`."""


class HostKeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a host."""

    type: str
    fingerprint: str
    key: str
    """As `host_keys` of an inventory has it."""
    pinned_by: list[str]
    """Clusters."""


class HostKeys(JsonDocument, frozen=True, kw_only=True, tag="host-keys"):
    """The keys that a host shows."""

    host: str
    port: int
    shown: list[HostKeyRow]
    pinned_and_not_shown: list[HostKeyRow]


class CertificateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One certificate of the federation."""

    name: str
    federation: str
    not_after: str
    """The day, such as 2026-12-01."""


class RevokedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was revoked and has not ended by itself."""

    id: str
    provider: str
    until: str
    """The day, such as 2026-12-01."""


class TrustAnswer(JsonDocument, frozen=True, kw_only=True, tag="trust"):
    """The certificates of the federation."""

    certificates: list[CertificateRow]
    revoked: list[RevokedRow]


class Adoption(JsonDocument, frozen=True, kw_only=True, tag="adoption"):
    """An engine that was brought under the mesh."""

    cluster: str
    job: str
    node: str
    session: str
    ready: bool


class ReleaseAnswer(JsonDocument, frozen=True, kw_only=True, tag="release"):
    """An engine that was let go."""

    cluster: str
    job: str


class Assignment(JsonDocument, frozen=True, kw_only=True, tag="assignment"):
    """What an idle agent was told to serve."""

    session: str
    version: int
    model: str
    """Empty: nothing."""
    former: str
    state: Literal["told", "serving", "idle"]


class ScriptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job as its scheduler would be given it."""

    address: str
    cluster: str
    command: str
    script: str


class Scripts(JsonDocument, frozen=True, kw_only=True, tag="scripts"):
    """The jobs that a plan would submit."""

    scripts: list[ScriptRow]
