"""The placement problem in the solver's terms: replica counts per option, pools of devices, rules as rows.

Counts, not device ids: identical devices make symmetric solutions, which a count removes (planner.md §3.6).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.simulator.capacity import Replica


@dataclass(frozen=True, slots=True)
class Pool:
    """One partition of one cluster: equal nodes."""

    cluster: str
    partition: str
    provider: str
    site: str
    device: str
    nodes: int
    devices_per_node: int
    price_per_node_hour: float
    power_per_node_w: float
    stable: bool = True
    """False for scavenger capacity, which never counts towards a minimum."""

    @property
    def key(self) -> tuple[str, str]:
        """(cluster, partition)."""
        return (self.cluster, self.partition)

    def within(self, cluster: str, partition: str) -> bool:
        """Whether this is that partition of that cluster; "": any."""
        return self.cluster == cluster and partition in ("", self.partition)


@dataclass(frozen=True, slots=True)
class Level:
    """A replica under one load."""

    rate: float
    """Requests/s that it gets."""
    in_system: float
    """Requests in it, waiting or served, on average: by Little's law the rate times the mean latency."""
    attains: bool
    """Whether the forecast at this load meets the model's SLO."""


@dataclass(frozen=True, slots=True)
class Option:
    """A column: replicas of one model on one pool with one tensor-parallel degree."""

    model: str
    pool: Pool
    tp: int
    figures: Replica
    levels: tuple[Level, ...]
    """Ascending; the last one is the most that a replica is planned for."""
    preference: float = 0.0
    """0 for what `place` prefers, more for what it does not; never negative, or replicas would be had for nothing."""

    @property
    def capacity(self) -> float:
        """Requests/s of one replica that never waits for work."""
        return self.figures.capacity

    @property
    def cost(self) -> float:
        """Per replica and hour: its share of the node's price."""
        return self.pool.price_per_node_hour * self.tp / self.pool.devices_per_node

    @property
    def power(self) -> float:
        """Watts per replica: its share of the node's."""
        return self.pool.power_per_node_w * self.tp / self.pool.devices_per_node

    @property
    def key(self) -> tuple[str, str, str, int]:
        """(model, cluster, partition, tp): what a count stands for."""
        return (self.model, self.pool.cluster, self.pool.partition, self.tp)


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """One model's demand and rules."""

    model: str
    rate: float
    """Requests/s."""
    minimum: int
    maximum: int
    priority: float = 1.0
    """Weight of a request that is not served."""
    spread_sites: bool = False
    pins: dict[tuple[str, str], int] = field(default_factory=dict)
    """(cluster, partition or "") → exactly that many replicas there."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that the solver may look at, in a fixed order."""

    needs: tuple[ModelNeed, ...]
    options: tuple[Option, ...]
    pools: tuple[Pool, ...]
    current: dict[tuple[str, str, str, int], int]
    """What runs now, by option key: the last objective keeps it where nothing is lost by that."""
    objective: tuple[str, ...]
    """Stages after ``served``: of ``slo``, ``latency``, ``cost``, ``energy``."""
    tables_sha256: str
    fixed: dict[tuple[str, str, str, int], int] = field(default_factory=dict)
    """Option key → its count, of replicas on clusters that do not answer: neither more nor fewer of them can be had."""

    def of(self, model: str) -> list[int]:
        """Indices of a model's options."""
        return [index for index, option in enumerate(self.options) if option.model == model]


@dataclass(frozen=True, slots=True)
class StageResult:
    """One level of the lexicographic objective."""

    name: str
    objective: float
    bound: float


@dataclass(frozen=True, slots=True)
class Solution:
    """Counts and loads by option index."""

    counts: dict[int, int]
    loads: dict[int, float]
    """Requests/s sent to all replicas of an option."""
    stages: tuple[StageResult, ...]
    solver: str
    optimal: bool


class Solver(Protocol):
    """Anything that places replicas: yields ever better solutions, the last one is the answer."""

    @property
    def name(self) -> str:
        """For the certificate."""
        ...

    def solve(
        self, problem: Problem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Improve until proven optimal or out of time.

        Raises
        ------
        InfeasibleError
            FT2001 with the rules that conflict.
        """
        ...
