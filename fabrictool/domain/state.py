"""What the operator's side remembers of a fabric: counts, places and what was applied last. Never a secret.

The truth is in the clusters. The state holds what they cannot say: the fabric's *lineage* (a random id that marks what
is ours), the *serial* that every write raises by one, and per address the *generation* of its last start.
"""

from __future__ import annotations

import hashlib

import msgspec

from fabrictool.domain.plan import Band, Forecast, Verdict
from fabrictool.domain.specs import AgentSpec, Phase, UnitSpec

SCHEMA = 1
SHORTEST_MARK = 8
"""Digits of a lineage that tell it from others: job comments have no room for all of them."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a unit was put; what is remembered of clusters that do not answer."""

    cluster: str
    partition: str = msgspec.field(name="node")
    """Of an agent; "" of a gateway. Written as ``node``."""
    tp: int = 1
    pp: int = 1
    merging: int | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="dp")
    """Base engines that merge; not written where it is a single engine."""
    phase: Phase = "unified"
    operation: str = ""

    @property
    def dp(self) -> int:
        """How many base engines it is."""
        return 1 if isinstance(self.merging, msgspec.UnsetType) else self.merging

    @classmethod
    def of(cls, spec: UnitSpec, cluster: str, operation: str) -> Placed:
        if not isinstance(spec, AgentSpec):
            return cls(cluster=cluster, partition="", operation=operation)
        return cls(
            cluster=cluster,
            partition=spec.partition,
            tp=spec.tp,
            pp=spec.pp,
            merging=spec.merging,
            phase=spec.phase,
            operation=operation,
        )


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of the last approved plan."""

    cluster: str
    spec: UnitSpec
    summary: str = ""


class ModelPromise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a plan forecasts of a model, as far as a gateway measures it."""

    ttft_p95_s: Band
    tpot_p95_s: Band
    slo: Verdict = ""
    attainment: float | None = None
    """Share of requests within the SLO; None: nothing was played."""


def promises_of(forecast: Forecast) -> dict[str, ModelPromise]:
    """Model → what is kept of its forecast."""
    return {
        model.model: ModelPromise(
            ttft_p95_s=model.ttft_p95_s,
            tpot_p95_s=model.tpot_p95_s,
            slo=model.slo,
            attainment=None if model.replay is None else model.replay.attainment,
        )
        for model in forecast.models
    }


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``state.json``."""

    schema: int = SCHEMA
    fabric: str = ""
    """Whose state it is."""
    lineage: str = ""
    """Random, given with the first write: marks what is ours."""
    serial: int = 0
    applied_plan: str = ""
    """Id of the last plan that was carried out."""
    applied_blueprint: str = ""
    """Digest of what that plan was made of."""
    applied_situation: str = ""
    """The same with the clusters and nodes that were there; "": it placed nothing."""
    forecast: dict[str, ModelPromise] | msgspec.UnsetType = msgspec.UNSET
    """Model → what that plan forecasts of it, to be held against what is measured; not written before there is one."""
    applied_units: dict[str, Applied] = {}
    """Address → what the last approved plan wants there: what `reconcile` heals to."""
    generations: dict[str, int] = {}
    """Address → how many units it ever had."""
    waits: dict[str, list[float]] = {}
    """``CLUSTER/PARTITION`` → seconds that our last jobs waited in its queue."""
    healed: dict[str, list[float]] = {}
    """Address → wall seconds at which healing started a unit there, those of the last hour: every operator's count."""
    served_on: list[str] = []
    """Clusters on which a unit of ours was once seen to serve: there its folder must be."""
    loads: dict[str, list[float]] = {}
    """`load_key` → seconds from the start of the last replicas until they served; earlier releases wrote the model."""
    failed_loaders: list[str] = []
    """`load_key` of those with which a replica ended before it served, where loaders were compared."""
    units: dict[str, Placed] = {}
    """Address → where its unit was started and not stopped since."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to write, which one process at a time has."""

    id: str
    who: str
    host: str
    pid: int
    purpose: str
    at: float
    """Wall seconds."""
    expires: float | None = None
    """Wall seconds after which another one may take it over; None: it ends with its process, or by hand."""

    def __str__(self) -> str:
        return f"{self.who}@{self.host} (pid {self.pid}), lease {self.id}, for {self.purpose}"


def load_key(model: str, cluster: str, loader: str) -> str:
    """Under which times of starts are kept."""
    return f"{model}@{cluster}/{loader}"


def operation_id(lineage: str, address: str, generation: int) -> str:
    """The id under which a unit is started, at most once: readable, unique in the fabric, the same on a retry."""
    mark = hashlib.sha256(f"{lineage}|{address}|{generation}".encode()).hexdigest()[:8]
    return f"{address.replace('/', '-')}-g{generation}-{mark}"


def same_lineage(mark: str, lineage: str) -> bool:
    """Whether a unit's mark is that lineage, or its beginning."""
    return bool(lineage) and (mark == lineage or (len(mark) >= SHORTEST_MARK and lineage.startswith(mark)))
