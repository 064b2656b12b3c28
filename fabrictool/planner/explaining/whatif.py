"""What a changed fabric would be worth: expressions such as ``gpus.a100-80g+=8``, each planned for and compared.

Planned for as `plan` does it, with the replay and its lessons: the row of the fabric as it is cannot contradict a plan.

=================================== ==================================================================================
``gpus.DEVICE+=8``, ``-=8``         so many devices more or fewer in the largest partition with this device: whole nodes
``gpus.CLUSTER/PARTITION+=8``       in this one
``rate.MODEL*=1.5``, ``rate.*=2``   demand of one model, of all
``replicas.MODEL.min=3``, ``.max=`` bounds
``survive.MODEL=site``, ``=none``   what may be lost
``trust.MODEL=*``, ``=alpha,beta``  every provider, or just these
``price.CLUSTER/PARTITION*=0.5``    price of its nodes
=================================== ==================================================================================
"""

from __future__ import annotations

import math
import re
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InfeasibleError, UsageError
from fabrictool.base.units import Price, Rate
from fabrictool.domain.blueprint import Replicas
from fabrictool.planner.certificate import certificate_of
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.explaining.rules import NO_MAXIMUM
from fabrictool.planner.moving import moves_in
from fabrictool.planner.stages import clean, user_stages, values_of
from fabrictool.planner.survival import KINDS
from fabrictool.planner.unchanged import as_applied, is_as_applied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from fabrictool.domain.blueprint import Companion
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import ModelForecast
    from fabrictool.planner.chosen import Chosen
    from fabrictool.planner.problem import OptionKey, Solver
    from fabrictool.planner.situation import Situation

MOST_RATE = 1e7
"""Requests/s of one model; numbers beyond it are no demand, and too large for the solvers."""
FORMS = (
    "gpus.DEVICE+=8, rate.MODEL*=1.5, rate.*=2, replicas.MODEL.min=3, survive.MODEL=node, trust.MODEL=*,"
    " price.CLUSTER/PARTITION*=0.5"
)
_EXPRESSION = re.compile(r"\s*(?P<what>[a-z]+)\.(?P<of>[^=\s]*?)\s*(?P<sign>[-+*]?=)\s*(?P<value>\S(?:.*\S)?)\s*")


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """What one expression leads to."""

    expression: str
    """"" for the plan as it is."""
    values: Mapping[str, float] = field(default_factory=dict)
    """User's stage → value; none when it is infeasible."""
    counts: Mapping[OptionKey, int] = field(default_factory=dict)
    """Replicas by option key."""
    optimal: bool = False
    repeatable: bool = True
    """Whether it does not depend on how fast this machine was."""
    models: tuple[ModelForecast, ...] = ()
    """With the verdict on each SLO, which is the one that a plan would have."""
    problem: str = ""
    """Why there is no placement; "" when there is one."""

    @property
    def feasible(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Sweep:
    """All outcomes, in the order of the expressions."""

    base: WhatIfResult
    outcomes: tuple[WhatIfResult, ...]
    stages: tuple[str, ...]
    """Those that users feel."""


def started(base: WhatIfResult, other: WhatIfResult) -> int:
    """Replicas that the other placement has where the base has none."""
    return sum(max(0, count - base.counts.get(key, 0)) for key, count in other.counts.items())


def stopped(base: WhatIfResult, other: WhatIfResult) -> int:
    """Replicas that the base has where the other placement has none."""
    return started(other, base)


# Wide: what is planned for, by what name and how hard, and what is known of it.
def evaluate(
    situation: Situation,
    expression: str,
    options: SearchOptions,
    *,
    from_itself: bool = False,
    stays: bool = False,
) -> WhatIfResult:
    """Plan for a situation that was changed already, just as `plan` does; `expression` is only its name.

    `from_itself` leaves out what the moves to it are worth: so others are compared that start from there. `stays`: it
    is as it was when what runs was applied, and so that is what is kept.
    """
    try:
        kept = as_applied(situation, options, situation.build()) if stays else None
        chosen = kept if kept is not None else best(situation, options)
    except InfeasibleError as error:
        return WhatIfResult(expression, problem="; ".join(complaint.message for complaint in error.problems))
    except FabrictoolError as error:  # such as FT2902: one that takes too long must not cost the others
        return WhatIfResult(
            expression, problem="; ".join(f"{complaint.code} {complaint.message}" for complaint in error.problems)
        )
    known = values_of(chosen.solution)
    if from_itself:
        known |= _without_moves(chosen, known)
    return WhatIfResult(
        expression,
        {name: known.get(name, 0.0) for name in user_stages(chosen.problem)},
        {chosen.problem.options[i].key: count for i, count in chosen.solution.counts.items()},
        certificate_of(chosen, options.seed).optimal,
        chosen.solution.repeatable,
        forecast_of(chosen, "").models,
    )


def _without_moves(chosen: Chosen, known: Mapping[str, float]) -> dict[str, float]:
    """The values that depend on what runs, if just this ran."""
    problem, counts = chosen.problem, chosen.solution.counts
    return {"moves": 0.0} | {name: clean(known[name] - moves_in(problem, counts, name)) for name in known}


# Wide: what is asked, who works on it, how long and with which seed.
def sweep(
    executor: Executor,
    situation: Situation,
    evidence: Evidence,
    expressions: Sequence[str],
    solver: Solver,
    *,
    deadline_s: float,
    seed: int,
    done: Callable[[int], None] | None = None,
) -> Sweep:
    """Every expression against the plan as it is; the same whatever executor does the work. Where nothing has changed
    since the last apply (`evidence` says so), that is what runs, as `plan` keeps it.

    What the plan places counts as running for the others, so that nothing differs from it without a reason. `done` is
    told how many are.

    Raises
    ------
    UsageError
        FT2011 an expression that is none, FT2012 one that names what is not there or cannot be.
    """
    changed = [changed_by(situation, expression) for expression in expressions]
    problem, _ = situation.build()
    options = SearchOptions(seed, deadline_s, solver)
    stays = is_as_applied(situation, problem, evidence)
    base = executor.submit(evaluate, situation, "", options, from_itself=True, stays=stays).result()
    current = base.counts if base.feasible else situation.current
    futures = {
        executor.submit(evaluate, replace(start, current=dict(current)), expression, options): at
        for at, (start, expression) in enumerate(zip(changed, expressions, strict=True))
    }
    outcomes: dict[int, WhatIfResult] = {}
    for future in as_completed(futures):
        outcomes[futures[future]] = future.result()
        if done is not None:
            done(len(outcomes))
    return Sweep(base, tuple(outcomes[at] for at in range(len(expressions))), tuple(user_stages(problem)))


def changed_by(situation: Situation, expression: str) -> Situation:
    """The situation that an expression describes. Raises as `sweep`."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise UsageError.of("FT2011", f"{expression!r} is not an expression", hint=f"such as {FORMS}")
    what, of, sign, value = (match[name] for name in ("what", "of", "sign", "value"))
    match what, sign:
        case "gpus", "+=" | "-=":
            return _with_devices(situation, of, _count(value, expression) * (1 if sign == "+=" else -1), expression)
        case "rate", "*=":
            return _with_rates(situation, of, _factor(value, expression), expression)
        case "replicas", "=":
            return _with_bound(situation, of, value, expression)
        case "survive", "=":
            return _with_survival(situation, of, value, expression)
        case "trust", "=":
            return _with_trust(situation, of, value, expression)
        case "price", "*=":
            return _with_price(situation, of, _factor(value, expression), expression)
        case _:
            raise UsageError.of("FT2011", f"{expression!r} is not an expression", hint=f"such as {FORMS}")


def _count(text: str, expression: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text):
        raise UsageError.of("FT2011", f"{expression}: {text!r} is not a whole number", hint="such as 8")
    return int(text)


def _factor(text: str, expression: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError.of("FT2011", f"{expression}: {text!r} is not a factor", hint="a number from 0 on, such as 1.5")
    return value


def _unknown(expression: str, what: str, name: str, known: Iterable[str]) -> FabrictoolError:
    names = sorted(known)
    hint = f"one of: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
    return UsageError.of("FT2012", f"{expression}: there is no {what} {name!r}", hint=hint)


def _partitions(inventory: Inventory) -> dict[str, Partition]:
    """``CLUSTER/PARTITION`` → partition, of enabled clusters."""
    return {
        f"{name}/{part}": partition
        for name, cluster in inventory.clusters.items()
        if cluster.enabled
        for part, partition in cluster.partitions.items()
    }


def _with_partition(situation: Situation, key: str, changed: Partition) -> Situation:
    name, part = key.split("/")
    inventory = situation.inventory
    cluster = inventory.clusters[name]
    cluster = cluster.model_copy(update={"partitions": {**cluster.partitions, part: changed}})
    return replace(
        situation, inventory=inventory.model_copy(update={"clusters": {**inventory.clusters, name: cluster}})
    )


def _with_devices(situation: Situation, of: str, devices: int, expression: str) -> Situation:
    there = _partitions(situation.inventory)
    if "/" in of:
        keys = [of] if of in there else []
    else:
        keys = [key for key, part in there.items() if part.device == of and key.split("/")[0] in situation.usable]
        keys.sort(key=lambda key: (-there[key].nodes, key))
    if not keys:
        devices_there = {partition.device for partition in there.values()}
        raise _unknown(expression, "device or partition", of, [*there, *devices_there])
    key = keys[0]
    partition = there[key]
    per_node = partition.devices_per_node
    if devices % per_node:
        near = per_node * max(1, round(abs(devices) / per_node))
        message = f"{expression}: a node of {key} has {per_node} devices, and nodes come whole"
        raise UsageError.of("FT2012", message, hint=f"a multiple of {per_node}, such as {near}")
    nodes = partition.nodes + devices // per_node
    if nodes < 0:
        message = f"{expression}: {key} has only {partition.nodes * per_node} devices"
        raise UsageError.of("FT2012", message, hint=f"{partition.nodes * per_node} at most")
    return _with_partition(situation, key, partition.model_copy(update={"nodes": nodes}))


def _with_rates(situation: Situation, of: str, factor: float, expression: str) -> Situation:
    models = situation.blueprint.models
    if of and of != "*" and of not in models:
        raise _unknown(expression, "model", of, models)
    changes = {}
    for name in models if of in ("", "*") else [of]:
        demand = models[name].demand
        if demand is not None and demand.rate is not None:
            rate = demand.rate * factor
            if not rate <= MOST_RATE:
                hint = f"at most {MOST_RATE:.0e} req/s"
                raise UsageError.of("FT2012", f"{expression}: {name} would get {rate:.0e} req/s", hint=hint)
            changes[name] = {
                "demand": demand.model_copy(update={"rate": Rate(rate)}),
                "companions": _faster(models[name].companions, factor),
            }
    if not changes:
        raise UsageError.of("FT2012", f"{expression}: no rate is declared there", hint="`demand.rate` of the blueprint")
    return situation.with_models(changes)


def _faster(companions: Mapping[str, Companion], factor: float) -> dict[str, Companion]:
    """What is asked of a model's companions goes with it: their load is planned for in proportion to its own."""
    changed = dict(companions)
    for name, its in companions.items():
        if its.demand is not None and its.demand.rate is not None:
            demand = its.demand.model_copy(update={"rate": Rate(its.demand.rate * factor)})
            changed[name] = its.model_copy(update={"demand": demand})
    return changed


def _with_bound(situation: Situation, of: str, value: str, expression: str) -> Situation:
    name, _, bound = of.rpartition(".")
    models = situation.blueprint.models
    if bound not in ("min", "max"):
        raise UsageError.of("FT2011", f"{expression}: which bound?", hint="replicas.MODEL.min=3, replicas.MODEL.max=3")
    if name not in models:
        raise _unknown(expression, "model", name, models)
    was, count = models[name].replicas, _count(value, expression)
    low, high = (count, was.max) if bound == "min" else (was.min, count)
    if low > high or high < 1 or high > NO_MAXIMUM:
        message = f"{expression}: {low} to {high} replicas cannot be the bounds"
        raise UsageError.of("FT2012", message, hint=f"now {was.min} to {was.max}; change the other one first")
    return situation.with_models({name: {"replicas": Replicas(min=low, max=high)}})


def _with_survival(situation: Situation, of: str, value: str, expression: str) -> Situation:
    models = situation.blueprint.models
    if of not in models:
        raise _unknown(expression, "model", of, models)
    if value not in (*KINDS, "none"):
        raise _unknown(expression, "loss", value, (*KINDS, "none"))
    return situation.with_models({of: {"survive": None if value == "none" else value}})


def _with_trust(situation: Situation, of: str, value: str, expression: str) -> Situation:
    models, providers = situation.blueprint.models, situation.inventory.providers
    if of not in models:
        raise _unknown(expression, "model", of, models)
    names = tuple(name.strip() for name in value.split(","))
    for name in names if value != "*" else ():
        if name not in providers:
            raise _unknown(expression, "provider", name, providers)
    return situation.with_models({of: {"trust": None if value == "*" else names}})


def _with_price(situation: Situation, of: str, factor: float, expression: str) -> Situation:
    there = _partitions(situation.inventory)
    if of not in there:
        raise _unknown(expression, "partition", of, there)
    price = there[of].price
    if price is None:
        raise UsageError.of("FT2012", f"{expression}: {of} has no price", hint="`price` of the inventory's partition")
    changed = Price(price.amount * factor, price.currency)
    return _with_partition(situation, of, there[of].model_copy(update={"price": changed}))
