"""The reviewed change: a placement, the actions that lead to it, what it relies on and what it forecasts.

A plan holds no time of day and no secret: the same inputs and seed give the same bytes, and its id is the digest of
those bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fabrictool.base.canonical import digest
from fabrictool.domain.specs import AgentSpec, GatewaySpec, Phase, lasting

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory

PLAN_API = "fabrictool/plan/v1"

ActionKind = Literal["create", "update", "replace", "delete", "keep", "unknown"]


class StagePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a pipeline."""

    cluster: str
    partition: str
    device: str
    tp: int


def node_blocks(tp: int, pp: int, devices_per_node: int) -> tuple[int, int]:
    """(nodes, devices on each) of a replica of `pp` equal stages: as few nodes as hold it, with as many devices on
    each, as engines want it. A `tp` that is larger than a node takes whole ones.
    """
    if tp > devices_per_node:
        return pp * tp // devices_per_node, devices_per_node
    least = math.ceil(pp / (devices_per_node // tp))
    nodes = next(number for number in range(least, pp + 1) if pp % number == 0)
    return nodes, tp * pp // nodes


class ReplicaPlacement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica: devices of one node, or a pipeline over several."""

    replica: str
    model: str
    provider: str
    site: str
    cluster: str
    partition: str
    device: str
    tp: int
    """Devices; of a pipeline: of its first stage."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Base engines of `tp` devices each that merge while they answer, on one node; 1: it is a single engine."""
    phase: Phase = "unified"
    stages: tuple[StagePlacement, ...] = ()
    """All stages, where they are not alike; else empty."""
    weight: float = 1.0
    """Its share of the model's traffic under equal load, beside the model's other replicas'."""
    group_weights: dict[str, float] = {}
    """Consumer group, "" for all that the demand does not name → that share of the group's requests. Not written where
    the demand is not divided.
    """
    variant: str = ""
    """Which of its model's variants; "": there is no choice."""

    @property
    def every_stage(self) -> tuple[StagePlacement, ...]:
        """One entry a stage, also for what is no pipeline; of engines that merge, one for all of them."""
        stage = StagePlacement(cluster=self.cluster, partition=self.partition, device=self.device, tp=self.tp)
        return self.stages or (stage,) * self.pp

    def blocks(self, inventory: Inventory) -> list[tuple[str, str, int]]:
        """(cluster, partition, devices that it keeps from others) of each node, or part of one, that it stands on.

        Raises
        ------
        KeyError
            The inventory has no such partition.
        """
        partitions = [inventory.clusters[s.cluster].partitions[s.partition] for s in self.every_stage]
        if self.stages:
            places = zip(self.stages, partitions, strict=True)
            return [(stage.cluster, stage.partition, partition.held(stage.tp)) for stage, partition in places]
        nodes, devices = node_blocks(self.tp * self.dp, self.pp, partitions[0].devices_per_node)
        return [(self.cluster, self.partition, partitions[0].held(devices))] * nodes

    @property
    def devices(self) -> int:
        return self.dp * sum(stage.tp for stage in self.every_stage)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which replica has which devices."""

    replicas: tuple[ReplicaPlacement, ...] = ()


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One step; `operation` names the unit to be started or updated, `former` the one to be stopped."""

    kind: ActionKind
    address: str
    cluster: str
    summary: str
    """Where and what, in words for a table."""
    reason: str = ""
    changes: tuple[str, ...] = ()
    """Changed fields, ``name: old → new``."""
    operation: str = ""
    former: str = ""
    stop_first: bool = False
    """Of a replacement: the old one must go before the new one can start."""
    spec: AgentSpec | GatewaySpec | None = None
    renews: bool | msgspec.UnsetType = msgspec.UNSET
    """Of an update whether it brings another certificate; not written where it does not."""


class Band(msgspec.Struct, frozen=True):
    """A forecast figure with the range in which it should be believed."""

    value: float
    low: float
    high: float


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One model's placement, played event by event until it is as full as it gets."""

    requests: int
    """That count: without those that came while it filled."""
    attainment: float
    """Share of them that met every target of the SLO."""
    low: float = 0.0
    """Of the attainment's 95 % interval."""
    high: float = 1.0
    in_system: float
    """Requests waiting or served, on average."""
    ttft_p95_s: float
    tpot_p95_s: float
    e2e_p95_s: float


Verdict = Literal["meets", "misses", "undecided", ""]
"""Of a model's SLO; "undecided": as many requests as are played at most do not show whether it is kept; "": it has
none, or an earlier release did not say."""


LossKind = Literal["node", "partition", "site", "provider"]
"""What may be lost at once."""


class LossReplay(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a model after its worst loss, played with the whole demand."""

    without: str
    """The loss, in words."""
    slo: Verdict
    attainment: float
    """Share of requests that met every target of the SLO."""
    low: float
    """Of its 95 % interval."""
    high: float
    misses: tuple[str, ...] = ()
    """Targets that are missed, or not shown to be met, in words."""


class Survival(msgspec.Struct, frozen=True):
    """What is left of a model's service after the worst of the losses that it is to survive."""

    loss: LossKind
    served: float
    """Share of the demand that the rest serves within the SLO."""
    worst: str = ""
    """The loss that leaves least, in words; "": each of them leaves all."""
    replay: LossReplay | msgspec.UnsetType = msgspec.UNSET
    """Of the loss that takes most; not written where that takes nothing or leaves nobody, and without an SLO."""


class GroupForecast(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one consumer group gets of a model, where the blueprint divides its demand."""

    group: str = ""
    """"": all those for whom the blueprint names no part."""
    share: float
    """Of the model's demand."""
    served: float
    """Share of that which can be served by those whom the group allows."""
    replicas: int
    """That may answer the group."""
    left: int | None = None
    """Of these, after the worst of the losses that the model is to survive; None: it is to survive none."""
    sent: dict[str, float] = {}
    """Provider, or both of a pair as ``A and B`` → share of what is served. Not written by earlier releases."""


class VariantForecast(msgspec.Struct, frozen=True):
    """Of one of a model's variants: how much it does."""

    variant: str
    replicas: int
    share: float
    """Of the load that the plan deals out."""


class DemandForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model that is planned for a quantile of its demand: in how many windows of it the placement holds."""

    quantile: float
    window_s: float
    windows: int
    counted: bool
    """In a trace; else they follow from the declared rate and its chance."""
    mean: float
    """Requests/s."""
    planned: float
    """Requests/s: the quantile."""
    low: float
    high: float
    """In nine of ten such intervals the true quantile lies, where the windows do not hang together; both are `planned`
    where nothing was counted."""
    served: float
    """Share of the windows in which all of the demand is served."""
    held: float
    """In which it is served within the SLO, by the closed form."""
    unserved: float
    """Requests/s, on average over all windows."""


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator expects of one model under its declared demand."""

    model: str
    replicas: int
    utilisation: float
    """Share of the placed capacity that the demand uses; above 1: overload."""
    served: float
    """Share of the demand that can be served."""
    ttft_p95_s: Band
    tpot_p95_s: Band
    e2e_p95_s: Band
    """All three are the replay's, where there is one."""
    replay: Replay | None = None
    """None without a demand."""
    misses: tuple[str, ...] = ()
    """SLO targets that the forecast does not meet, in words; none without an SLO."""
    undecided: tuple[str, ...] = ()
    """SLO targets of which the replay cannot tell whether they are met, in words."""
    slo: Verdict = ""
    judge: Literal["replay", "closed form", "turns", ""] = ""
    """Who gave the verdict: the replay, where there is one; "turns": an engine of several models, played as it gives
    them turns, with mean lengths."""
    overruled: Verdict = ""
    """What the closed form says, where the replay says the opposite."""
    survival: Survival | None = None
    """None: the model is not to survive anything."""
    why: str = ""
    """Of a model that is not shown to meet its SLO: why nothing more was done about it."""
    groups: tuple[GroupForecast, ...] | msgspec.UnsetType = msgspec.UNSET
    """Not written where the blueprint does not divide the demand."""
    variants: tuple[VariantForecast, ...] | msgspec.UnsetType = msgspec.UNSET
    """Those that are placed; not written of a model without a choice."""
    spared: tuple[float, float, float] | msgspec.UnsetType = msgspec.UNSET
    """How many times as long as forecast TTFT, TPOT and E2E are for `slo`, as `slo.band` of the blueprint wants it; not
    written where they are judged as they are forecast."""
    demand: DemandForecast | msgspec.UnsetType = msgspec.UNSET
    """Not written of a model that is planned for its mean demand."""

    @property
    def unserved(self) -> str:
        """What of the demand cannot be served, in words; "" when all can."""
        # Rounded down: what is not all is never called 100 %.
        return f"only {math.floor(self.served * 1000) / 10:g}% of the demand can be served" if self.served < 1 else ""


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a limit the placement uses."""

    name: str
    field: str
    """As it is written, such as ``device_hours_per_month``."""
    whose: str
    """Such as ``provider north``; "": the whole fabric."""
    used: float
    most: float
    """Both in `unit`."""
    unit: str


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fabric after the plan."""

    models: tuple[ModelForecast, ...]
    cost_per_hour: float
    currency: str
    power_w: float
    carbon_g_per_hour: float | msgspec.UnsetType = msgspec.UNSET
    """Of CO2 equivalent; not written where the inventory does not know it of every site in use."""
    basis: str
    """Where the figures come from and how far they have been wrong."""
    limits: tuple[LimitUse, ...] | msgspec.UnsetType = msgspec.UNSET
    """Not written where neither blueprint nor inventory has any."""
    held_together: float | msgspec.UnsetType = msgspec.UNSET
    """Share of windows in which all models that are planned for a quantile are served within their SLO at once; not
    written where there are not several."""
    wanted_together: float | msgspec.UnsetType = msgspec.UNSET
    """The share of windows in which they are to be; not written where the blueprint does not say."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the lexicographic objective, recomputed in floating point outside the solver."""

    name: str
    objective: float
    bound: float
    gap: float
    spared: float | msgspec.UnsetType = msgspec.UNSET
    """The share by which it is above what the search reached, so that fewer replicas move; `gap` is of what it reached.
    Not written where it is not."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """How good the placement is proved to be."""

    solver: str
    seed: int
    optimal: bool
    stages: tuple[Stage, ...]
    tables_sha256: str
    stage: str = ""
    """The one with the largest gap of those that users feel; the next three figures are its."""
    objective: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    version: str = ""
    """Of OR-Tools: another one may find another placement that is as good."""
    work: int = 0
    """Units of work of all searches, each a hundredth of a second of one core, about: a search with this limit
    (`--work`) finds the same on any machine."""
    ended: bool = False
    """Whether it ended there with more to be tried."""
    lessons: int = 0
    """Kinds of replica whose tables the replay corrected. Values have these corrections in them, bounds have not: they
    are of the problem as it was asked, and no correction leads below them."""
    gap_with_lessons: float = 0.0
    """Where there are lessons: the largest gap to bounds that have them in them, which are as good as the lessons."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a batch scheduler says of a unit that would be submitted now; a fact of the moment, and not promised."""

    address: str
    partition: str
    queue: str = ""
    """State of the partition, in words."""
    starts_at: float | None = None
    """Wall seconds; None when it does not say."""
    ends_at: float | None = None
    """Of the allocation, if it starts then."""
    walltime_s: float | None = None
    window: str = ""
    """The reservation or maintenance window that shortens or delays it."""


class StartTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long starts like one of the plan took before, from the start of the job until the replica served."""

    address: str
    loader: str
    median_s: float
    starts: int
    alike: bool
    """Whether they were on the same cluster by the same loader; else what is known of the model elsewhere."""


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan changes of what runs."""

    starts: int
    stops: int
    loading_s: float
    """Of all that start, one after another."""
    devices: int
    """Of all that start."""
    otherwise: str
    """What would be lost without them, in words; "": nothing that users feel."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring."""

    api: str = PLAN_API
    fabric: str
    lineage: str
    """Of the state that the plan was made against; another fabric's plan cannot be applied here."""
    blueprint_digest: str
    read_set: dict[str, str]
    """Fact → digest, for just the facts that the plan relies on."""
    actions: tuple[Action, ...]
    placement: Placement
    forecast: Forecast
    certificate: Certificate
    situation: str | msgspec.UnsetType = msgspec.UNSET
    """Digest of what the placement was searched from, but for what ran: the files, and which clusters and nodes were
    there. Not written where nothing is placed."""
    unchanged: bool | msgspec.UnsetType = msgspec.UNSET
    """True where what runs stays without a search: nothing has changed since it was applied. Else not written."""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    moves: Moves | msgspec.UnsetType = msgspec.UNSET
    """Not written where nothing ran, or all of it stays."""
    assumed: bool = False
    """Whether clusters were supposed to be there and empty, and none was asked: such a plan is never carried out."""
    outlook: tuple[Outlook, ...] = ()
    """Of the units that would be submitted to a scheduler; no part of the id."""
    starts: tuple[StartTime, ...] = ()
    """Of the replicas that start, as far as it was measured; no part of the id."""

    @property
    def id(self) -> str:
        """The digest of everything above but what is of the moment."""
        document = msgspec.to_builtins(msgspec.structs.replace(self, outlook=()))
        del document["starts"]
        return digest(document)

    @property
    def changes(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.kind not in ("keep", "unknown"))


_decoder = msgspec.json.Decoder(Plan)


def decode_plan(data: bytes) -> Plan:
    """From JSON; raises msgspec.DecodeError on anything else."""
    plan: Plan = _decoder.decode(data)
    return plan


LATER: dict[str, tuple[str, ...]] = {
    "": ("variants",),
    "parallelism": ("dp",),
    "demand": ("groups", "quantile", "window", "hours", "begins", "wait"),
    "slo": ("band",),
}
"""By part of a model: fields that came after digests were kept."""


def inputs_digest(blueprint: Blueprint, inventory: Inventory) -> str:
    """Of what the files say after merging, as the types understand it: comments and order do not count.

    What says nothing of fields that came later has the digest that it had before there were such: plans stay good.
    """
    left_out = {name for name in ("architectures", "limits", "together") if not getattr(blueprint, name)}
    if blueprint.timezone == "UTC":
        left_out.add("timezone")
    wanted = blueprint.model_dump(mode="json", exclude=left_out)
    models = wanted["models"].values()
    for part in (wanted["defaults"], *models, *(beside for model in models for beside in model["companions"].values())):
        _drop_unwritten(part)
    # Of a calibration counts what it says, and not where it lies.
    there = inventory.model_dump(
        mode="json", exclude={"calibrations"} if inventory.limits else {"calibrations", "limits"}
    )
    for cluster in there["clusters"].values():
        for partition in cluster["partitions"].values():
            for name in ("price_hours", "queue_wait"):
                if partition[name] is None:
                    del partition[name]
    for site in there["sites"].values():
        for name in ("carbon", "carbon_hours"):
            if site[name] is None:
                del site[name]
    return digest([wanted, there, *inventory.calibrated])


def _drop_unwritten(model: dict[str, Any]) -> None:
    for name, fields in LATER.items():
        part = model.get(name) if name else model
        for field in fields:
            if part and not part.get(field):
                part.pop(field, None)


def spec_digest(spec: AgentSpec | GatewaySpec) -> str:
    """What decides whether a running unit is the wanted one."""
    return digest(msgspec.to_builtins(lasting(spec)))
