"""``plan --horizon``: what would run in each step of the next hours, and what that comes to."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from fabrictool.base.clock import duration_text
from fabrictool.base.units import Instant, UnitError
from fabrictool.cli.forecast_answers import (
    HorizonAnswer,
    HorizonQuota,
    HorizonRenewal,
    HorizonStart,
    HorizonStep,
    HorizonTotals,
)
from fabrictool.cli.output import data, json_data, say, table
from fabrictool.cli.searches import Searches, placement_row
from fabrictool.planner.horizon import FOR_WAYS, planned
from fabrictool.planner.loading import lead_of
from fabrictool.planner.quotas import quotas_of
from fabrictool.planner.schedules import different
from fabrictool.planner.steps import HOUR_S, steps_of, waits_of
from fabrictool.planner.survival import exposure, worst_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import tzinfo

    from fabrictool.cli.planning import SearchLimit
    from fabrictool.cli.source import Source
    from fabrictool.domain.evidence import Evidence
    from fabrictool.planner.horizon import Horizon
    from fabrictool.planner.loading import Lead, TimedStart
    from fabrictool.planner.renewals import JobRenewal
    from fabrictool.planner.schedules import PlacedStep, Schedule
    from fabrictool.planner.steps import Step

SHORTEST_S = 0.2
"""Of one search, also after the budget: each step needs a placement."""
MINUTE_S, DAY_S = 60.0, 86400.0


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is planned for."""

    seconds: float
    step_s: float
    begin: float | None = None
    """Seconds since 1970; None: now."""

    @classmethod
    def of(cls, seconds: float, step_s: float | None, at: str | None) -> Span:
        """As the options say it; raises BadParameter."""
        try:
            begin = None if at is None else float(Instant.parse(at))
        except UnitError as error:
            raise typer.BadParameter(f"{error.message}: {error.hint}", param_hint="--at") from error
        return cls(seconds, HOUR_S if step_s is None else step_s, begin)


# Wide: what the command was given.
def show_horizon(
    source: Source,
    evidence_of: Callable[[], Evidence],
    limit: SearchLimit,
    seed: int,
    span: Span,
    *,
    as_json: bool,
) -> int:
    """Plan each step and print it; returns the exit code. Raises UsageError FT2032, InfeasibleError FT200x."""
    from fabrictool.planner.ends import job_ends
    from fabrictool.planner.plan import currency_of
    from fabrictool.planner.situation import situation_of

    begin = now = time.time()
    if span.begin is not None:  # what is past is looked at as if it were now
        begin, now = span.begin, min(now, span.begin)
    begin -= begin % min(span.step_s, HOUR_S)
    evidence = evidence_of().within(source.inventory)
    situation = situation_of(source.blueprint, source.inventory, evidence, begin)
    steps = steps_of(situation, begin, span.step_s, math.ceil(span.seconds / span.step_s))
    waits = waits_of(situation, span.step_s)
    ends = job_ends(source.blueprint, situation.inventory, evidence, begin)
    lead = replace(lead_of(situation.inventory, evidence.state.waits, now), ends=ends)
    # Of alike steps each is asked for from nothing, from what another leaves, from what it has itself, and for what
    # loads fast.
    number = min(3 * len(steps), 4 * different(steps)) + 1
    number *= 2 if waits else 1
    number *= 3 if quotas_of(steps) else 1
    searches = Searches(limit, seed, number, keeps=True, share=1.0 - FOR_WAYS, least_s=SHORTEST_S)
    with searches.clock.hearing():
        horizon = planned(
            steps,
            situation.current,
            searches.solve,
            searches.more,
            waits,
            searches.clock.left_s,
            lead,
        )
    units = {"cost": currency_of(source.inventory), "energy": "kWh", "carbon": "kg CO2e"}
    currency = units[steps[0].paid_in]
    interrupted = searches.clock.interrupted
    if as_json:
        json_data(document(horizon, currency, interrupted=interrupted))
        return 0
    data(text(horizon, currency, source.blueprint.zone, now))
    if horizon.copied or interrupted:
        why = "Ctrl-C: this is the best so far" if interrupted else "the budget was over"
        say(f"{why}: {_not_searched(horizon)}")
    for line in [*_notes(source, horizon, waits), *_queue_notes(source, lead), *_unasked_notes(horizon, lead)]:
        say(line)
    say("nothing is applied; `--json` has the placement of each step, and when each job is to be submitted")
    return 0


def text(horizon: Horizon, currency: str, zone: tzinfo, now: float) -> str:
    """A line for each step, then what it comes to beside other ways of doing it; within 80 columns."""
    rows = [_row(step, part, zone, now) for step, part in zip(horizon.steps, horizon.schedule.parts, strict=True)]
    headings = ["step", "req/s", "replicas", "starts", "stops", currency, "served", "in SLO"]
    loading = [*_late(horizon, zone), *_renewed(horizon, zone)]
    loading += [f"lost to loading: {_lost(horizon.schedule.to_loading)} requests"] if loading else []
    beside = [*_away(horizon.steps, zone), *loading, *_exposed(horizon, zone), *_quotas(horizon)]
    lines = [table(headings, rows, columns=80), "", *beside, *([""] if beside else [])]
    others = [] if horizon.at_once is None else [("no request waits", horizon.at_once)]
    others += [("step by step, not looking ahead", horizon.greedy)]
    others += [] if horizon.peak is None else [("one placement for the peak", horizon.peak)]
    ways = [("this schedule", horizon.schedule), *others]
    compared = [
        [
            f"{name}{' ▲' if way.over else ''}{' ▽' if way.exposed else ''}",
            f"{way.running + way.switching:,.2f}",
            f"{way.switching:,.2f}",
            _lost(way.unserved),
            _lost(way.misses),
        ]
        for name, way in ways
    ]
    headings = ["in all", currency, "of it moving", "unserved", "miss SLO"]
    lines.append(table(headings, compared, columns=80))
    if any(way.over for _, way in others):
        lines.append("▲ uses more of a limit than there is: it could not be run")
    if any(way.exposed for _, way in ways):
        lines.append("▽ does not survive a loss that its models are to `survive`, and others could")
    return "\n".join(lines)


def _time(seconds: float, zone: tzinfo) -> str:
    return f"{datetime.fromtimestamp(seconds, zone):%a %d %b %H:%M}"


def _away(steps: Sequence[Step], zone: tzinfo) -> list[str]:
    """Where nothing runs for maintenance, and in how many steps."""
    lines = []
    for place in sorted(frozenset().union(*(step.away for step in steps))):
        begins = [step.begin for step in steps if place in step.away]
        number = f"{len(begins)} step{'s'[: len(begins) != 1]}"
        lines.append(f"maintenance: {'/'.join(place)} is away in {number} from {_time(begins[0], zone)} on")
    return lines


def _late(horizon: Horizon, zone: tzinfo) -> list[str]:
    """How many replicas serve after the beginning of their step."""
    parts = list(zip(horizon.steps, horizon.schedule.parts, strict=True))
    late = [(step, start) for step, part in parts for start in part.begun if start.late]
    if not late:
        return []
    number, every = sum(start.count for _, start in late), sum(part.starts for _, part in parts)
    step, start = late[0]
    first = f"first {_time(step.begin, zone)} from {_clock(step.begin + start.serves, zone, step.begin)} on"
    return [f"late: {number} of {every} starts serve after the beginning of their step,", f"  {first}"]


def _renewed(horizon: Horizon, zone: tzinfo) -> list[str]:
    """How many jobs end, and where the next one does not serve by then."""
    parts = zip(horizon.steps, horizon.schedule.parts, strict=True)
    every = [(step, renewal) for step, part in parts for renewal in part.renewals]
    late = [(step, renewal) for step, renewal in every if renewal.late]
    if not every:
        return []
    ending = f"{len(every)} job{'s'[: len(every) != 1]} end{'s'[len(every) != 1 :]} within this time"
    if not late:
        return [f"renewed: {ending}, and the next one serves by then"]
    step, first = late[0]
    since, until = step.begin + first.lacks_from, step.begin + first.serves
    model, cluster, partition, *_ = first.key
    return [
        f"renewed: {ending}; for {'all' if len(late) == len(every) else len(late)} the next one serves later,",
        f"  first {model} on {cluster}/{partition} {_time(since, zone)} to {_clock(until, zone, since)}",
    ]


def _exposed(horizon: Horizon, zone: tzinfo) -> list[str]:
    """In how many steps a model would not survive what it is to, and what is lost most in the first of them."""
    lines = []
    for name in [need.model for need in horizon.steps[0].problem.needs if need.survive is not None]:
        exposed = []
        for step, part in zip(horizon.steps, horizon.schedule.parts, strict=True):
            known = {option.key: i for i, option in enumerate(step.problem.options)}
            counts = {known[key]: count for key, count in part.placed if key in known}
            need = next(need for need in step.problem.needs if need.model == name)
            loss, rate = worst_loss(step.problem, need, counts)
            if loss is not None:
                able = exposure(step.problem, need, counts) > 0.0
                exposed.append((step, loss, 1.0 - rate / need.rate if need.rate else 0.0, able))
        if exposed:
            step, loss, share, _ = exposed[0]
            number = f"{len(exposed)} step{'s'[: len(exposed) != 1]}"
            never = "" if any(able for *_, able in exposed) else ", as no placement can"
            lines.append(f"{name} does not survive every loss in {number}{never},")
            lines.append(f"  first {_time(step.begin, zone)}: without {loss.words} {_share(share)} is served")
    return lines


def _quotas(horizon: Horizon) -> list[str]:
    """What is used of each limit of a month."""
    schedule = horizon.schedule
    length = duration_text(schedule.seconds * len(schedule.parts))
    return [
        f"limit {quota.limit.name}: {used:,.1f} of {quota.most:,.1f} {quota.unit} for these {length}"
        + (": MORE than that" if quota.over(used) else "")
        for quota, used in zip(schedule.quotas, schedule.used, strict=True)
    ]


def _clock(seconds: float, zone: tzinfo, beside: float) -> str:
    """With the day where that is not the one of the time `beside` it."""
    then, other = (datetime.fromtimestamp(its, zone) for its in (seconds, beside))
    return f"{then:%H:%M}" if then.date() == other.date() else f"{then:%a %H:%M}"


def _starts(step: Step, part: PlacedStep, zone: tzinfo, now: float) -> str:
    """How many, and by when the first of their jobs is to be submitted."""
    if not part.begun:
        return "–"
    by = step.begin + min(start.submit for start in part.begun)
    return f"{part.starts} " + ("now" if by < now + MINUTE_S else f"by {_clock(by, zone, step.begin)}")


def _row(step: Step, part: PlacedStep, zone: tzinfo, now: float) -> list[str]:
    rate = step.rate
    return [
        _time(step.begin, zone),
        f"{rate:,.0f}" if rate >= 100.0 else f"{rate:.3g}",
        str(part.replicas),
        _starts(step, part, zone, now),
        str(part.stops or "–"),
        f"{part.running + part.switching:,.2f}",
        _share(1.0 - part.unserved / rate if rate else 1.0),
        _share(1.0 - (part.unserved + part.misses) / rate if rate else 1.0),
    ]


def _share(share: float) -> str:
    """Rounded down: what is not all is never called 100%."""
    return f"{math.floor(min(1.0, max(0.0, share)) * 1000 + 1e-6) / 10:g}%"


def _lost(requests: float) -> str:
    return f"{requests:,.0f}"


def _notes(source: Source, horizon: Horizon, waits: Collection[str]) -> list[str]:
    steps, waiting = horizon.steps, horizon.waiting
    demands = {name: model.demand for name, model in sorted(source.blueprint.models.items())}
    even = [name for name, demand in demands.items() if demand is not None and not demand.factors]
    of_quantiles = {name: its for name, its in demands.items() if its is not None and its.quantile is not None}
    by_mean = [name for name, its in of_quantiles.items() if its.factors or its.wait]
    notes = []
    slow = [name for name, its in demands.items() if its is not None and its.wait is not None and name not in waits]
    if waiting:
        notes.append(f"{', '.join(waiting)}: requests wait where that costs less, at most as `demand.wait` says")
        notes.append("all that comes in this time is served in it: what comes last has less time to wait")
    if staying := [name for name in waits if name not in waiting]:
        why = "waiting saves nothing there, or is not planned beside `survive` or `variants`"
        why = "the budget was over before that was looked at" if horizon.copied else why
        notes.append(f"served as they come: {', '.join(staying)} ({why})")
    if slow:
        notes.append(f"served as they come, for `demand.wait` is shorter than a step: {', '.join(slow)}")
    if even:
        notes.append(f"the same demand in all hours (no `demand.hours`): {', '.join(even)}")
    if by_mean:
        notes.append(f"planned for each step's mean, not its `quantile`: {', '.join(by_mean)}")
    notes.append(f"steps of {duration_text(steps[0].seconds)}, by the planner's tables, not replayed")
    return notes


def _not_searched(horizon: Horizon) -> str:
    if not horizon.copied:
        return "each step was searched, and not all ways through them"
    ways = "that of the step before or for the peak"
    return f"{horizon.copied} of {len(horizon.steps)} steps were not searched, and have {ways}"


def _queue_notes(source: Source, lead: Lead) -> list[str]:
    """How long jobs are thought to wait, and where nobody knows."""
    known = [f"{'/'.join(place)} {duration_text(wait)}" for place, wait in sorted(lead.waits.items())]
    unknown = [
        f"{cluster}/{name}"
        for cluster, its in sorted(source.inventory.clusters.items())
        for name, partition in its.partitions.items()
        if its.enabled and its.queues and partition.queue_wait is None and (cluster, name) not in lead.waits
    ]
    notes = [f"jobs are taken to wait in the queue: {', '.join(known)}"] if known else []
    if unknown:
        notes.append(f"no wait in the queue is known, and none is counted (`queue_wait`): {', '.join(unknown)}")
    return notes


def _unasked_notes(horizon: Horizon, lead: Lead) -> list[str]:
    """Why every job that ends there leaves a gap."""
    ending = {its.key[1:3] for part in horizon.schedule.parts for its in part.renewals} & lead.ends.unasked
    places = ", ".join("/".join(place) for place in sorted(ending))
    return [f"no scheduler is asked for the next job before one ends: {places}"] if ending else []


def document(horizon: Horizon, currency: str, *, interrupted: bool = False) -> HorizonAnswer:
    """All of it as one JSON document."""
    return HorizonAnswer(
        unit=currency,
        step_s=horizon.steps[0].seconds,
        steps=[
            _step_document(step, part, came)
            for step, part, came in zip(
                horizon.steps, horizon.schedule.parts, horizon.came or horizon.steps, strict=True
            )
        ],
        schedule=_totals(horizon.schedule),
        without_look_ahead=_totals(horizon.greedy),
        peak=None if horizon.peak is None else _totals(horizon.peak),
        no_request_waits=None if horizon.at_once is None else _totals(horizon.at_once),
        quotas=[
            HorizonQuota(limit=quota.limit.name, unit=quota.unit, used=round(used, 6), share=round(quota.most, 6))
            for quota, used in zip(horizon.schedule.quotas, horizon.schedule.used, strict=True)
        ],
        interrupted=interrupted,
        copied=horizon.copied,
    )


def _totals(way: Schedule) -> HorizonTotals:
    return HorizonTotals(
        running=round(way.running, 6),
        moving=round(way.switching, 6),
        unserved=round(way.unserved, 6),
        lost_to_loading=round(way.to_loading, 6),
        misses_slo=round(way.misses, 6),
        unserved_after_losses=round(way.exposed, 6),
    )


def _step_document(step: Step, part: PlacedStep, came: Step) -> HorizonStep:
    options = {option.key: option for option in step.problem.options}
    return HorizonStep(
        begin=_instant(step.begin),
        arrivals={need.model: round(need.rate, 6) for need in came.problem.needs},
        rates={need.model: round(need.rate, 6) for need in step.problem.needs},
        away=sorted("/".join(place) for place in step.away),
        replicas={need.model: _of(part, need.model) for need in step.problem.needs},
        starts=part.starts,
        stops=part.stops,
        running=round(part.running, 6),
        moving=round(part.switching, 6),
        unserved_rate=round(part.unserved, 6),
        lost_to_loading_rate=round(part.to_loading, 6),
        misses_slo_rate=round(part.misses, 6),
        unserved_after_losses_rate=round(part.exposed, 6),
        starting=[_start_document(step, start) for start in part.begun],
        renewals=[_renewal_document(step, its, count) for its, count in Counter(part.renewals).items()],
        placement=[placement_row(options[key], count) for key, count in part.placed],
    )


def _start_document(step: Step, start: TimedStart) -> HorizonStart:
    return HorizonStart(
        model=start.key[0],
        cluster=start.key[1],
        partition=start.key[2],
        replicas=start.count,
        submit_by=_instant(step.begin + start.submit),
        loads_from=_instant(step.begin + start.begins),
        serves_from=_instant(step.begin + start.serves),
    )


def _renewal_document(step: Step, renewal: JobRenewal, count: int) -> HorizonRenewal:
    return HorizonRenewal(
        model=renewal.key[0],
        cluster=renewal.key[1],
        partition=renewal.key[2],
        replicas=count,
        ends=_instant(step.begin + renewal.ends),
        submit_by=_instant(step.begin + renewal.submit),
        loads_from=_instant(step.begin + renewal.begins),
        serves_from=_instant(step.begin + renewal.serves),
    )


def _instant(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _of(part: PlacedStep, model: str) -> int:
    return sum(count for key, count in part.placed if key[0] == model)
