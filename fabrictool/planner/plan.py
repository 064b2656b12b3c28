"""Solve, name, compare: the plan of a fabric as a function of what is wanted and what was seen.

The same call online, from a bundle, in CI and in what-ifs: whatever it reads is an argument.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError, InfeasibleError, Place, Problem, UnreachableError
from fabrictool.domain.address import Address
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan, inputs_digest
from fabrictool.domain.specs import AgentSpec
from fabrictool.planner.at_once import planned_at_once
from fabrictool.planner.build import pools_of, waiting
from fabrictool.planner.certificate import certificate_of
from fabrictool.planner.chosen import SearchOptions, best, forecast_of, refuse_broken
from fabrictool.planner.diff import actions, delete, is_gateway
from fabrictool.planner.drift import clock_warnings, out_of_reach
from fabrictool.planner.entitled import unserved_groups
from fabrictool.planner.explaining.explain import explanation, reason_of, reasons
from fabrictool.planner.explaining.moves import moves_of, refuse_too_few
from fabrictool.planner.explaining.relaxations import explain_conflict
from fabrictool.planner.explaining.resolving import Resolver, in_parts
from fabrictool.planner.explaining.sizing import shape_sentences, shortfall_sentence
from fabrictool.planner.explaining.whynot import answers, checked
from fabrictool.planner.extra import extra_sentences
from fabrictool.planner.gateways import stranded
from fabrictool.planner.hysteresis import standing_sentences
from fabrictool.planner.judged import learned_sentences
from fabrictool.planner.loads import start_times
from fabrictool.planner.lost_together import unkept_losses
from fabrictool.planner.moving import changed
from fabrictool.planner.node_parts import with_too_close
from fabrictool.planner.one_node import broken_spreads, one_node_sentences
from fabrictool.planner.readset import ABSENT, read_set
from fabrictool.planner.situation import placed_option, situation_of
from fabrictool.planner.stages import proved
from fabrictool.planner.succession import successions, successors
from fabrictool.planner.uncertain import busiest_hours
from fabrictool.planner.unchanged import as_applied, is_as_applied, situation_digest
from fabrictool.planner.units import wanted_units
from fabrictool.planner.work import StepwiseWork, never, units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.observed import Observed
    from fabrictool.planner.chosen import Chosen
    from fabrictool.planner.diff import WantedUnit
    from fabrictool.planner.problem import PlacementProblem, Solution
    from fabrictool.planner.situation import Situation


LEAST_WORK = 200
"""That may be done to explain a placement which was soon there."""


@dataclass(frozen=True, slots=True)
class PlanOptions(SearchOptions):
    """How a plan is searched for, and what it tells."""

    explain: bool = False
    """Adds what rules cost and what was not chosen to the reasons: it solves again, and does as much work as the search
    at most. Ctrl-C ends it as well, where there is `progress`, and keeps what it has."""
    explain_left_s: Callable[[], float] = never
    """Seconds until a clock ends what explains, too."""
    why_not: tuple[str, ...] = ()
    """Questions that the reasons answer, too (`explaining.whynot`)."""
    max_moves: int | None = None
    """Replicas that may start or stop, where something runs."""
    improve: bool = False
    """Searches also where nothing has changed since the last apply."""
    node_loss: bool = False
    """Warns also of whom the loss of any one node would leave without an answer."""


# Long: a line for each part of a plan.
def plan(
    blueprint: Blueprint,
    inventory: Inventory,
    evidence: Evidence,
    options: PlanOptions,
    *,
    now: float,
    warnings: Sequence[Problem] = (),
) -> Plan:
    """What should change; `warnings` are the loader's, and stand in the plan. `now` in wall seconds.

    Raises
    ------
    InfeasibleError
        FT200x with what conflicts and what would resolve it.
    UsageError
        FT2015 a question that is none.
    FabrictoolError
        FT2903 the devices that were given away break a rule; and what the search raises.
    """
    evidence = evidence.within(inventory)
    for question in options.why_not:
        checked(question, sorted(blueprint.models), pools_of(inventory), blueprint.bases)
    situation = planned_at_once(situation_of(blueprint, inventory, evidence, now))
    asked = replace(situation, max_moves=options.max_moves)
    chosen, built = _chosen(asked, options, evidence)
    kept = chosen.again == "kept"
    situation, problem, solution, placement = chosen.situation, chosen.problem, chosen.solution, chosen.placement
    keys = evidence.keys_of(blueprint)
    expiring = stranded(blueprint.every_gateway, evidence) | successions(evidence, now)
    wanted = wanted_units(blueprint, inventory, placement, evidence, successors(expiring))
    specs = [unit.spec for unit in wanted.values()]
    blind = situation.blind | {replica.cluster for replica in situation.unseen}
    if not any(replica.stages for replica in placement.replicas):  # whose units name the first of their partitions
        refuse_broken(list(broken_spreads(blueprint, situation.inventory, specs, blind)))
    currency = currency_of(inventory)
    sentences = _asked(situation, problem, chosen.needed or solution, currency, options)
    why, cut = _until_interrupted(sentences, patient=options.progress is None)
    steps = actions(wanted, evidence, with_too_close(expiring, specs, evidence))
    forecast = forecast_of(chosen, currency, options.seed)
    return Plan(
        fabric=evidence.fabric,
        lineage=evidence.lineage,
        blueprint_digest=inputs_digest(blueprint, inventory),
        read_set={f"unit/{address}": ABSENT for address in wanted}
        | read_set(inputs_digest(blueprint, inventory), evidence.observed, keys),
        actions=steps,
        starts=start_times(steps, evidence.state.loads),
        placement=placement,
        moves=moves_of(problem, solution, currency, options.seed) or msgspec.UNSET,
        forecast=forecast,
        certificate=certificate_of(chosen, options.seed),
        situation=situation_digest(asked, built),
        unchanged=kept or msgspec.UNSET,
        reasons=(
            *reasons(problem, solution, currency, forecast.models, options.explain_left_s),
            *standing_sentences(chosen.standing_by, float(blueprint.hysteresis)),
            *extra_sentences(specs),
            *learned_sentences(situation.learned),
            *why,
        ),
        warnings=(
            *_unrepeatable(solution),
            *(
                ["nothing runs yet, so --max-moves limits nothing"]
                if options.max_moves is not None and not problem.current
                else ()
            ),
            *(() if kept else _ended(chosen)),
            *_moved_anyway(steps, problem, solution, options.max_moves),
            *(["the search was stopped early: this is the best placement that it found"] if chosen.stopped else ()),
            *(["the explanation was cut short"] if cut else ()),
            *(f"{warning.code} {warning.message}" for warning in warnings),
            *unserved_groups(blueprint, inventory, placement, node_loss=options.node_loss),
            *unkept_losses(blueprint, inventory, placement, forecast),
            *one_node_sentences(blueprint, situation.inventory, specs, blind),
            *_without_hours(blueprint),
            *busiest_hours(blueprint, problem, solution),
            *_open_networks(wanted.values()),
            *_ending_providers(evidence, now),
            *_unread_keys(blueprint, keys),
            *clock_warnings(evidence),
            *_waiting_pins(blueprint, situation),
            *(trouble.message for trouble in out_of_reach(evidence) if _disabled(trouble, evidence.observed)),
        ),
    )


def decision(
    blueprint: Blueprint, inventory: Inventory, evidence: Evidence, options: PlanOptions, question: str, *, now: float
) -> tuple[str, ...]:
    """Why a model stands where it stands; or the answer to a question as `explaining.whynot` reads it.

    Raises
    ------
    InfeasibleError
        FT200x as `plan` does.
    UsageError
        FT2015 neither a model nor a question.
    """
    model = blueprint.bases.get(question, question)
    whole = model in blueprint.models
    evidence = evidence.within(inventory)
    if not whole:
        checked(question, sorted(blueprint.models), pools_of(inventory), blueprint.bases)
    situation = planned_at_once(situation_of(blueprint, inventory, evidence, now))
    chosen, _ = _chosen(situation, options, evidence)
    problem, solution, currency = chosen.problem, chosen.solution, currency_of(inventory)
    places = dict.fromkeys(pool.device for pool in problem.pools)
    questions = [f"{model}@{place}" for place in places] if whole else [question]
    resolver = _resolver(problem, chosen.needed or solution, options)
    return (
        *(
            sentence
            for need in problem.needs
            if whole and need.model == model
            for sentence in (
                reason_of(problem, solution, need),
                *_lacking(chosen, currency, options, model),
                *shape_sentences(problem, solution, need, currency),
            )
        ),
        *(
            sentence
            for part, asked in zip(in_parts(resolver.work, len(questions)), questions, strict=False)
            for sentence in answers(resolver.within(part), asked, currency, blueprint.bases)
        ),
    )


def _lacking(chosen: Chosen, currency: str, options: PlanOptions, model: str) -> list[str]:
    """What a model is expected to lack, in a sentence."""
    models = forecast_of(chosen, currency, options.seed).models
    return [text for its in models if its.model == model and (text := shortfall_sentence(its))]


def _resolver(problem: PlacementProblem, solution: Solution, options: PlanOptions) -> Resolver:
    """For what is asked afterwards: it may do as much as the search did."""
    work = StepwiseWork(max(LEAST_WORK, units(solution.work)), options.explain_left_s)
    return Resolver(problem, solution, options.seed, work)


def _asked(
    situation: Situation, problem: PlacementProblem, solution: Solution, currency: str, options: PlanOptions
) -> Iterator[str]:
    """Why it is as it is, as far as somebody wants to know; each question has an even share of the work."""
    telling = [partial(explanation, situation, currency=currency)] if options.explain else []
    telling += [
        partial(answers, question=question, currency=currency, bases=situation.blueprint.bases)
        for question in options.why_not
    ]
    if not telling:
        return
    resolver = _resolver(problem, solution, options)
    for part, tell in zip(in_parts(resolver.work, len(telling)), telling, strict=False):
        yield from tell(resolver.within(part))


def destruction(blueprint_digest: str, evidence: Evidence) -> tuple[Plan, list[Problem]]:
    """Delete every unit of this fabric on clusters that can be seen, gateways last; and what that leaves out."""
    observed = evidence.observed
    ends = [delete(name, unit, unit.state) for name, facts in observed.clusters.items() for unit in facts.units]
    changes = tuple(sorted(ends, key=lambda action: (is_gateway(action), action.address)))
    facts = read_set(blueprint_digest, observed)
    return unsolved(evidence, blueprint_digest, facts, changes, "nothing is left to forecast"), out_of_reach(evidence)


def unsolved(
    evidence: Evidence, blueprint_digest: str, facts: Mapping[str, str], changes: tuple[Action, ...], basis: str
) -> Plan:
    """A plan that no solver made: it places nothing and forecasts nothing."""
    return Plan(
        fabric=evidence.fabric,
        lineage=evidence.lineage,
        blueprint_digest=blueprint_digest,
        read_set=dict(facts),
        actions=changes,
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis=basis),
        certificate=Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
    )


def _chosen(situation: Situation, options: PlanOptions, evidence: Evidence) -> tuple[Chosen, PlacementProblem]:
    """What was chosen: by a search, or because it was applied and nothing has changed; and of which problem."""
    observed = evidence.observed
    options = replace(options, steady=not options.improve)
    try:
        built = situation.build()
    except InfeasibleError as error:
        raise _cause_first(error.problems, situation, observed) from error
    wanted = options.improve or options.max_moves is not None
    stays = not wanted and is_as_applied(situation, built[0], evidence)
    if stays and (kept := as_applied(situation, options, built)) is not None:
        return kept, built[0]
    try:
        return best(situation, options, built), built[0]
    except InfeasibleError as error:
        refuse_too_few(built[0], options.seed, options.explain_left_s)
        why = [*error.problems, *explain_conflict(situation, options.explain_left_s)]
        raise _cause_first(why, situation, observed) from error


def _cause_first(why: Iterable[Problem], situation: Situation, observed: Observed) -> FabrictoolError:
    """What does not answer comes before what follows from it; when nothing answers, nothing else is worth a word."""
    unknown = _unknown_clusters(observed)
    return InfeasibleError([*unknown, *why]) if situation.usable else UnreachableError(unknown)


def _until_interrupted(sentences: Iterable[str], *, patient: bool) -> tuple[list[str], bool]:
    """All sentences, and whether Ctrl-C cut them short; the `patient` let it through."""
    complete: list[str] = []
    try:
        for sentence in sentences:
            complete.append(sentence)  # noqa: PERF402 - what came before Ctrl-C counts
    except KeyboardInterrupt:
        if patient:
            raise
        return complete, True
    return complete, False


def _disabled(trouble: Problem, observed: Observed) -> bool:
    return (trouble.place.thing or "").removeprefix("cluster/") not in observed.clusters


def _unrepeatable(solution: Solution) -> list[str]:
    if solution.repeatable:
        return []
    return ["the search ran out of time: on another machine the same files may be placed otherwise"]


def _moved_anyway(
    steps: Iterable[Action], problem: PlacementProblem, solution: Solution, most: int | None
) -> list[str]:
    """What `--max-moves` does not count: the same replica with another specification, and what nothing asks for."""
    ends = sum(a.kind in ("replace", "delete") and Address.parse(a.address).kind == "replica" for a in steps)
    ends -= sum(-change for _, change in changed(problem, solution.counts) if change < 0)
    if most is None or ends <= 0:
        return []
    which = f"{ends} replica{'s are' if ends > 1 else ' is'}"
    return [
        f"{which} replaced or deleted beside what --max-moves counts: their place is the same, or nothing asks for them"
    ]


def _ended(chosen: Chosen) -> list[str]:
    """Of a search that could have gone on, for something that users feel or that the replay taught."""
    solution = chosen.solution
    settled = proved(solution) and chosen.again != "no time"
    if not solution.ended or not solution.work or settled:
        return []
    work = units(solution.work)
    return [f"the search ended at work {work} with more to try; a larger `--budget` or `--work` may find better"]


def _open_networks(wanted: Iterable[WantedUnit]) -> list[str]:
    """No engine encrypts what passes between the nodes of one replica, nor asks who sends it."""
    specs = [unit.spec for unit in wanted if isinstance(unit.spec, AgentSpec) and unit.spec.on_nodes > 1]
    return [
        f"{place}: what passes between the nodes of one replica is neither encrypted nor authenticated, so whoever is"
        " on their network can read and change it"
        for place in sorted({f"{spec.cluster}/{spec.partition}" for spec in specs})
    ]


def _ending_providers(evidence: Evidence, now: float) -> list[str]:
    """No session outlasts its provider's certificate, whatever is renewed or started."""
    used = {spec.provider for spec in evidence.running_specs().values()}
    ending = {name: ends - now for name, ends in evidence.signs.items() if name in used and ends - now < 86400.0}
    return [
        f"the certificate of provider {name} ends in {duration_text(max(0.0, left))}, and all its sessions with it:"
        f" `fabrictool trust issue {name}` renews it"
        for name, left in ending.items()
    ]


def _without_hours(blueprint: Blueprint) -> list[str]:
    """Uneven gaps are all that one number says of a trace: bursts, but no hours of more and of less."""
    return [
        f"{name}: of demand.trace its mean rate, its lengths and its bursts (cv {model.demand.cv or 1.0:g}) are planned"
        " for, not its busiest hours"
        for name, model in sorted(blueprint.models.items())
        if model.demand is not None
        and model.demand.trace is not None
        and model.demand.quantile is None
        and not model.demand.factors
    ]


def _unread_keys(blueprint: Blueprint, keys: str | None) -> list[str]:
    if keys is not None or not (blueprint.tenants or blueprint.key_api) or not blueprint.every_gateway:
        return []
    return ["tenant keys unavailable (`fabrictool doctor` says which); key changes not checked"]


def _waiting_pins(blueprint: Blueprint, situation: Situation) -> list[str]:
    unseen = Counter(placed_option(replica.replica, replica, replica.variant) for replica in situation.unseen)
    unknown = {name for name, described in situation.inventory.clusters.items() if described.enabled}
    unknown -= set(situation.usable)
    return [
        f"{name}: {count} more pinned to {'/'.join(filter(None, place))} when it answers again"
        for name, model in sorted(blueprint.models.items())
        for place, count in waiting(
            {(pin.cluster, pin.partition or ""): pin.replicas for pin in model.place.pin},
            {key: n for key, n in unseen.items() if key[0] == name},
            unknown,
        ).items()
    ]


def _unknown_clusters(observed: Observed) -> list[Problem]:
    return [
        Problem(
            "FT2005",
            f"{name} is unknown and cannot be planned with: {facts.reason}",
            Place(thing=f"cluster/{name}"),
            facts.hint or None,
        )
        for name, facts in sorted(observed.clusters.items())
        if not facts.known
    ]


def currency_of(inventory: Inventory) -> str:
    """Of all prices; "" without any."""
    prices = [p.price for c in inventory.clusters.values() for p in c.partitions.values() if p.price is not None]
    return prices[0].currency if prices else ""
