"""What commands that forecast, compare and measure print with ``--json``; see `answers`."""

from __future__ import annotations

import msgspec

from fabrictool.cli.answers import JsonDocument


class PlayedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a replica in a simulation."""

    kind: str
    replica: str
    at_s: float
    happened: bool
    """Whether the simulation got that far."""


class SimulatedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one model's play. Null is what is not a number, as the time per token of answers of one token."""

    model: str
    scenario: str | None
    trace: str | None
    """Null unless several are compared."""
    seed: int
    events: list[PlayedEvent]
    unserved: int | None
    """Requests that waited in vain."""
    requests: int
    finished: int
    refused: int
    lost: int
    retried: int
    complete: bool
    span_s: float
    rate: float
    """Requests per second that arrived."""
    latency: dict[str, dict[str, float | None]]
    """ttft, tpot, itl, e2e → mean, p50, p90, p95, p99 in seconds."""
    bands: dict[str, tuple[float, float]]
    """Metric → factors of its 90 % band."""
    attainment: float
    """Share of all requests that met every target."""
    goodput: float
    """Requests per second that met every target."""
    output_tokens_per_s: float
    input_tokens_per_s: float
    utilisation: tuple[float, ...]
    """Busy share of each replica."""
    kv_use: tuple[float, ...]
    """Mean share of the cache in use, of each replica, while busy."""
    preemptions: int
    prefix_hits: float
    """Share of prompt tokens found in the prefix cache."""
    cost: float
    energy_j: float
    joules_per_token: float | None
    cost_per_million_tokens: float | None
    basis: str


class FigureOfSeeds(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over several seeds."""

    mean: float
    deviation: float
    least: float
    most: float


class SimulatedSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How far the plays of one model differ."""

    model: str
    scenario: str | None
    trace: str | None
    seeds: int
    figures: dict[str, FigureOfSeeds]


class Simulation(JsonDocument, frozen=True, kw_only=True, tag="simulation"):
    """The figures that `simulate` forecasts."""

    seed: int
    models: list[SimulatedModel]
    spreads: list[SimulatedSpread]
    """With `--seeds` alone."""


class WhatIfModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is forecast of one model, in the words of a plan."""

    slo: str
    judge: str
    served: float
    misses: tuple[str, ...]
    undecided: tuple[str, ...]
    why: str
    attainment: float | None


class WhatIfOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of one what-if."""

    expression: str | msgspec.UnsetType = msgspec.UNSET
    """Not of `base`."""
    feasible: bool
    problem: str | None
    optimal: bool
    repeatable: bool
    models: dict[str, WhatIfModel]
    stages: dict[str, float]
    differences: dict[str, float]
    """To `base`."""
    started: int | None
    stopped: int | None


class WhatIf(JsonDocument, frozen=True, kw_only=True, tag="what-if"):
    """What `plan --what-if` compares."""

    base: WhatIfOutcome
    outcomes: list[WhatIfOutcome]


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a pipeline."""

    cluster: str
    partition: str
    device: str
    tp: int


class PlacedRow(msgspec.Struct, frozen=True, kw_only=True):
    """So many replicas of one kind."""

    model: str
    cluster: str
    partition: str
    tp: int
    pp: int
    dp: int
    phase: str
    replicas: int
    variant: str | msgspec.UnsetType = msgspec.UNSET
    """Of a model that has several."""
    stages: list[StageRow] | msgspec.UnsetType = msgspec.UNSET
    """Of a pipeline over several kinds of devices."""


class FrontRow(msgspec.Struct, frozen=True, kw_only=True):
    """One placement that none beats in all criteria."""

    values: dict[str, float]
    chosen: bool
    """Whether it is what the blueprint's objective leads to."""
    proved: bool
    placement: list[PlacedRow]


class Pareto(JsonDocument, frozen=True, kw_only=True, tag="pareto"):
    """What `plan --pareto` shows."""

    criteria: list[str]
    complete: bool
    points: list[FrontRow]


class HorizonStart(msgspec.Struct, frozen=True, kw_only=True):
    """Alike replicas that start for one step."""

    model: str
    cluster: str
    partition: str
    replicas: int
    submit_by: str
    """When their jobs are to be submitted, at the latest."""
    loads_from: str
    """When they are thought to hold their devices, after the wait in the queue."""
    serves_from: str
    """When they are thought to have loaded; after the beginning of the step: they are late."""


class HorizonRenewal(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that end at the same time, and those that follow them; until these serve their model lacks them."""

    model: str
    cluster: str
    partition: str
    replicas: int
    ends: str
    submit_by: str
    """When the next job is asked for."""
    loads_from: str
    """From then on it holds devices."""
    serves_from: str


class HorizonStep(msgspec.Struct, frozen=True, kw_only=True):
    """What would run in one step."""

    begin: str
    arrivals: dict[str, float]
    """Model → requests per second that come in it."""
    rates: dict[str, float]
    """Model → requests per second that are served in it, or given up."""
    away: list[str]
    """`CLUSTER/PARTITION` in maintenance."""
    replicas: dict[str, int]
    starts: int
    stops: int
    running: float
    moving: float
    unserved_rate: float
    lost_to_loading_rate: float
    """Of what is unserved, what all replicas would serve if none of them still loaded."""
    misses_slo_rate: float
    unserved_after_losses_rate: float
    """Requests/s; see `HorizonTotals`."""
    starting: list[HorizonStart]
    renewals: list[HorizonRenewal]
    """Of jobs that end in it, by their ends."""
    placement: list[PlacedRow]


class HorizonTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a way through all steps comes to."""

    running: float
    moving: float
    unserved: float
    lost_to_loading: float
    """Requests, of those that are unserved, for which replicas still loaded."""
    misses_slo: float
    unserved_after_losses: float
    """Requests by priority, of all losses that models are to survive and that some placement can, each by itself."""


class HorizonQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of a month, and what the schedule uses of the horizon's share of it."""

    limit: str
    """Its name."""
    unit: str
    """A currency, or device hours."""
    used: float
    share: float
    """The most that the horizon may use: its hours of 730."""


class HorizonAnswer(JsonDocument, frozen=True, kw_only=True, tag="horizon"):
    """What `plan --horizon` shows."""

    unit: str
    """Of `running` and `moving`: a currency, kWh, or kg CO2e."""
    step_s: float
    steps: list[HorizonStep]
    schedule: HorizonTotals
    without_look_ahead: HorizonTotals
    peak: HorizonTotals | None
    """One placement for all steps."""
    no_request_waits: HorizonTotals | None
    """With every request served in the step in which it comes; null where none may wait."""
    quotas: list[HorizonQuota]
    interrupted: bool
    """Whether Ctrl-C ended the search."""
    copied: int
    """Steps that there was no time to search: they have the placement of the step before, or the one for the peak."""


class InstanceAnswer(JsonDocument, frozen=True, kw_only=True, tag="instance"):
    """What `instance` found for a published problem."""

    solver: str
    gpus: dict[str, int]
    cost_per_hour: float
    bound: float
    gap: float
    optimal: bool


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration that was written."""

    device: str
    engine: str
    scope: str
    measurements: int
    error_before: float
    """Mean relative error of forecasts."""
    error_after: float
    """The same of measurements that the fit had not seen."""
    file: str


class CalibrationAnswer(JsonDocument, frozen=True, kw_only=True, tag="calibration"):
    """The calibrations that `calibrate` wrote."""

    calibrations: list[CalibrationRow]
    unusable_rows: int | msgspec.UnsetType = msgspec.UNSET
    """Of a sheet."""
    dropped: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """Of records: why → how many."""
    overloaded: int | msgspec.UnsetType = msgspec.UNSET
    """Of records: requests that arrived while the service did not keep up."""


class TraceStatistics(JsonDocument, frozen=True, kw_only=True, tag="trace-statistics"):
    """What `trace stats` says of a trace. Null is what is not a number."""

    requests: int
    span_s: float
    rate: float | None
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals."""
    input: dict[str, float | None]
    """Tokens: mean and quantiles."""
    output: dict[str, float | None]
    peak_to_mean: float | None
    io_ratio: tuple[float | None, ...]
    """Input over output tokens in each tenth of the span."""
    popularity: dict[str, float]
    """Model → share of requests."""
    top_tenth: float | None
    prefix_reuse: float | None
    latency: dict[str, float | None]
    """Seconds; empty where the source measured none."""
    dropped: dict[str, int]


class ProfiledModel(msgspec.Struct, frozen=True, kw_only=True):
    """What users ask of one model."""

    model: str
    requests: int
    hours: int
    first: str
    last: str
    rate: float
    """Requests per second."""
    peak_rate: float
    peak_hour: str
    cv: float
    """Coefficient of variation of the gaps between arrivals."""
    input: dict[str, float]
    """Tokens: mean, sd, max and quantiles."""
    output: dict[str, float]
    repeated_share: float
    """Of prompt tokens, in blocks that an earlier prompt began with."""
    cached_share: float


class WorkloadProfile(JsonDocument, frozen=True, kw_only=True, tag="workload-profile"):
    """What `trace profile` says of a store of records."""

    models: list[ProfiledModel]


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run one replica."""

    engine: str
    device: str
    precision: str
    tp: int
    pp: int
    ep: int
    dp: int
    devices: int


class RefusedSetting(SettingRow, frozen=True, kw_only=True):
    """A way that does not work."""

    why: str


class RecommendedPoint(SettingRow, frozen=True, kw_only=True):
    """A way to run one replica, with one limit of its batch."""

    max_num_seqs: int
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    ttft_p50_s: float | msgspec.UnsetType | None = msgspec.UNSET
    """Quantiles: those that the targets name."""
    ttft_p95_s: float | msgspec.UnsetType | None = msgspec.UNSET
    ttft_p99_s: float | msgspec.UnsetType | None = msgspec.UNSET
    tpot_p50_s: float | msgspec.UnsetType | None = msgspec.UNSET
    tpot_p95_s: float | msgspec.UnsetType | None = msgspec.UNSET
    tpot_p99_s: float | msgspec.UnsetType | None = msgspec.UNSET
    e2e_p50_s: float | msgspec.UnsetType | None = msgspec.UNSET
    e2e_p95_s: float | msgspec.UnsetType | None = msgspec.UNSET
    e2e_p99_s: float | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_s: float
    tokens_per_s_per_device: float
    requests_per_s: float
    joules_per_token: float | None
    cost_per_million_tokens: float | None
    """Null without prices."""
    worst_over_target: float
    """The worst latency over its target; 1 or less keeps them all."""
    worst_over_target_with_confidence: float
    outside_of_measured: list[str]
    basis: str


class PickedPoint(RecommendedPoint, frozen=True, kw_only=True):
    """The one with the most tokens within the targets."""

    requests_per_s_within_targets: float | None


class RecommendationAnswer(JsonDocument, frozen=True, kw_only=True, tag="recommendation"):
    """The settings that `recommend` compared."""

    model: str
    input_len: int
    output_len: int
    targets: dict[str, float]
    """Such as `ttft_p95`, in seconds."""
    confidence: float
    kv_precision: str
    pick: PickedPoint | None
    """Null where none keeps the targets."""
    by_forecast: PickedPoint | None
    """The same by the forecast as it is."""
    front: list[RecommendedPoint]
    points: list[RecommendedPoint]
    refused: list[RefusedSetting]
