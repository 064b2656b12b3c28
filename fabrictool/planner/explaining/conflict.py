"""Why no placement keeps all rules: an irreducible set of rules that conflict.

Every rule has a name and can be left out. The set is found by divide and conquer (Junker, "QuickXplain", AAAI 2004): a
rule stays in it when the others of the set can be kept without it. Whole programs decide what can be kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.node_spread import is_alone, is_spread
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from fabrictool.planner.problem import ModelNeed, Option, OptionKey, PlacementProblem, PoolKey
    from fabrictool.planner.situation import Situation

SECONDS = 10.0
"""For each question whether a placement exists; what cannot be said by then counts as possible."""


@dataclass(frozen=True, slots=True, order=True)
class Constraint:
    """One thing that is demanded."""

    kind: str
    """``trust``, ``tier``, ``min``, ``pin``, ``max``, ``spread`` (over sites), ``nodes`` (so many have one),
    ``unseen``, ``outage``, ``limit`` or ``devices``."""
    subject: str
    """The model, ``CLUSTER/PARTITION``, or a limit's place."""
    where: tuple[str, str] = ("", "")
    """Of a pin."""
    words: str = ""

    @property
    def place(self) -> str:
        """Of a pin: ``CLUSTER`` or ``CLUSTER/PARTITION``."""
        return "/".join(filter(None, self.where))

    @property
    def thing(self) -> str:
        """Its place in blueprint or inventory."""
        return {
            "trust": f"models.{self.subject}.trust",
            "tier": f"models.{self.subject}.tier",
            "min": f"models.{self.subject}.replicas.min",
            "max": f"models.{self.subject}.replicas.max",
            "pin": f"models.{self.subject}.place.pin",
            "spread": f"models.{self.subject}.place.spread",
            "nodes": f"models.{self.subject}.place.spread",
            "unseen": f"models.{self.subject}",
            "outage": f"{self.subject}.maintenance",
        }.get(self.kind, self.subject)


class Constraints:
    """The rules of a problem, each of which can be left out."""

    def __init__(self, problem: PlacementProblem, barred: Mapping[int, frozenset[Constraint]] | None = None) -> None:
        """`barred`: option → the rules of trust and tier that forbid it; `problem` has those options as well."""
        self.problem = problem
        self._barred = barred or {}
        self._need = {need.model: need for need in problem.needs}
        stuck = Counter[str]()
        for option in problem.options:
            stuck[option.model] += problem.fixed.get(option.key, 0)
        self._sites = len({option.pool.site for option in problem.options})
        asked = sum(need.minimum + sum(need.pins.values()) + stuck[need.model] for need in problem.needs)
        self.enough = max(1, asked) * 2 * max(1, self._sites)
        """More replicas, or nodes, than any rule can make necessary."""
        self.all = [*sorted({rule for rules in self._barred.values() for rule in rules}), *self._stated(stuck)]

    def _stated(self, stuck: Mapping[str, int]) -> Iterator[Constraint]:
        for need in self.problem.needs:
            name = need.model
            if need.minimum:
                yield Constraint("min", name, words=f"at least {_replicas(need.minimum, name)} on owned capacity")
            for (cluster, partition), count in sorted(need.pins.items()):
                rule = Constraint("pin", name, (cluster, partition))
                yield replace(rule, words=f"just {_replicas(count, name)} on {rule.place}")
            if stuck[name]:
                yield Constraint("unseen", name, words=f"{_replicas(stuck[name], name)} on clusters that do not answer")
            if need.minimum or need.pins:
                yield Constraint("max", name, words=f"at most {_replicas(need.maximum, name)}")
                if need.spread_sites:
                    yield Constraint("spread", name, words=f"{name} spread over sites")
                if is_spread(need):
                    yield Constraint("nodes", name, words=f"{name} on {need.minimum} different nodes")
        for away in self.problem.outages if any(need.minimum for need in self.problem.needs) else ():
            there = _together(away)
            yield Constraint("outage", there, words=f"minima also while {there} is under maintenance")
        for limit in self.problem.limits:
            yield Constraint("limit", limit.thing, words=f"at most {limit.words} ({limit.thing})")
        for pool in self.problem.pools:
            size = pool.nodes * pool.devices_per_node
            yield Constraint("devices", "/".join(pool.key), words=f"{size} {pool.device} in {'/'.join(pool.key)}")

    def with_only(self, kept: Iterable[Constraint]) -> PlacementProblem:
        """The problem with these rules and no others."""
        active = set(kept)
        gone = {rule.subject for rule in self.all if rule.kind == "unseen"} - {
            rule.subject for rule in active if rule.kind == "unseen"
        }
        problem = self.problem
        options = tuple(
            option
            for i, option in enumerate(problem.options)
            if active.isdisjoint(self._barred.get(i, frozenset()))
            and not (option.model in gone and option.key in problem.fixed)
        )
        there = {option.key for option in options}
        of = {(rule.kind, rule.subject) for rule in active}
        pinned = {(rule.subject, rule.where) for rule in active if rule.kind == "pin"}
        return replace(
            problem,
            options=options,
            fixed={key: count for key, count in problem.fixed.items() if key in there},
            outages=tuple(away for away in problem.outages if ("outage", _together(away)) in of),
            limits=tuple(limit for limit in problem.limits if ("limit", limit.thing) in of),
            needs=tuple(self._without(need, of, pinned) for need in problem.needs),
            pools=tuple(
                pool if ("devices", "/".join(pool.key)) in of else replace(pool, nodes=pool.nodes + self.enough)
                for pool in problem.pools
            ),
        )

    def _without(
        self, need: ModelNeed, of: set[tuple[str, str]], pinned: set[tuple[str, tuple[str, str]]]
    ) -> ModelNeed:
        name = need.model
        return replace(
            need,
            minimum=need.minimum if ("min", name) in of else 0,
            maximum=need.maximum if ("max", name) in of else need.maximum + self.enough,
            pins={where: count for where, count in need.pins.items() if (name, where) in pinned},
            spread_sites=need.spread_sites and ("spread", name) in of,
            spread_nodes=need.spread_nodes and ("nodes", name) in of,
        )


def _together(pools: Iterable[PoolKey]) -> str:
    return ", ".join(sorted("/".join(key) for key in pools))


def _replicas(count: int, model: str) -> str:
    return f"{count} replica{'' if count == 1 else 's'} of {model}"


def possible(problem: PlacementProblem, left_s: Callable[[], float] = never) -> bool:
    """Whether a placement exists; True also when it cannot be said in time. `left_s`: seconds until a clock ends it."""
    if left_s() <= 0.0:
        return True
    asked = {need.model: need for need in problem.needs if need.minimum or any(need.pins.values())}
    held = {option.model for option in problem.options if option.key in problem.fixed}
    # Nobody asks for replicas of the others; and one load level is enough to know whether a replica can be had.
    options = [
        replace(option, levels=option.levels[-1:])
        for option in problem.options
        if option.model in asked or option.model in held
    ]
    if set(asked) - {option.model for option in options}:
        return False
    options = _least_devices(options, problem.fixed)
    needs = tuple(need for need in problem.needs if need.model in asked or need.model in held)
    bare = replace(problem, needs=needs, options=tuple(options), current={})
    whole = Formulation(bare, range(len(options)), whole=True)
    try:
        return whole.minimise("moves", seconds=SECONDS, seed=0, left_s=left_s) is not None  # of nothing: any will do
    except FabrictoolError:
        return True


def _least_devices(options: Sequence[Option], fixed: Container[OptionKey]) -> list[Option]:
    """Without options that take more devices of a node than another one does that counts for the same rules."""
    least: dict[object, Option] = {}
    others = []
    for option in options:
        if option.others or option.pp > 1 or option.key in fixed:
            others.append(option)
            continue
        pool = option.pool
        apart = pool.keeps_apart or is_alone(pool, max(size for _, size in option.blocks))  # by `spread: node`
        key = (option.model, pool.key, option.phase, apart)
        known = least.setdefault(key, option)
        if option.devices < known.devices:
            least[key] = option
    return [*least.values(), *others]


def conflict_of(rules: Constraints, left_s: Callable[[], float] = never) -> list[Constraint]:
    """A set of rules that cannot be kept together; none when all can. It is irreducible, unless the clock ended that:
    then some of them may not be needed.
    """
    if possible(rules.with_only(rules.all), left_s):
        return []

    def kept(some: Sequence[Constraint]) -> bool:
        return possible(rules.with_only(some), left_s)

    return _irreducible(kept, [], [], rules.all, left_s)


# Wide: what of the rules is settled, and what is not.
def _irreducible(
    kept: Callable[[Sequence[Constraint]], bool],
    base: list[Constraint],
    added: list[Constraint],
    rest: list[Constraint],
    left_s: Callable[[], float],
) -> list[Constraint]:
    """What of `rest` conflicts with `base`; `added` are those that base has just got."""
    if left_s() <= 0.0:
        return rest
    if added and not kept(base):
        return []
    if len(rest) == 1:
        return rest
    first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    of_second = _irreducible(kept, [*base, *first], first, second, left_s)
    of_first = _irreducible(kept, [*base, *of_second], of_second, first, left_s)
    return [*of_first, *of_second]


def rules_of(situation: Situation) -> Constraints:
    """With the options that trust and tier rule out, and by which of them."""
    models = situation.blueprint.models
    loose, _ = situation.with_models({name: {"trust": None, "tier": "scavenger"} for name in models}).build()
    barred: dict[int, frozenset[Constraint]] = {}
    for i, option in enumerate(loose.options):
        model, reasons = models[option.model], set()
        if model.trust is not None and not {pool.provider for pool in option.pools} <= set(model.trust):
            words = f"{option.model} on {', '.join(model.trust) or 'nobody'} alone"
            reasons.add(Constraint("trust", option.model, words=words))
        if model.tier == "owned" and not option.stable:
            reasons.add(Constraint("tier", option.model, words=f"{option.model} on owned capacity alone"))
        if reasons:
            barred[i] = frozenset(reasons)
    return Constraints(loose, barred)
