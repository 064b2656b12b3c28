"""Does a plan keep the limits of a policy? Pure: plan, policy and time in, findings out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from fabrictool.domain.address import Address
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from fabrictool.domain.plan import Plan
    from fabrictool.domain.policy import Hours, Limits, ReviewPolicy

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_L = TypeVar("_L")


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit that is not kept."""

    rule: str
    index: int
    """Of the rule in the policy."""
    effect: Literal["deny", "warn"]
    limit: str
    """The limit's key in the file."""
    text: str


@dataclass(frozen=True, slots=True)
class _PlanFacts:
    """What limits are compared with."""

    plan: Plan
    protected: Collection[str]
    now: float

    @property
    def after(self) -> dict[str, int]:
        """Model → replicas once the plan is carried out; those out of sight count as there."""
        counts = dict.fromkeys([f.model for f in self.plan.forecast.models], 0)
        addresses = {action.address for action in self.plan.actions}
        stays = {action.address for action in self.plan.actions if action.kind != "delete"}
        for address in addresses:
            model = _model(address)
            if model is not None:
                counts[model] = counts.get(model, 0) + (address in stays)
        return counts

    @property
    def losing(self) -> dict[str, list[str]]:
        """Model → addresses of it that are no more after the plan."""
        stays = {action.address for action in self.plan.actions if action.kind != "delete"}
        lost: dict[str, list[str]] = {}
        for action in self.plan.actions:
            model = _model(action.address)
            if action.kind == "delete" and model is not None and action.address not in stays:
                lost.setdefault(model, []).append(action.address)
        return lost

    @property
    def serving(self) -> set[tuple[str, str]]:
        """Model and provider, of the placement and of what is started."""
        pairs = {(replica.model, replica.provider) for replica in self.plan.placement.replicas}
        specs = (action.spec for action in self.plan.changes)
        return pairs | {(spec.model, spec.provider) for spec in specs if isinstance(spec, AgentSpec)}


def evaluate(policy: ReviewPolicy, plan: Plan, *, protected: Collection[str], now: float) -> tuple[Finding, ...]:
    """All limits that `plan` does not keep, in the order of the file.

    `protected` are the models that the blueprint protects; `now` is in wall seconds.
    """
    facts = _PlanFacts(plan, protected, now)
    findings = []
    for index, rule in enumerate(policy.rules):
        effect: Literal["deny", "warn"] = "deny" if rule.deny is not None else "warn"
        limits = rule.deny or rule.warn
        if limits is not None:
            for limit in type(limits).model_fields:
                if limit in limits.model_fields_set:
                    findings += [
                        Finding(rule.name, index, effect, limit, text) for text in _CHECKS[limit](limits, facts)
                    ]
    return tuple(findings)


def _counted(kind: str, verb: str) -> Callable[[Limits, _PlanFacts], Iterator[str]]:
    def check(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
        most = getattr(limits, f"max_{kind}s")
        count = sum(kind in ("change", action.kind) for action in facts.plan.changes)
        if most is not None and count > most:
            yield f"the plan {verb} {count} units, {most} are allowed"

    return check


def _min_replicas(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    after = facts.after
    for model, least in _per_model(limits.min_replicas_after, after):
        count = after.get(model, 0)
        if count < least:
            yield f"{model} has {count} replicas after the plan, at least {least} are wanted"


def _keep(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    for model, addresses in sorted(facts.losing.items()):
        if model in limits.keep or "*" in limits.keep:
            yield f"replicas of {model} are deleted: {', '.join(sorted(addresses))}"


def _keep_protected(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    for model, addresses in sorted(facts.losing.items()):
        if limits.keep_protected and model in facts.protected:
            yield f"replicas of {model}, which the blueprint protects, are deleted: {', '.join(sorted(addresses))}"


def _allowed(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    serving = facts.serving
    for model, allowed in _per_model(limits.providers_allowed, {model: 0 for model, _ in serving}):
        for provider in sorted(provider for served, provider in serving if served == model):
            if provider not in allowed:
                yield f"{model} is served by {provider}; allowed: {', '.join(allowed) or 'none'}"


def _forbidden(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    serving = facts.serving
    for model, forbidden in _per_model(limits.providers_forbidden, {model: 0 for model, _ in serving}):
        for provider in sorted(provider for served, provider in serving if served == model):
            if provider in forbidden:
                yield f"{model} is served by {provider}, which is forbidden"


def _cost(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    most, forecast = limits.max_cost_per_hour, facts.plan.forecast
    if most is None:
        return
    if forecast.currency != most.currency:
        currency = f"in {forecast.currency}" if forecast.currency else "not known"
        yield f"the cost is {currency}, and the limit is {most}"
    elif forecast.cost_per_hour > most.amount:
        yield f"the placement costs {forecast.cost_per_hour:.2f} {forecast.currency}/h, {most} are allowed"


def _slo(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    for model in facts.plan.forecast.models:
        if model.model not in limits.slo_met and "*" not in limits.slo_met:
            continue
        if model.misses or model.slo == "misses":
            what = [*([model.unserved] if model.unserved else []), *model.misses]
            yield f"{model.model} misses its SLO by the forecast: {'; '.join(what)}"
        elif model.slo == "undecided":
            doubts = "; ".join(model.undecided)
            yield f"{model.model} is not shown to meet its SLO, the replay leaves it undecided: {doubts}"


def _places(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    for action in facts.plan.changes:
        if action.spec is not None:
            partition = f"{action.cluster}/{action.spec.partition}" if isinstance(action.spec, AgentSpec) else ""
            for place in (action.cluster, partition):
                if place in limits.places_forbidden:
                    yield f"{action.address} would be started on {place}"


def _hours(limits: Limits, facts: _PlanFacts) -> Iterator[str]:
    hours = limits.hours
    if hours is not None and facts.plan.changes and not _within(hours, facts.now):
        now = time.gmtime(facts.now)
        clock = f"{DAYS[now.tm_wday]} {now.tm_hour:02}:{now.tm_min:02} UTC"
        yield f"it is {clock}; changes are made on {', '.join(hours.days)} from {hours.begin} to {hours.end} UTC"


def _within(hours: Hours, now: float) -> bool:
    here = time.gmtime(now)
    minute, begin, end = here.tm_hour * 60 + here.tm_min, _minute(hours.begin), _minute(hours.end)
    today, yesterday = DAYS[here.tm_wday], DAYS[here.tm_wday - 1]
    if begin < end:
        return today in hours.days and begin <= minute < end
    return (today in hours.days and minute >= begin) or (yesterday in hours.days and minute < end)


def _minute(text: str) -> int:
    return int(text[:2]) * 60 + int(text[3:])


def _per_model(limits: Mapping[str, _L], models: Iterable[str]) -> Iterator[tuple[str, _L]]:
    """Named models, and under ``*`` all others."""
    for model in sorted({*models, *limits} - {"*"}):
        if model in limits or "*" in limits:
            yield model, limits[model] if model in limits else limits["*"]


def _model(address: str) -> str | None:
    return Address.parse(address).model or None


_CHECKS: Mapping[str, Callable[[Limits, _PlanFacts], Iterator[str]]] = {
    "max_changes": _counted("change", "changes"),
    "max_deletes": _counted("delete", "deletes"),
    "max_replaces": _counted("replace", "replaces"),
    "min_replicas_after": _min_replicas,
    "keep": _keep,
    "keep_protected": _keep_protected,
    "providers_allowed": _allowed,
    "providers_forbidden": _forbidden,
    "max_cost_per_hour": _cost,
    "slo_met": _slo,
    "places_forbidden": _places,
    "hours": _hours,
}
"""Limit → the sentences of what does not keep it."""
