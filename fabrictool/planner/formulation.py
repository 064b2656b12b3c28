r"""The planner's mathematical program: columns for replicas at load levels, rules as rows, objectives as terms.

For model m, option o (pool n, tensor parallelism t) and load level l with rate :math:`r_{ol}` and mean number of
requests in a replica :math:`q_{ol}` (convex in the rate): :math:`x_{ol} \ge 0` replicas at that level, level 0 being
idle, :math:`k_o = \sum_l x_{ol} \in \mathbb{N}` replicas, :math:`u_m \ge 0` requests/s unserved:

* demand      :math:`\sum_{o \in m, l} r_{ol} x_{ol} + u_m = \lambda_m`
* devices     :math:`\sum_{o \in n} t_o k_o \le D_n`, and for each size s that occurs, whole nodes:
  :math:`\sum_{t_o \ge s} k_o f_{os} \le N_n \lfloor d_n / s \rfloor` with
  :math:`f_{os} = \lfloor d_n / s \rfloor - \lfloor (d_n - t_o) / s \rfloor`, for powers of two
  :math:`\lfloor t_o / s \rfloor` (planner.md §3.6); a pipeline is a block in each of its nodes
* counts      :math:`k^{min}_m \le \sum k_o \le k^{max}_m`; stable pools alone reach the minimum, also without the
  pools of any outage; prefill replicas do not count towards it
* phases      what prefill options of a pool get is handed to decode options of the pools that it reaches, and all that
  crosses the link between two sites fits it
* groups      who may be served by whom, where the demand is divided by consumer group (`planner.consumers`)
* fairness    between models, and groups (`planner.fairness`)
* survival    for each loss l (`planner.survival`), what is left and :math:`v_{ml} \ge 0` take the demand; of a node, a
  column in :math:`\{0, 1\}` says whether less is lost with what it can hold or with all that its pool has
* limits      on devices, cost and power of parts of the fabric (`planner.limits`)
* pins, and with *spread* at most :math:`\lceil \sum k_o / S \rceil` replicas a site; or as many nodes
  with a replica as the minimum says (`planner.node_spread`)
* counts of clusters that do not answer are fixed

In the relaxation nothing is whole and :math:`k` is not a column: the rows stand on :math:`x` alone, which makes them
few and the program fast (planner.md §3.3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from fabrictool.planner.consumers import flow_rows, providers_of
from fabrictool.planner.fairness import FAIRNESS, fair_rows, joined
from fabrictool.planner.limits import limit_rows
from fabrictool.planner.moving import move_prices
from fabrictool.planner.node_spread import SpreadRows
from fabrictool.planner.program import Program, ProgramSolution, Terms
from fabrictool.planner.survival import SIDES
from fabrictool.planner.survival_rows import SurvivalRows
from fabrictool.planner.tangents import BY_LOAD, DUST, NOTHING, LoadPrices, of_levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.fairness import Lacks
    from fabrictool.planner.highs import Searched
    from fabrictool.planner.problem import Level, ModelNeed, PlacementProblem, Pool, PoolKey

INFINITY = math.inf
BY_CAPACITY = frozenset({FAIRNESS, "served", "survived"})
"""Stages that do not depend on the load of any replica. Each needs only stages of these to be kept."""


@dataclass(frozen=True, slots=True)
class PricedRows:
    """Where the rows stand whose prices matter."""

    demand: dict[str, int] = field(default_factory=dict)
    """By model."""
    devices: dict[PoolKey, int] = field(default_factory=dict)
    """By pool."""
    decode: dict[tuple[str, PoolKey], int] = field(default_factory=dict)
    """By model and pool: what is handed to decode replicas there."""


class Formulation:
    """See the module's docstring; over the options `chosen`, by index."""

    restarts = True
    """Whether a search of it may begin anew at its root."""

    # Wide: what it is of, and what is known of it.
    def __init__(
        self,
        problem: PlacementProblem,
        chosen: Sequence[int],
        *,
        whole: bool,
        given: Mapping[int, float] | None = None,
        program: Program | None = None,
        by_capacity: bool = False,
    ) -> None:
        """`given` counts, by option, leave only the loads to be found; `program`: one that is of more than this.

        `by_capacity`: in whole numbers, with no column that says what load a replica is under: what counts is the most
        that it can take. It is for the stages of `BY_CAPACITY` alone (but see `planner.told`).
        """
        self.problem = problem
        self.chosen = list(chosen)
        self.rows = PricedRows()
        self.program = Program(whole=whole) if program is None else program
        self._whole, self._given, self._by_capacity = whole, given, by_capacity
        self._limit = {need.model: need.maximum for need in problem.needs}
        self._owners: list[str] = []
        self._idle: dict[int, int] = {}
        self._levels: dict[int, list[int]] = {}
        self._count: dict[int, int] = {}
        self._unserved: dict[str, int] = {}
        self._lost: Terms = []
        self._asked: dict[str, Terms] = {}
        self._lacking: dict[str, Lacks] = {}
        self._fairest: Terms = []
        self._kept: dict[str, int] = {}
        self._terms: dict[str, Terms] = {}
        self._starts: dict[int, Terms] = {}
        self._stops: dict[int, Terms] = {}
        self._handed: dict[tuple[str, PoolKey, PoolKey], int] = {}
        by_model: dict[str, list[int]] = defaultdict(list)
        blocks: dict[PoolKey, list[tuple[int, int, int]]] = defaultdict(list)
        flows = {need.model for need in problem.needs if need.parts}
        flows |= {problem.options[i].model for i in self.chosen if problem.options[i].phase != "unified"}
        self._flows = flows
        for i in self.chosen:
            self._add_option(i)
            by_model[problem.options[i].model].append(i)
            for (key, size), number in problem.options[i].blocks.items():
                blocks[key].append((i, size, number))
        survival = SurvivalRows(self.program, problem, self._column, self.count, given)
        for need in problem.needs:
            self._demand_rows(need, by_model[need.model])
            self._phase_rows(need.model, by_model[need.model])
            self._group_rows(need, by_model[need.model])
            self._lost += survival.of(need, by_model[need.model])
        SpreadRows(self.program, problem, self._column, self.count).add(by_model, blocks)
        self._link_rows()
        for pool in problem.pools:
            self._device_rows(pool, blocks[pool.key])
        self._fair_rows()
        limit_rows(self.program, problem, self.chosen, self.count)
        self._move_rows()
        if problem.max_moves is not None and problem.runs:
            self.program.row(-INFINITY, problem.max_moves, self.terms("moves"))

    @classmethod
    def of_counts(
        cls, problem: PlacementProblem, counts: Mapping[int, int], among: Iterable[int] | None = None
    ) -> Formulation:
        """The linear program of what given counts, by option, can be loaded with; `among`: those that may have any.

        What runs or cannot be seen takes part also without a count: that it goes is a move, and a rule may want it.
        """
        known = problem.current.keys() | problem.fixed.keys()
        every = range(len(problem.options)) if among is None else among
        chosen = [i for i in every if counts.get(i) or problem.options[i].key in known]
        return cls(problem, chosen, whole=False, given=counts)

    # -- solving ----------------------------------------------------------------------------------------------

    # Wide: hands on the limits of `Program.minimise`.
    def minimise(
        self,
        name: str,
        *,
        seconds: float,
        seed: int,
        gap: float = 0.0,
        nodes: int | None = None,
        start: ProgramSolution | None = None,
        counts: Mapping[int, int] | None = None,
        left_s: Callable[[], float] | None = None,
    ) -> ProgramSolution | None:
        """The best answer of one stage, with just these `counts` when they are given; None when there is none."""
        return self.program.minimise(
            self.terms(name),
            seconds=seconds,
            seed=seed,
            gap=gap,
            nodes=nodes,
            start=None if start is None else start.values,
            fixed=None if counts is None else {self._count[i]: k for i, k in counts.items()},
            left_s=left_s,
        )

    def keep(self, name: str, limit: float) -> None:
        """From now on the stage's value may not exceed `limit`, whatever was said of it before."""
        if name in self._kept:
            self.program.set_most(self._kept[name], limit)
        else:
            self._kept[name] = self.program.row(-INFINITY, limit, self.terms(name))

    def tighten(self) -> None:
        """Adds rows that are implied by the others, and in whole numbers cut more off than these: what is not served is
        at least what all replicas together could not.
        """
        options = self.problem.options
        for need in self.problem.needs:
            mine = [i for i in self.chosen if options[i].model == need.model]
            for side in SIDES if need.model in self._flows else SIDES[:1]:
                able = [term for i in mine if options[i].phase in ("unified", side) for term in self._capacity(i)]
                if able and need.rate:
                    self.program.row(need.rate, INFINITY, [*able, (self._unserved[need.model], 1.0)])

    def gain(self, stage: str, answer: ProgramSolution) -> float:
        """By how much an answer's objective would be less if a kept stage might come to one unit more."""
        return -float(answer.prices[self._kept[stage]])

    def prices(self, name: str, answer: ProgramSolution) -> LoadPrices:
        """Of an answer of a linear program to a stage."""
        demand = {model: float(answer.prices[row]) for model, row in self.rows.demand.items()}
        stages = {stage: self.gain(stage, answer) for stage in self._kept if stage in BY_LOAD}
        # Of what may be nothing, any price is true, and one that nobody would pay says the most.
        stages |= {stage: 2 * max(demand.values()) for stage in stages if self.nothing(stage) is not None}
        stages = {stage: weight for stage, weight in stages.items() if weight > DUST}
        decode = {key: float(answer.prices[row]) for key, row in self.rows.decode.items()}
        return LoadPrices(demand, stages | ({name: 1.0} if name in BY_LOAD else {}), decode)

    def nothing(self, stage: str) -> float | None:
        """Where a stage is kept at nothing, the slack of that; else None."""
        most = self.program.most(self._kept[stage]) if stage in self._kept else INFINITY
        return most if most <= NOTHING else None

    def beginning(self, counts: Mapping[int, int]) -> dict[int, float]:
        """The columns that say how many replicas there are, with what they are at these counts."""
        values = {column: float(counts.get(i, 0)) for i, column in self._count.items()}
        for i, starts in self._starts.items():
            change = counts.get(i, 0) - self.problem.running.get(i, 0)
            if self.problem.running.get(i, 0):
                values |= {starts[0][0]: float(max(0, change)), self._stops[i][0][0]: float(max(0, -change))}
        return values

    def value(self, name: str, answer: ProgramSolution) -> float:
        """The stage's objective of an answer, in floating point."""
        if name == FAIRNESS:  # its column may be larger once it is kept within a limit
            return joined(name, self.shares(name, answer).values())
        return math.fsum(weight * float(answer.values[column]) for column, weight in self.terms(name))

    def shares(self, name: str, answer: ProgramSolution) -> dict[str, float]:
        """The stage's objective by model: every column is one model's, but for the one of fairness."""
        shares = {need.model: 0.0 for need in self.problem.needs}
        if name == FAIRNESS:
            priority = {need.model: need.priority for need in self.problem.needs}
            for model, lacks in self._lacking.items():
                beyond = [weight * float(answer.values[column]) - inevitable for column, weight, inevitable in lacks]
                shares[model] = priority[model] * max(0.0, *beyond)
            return shares
        for column, weight in self.terms(name):
            shares[self._owners[column]] += weight * float(answer.values[column])
        return shares

    def counts(self, answer: ProgramSolution | Searched) -> dict[int, int]:
        """Whole replicas by option, of those that have any."""
        values = np.zeros(self.program.columns) if answer.values is None else answer.values
        counts = {i: round(sum(w * float(values[c]) for c, w in self.count(i))) for i in self.chosen}
        return {i: k for i, k in counts.items() if k}

    def loads(self, answer: ProgramSolution) -> dict[int, float]:
        """Requests/s by option, of those that get any."""
        loads = {i: sum(w * float(answer.values[c]) for c, w in self._load(i)) for i in self.chosen}
        return {i: y for i, y in loads.items() if y > 1e-6}

    def rate(self, model: str, answer: ProgramSolution) -> float:
        """Requests/s of a model that are served."""
        return math.fsum(weight * float(answer.values[column]) for column, weight in self.served(model))

    def usage(self, answer: ProgramSolution) -> dict[int, float]:
        """Replicas by option, not whole ones: of a relaxation."""
        return {i: sum(w * float(answer.values[c]) for c, w in self.count(i)) for i in self.chosen}

    def distance(self, answer: ProgramSolution, i: int) -> float:
        """What one request/s on an option would cost the objective of a relaxation at least."""
        levels = zip(self._levels[i], self.problem.options[i].levels, strict=True)
        return min(float(answer.reduced[column]) / level.rate for column, level in levels)

    # -- columns and rows -------------------------------------------------------------------------------------

    def count(self, i: int) -> Terms:
        """The number of an option's replicas."""
        if self._whole:
            return [(self._count[i], 1.0)]
        return [(column, 1.0) for column in self.ladder(i)]

    def ladder(self, i: int) -> list[int]:
        """Columns of an option's replicas: idle ones, then those at each load level."""
        return [self._idle[i], *self._levels[i]]

    def served(self, model: str) -> Terms:
        """What is served of a model, in requests/s."""
        options = self.problem.options
        # Each request has its prompt read once: by a replica that does both, or by one for prefill.
        mine = (i for i in self.chosen if options[i].model == model and options[i].phase != "decode")
        return [term for i in mine for term in self._load(i)]

    def _column(self, model: str, low: float, high: float, *, whole: bool = False) -> int:
        self._owners.append(model)
        return self.program.column(low, high, whole=whole)

    def _load(self, i: int) -> Terms:
        """What an option serves; where nobody asks whom, all that it could."""
        levels = self._loads_of(i)
        if not levels:
            return self._capacity(i)
        return [(column, level.rate) for column, level in zip(self._levels[i], levels, strict=True)]

    def _capacity(self, i: int) -> Terms:
        return [(self._count[i], self.problem.options[i].levels[-1].rate)]

    def _loads_of(self, i: int) -> Sequence[Level]:
        """The loads that have a column: by capacity none, or the largest where who gets it matters."""
        option = self.problem.options[i]
        if not self._by_capacity:
            return option.levels
        return option.levels[-1:] if option.model in self._flows else ()

    def _add_option(self, i: int) -> None:
        option, program = self.problem.options[i], self.program
        levels = self._loads_of(i)
        if levels:
            self._idle[i] = self._column(option.model, 0, INFINITY)
            self._levels[i] = [self._column(option.model, 0, INFINITY) for _ in levels]
        fixed = self.problem.fixed.get(option.key) if self._given is None else self._given.get(i, 0)
        low, high = (0, self._limit[option.model]) if fixed is None else (fixed, fixed)
        parts = [(column, 1.0) for column in self.ladder(i)] if levels else []
        if self._whole:
            self._count[i] = self._column(option.model, low, high, whole=True)
            if parts:
                program.row(0, 0, [*parts, (self._count[i], -1.0)])
        elif fixed is not None:
            program.row(fixed, fixed, parts)

    def _demand_rows(self, need: ModelNeed, mine: list[int]) -> None:
        program, problem = self.program, self.problem
        self._unserved[need.model] = self._column(need.model, 0, need.rate)
        served = [*self.served(need.model), (self._unserved[need.model], 1.0)]
        most = INFINITY if self._by_capacity and need.model not in self._flows else need.rate
        self.rows.demand[need.model] = program.row(need.rate, most, served)
        if not mine and self._given is None:
            return
        total = [term for i in mine for term in self.count(i)]
        fixed = {i: problem.fixed[problem.options[i].key] for i in mine if problem.options[i].key in problem.fixed}
        program.row(-INFINITY, max(need.maximum, sum(fixed.values())), total)
        stable = [i for i in mine if problem.options[i].stable and problem.options[i].serves]
        for away in (frozenset(), *problem.outages) if need.minimum else ():
            left = [i for i in stable if away.isdisjoint(pool.key for pool in problem.options[i].pools)]
            if not away or len(left) < len(stable):
                program.row(need.minimum, INFINITY, [term for i in left for term in self.count(i)])
        for (cluster, partition), wanted in sorted(need.pins.items()):
            there = [i for i in mine if problem.options[i].pool.within(cluster, partition)]
            program.row(wanted, wanted, [term for i in there for term in self.count(i)])
        sites = sorted({problem.options[i].pool.site for i in mine})
        over = need.sites or len(sites)
        if need.spread_sites and over > 1:
            for site in sites:
                here = [i for i in mine if problem.options[i].pool.site == site]
                # count <= ceil(total / S), in whole numbers; what cannot be seen cannot be moved, so it may exceed that
                stuck = sum(fixed.get(i, 0) for i in here)
                excess = max(0, stuck - math.ceil(need.minimum / over))
                terms = [(column, over * weight) for i in here for column, weight in self.count(i)]
                terms += [(column, -weight) for column, weight in total]
                program.row(-INFINITY, over * excess + over - 1, terms)

    def _phase_rows(self, model: str, mine: list[int]) -> None:
        """What prefill replicas of a pool hand over goes to decode replicas of pools that it can reach."""
        program, options = self.program, self.problem.options
        loads: dict[Phase, dict[PoolKey, Terms]] = {"prefill": defaultdict(list), "decode": defaultdict(list)}
        for i in mine:
            if options[i].phase != "unified":
                loads[options[i].phase][options[i].pool.key] += self._load(i)
        if not loads["prefill"] and not loads["decode"]:
            return
        for key in self.problem.transfers:
            if key[0] == model and key[1] in loads["prefill"] and key[2] in loads["decode"]:
                self._handed[key] = self._column(model, 0, INFINITY)
        for side, load_by_pool in ((1, loads["prefill"]), (2, loads["decode"])):
            for pool, load in load_by_pool.items():
                handed = [(c, -1.0) for key, c in self._handed.items() if key[0] == model and key[side] == pool]
                row = program.row(0, 0, [*load, *handed])
                if side == 2:
                    self.rows.decode[model, pool] = row
        # Without a demand nothing flows, and still neither phase is of use without the other, where it reaches it.
        most = float(self._limit[model])
        sides: tuple[tuple[Phase, Phase, Literal[1, 2]], ...] = (("prefill", "decode", 1), ("decode", "prefill", 2))
        for phase, other, side in sides:
            reached: dict[frozenset[PoolKey], set[PoolKey]] = defaultdict(set)
            for pool in loads[phase]:
                ways = [(key[1], key[2]) for key in self._handed if key[0] == model and key[side] == pool]
                reached[frozenset(way[2 - side] for way in ways)].add(pool)
            for there, pools in reached.items():
                sending = [i for i in mine if options[i].phase == phase and options[i].pool.key in pools]
                getting = [i for i in mine if options[i].phase == other and options[i].pool.key in there]
                these, those = ([term for i in its for term in self.count(i)] for its in (sending, getting))
                program.row(-INFINITY, 0, [*these, *[(c, -most * w) for c, w in those]])

    def _group_rows(self, need: ModelNeed, mine: list[int]) -> None:
        """Who of a model's consumers is served by whom."""
        if not need.parts or not need.rate:
            return
        options, loads = self.problem.options, defaultdict[frozenset[str], Terms](list)
        for i in mine:
            if options[i].phase == "unified":
                loads[providers_of(options[i])] += self._load(i)
        provider = {options[i].pool.key: options[i].pool.provider for i in mine}
        for (model, sender, receiver), column in self._handed.items():
            if model == need.model:
                loads[frozenset({provider[sender], provider[receiver]})].append((column, 1.0))
        self._asked[need.model] = flow_rows(self.program, need, loads, lambda most: self._column(need.model, 0, most))

    def _fair_rows(self) -> None:
        """The column of the largest share that anybody lacks, of those who could be served more."""
        if FAIRNESS not in self.problem.objective:
            return
        fairest = self._column("", 0, INFINITY)
        self._fairest = [(fairest, 1.0)]
        for need in self.problem.needs:
            reach = need.reached(self.problem.options[i] for i in self.problem.of(need.model)) if need.rate else 0.0
            if reach:
                groups, unserved = self._asked.get(need.model, []), self._unserved[need.model]
                self._lacking[need.model] = fair_rows(self.program, need, reach, fairest, unserved, groups)

    def _link_rows(self) -> None:
        shared: dict[tuple[str, str], Terms] = defaultdict(list)
        for key, column in self._handed.items():
            transfer = self.problem.transfers[key]
            if transfer.link is not None:
                shared[transfer.link].append((column, transfer.octets))
        for link, terms in shared.items():
            # In megabytes: a solver's tolerances are absolute.
            self.program.row(-INFINITY, self.problem.links[link] / 1e6, [(c, w / 1e6) for c, w in terms])

    def _device_rows(self, pool: Pool, here: list[tuple[int, int, int]]) -> None:
        """`here`: (option, size of a block of devices inside a node, how many of them a replica takes)."""
        taken, key, per_node = self.problem.taken, pool.key, pool.devices_per_node
        terms = [(column, size * number * weight) for i, size, number in here for column, weight in self.count(i)]
        self.rows.devices[key] = self.program.row(-INFINITY, pool.nodes * per_node - taken.get((key, 1), 0), terms)
        for limit in sorted({size for _, size, _ in here if size > 1}):
            large = [(i, pool.parts_lost(size, limit) * number) for i, size, number in here if size >= limit]
            parts = [(column, blocks * weight) for i, blocks in large for column, weight in self.count(i)]
            self.program.row(-INFINITY, pool.nodes * (per_node // limit) - taken.get((key, limit), 0), parts)

    # -- objectives -------------------------------------------------------------------------------------------

    def terms(self, name: str) -> Terms:
        """Of a stage's objective."""
        if name not in self._terms:
            self._terms[name] = self._terms_of(name)
        return self._terms[name]

    def _terms_of(self, name: str) -> Terms:
        options = self.problem.options
        match name:
            case "fairness":
                return self._fairest
            case "served":
                return [(self._unserved[need.model], need.priority) for need in self.problem.needs]
            case "survived":
                return self._lost
            case "slo" | "excess" | "quality":
                return self._levelled(name)
            case "latency":
                handed = [(column, self.problem.transfers[key].seconds) for key, column in self._handed.items()]
                return [*handed, *self._levelled(name), *self._priced_moves(name)]
            case "moves":
                return [term for i in self._starts for term in (*self._starts[i], *self._stops[i])]
            case "cost" | "energy" | "carbon" | "preference":
                field = {"cost": "cost", "energy": "power"}.get(name, name)
                weights = {i: float(getattr(options[i], field)) for i in self.chosen}
            case "replicas":
                weights = dict.fromkeys(self.chosen, 1.0)
            case _:  # any fixed order will do, as long as it is the same everywhere: the first of the sorted options
                weights = {i: float(i) for i in self.chosen}
        return [*self._weighted(weights), *self._priced_moves(name)]

    def _levelled(self, name: str) -> Terms:
        """Of replicas at each load level, where they weigh anything."""
        ladders = ((self.ladder(i), of_levels(self.problem.options[i], name)) for i in self.chosen)
        return [(column, w) for ladder, weights in ladders for column, w in zip(ladder, weights, strict=True) if w]

    def _weighted(self, weights: Mapping[int, float]) -> Terms:
        return [(column, weights[i] * weight) for i in self.chosen if weights[i] for column, weight in self.count(i)]

    def _priced_moves(self, name: str) -> Terms:
        terms: Terms = []
        for i in self._starts:
            start, stop = move_prices(self.problem, self.problem.options[i], name)
            terms += [(column, weight * start) for column, weight in self._starts[i] if start]
            terms += [(column, weight * stop) for column, weight in self._stops[i] if stop]
        return terms

    def _move_rows(self) -> None:
        """Replicas to be started, and to be stopped, against what runs; nothing when nothing runs."""
        for i in self.chosen if self.problem.runs else ():
            option = self.problem.options[i]
            now = self.problem.running.get(i, 0)
            if not now:  # all of them are new
                self._starts[i], self._stops[i] = self.count(i), []
                continue
            # Given counts are known, and their moves not to be used up to a limit.
            known = None if self._given is None else self._given.get(i, 0) - now
            more = (0.0, self._limit[option.model]) if known is None else (max(0, known),) * 2
            fewer = (0.0, now) if known is None else (max(0, -known),) * 2
            start, stop = (self._column(option.model, *bounds, whole=True) for bounds in (more, fewer))
            self._starts[i], self._stops[i] = [(start, 1.0)], [(stop, 1.0)]
            if known is None:
                self.program.row(now, now, [*self.count(i), (start, -1.0), (stop, 1.0)])
