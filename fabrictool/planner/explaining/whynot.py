"""Why a model does not stand somewhere: ``MODEL on PLACE`` or ``MODEL@PLACE``.

A place is a device, a partition, a cluster, a site or a provider.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.planner.explaining.alternatives import with_one_of, with_one_words
from fabrictool.planner.explaining.resolving import LATE, in_parts
from fabrictool.planner.explaining.wording import more
from fabrictool.planner.stages import TIE_BREAK, TOLERANCE, number, stage_names, tolerance, where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.explaining.resolving import Resolver
    from fabrictool.planner.problem import Option, Pool

MOST_PLACES = 6
"""Partitions that are answered for one by one."""
NO_BASES: Mapping[str, str] = MappingProxyType({})
_QUESTION = re.compile(r"\s*(?P<model>\S+?)(?:\s+on\s+|@)(?P<place>\S+)\s*")


def checked(
    question: str, models: Sequence[str], pools: Sequence[Pool], bases: Mapping[str, str] = NO_BASES
) -> tuple[str, list[Pool]]:
    """(model, partitions that are meant); of what `bases` says that another model's replicas serve, that model.

    Raises
    ------
    UsageError
        FT2015 what is no such question, or names what is not there.
    """
    match = _QUESTION.fullmatch(question)
    if match is None and question not in models and not any(letter.isspace() for letter in question):
        raise UsageError.of("FT2015", f"there is no model {question!r}", hint=f"one of: {_some(models)}")
    if match is None:
        raise UsageError.of("FT2015", f"{question!r} is not a question", hint='such as "chat on h100-sxm"')
    model, place = bases.get(match["model"], match["model"]), match["place"]
    if model not in models:
        raise UsageError.of("FT2015", f"{question}: there is no model {model!r}", hint=f"one of: {_some(models)}")
    meant = [pool for pool in pools if place in _names(pool)]
    if not meant:
        known = sorted({pool.device for pool in pools} | {"/".join(pool.key) for pool in pools})
        message = f"{question}: no partition is called {place!r} or has that device"
        raise UsageError.of("FT2015", message, hint=f"one of: {_some(known)}")
    return model, meant


def answers(resolver: Resolver, question: str, currency: str, bases: Mapping[str, str] = NO_BASES) -> Iterator[str]:
    """A sentence for each partition that is meant. Raises as `checked`."""
    problem = resolver.whole
    model, pools = checked(question, [need.model for need in problem.needs], problem.pools, bases)
    asked = pools[:MOST_PLACES]
    for part, pool in zip(in_parts(resolver.work, len(asked)), asked, strict=False):
        yield f"{model} on {'/'.join(pool.key)}: {_answer(resolver.within(part), model, pool, currency)}"
    left = len(pools) - MOST_PLACES
    if left > 0:
        yield f"{left} more partition{'s'[: left != 1]} like these: name one for its answer"


def _answer(resolver: Resolver, model: str, pool: Pool, currency: str) -> str:
    problem, counts = resolver.whole, resolver.solution.counts
    here = [i for i in problem.of(model) if pool.key in {its.key for its in problem.options[i].pools}]
    placed = [i for i in here if counts.get(i)]
    if placed:
        parts = [f"{counts[i]} on {where(problem.options[i])}" for i in placed]
        return f"the plan has it there: {', '.join(parts)}"
    if not here:
        generator = problem.columns.get(model)
        refusals = [] if generator is None else generator.refusals()
        mine = [text for text in refusals if text.startswith(f"{'/'.join(pool.key)} ")]
        return f"it cannot be: the partition {mine[0].partition(' ')[2]}" if mine else "it cannot be"
    best = min(here, key=lambda i: (_misses(problem.options[i]), problem.options[i].cost / problem.options[i].capacity))
    loss = ""
    if resolver.is_small:  # the option that suits this demand, not that of a full replica
        outcome = with_one_of(resolver, [resolver.place_of[i] for i in here])
        loss = with_one_words(outcome, currency)
        best = next((i for i in here if outcome.counts.get(resolver.place_of[i])), best)
    option = problem.options[best]
    facts = [f"a replica on {where(option)} takes {number(option.capacity)} req/s"]
    if option.cost:
        per_request = option.cost / option.capacity / 3600 * 1000
        facts.append(f"{number(per_request)} {currency} for 1,000 requests at full load")
    if any(not level.attains for level in option.levels):
        attained = max((level.rate for level in option.levels if level.attains), default=0.0)
        facts.append(
            f"it keeps the SLO up to {number(attained)} req/s" if attained else "it misses the SLO under any load"
        )
    return f"{'; '.join(facts)}; {loss or _distance(resolver, resolver.place_of[best], currency)}"


def _distance(resolver: Resolver, i: int, currency: str) -> str:
    """Of a problem that takes long to solve again: what the relaxation says of a little load there."""
    relaxed = resolver.relaxation()
    try:
        for name in (name for name in stage_names(resolver.problem) if name != TIE_BREAK and relaxed.terms(name)):
            answer = resolver.relaxed(relaxed, name)
            if answer is None:
                break
            distance = relaxed.distance(answer, i)
            if distance > TOLERANCE:
                worse = more(name, distance, currency)
                return f"each request/s there would mean {worse} (marginal, by the relaxation)"
            relaxed.keep(name, answer.objective + tolerance(name, answer.objective))
    except FabrictoolError:
        return f"what a replica there would cost {LATE}"
    return "by the relaxation it would do as well; whole replicas can cost more"


def _misses(option: Option) -> bool:
    return not any(level.attains for level in option.levels)


def _names(pool: Pool) -> set[str]:
    return {pool.device, pool.cluster, "/".join(pool.key), pool.site, pool.provider}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
