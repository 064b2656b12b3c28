"""What placements in each step of a horizon come to, and the best way through what each may have.

A schedule is judged by what it uses beyond its quotas, then by unserved requests, by what losses that models are to
survive would leave unserved, by requests that miss their SLO, and by what running, starting and stopping come to. What
each placement serves in each step is a linear program with its counts; what is lost while some of it loads is added by
model (`planner.loading`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.loading import Lead, Starts, lost, stretches
from fabrictool.planner.moving import DRAIN_S
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.stages import in_order
from fabrictool.planner.steps import HOUR_S
from fabrictool.planner.survival import exposure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from fabrictool.planner.loading import Begun, Missing, Past, TimedStart
    from fabrictool.planner.problem import ModelNeed, OptionKey, PlacementProblem
    from fabrictool.planner.quotas import Quota
    from fabrictool.planner.renewals import JobRenewal
    from fabrictool.planner.steps import Placed, Step

MOST_TRIED = 5000
"""Placements in steps; what was found until then is the answer."""
LP_SECONDS = 60.0
DUST = 4
"""Digits of requests/s that count: less is the solver's rounding."""
Service = tuple[float, float, float]
"""Requests/s that are not served, by priority; that miss their SLO; and that are not served."""
Value = tuple[float, float, float, float]
"""Requests that are not served, by priority; that losses would leave unserved; that miss their SLO; what it costs."""
PAID = 3
"""Where in a value that stands."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """One step of a schedule."""

    placed: Placed
    lacks: float
    """Requests/s that are not served, by their models' priorities."""
    exposed: float
    """The same, after losses that they are to survive, in the sum of all of them."""
    misses: float
    """Requests/s that miss their SLO."""
    unserved: float
    """Requests/s."""
    running: float
    """In what the step is paid in."""
    switching: float
    """The same, of what loads before the step or beside the job that it follows, and of what stops at its beginning."""
    begun: tuple[TimedStart, ...]
    stops: int
    to_loading: float = 0.0
    """Of what is unserved, requests/s that all replicas would serve if none still loaded."""
    used: tuple[float, ...] = ()
    """Of each quota: device hours, or money."""
    renewals: tuple[JobRenewal, ...] = ()
    """Of jobs that end in the step."""

    @property
    def replicas(self) -> int:
        return sum(count for _, count in self.placed)

    @property
    def starts(self) -> int:
        return sum(start.count for start in self.begun)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A placement for each step."""

    parts: tuple[PlacedStep, ...]
    seconds: float
    quotas: tuple[Quota, ...] = ()

    @property
    def unserved(self) -> float:
        """Requests of the whole horizon."""
        return math.fsum(part.unserved for part in self.parts) * self.seconds

    @property
    def to_loading(self) -> float:
        """Requests, of those that are not served."""
        return math.fsum(part.to_loading for part in self.parts) * self.seconds

    @property
    def exposed(self) -> float:
        """Requests that losses would leave unserved, by priority, in the sum of all steps and losses."""
        return math.fsum(part.exposed for part in self.parts) * self.seconds

    @property
    def misses(self) -> float:
        return math.fsum(part.misses for part in self.parts) * self.seconds

    @property
    def running(self) -> float:
        return math.fsum(part.running for part in self.parts)

    @property
    def switching(self) -> float:
        return math.fsum(part.switching for part in self.parts)

    @property
    def used(self) -> tuple[float, ...]:
        """Of each quota, in all steps together."""
        return tuple(math.fsum(part.used[at] for part in self.parts) for at in range(len(self.quotas)))

    @property
    def over(self) -> float:
        """By how much of themselves quotas are exceeded."""
        return math.fsum(quota.over(used) for quota, used in zip(self.quotas, self.used, strict=True))

    @property
    def value(self) -> Value:
        """The less, the better, the first ones first."""
        lacks = math.fsum(part.lacks for part in self.parts) * self.seconds
        paid = self.running + self.switching
        return round(lacks, DUST), round(self.exposed, DUST), round(self.misses, DUST), round(paid, 6)

    @property
    def rank(self) -> tuple[float, Value]:
        """With quotas before all else."""
        return round(self.over, 9), self.value


class Judge:
    """What placements come to in each step; alike steps and placements are looked at once."""

    # Wide: what there is, what is known by then, and what is asked of it.
    def __init__(
        self,
        steps: Sequence[Step],
        current: Mapping[OptionKey, int],
        more: Callable[[], bool] = lambda: True,
        lead: Lead | None = None,
        waiting: Collection[str] = (),
        quotas: Sequence[Quota] = (),
    ) -> None:
        """`waiting`: models whose requests may be served at any time within a step."""
        self.steps, self.more, self._waiting, self.quotas = steps, more, frozenset(waiting), tuple(quotas)
        self.choosing = False
        self.options = [{o.key: (i, o) for i, o in enumerate(step.problem.options)} for step in steps]
        self.same = [_first_alike(steps, at) for at in range(len(steps))]
        lead = Lead() if lead is None else lead
        self._starts = Starts(steps, self.same, lead, waiting)
        self.first = self._starts.first(current)
        self._begin = max(lead.now, steps[0].begin)
        kinds = [self._starts.kind(at) for at in range(len(steps))]
        self._kinds = [kinds.index(kind) for kind in kinds]
        # Where each model's replicas work for themselves, whether a placement is possible hangs on no demand.
        every = [option for step in steps for option in step.problem.options]
        self._apart = all(option.phase == "unified" for option in every)
        rules = [_rules(step) for step in steps]
        self._rules = [rules.index(its) for its in rules]
        self._possible: dict[tuple[int, Placed], bool] = {}
        self._prices: dict[tuple[int, OptionKey], float] = {}
        self._services: dict[tuple[int, Placed], Service | None] = {}
        self._exposed: dict[tuple[int, Placed], float] = {}
        self._parts: dict[tuple[int, Past, Placed], tuple[PlacedStep, Past] | None] = {}
        self._losses: dict[tuple[int, str, tuple[tuple[OptionKey, float], ...]], tuple[float, float]] = {}

    def service(self, at: int, placed: Placed) -> Service | None:
        """Requests/s that are not served, by priority; that miss their SLO; and that are not served; once all has
        loaded. None where the placement is not possible, or is one of many to choose from and enough was tried.
        """
        key = (self.same[at], placed)
        if key not in self._services:
            if self.choosing and self.exhausted:
                return None
            self._services[key] = self._service(at, placed)
        return self._services[key]

    def _service(self, at: int, placed: Placed) -> Service | None:
        known, problem = self.options[at], self.steps[at].problem
        if any(key not in known for key, _ in placed):
            return None
        if self._apart:
            return self._by_model(at, placed) if self._is_possible(at, placed) else None
        loads = Formulation.of_counts(problem, {known[key][0]: count for key, count in placed})
        answer = in_order(loads, ["served", "slo"], seconds=LP_SECONDS, seed=0)
        if answer is None:
            return None
        values, solution = answer
        unserved = math.fsum(max(0.0, need.rate - loads.rate(need.model, solution)) for need in problem.needs)
        lacks, misses = values.get("served", 0.0), values.get("slo", 0.0)
        return max(0.0, round(lacks, DUST)), max(0.0, round(misses, DUST)), round(unserved, DUST)

    def _is_possible(self, at: int, placed: Placed) -> bool:
        """Whether the rules of a step allow a placement."""
        key = (self._rules[at], placed)
        if key not in self._possible:
            step = self.steps[key[0]]
            index = self.options[key[0]]
            loads = Formulation.of_counts(step.problem, {index[its][0]: count for its, count in placed})
            self._possible[key] = loads.minimise("served", seconds=LP_SECONDS, seed=0) is not None
        return self._possible[key]

    def _by_model(self, at: int, placed: Placed) -> Service:
        mine: dict[str, dict[OptionKey, float]] = {need.model: {} for need in self.steps[at].problem.needs}
        for key, count in placed:
            mine[key[0]][key] = float(count)
        total = [0.0, 0.0, 0.0]
        for need in self.steps[at].problem.needs:
            unserved, misses = self.loss(at, need, mine[need.model])
            total[0] += need.priority * unserved
            total[1] += misses
            total[2] += unserved
        return round(total[0], DUST), round(total[1], DUST), round(total[2], DUST)

    def part(self, at: int, past: Past, placed: Placed) -> tuple[PlacedStep, Past] | None:
        """One step, and what later ones have to know; None where the placement is not possible."""
        key = (self._kinds[at], past, placed)
        if key not in self._parts:
            self._parts[key] = self._part(at, past, placed)
        return self._parts[key]

    def _part(self, at: int, past: Past, placed: Placed) -> tuple[PlacedStep, Past] | None:
        service, step = self.service(at, placed), self.steps[at]
        if service is None:
            return None
        its, after = self._starts.after(at, past, placed)
        lacks, misses, unserved = service
        late = (0.0, 0.0, 0.0) if not its.missing else self._while_loading(at, dict(placed), its.missing)
        running = self._running(at, placed)
        now, before = dict(placed), past.placed[-1]
        moves = [(start.key, start.count, start.early_s) for start in its.starts]
        moves += [(key, n - now.get(key, 0), DRAIN_S) for key, n in before if n > now.get(key, 0)]
        switching = math.fsum(n * step.moving(self._price(at, key), seconds) for key, n, seconds in moves)
        # A walltime ends whatever is planned: that is no move, and costs just the devices that two hold.
        switching += math.fsum(self._price(at, end.key) * end.doubled_s / HOUR_S for end in its.renewals)
        part = PlacedStep(
            placed,
            max(0.0, lacks + late[0]),
            self.exposed(at, placed),
            max(0.0, misses + late[1]),
            unserved + late[2],
            running,
            switching,
            its.starts,
            its.stops,
            late[2],
            self._used(at, placed, its),
            its.renewals,
        )
        return part, after

    def room(self, at: int, placed: Placed, key: OptionKey, wanted: int) -> int:
        """How many more of a kind devices, limits and its model's maximum leave room for beside a placement."""
        if key not in self.options[at]:
            return 0
        there = sum(count for its, count in placed if its[0] == key[0])
        most = next(need.maximum for need in self.steps[at].problem.needs if need.model == key[0])
        return self._starts.room(at, placed, {}, key, max(0, min(wanted, most - there)))

    def standing(self, at: int, placed: Placed) -> Value | None:
        """Of a placement by itself, with requests/s for requests; None where it is not possible."""
        service = self.service(at, placed)
        if service is None:
            return None
        return service[0], self.exposed(at, placed), service[1], self._running(at, placed)

    def exposed(self, at: int, placed: Placed) -> float:
        """What the losses that models are to survive would leave unserved, once all has loaded; see `PlacedStep`."""
        key = (self.same[at], placed)
        if key not in self._exposed:
            known, problem = self.options[at], self.steps[at].problem
            counts = {known[its][0]: count for its, count in placed if its in known}
            lost = math.fsum(exposure(problem, need, counts) for need in problem.needs if need.survive is not None)
            self._exposed[key] = round(lost, DUST)
        return self._exposed[key]

    def _running(self, at: int, placed: Placed) -> float:
        return math.fsum(self._price(at, key) * count for key, count in placed) * self.steps[at].hours

    # -- while something loads --------------------------------------------------------------------------------

    def _while_loading(self, at: int, counts: Mapping[OptionKey, int], missing: Missing) -> Service:
        """What is lost more, as `service` says it, in requests/s of the whole step."""
        step, total = self.steps[at], [0.0, 0.0, 0.0]
        late: dict[str, list[tuple[OptionKey, float, float, int]]] = defaultdict(list)
        for its in missing:
            late[its[0][0]].append(its)
        for need in step.problem.needs:
            if need.model not in late:
                continue
            parts = stretches(tuple(late[need.model]), step.seconds, self._begin - step.begin)
            mine = {key: float(count) for key, count in counts.items() if key[0] == need.model}
            pieces = [(share, {key: float(lacking.get(key, 0)) for key in mine}) for share, lacking in parts]
            if need.model in self._waiting:  # what one part of the step cannot do another one may
                pieces = [(1.0, {key: math.fsum(share * its[key] for share, its in pieces) for key in mine})]
            whole = self.loss(at, need, mine)
            for share, lacking in pieces:
                ready = {key: count - lacking[key] for key, count in mine.items()}
                unserved, misses = self.loss(at, need, ready)
                total[0] += share * need.priority * (unserved - whole[0])
                total[1] += share * (misses - whole[1])
                total[2] += share * (unserved - whole[0])
        return total[0], total[1], total[2]

    def loss(self, at: int, need: ModelNeed, ready: Mapping[OptionKey, float]) -> tuple[float, float]:
        """(requests/s not served, requests/s that miss their SLO) of one model with so many replicas."""
        key = (self.same[at], need.model, tuple(sorted((its, count) for its, count in ready.items() if count)))
        if key not in self._losses:
            options = [(self.options[at][its][1], count) for its, count in key[2]]
            simple = not need.parts and all(option.phase == "unified" for option, _ in options)
            its = lost(need.rate, [(option.levels, count) for option, count in options]) if simple else None
            self._losses[key] = self._programmed(at, need, dict(key[2])) if its is None else its
        return self._losses[key]

    def _programmed(self, at: int, need: ModelNeed, ready: Mapping[OptionKey, float]) -> tuple[float, float]:
        """The same by a program, of a model whose replicas work together; its minima and pins do not hold meanwhile."""
        known, problem = self.options[at], self.steps[at].problem
        among = [known[key][0] for key in sorted(ready)]
        part, indices = part_of(problem, {}, among, [need.model])
        free = replace(need, minimum=0, pins={}, spread_sites=False, spread_nodes=False, survive=None)
        part = replace(part, needs=(free,), fixed={}, limits=(), objective=("slo",), max_moves=None)
        counts = {i: ready[problem.options[index].key] for i, index in enumerate(indices)}
        loads = Formulation(part, range(len(part.options)), whole=False, given=counts)
        answer = in_order(loads, ["served", "slo"], seconds=LP_SECONDS, seed=0)
        if answer is None:
            return need.rate, 0.0
        return max(0.0, need.rate - loads.rate(need.model, answer[1])), max(0.0, answer[0].get("slo", 0.0))

    # -- what it costs ----------------------------------------------------------------------------------------

    def _price(self, at: int, key: OptionKey) -> float:
        """Of one replica for an hour; nothing of what no option stands for any more."""
        where = (self.same[at], key)
        if where not in self._prices:
            known, step = self.options[at].get(key), self.steps[at]
            option = known[1] if known is not None else step.gone.get(key)
            self._prices[where] = 0.0 if option is None else step.price(option)
        return self._prices[where]

    def _used(self, at: int, placed: Placed, begun: Begun) -> tuple[float, ...]:
        if not self.quotas:
            return ()
        step = self.steps[at]
        held = [(key, count * step.hours) for key, count in placed]
        # What loads before the horizon is of other hours.
        before = at * step.seconds
        held += [(its.key, its.count * min(its.early_s, before) / HOUR_S) for its in begun.starts]
        held += [(its.key, max(0.0, its.until - max(its.begins, -before)) / HOUR_S) for its in begun.renewals]
        options = [(self.options[at][key][1], hours) for key, hours in held]
        return tuple(math.fsum(hours * its.limit.used_by(option) for option, hours in options) for its in self.quotas)

    # -- all steps -------------------------------------------------------------------------------

    def schedule(self, placements: Sequence[Placed]) -> Schedule | None:
        """None where a step does not allow its placement."""
        parts = []
        past = self.first
        for at, placed in enumerate(placements):
            its = self.part(at, past, placed)
            if its is None:
                return None
            parts.append(its[0])
            past = its[1]
        return Schedule(tuple(parts), self.steps[0].seconds, self.quotas)

    def quick(self, at: int, running: Mapping[OptionKey, int], renewals: Sequence[JobRenewal] = ()) -> PlacementProblem:
        """A step's problem in which all but what runs takes only what it can after it has loaded in it, and what is
        renewed what it can beside that.
        """
        step = self.steps[at]
        shares = {
            o.key: 1.0 if o.key in running else self._starts.share_of_late(at, o.key) for o in step.problem.options
        }
        for its in renewals:
            if its.late and its.key in shares and running.get(its.key):
                lost = (min(step.seconds, its.serves) - its.lacks_from) / step.seconds
                shares[its.key] = max(0.0, shares[its.key] - lost / running[its.key])
        options = tuple(
            replace(o, levels=tuple(replace(level, rate=level.rate * share) for level in o.levels))
            if share < 1.0
            else o
            for o in step.problem.options
            if (share := shares[o.key]) > 0.0
        )
        there = {key: count for key, count in running.items() if shares.get(key)}
        return replace(step.problem, options=options, current=there)

    def nearest(self, at: int, past: Past, known: Sequence[Placed]) -> Placed | None:
        """Which of these is best in that step alone; None where it allows none of them."""
        parts = [its[0] for placed in known if (its := self.part(at, past, placed)) is not None]
        values = [((p.lacks, p.exposed, p.misses, p.running + p.switching), p.placed) for p in parts]
        return min(values)[1] if values else None

    @property
    def exhausted(self) -> bool:
        """Whether enough was tried, by number or by the clock."""
        tried = len(self._possible) if self._apart else len(self._services)
        return tried > MOST_TRIED or not self.more()


def different(steps: Sequence[Step]) -> int:
    """How many of the steps are like none before."""
    return len({_first_alike(steps, at) for at in range(len(steps))})


def _first_alike(steps: Sequence[Step], at: int) -> int:
    """The first step with the same demand, prices, partitions and limits."""

    def facts(step: Step) -> object:
        problem = step.problem
        return ([need.rate for need in problem.needs], problem.pools, step.away, problem.limits)

    mine = facts(steps[at])
    return next(i for i, step in enumerate(steps) if facts(step) == mine)


def _rules(step: Step) -> object:
    """What is to be kept in a step, but for what it costs; where a limit is on that, with prices."""
    limits = step.problem.limits
    priced = any(limit.resource in ("cost", "carbon") for limit in limits)
    return step.away, limits, step.problem.pools if priced else ()
