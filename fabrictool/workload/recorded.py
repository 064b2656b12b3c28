"""Recorded demand: the traces that a blueprint names, read, and what the planner needs of them put in their place."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError, Problem
from fabrictool.base.files import file_error
from fabrictool.base.units import Duration, Rate, Tokens
from fabrictool.domain.blueprint import Length
from fabrictool.workload import formats
from fabrictool.workload.arrivals import CVS
from fabrictool.workload.statistics import gap_cv
from fabrictool.workload.windows import (
    declared_quantile,
    declared_rates,
    fewest_windows,
    gap_cv_inside,
    hour_factors,
    quantile_rate,
    window_rates,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.base.errors import Place
    from fabrictool.domain.blueprint import Blueprint, Demand
    from fabrictool.workload.trace import Ints, Trace

FEWEST = 10
"""Requests of a model that say something about its rate."""


def read_trace(path: Path) -> Trace:
    """A trace from a file, packed or not. Raises FT2201 for what is none, FT43xx for what cannot be read."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        problem = error if isinstance(error, OSError) else OSError(str(error))
        raise file_error(problem, path) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT2201", f"{path} is not text: {error}") from error
    return formats.read(text, str(path))


def with_traces(blueprint: Blueprint, folder: Path, place: Callable[[str], Place]) -> Blueprint:
    """The blueprint with rate and lengths beside each trace, so that its digest is also that of what they hold.

    Where a quantile of the demand is planned for, it is the rate.

    Traces are relative to `folder`; `place` says where a model names its trace.

    Raises
    ------
    InvalidInputError
        FT1127 for every trace that cannot be read or says too little.
    """
    read: dict[Path, Trace] = {}
    problems: list[Problem] = []
    models = dict(blueprint.models)

    def recorded(demand: Demand | None, name: str, of: str) -> Demand | None:
        if demand is None or demand.trace is None:
            return None if demand is None else _declared(demand, name)
        path = folder / demand.trace
        try:
            if path not in read:
                read[path] = read_trace(path).renamed(blueprint.adapted)
            return _recorded(demand, name, read[path], blueprint)
        except FabrictoolError as error:
            message = f"{name}: {'; '.join(problem.message for problem in error.problems)}"
            problems.append(Problem("FT1127", message, place(of), error.problems[0].hint))
            return None

    for name, model in blueprint.models.items():
        companions = {
            beside: its.model_copy(update={"demand": recorded(its.demand, beside, name)})
            for beside, its in model.companions.items()
        }
        demand = recorded(model.demand, name, name)
        models[name] = model.model_copy(update={"demand": demand, "companions": companions})
    if problems:
        raise InvalidInputError(problems)
    return blueprint.model_copy(update={"models": models})


def _recorded(demand: Demand, name: str, trace: Trace, blueprint: Blueprint) -> Demand:
    """Those of its requests that name the model; all, where none names any."""
    mine = trace if trace.models == ("",) else trace.of_model(name)
    if len(mine) < FEWEST or not mine.rate:
        of = "" if trace.models == ("",) else f" for {name} (it has {', '.join(trace.models[:5])})"
        held = f"{len(mine)} request{'s'[: len(mine) != 1]}{of}"
        message = f"{demand.trace} has {held}; a rate needs {FEWEST}, at different times"
        raise InvalidInputError.of(
            "FT2201", message, hint="use a longer trace, or declare `rate`, `input` and `output`"
        )
    lengths = {"input": _length(mine.prompt), "output": _length(mine.output)}
    recorded = demand.model_copy(update={"rate": Rate(mine.rate), "cv": _two_digits(gap_cv(mine)), **lengths})
    times = trace.times_of(name)
    if demand.begins is not None:
        recorded = recorded.by_hours(hour_factors(times, trace.span, float(demand.begins), blueprint.zone))
    if demand.quantile is not None or recorded.factors:
        # Hours and windows are of the whole trace, so the mean beside them is, too, where the model came late.
        recorded = recorded.model_copy(update={"rate": Rate((len(mine) - 1) / trace.span)})
    if demand.quantile is None:
        return recorded
    quantile, rates = float(demand.quantile), window_rates(times, trace.span, demand.window_s)
    highest = max(demand.quantile, blueprint.together or demand.quantile)
    fewest = fewest_windows(float(highest))
    if len(rates) < fewest:
        message = f"{demand.trace} has {len(rates)} windows of {Duration(demand.window_s)}; {highest} needs {fewest}"
        hint = "a longer trace, a lower `quantile` or a shorter `window`"
        raise InvalidInputError.of("FT2201", message, hint=hint)
    rate, windows = Rate(quantile_rate(rates, quantile)), tuple(rates.tolist())
    # What differs between windows is in their quantile already.
    return recorded.at_quantile(rate, _two_digits(gap_cv_inside(times, demand.window_s)), windows)


def _declared(demand: Demand, name: str) -> Demand:
    """With its quantile, if one is asked for, by nothing but its chance."""
    if demand.quantile is None or demand.rate is None:
        return demand
    rate, cv = float(demand.rate), 1.0 if demand.cv is None else demand.cv
    planned = Rate(declared_quantile(rate, cv, demand.window_s, float(demand.quantile)))
    windows = declared_rates(rate, cv, demand.window_s, name)
    return demand.at_quantile(planned, demand.cv, tuple(windows.tolist()))


def _two_digits(cv: float) -> float:
    """That of a sample is known no better, and a plan that changes little is soon read."""
    return min(max(float(f"{cv:.2g}"), CVS[0]), CVS[1])


def _length(tokens: Ints) -> Length:
    most = max(1, int(tokens.max()))
    mean = min(max(1, round(float(tokens.mean()))), most)
    return Length(mean=Tokens(mean), sd=Tokens(round(float(tokens.std()))), max=Tokens(most))
