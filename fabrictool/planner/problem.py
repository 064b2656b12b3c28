"""The placement problem in the solver's terms: replica counts per option, pools of devices, rules as rows.

Counts, not device ids: identical devices make symmetric solutions, which a count removes (planner.md §3.6).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from fabrictool.domain.plan import LossKind, node_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fabrictool.base.canonical import LateDigest
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.domain.specs import Phase
    from fabrictool.simulator.capacity import ReplicaFigures
    from fabrictool.simulator.demanded import GroupDemand
    from fabrictool.simulator.elastic import Elastic
    from fabrictool.simulator.physics import PeakUse
    from fabrictool.simulator.shared import Shared


PoolKey = tuple[str, str]
"""(cluster, partition)."""
OptionKey = tuple[str, str, str, int, int, str]
"""(model, cluster, partition, tp, pp, phase with base engines, the places of further stages and, where there are
several, the variant): what a count stands for."""
Kind = tuple[str, str, tuple[tuple[str, int], ...], int, str]
"""(model, phase, device and tp of each stage, base engines, variant): what does the same wherever it stands."""


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
    carbon_per_kwh: float | None = None
    """Grams of CO2 equivalent; None: nobody knows."""
    whole_nodes: bool = False
    """Whether the scheduler gives only whole nodes."""
    stable: bool = True
    """False for scavenger capacity, which never counts towards a minimum."""
    joined: bool = False
    """Whether its nodes come by themselves: the inventory cannot add any."""
    shares_nodes: bool = False
    """Whether any number of replicas may stand on one node, whatever devices it has."""
    keeps_apart: bool = True
    """Whether replicas of a model that have room on one node can be kept on different ones."""

    @property
    def key(self) -> PoolKey:
        return (self.cluster, self.partition)

    @property
    def carbon_per_node_hour(self) -> float:
        """Grams of CO2 equivalent."""
        return self.power_per_node_w / 1000.0 * (self.carbon_per_kwh or 0.0)

    def held(self, tp: int) -> int:
        """Devices that `tp` of them keep from others; more than a node has are whole nodes."""
        return max(self.devices_per_node, tp) if self.whole_nodes else tp

    def parts_lost(self, size: int, part: int) -> int:
        """Parts of so many devices that a node has less room for with a block of `size` in it.

        Where these are no more than all nodes have room for, for every size that occurs, all blocks fit their nodes:
        found by trying all of them in up to three nodes of up to eight devices.
        """
        return self.devices_per_node // part - (self.devices_per_node - size) // part

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
    excess: float = 0.0
    """By how much of itself it is over the target that it misses most."""


@dataclass(frozen=True, slots=True)
class Option:
    """A column: replicas of one model, all alike, in one phase of serving."""

    model: str
    pool: Pool
    """Where its devices are; those of its first stage."""
    tp: int
    """Devices a stage; of the first stage."""
    figures: ReplicaFigures
    levels: tuple[Level, ...]
    """Ascending; the last one is the most that a replica is planned for."""
    start_s: float = 0.0
    """From its start until it serves."""
    preference: float = 0.0
    """0 for what `place` prefers, more for what it does not; never negative, or replicas would be had for nothing."""
    pp: int = 1
    """Pipeline stages."""
    phase: Phase = "unified"
    others: tuple[tuple[Pool, int], ...] = ()
    """(pool, tp) of the stages after the first, when they are not all alike."""
    elastic: Elastic | None = None
    """Of base engines that merge while they answer: what they do together and apart. None: it is a single engine."""

    shared: Shared | None = None
    """Of an engine that serves other models, too: what they leave this one. None: it has the engine for itself."""

    variant: str = ""
    """Which of its model's variants; "": there is no choice."""
    steps_down: int = 0
    """How many better qualities its model has."""

    key: OptionKey = field(init=False, repr=False, compare=False)
    """What a count stands for."""
    blocks: Mapping[tuple[PoolKey, int], int] = field(init=False, repr=False, compare=False)
    """How many blocks of so many devices of one node it takes, by pool and size."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self._key())  # both are asked for a hundred times in a large problem
        object.__setattr__(self, "blocks", self._blocks())

    @property
    def dp(self) -> int:
        """Base engines of `tp` devices each, on one node."""
        return 1 if self.elastic is None else self.elastic.engines

    @property
    def stage_devices(self) -> int:
        """Of its first stage, those of all base engines."""
        return self.tp * self.dp

    @property
    def stages(self) -> tuple[tuple[Pool, int], ...]:
        """(pool, tp) of each pipeline stage."""
        return ((self.pool, self.tp), *self.others) if self.others else ((self.pool, self.tp),) * self.pp

    def _blocks(self) -> dict[tuple[PoolKey, int], int]:
        if self.others:
            return dict(Counter((pool.key, pool.held(tp)) for pool, tp in self.stages))
        nodes, devices = node_blocks(self.stage_devices, self.pp, self.pool.devices_per_node)
        return {(self.pool.key, self.pool.held(devices)): nodes}

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(dict.fromkeys(pool for pool, _ in self.stages)) if self.others else (self.pool,)

    @property
    def devices(self) -> int:
        """That one replica keeps from others."""
        return sum(size * number for (_, size), number in self.blocks.items())

    @property
    def nodes(self) -> Iterator[tuple[Pool, float]]:
        """How many nodes of each pool it keeps, not whole ones."""
        for pool in self.pools:
            held = sum(size * number for (key, size), number in self.blocks.items() if key == pool.key)
            yield pool, held / pool.devices_per_node

    @property
    def stable(self) -> bool:
        """Whether no part of it may be taken away at any time."""
        return all(pool.stable for pool in self.pools)

    @property
    def serves(self) -> bool:
        """Whether answers come from it: prefill replicas alone give none."""
        return self.phase != "prefill"

    @property
    def capacity(self) -> float:
        """Requests/s of one replica that never waits for work."""
        return self.figures.capacity

    @property
    def cost(self) -> float:
        """Per replica and hour: its share of the nodes' prices."""
        return sum(pool.price_per_node_hour * share for pool, share in self.nodes)

    @property
    def power(self) -> float:
        """Watts per replica: its share of the nodes'."""
        return sum(pool.power_per_node_w * share for pool, share in self.nodes)

    @property
    def carbon(self) -> float:
        """Grams of CO2 equivalent per replica and hour: its share of the nodes'."""
        return sum(pool.carbon_per_node_hour * share for pool, share in self.nodes)

    @property
    def kind(self) -> Kind:
        return (self.model, self.phase, tuple((pool.device, tp) for pool, tp in self.stages), self.dp, self.variant)

    def _key(self) -> OptionKey:
        further = "".join(f"+{'/'.join(pool.key)}:{tp}" for pool, tp in self.others)
        cut = (self.tp, len(self.stages), self.dp)
        return unit_key(self.model, self.pool.key, cut, self.phase + further, self.variant)


def unit_key(model: str, place: PoolKey, cut: tuple[int, int, int], phase: str, variant: str = "") -> OptionKey:
    """The key of the option that a running replica is one of; `cut`: its tp, pp and dp."""
    tp, pp, dp = cut
    shape = f"{phase}×{dp}" if dp > 1 else phase
    return (model, *place, tp, pp, f"{shape} as {variant}" if variant else shape)


def replica_key(replica: ReplicaPlacement) -> OptionKey:
    """The key of the option that a placed replica is one of."""
    further = "".join(f"+{stage.cluster}/{stage.partition}:{stage.tp}" for stage in replica.stages[1:])
    place = (replica.cluster, replica.partition)
    cut = (replica.tp, replica.pp, replica.dp)
    return unit_key(replica.model, place, cut, replica.phase + further, replica.variant)


class ColumnGenerator(Protocol):
    """Makes further columns of one model, on demand."""

    def mixed(self, stages: Sequence[tuple[Pool, int]], phase: Phase) -> Option | None:
        """Replicas with these stages, (pool, tp) each; None where they do not fit."""

    def at_once(self, variant: str) -> int:
        """Requests that the engine takes into a batch at most."""

    def widths(self, pool: Pool, variant: str) -> list[int]:
        """Tensor-parallel degrees that its engine could have there, whether or not the model fits."""

    def peak_use(self, option: Option) -> PeakUse | None:
        """How near a replica that is one engine on one node comes to what its devices can do at most."""

    def refusals(self) -> list[str]:
        """Why no replica can stand, for each partition by itself."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What handing a request's key-value cache from one pool to another takes."""

    seconds: float
    """Mean, with nothing else on the link."""
    octets: float
    """Of one request."""
    link: tuple[str, str] | None = None
    """The two sites, where the link between them is shared."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """One thing of which no more may be used."""

    name: str
    field: str
    """As it is written: ``device_hours_per_month``."""
    resource: Literal["devices", "cost", "power", "carbon"]
    most: float
    """In devices, money per hour, watts or grams per hour."""
    pools: frozenset[PoolKey]
    whose: str = ""
    """Such as ``provider north``; "": the whole fabric."""
    unit: str = ""
    scale: float = 1.0
    """Of `unit` in one of what `most` is in."""
    taken: float = 0.0
    """By replicas that no option stands for: of clusters that do not answer."""

    @property
    def thing(self) -> str:
        """Its place in blueprint or inventory."""
        return f"limits.{self.name}.{self.field}"

    def used_by(self, option: Option) -> float:
        """What one replica takes of it."""
        if self.resource == "devices":
            return float(sum(size * number for (key, size), number in option.blocks.items() if key in self.pools))
        return sum(self.of(pool, share) for pool, share in option.nodes)

    def of(self, pool: Pool, nodes: float) -> float:
        """What so many nodes of a pool, not whole ones, take of it."""
        of_a_node = {
            "devices": pool.devices_per_node, "cost": pool.price_per_node_hour, "power": pool.power_per_node_w,
            "carbon": pool.carbon_per_node_hour,
        }  # fmt: skip
        return nodes * of_a_node[self.resource] if pool.key in self.pools else 0.0

    def used(self, options: Sequence[Option], counts: Mapping[int, int]) -> float:
        return self.taken + math.fsum(count * self.used_by(options[i]) for i, count in counts.items() if count)

    def text(self, value: float) -> str:
        """A number of its unit, as it is written."""
        shown = value * self.scale
        unit = "device" if shown == 1 and self.unit == "devices" else self.unit
        return f"{shown:,.0f} {unit}" if shown >= 100 or shown == round(shown) else f"{shown:.3g} {unit}"

    @property
    def words(self) -> str:
        """Such as ``64 devices of provider north``."""
        return f"{self.text(self.most)} of {self.whose or 'the whole fabric'}"


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
    sites: int = 0
    """Over how many sites it can be spread; 0: those of its options."""
    spread_nodes: bool = False
    """Whether that many nodes hold a replica as there are to be at least (`planner.node_spread`)."""
    pins: dict[tuple[str, str], int] = field(default_factory=dict)
    """(cluster, partition or "") → exactly that many replicas there."""
    survive: LossKind | None = None
    """What may be lost without the demand being unserved (`planner.survival`)."""
    groups: tuple[frozenset[str], ...] = ()
    """Providers that may serve each consumer group which may ask for the model; none: there are no groups."""
    parts: tuple[GroupDemand, ...] = ()
    """The whole demand, by who asks (`planner.consumers`); none: it is not divided."""
    reach: float = 0.0
    """Requests/s that so many replicas as it may have could take at most; 0: what its options say."""

    def reached(self, options: Iterable[Option]) -> float:
        """Requests/s of its demand that could be served if it had all that there is; `options`: its own."""
        best = max((option.levels[-1].rate for option in options if option.phase != "decode"), default=0.0)
        return min(self.rate, self.reach or self.maximum * best)


@dataclass(frozen=True)
class PlacementProblem:
    """Everything that the solver may look at, in a fixed order."""

    needs: tuple[ModelNeed, ...]
    options: tuple[Option, ...]
    pools: tuple[Pool, ...]
    current: dict[OptionKey, int]
    """What runs now, by option key: the last objective keeps it where nothing is lost by that."""
    objective: tuple[str, ...]
    """Stages after ``served``: of ``slo``, ``quality``, ``latency``, ``cost``, ``energy``, ``carbon``; and
    ``fairness``, which comes before it."""
    tables: LateDigest
    fixed: dict[OptionKey, int] = field(default_factory=dict)
    """Option key → its count, of replicas on clusters that do not answer: neither more nor fewer of them can be had."""
    ways: dict[tuple[PoolKey, PoolKey], tuple[float, float]] = field(default_factory=dict)
    """Two pools → (seconds, octets/s) between them; absent: no network joins them."""
    columns: Mapping[str, ColumnGenerator] = field(default_factory=dict)
    """By model, for solvers that look beyond `options`."""
    phases: Mapping[str, tuple[Phase, ...]] = field(default_factory=dict)
    """By model; absent: unified."""
    transfers: dict[tuple[str, PoolKey, PoolKey], Transfer] = field(default_factory=dict)
    """(model, pool of prefill, pool of decode) → hand-over; a pair that is not here cannot work together."""
    links: dict[tuple[str, str], float] = field(default_factory=dict)
    """Two sites → octets/s that all hand-overs between them may use together."""
    taken: Mapping[tuple[PoolKey, int], int] = field(default_factory=dict)
    """(pool, size) → blocks of so many devices that are not to be had: of a part of a larger problem."""
    move_price: float = 0.0
    """By how much the cost for an hour must fall for each replica that is started or stopped."""
    runs_elsewhere: bool = False
    """Whether something runs that is not in `current`: of a part of a larger problem."""
    max_moves: int | None = None
    """Replicas that may start or stop, where something runs."""
    outages: tuple[frozenset[PoolKey], ...] = ()
    """Pools that will be away at the same time, each once: minima have to hold without them."""
    limits: tuple[ResourceLimit, ...] = ()
    """What all replicas together may use."""
    crowded: Mapping[PoolKey, int] = field(default_factory=dict)
    """Pool → devices that stay free there, as its nodes had no room for replicas that are spread over them
    (`planner.apart_search`)."""
    apart: Mapping[tuple[PoolKey, int], int] = field(default_factory=dict)
    """(pool, size) → blocks of so many devices that are not to be had because smaller ones are on nodes of their own:
    of a part of a larger problem."""

    @property
    def tables_sha256(self) -> str:
        """Of what the solver reads off the columns; of a part of a larger problem, off all of that one's."""
        return self.tables.sha256

    @property
    def runs(self) -> bool:
        """Whether anything does: then every change is a move."""
        return bool(self.current) or self.runs_elsewhere

    @cached_property
    def running(self) -> dict[int, int]:
        """What runs, by index of its option."""
        now = ((i, self.current.get(option.key, 0)) for i, option in enumerate(self.options if self.current else ()))
        return {i: count for i, count in now if count}

    @cached_property
    def _by_model(self) -> dict[str, tuple[int, ...]]:
        by_model: dict[str, list[int]] = defaultdict(list)
        for i, option in enumerate(self.options):
            by_model[option.model].append(i)
        return {model: tuple(mine) for model, mine in by_model.items()}

    def of(self, model: str) -> Sequence[int]:
        """Indices of a model's options."""
        return self._by_model.get(model, ())


@dataclass(frozen=True, slots=True)
class StageResult:
    """One level of the lexicographic objective."""

    name: str
    objective: float
    bound: float
    reached: float | None = None
    """What it came to before it was let rise so that fewer replicas move; None: it was not."""

    @property
    def searched(self) -> float:
        """What the search is to be judged by."""
        return self.objective if self.reached is None else min(self.objective, self.reached)


@dataclass(frozen=True, slots=True)
class Solution:
    """Counts and loads by option index."""

    counts: dict[int, int]
    loads: dict[int, float]
    """Requests/s sent to all replicas of an option."""
    stages: tuple[StageResult, ...]
    solver: str
    optimal: bool
    repeatable: bool = True
    """Whether it does not depend on how fast this machine was."""
    added: tuple[Option, ...] = ()
    """Columns that the solver made; their indices follow those of the problem's own."""
    work: float = 0.0
    """Seconds of its limit that it used up, counted in what is the same on every machine (`planner.work`)."""
    ended: bool = False
    """By its limit, by a clock or by Ctrl-C: there was more to be tried."""

    def whole(self, problem: PlacementProblem) -> PlacementProblem:
        """The problem with the columns that this solution speaks of."""
        return replace(problem, options=problem.options + self.added) if self.added else problem


class Solver(Protocol):
    """Anything that places replicas: yields ever better solutions, the last one is the answer."""

    @property
    def name(self) -> str:
        """As the certificate has it."""

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Improve until proven optimal, or until work of about `deadline_s` seconds is done, in all stages together.

        Raises
        ------
        InfeasibleError
            FT2001 with the rules that conflict.
        """
