"""One fit for all devices and engines: what they share, and by how much each of them departs from it.

The logarithms of a pair's factors are a sum: physics shared by all, a departure of the engine, one of the device, one
of the pair. Departures are held to nothing by priors whose widths are shares of `fitting.SPREAD`, so that few rows move
little, and what a pair was not measured for it has from its relatives. Many rows of one model on one pair share what is
wrong with that model's forecast: their number counts by its square root.

Two more levels were tried and dropped, because models that were left out did not gain. Without them errors were 11.8
and 17.4 % of TPOT then, of dense models and of mixtures, and 32.2 % of TTFT. A level for Hopper and Blackwell: 11.3,
17.7 and 33.0 %. One for an engine's releases around their mean: 12.1, 17.5 and 33.4 %; with the release's own
departures in the forecasts: 12.1, 20.6 and 37.7 %. What one model showed of a release says little of the next. A term
for each model in the fit, left out of forecasts: 14.5 and 17.8 % of TPOT. Lower efficiencies for experts' products
with few inputs: no change.
"""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from measured import architecture, held_out, sample

from fabrictool.catalog import accelerators
from fabrictool.simulator import fitting
from fabrictool.simulator.calibration import ANY, Spread
from fabrictool.simulator.stepmodel import Factors

OWN = ("device", "pair")
"""Levels that only what was measured on a device can tell."""
COUNT = len(fitting.NAMES)
PRIOR = replace(Factors(), tile=16.0)
"""The constants of the literature, for accelerators: their units take 16 rows of a product at once."""
METRICS = tuple(fitting.WEIGHT)
WIDTHS = {"shared": 1.0, "vendor": 0.5, "engine": 0.5, "device": 0.4, "pair": 0.3}
"""Standard deviations of departures, as shares of how far factors differ."""
UPPER = np.log([fitting.LIMIT.get(name, 1.0) for name in fitting.NAMES])
TIMED = {"link": 0.12, "collective": 0.35}
"""Spreads of factors that kernels tell which were timed by themselves on several devices of one maker. As free as the
others, the link took the blame for what is slow in mixtures (0.24 to 0.44 of its peak)."""
SPREAD = np.array([TIMED.get(name, fitting.SPREAD[name]) for name in fitting.NAMES])
EXPERTS = [i for i, name in enumerate(fitting.NAMES) if name.startswith(("expert", "block"))]
ROWS_OF_A_GROUP = 10
"""More of one model on one pair say nothing new."""
ENOUGH_MODELS = 3
ENOUGH = 4e-3
"""Share of the cost below which a round has gained too little for another one."""
HELD = [fitting.NAMES.index(name) for name in ("reuse", "tile")]
"""Of engines of 2024 alone, which were measured by batches: free here, they made dense models that were left out worse
(TPOT 12.1 %, 11.6 without)."""
LINKS = [fitting.NAMES.index(name) for name in ("link", "exchange", "collective")]


def levels(device, engine):
    """Which departures add up for a pair."""
    return [
        ("shared",),
        ("vendor", device.vendor),
        ("engine", engine),
        ("device", device.id),
        ("pair", device.id, engine),
    ]


@dataclass(frozen=True)
class Hierarchy:
    """Logarithms: (level, …) → (factors,)."""

    parts: dict

    def factors(self, device, engine, without=()):
        """Of a pair, seen or not; levels in `without` do not count."""
        known = [self.parts[k] for k in levels(device, engine) if k in self.parts and k[0] not in without]
        return Factors.of(np.minimum(np.sum(known, axis=0), UPPER))

    def shipped(self, place, engine, own):
        """What a file of the catalogue holds: of a maker's devices, or of one device with its own departures."""
        known = [("shared",)]
        known += [("vendor", place.split("/")[0])] if place.endswith("/*") else []
        known += [("engine", engine)] if engine != ANY else []
        if own:
            return self.factors(accelerators()[place], engine)
        return Factors.of(np.minimum(np.sum([self.parts[k] for k in known], axis=0), UPPER))


def fit(observations, rounds=6, workers=2):
    """The hierarchy that explains `observations`: Gauss-Newton with a trust region, as `fitting.explain`."""
    sizes = Counter(_group(o) for o in observations)
    share = np.array([sizes[_group(o)] ** -0.5 for o in observations])
    keys = list(dict.fromkeys(k for o in observations for k in levels(o.case.device, o.case.engine)))
    column = {k: i for i, k in enumerate(keys)}
    member = np.zeros((len(observations), len(keys)))
    for row, o in enumerate(observations):
        member[row, [column[k] for k in levels(o.case.device, o.case.engine)]] = 1.0
    middle = np.zeros((len(keys), COUNT))
    middle[0] = PRIOR.vector()
    width = np.stack([WIDTHS[k[0]] * SPREAD for k in keys])
    weight = np.array([fitting.WEIGHT[m] / fitting.NOISE for m in METRICS])
    point = middle.copy()

    def cost(errors, at):
        soft = 2.0 * (np.sqrt(1.0 + np.nan_to_num(errors * weight) ** 2) - 1.0)
        return float((share[:, None] * soft).sum() + (((at - middle) / width) ** 2).sum())

    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(observations,)) as pool:

        def evaluate(at, slopes):
            vectors = np.minimum(member @ at, UPPER)
            tasks = [(i, vectors[i], slopes) for i in range(len(observations))]
            answers = list(pool.map(_errors, tasks, chunksize=8))
            return np.array([a[0] for a in answers]), np.array([a[1] for a in answers]) if slopes else None

        radius = fitting.RADIUS
        for _ in range(rounds):
            errors, slopes = evaluate(point, True)
            now = cost(errors, point)
            step = _step(errors, slopes, member, share, weight, point, middle, width)
            while radius > fitting.SMALLEST:
                trial = point + np.clip(step, -radius, radius)
                new, _ = evaluate(trial, False)
                if cost(new, trial) < now:
                    break
                radius *= 0.4
            else:
                break
            gain, point = now - cost(new, trial), trial
            radius = min(fitting.RADIUS, 1.5 * radius)
            if gain < ENOUGH * now:
                break
    return Hierarchy({k: point[i] for k, i in column.items()})


def _group(o):
    return o.case.device.id, o.case.engine, o.case.precision, architecture(o)


def _begin(observations):
    globals()["ROWS"] = observations


def _log_errors(row, vector):
    found = row.log_errors(Factors.of(vector))
    return [found[m] if m in found and math.isfinite(getattr(row, m)) else math.nan for m in METRICS]


def _errors(task):
    index, vector, slopes = task
    row = globals()["ROWS"][index]
    base = np.array(_log_errors(row, vector))
    if not slopes:
        return base, None
    jacobian = np.zeros((COUNT, len(METRICS)))
    case = row.case
    alone = case.mode != "disagg" and case.cut.devices == 1
    skipped = {*HELD, *([] if case.model.experts else EXPERTS), *(LINKS if alone else [])}
    for i in range(COUNT):
        if i in skipped:
            continue
        h = -fitting.PROBE if vector[i] + fitting.PROBE > UPPER[i] else fitting.PROBE
        moved = vector.copy()
        moved[i] += h
        jacobian[i] = (np.array(_log_errors(row, moved)) - base) / h
    return base, np.nan_to_num(jacobian)


def _step(errors, slopes, member, share, weight, point, middle, width):
    """Of the linear problem, all departures at once."""
    known = np.isfinite(errors)
    error = np.nan_to_num(errors) * weight
    robust = np.sqrt(share[:, None] / np.sqrt(1.0 + error**2)) * known
    count = member.shape[1] * COUNT
    scaled = (slopes * (weight * robust)[:, None, :]).transpose(0, 2, 1)  # (rows, metrics, factors)
    rows = scaled.reshape(-1, COUNT)
    wide = (np.repeat(member, len(METRICS), axis=0)[:, :, None] * rows[:, None, :]).reshape(-1, count)
    normal = wide.T @ wide + np.diag(1.0 / width.ravel() ** 2)
    right = -wide.T @ (error * robust).ravel() + ((middle - point) / width**2).ravel()
    return np.linalg.solve(normal, right).reshape(point.shape)


def thinned(observations):
    """At most `ROWS_OF_A_GROUP` of each model, precision, device and engine."""
    groups = {}
    for o in observations:
        groups.setdefault(_group(o), []).append(o)
    return [o for mine in groups.values() for o in sample(mine, ROWS_OF_A_GROUP)]


@dataclass(frozen=True)
class Blind:
    """Forecasts of rows by fits that have not seen their like: row → log errors by metric."""

    model: dict
    """Their model was left out; the levels that the catalogue ships count."""
    model_own: dict
    """The same with the departures of the device and the pair, whether shipped or not."""
    model_shared: dict
    """The same without those."""
    device: dict
    """Their device was left out."""
    shape: dict
    """A quarter of the shapes was left out, by a hash."""
    whole: Hierarchy
    """The fit to all rows."""
    own: frozenset
    """(device, engine) whose own departures make models that were left out better."""


def blind(observations, log=print):
    """Leaves out each model, each device and a quarter of the shapes in turn, and fits the rest again from scratch."""
    rows = range(len(observations))

    def errors(hierarchy, chosen, without):
        return {
            i: observations[i].log_errors(
                hierarchy.factors(observations[i].case.device, observations[i].case.engine, without)
            )
            for i in chosen
        }

    def without(what, name):
        log(f"leaving out {name} …")
        return fit(thinned([o for o in observations if what(o) != name]))

    own, shared, device = {}, {}, {}
    for name in sorted({architecture(o) for o in observations}):
        rest = without(architecture, name)
        mine = [i for i in rows if architecture(observations[i]) == name]
        own |= errors(rest, mine, ())
        shared |= errors(rest, mine, OWN)
    for name in sorted({o.case.device.id for o in observations}):
        mine = [i for i in rows if observations[i].case.device.id == name]
        device |= errors(without(lambda o: o.case.device.id, name), mine, ())
    log("leaving out a quarter of the shapes …")
    quarter = fit(thinned([o for o in observations if not held_out(o)]))
    held = [i for i in rows if held_out(observations[i])]
    pairs = _better(observations, own, shared)
    ships = {i: (observations[i].case.device.id, observations[i].case.engine) in pairs for i in rows}
    shape = {
        i: e
        for own_too in (True, False)
        for i, e in errors(quarter, [i for i in held if ships[i] is own_too], () if own_too else OWN).items()
    }
    log("fitting all …")
    return Blind(
        model={i: (own if ships[i] else shared)[i] for i in own},
        model_own=own,
        model_shared=shared,
        device=device,
        shape=shape,
        whole=fit(thinned(observations)),
        own=frozenset(pairs),
    )


def _better(observations, own, shared):
    """Pairs of at least two models whose left-out rows are nearer with the departures of the pair."""
    found = set()
    for pair in {(o.case.device.id, o.case.engine) for o in observations}:
        mine = [i for i in own if (observations[i].case.device.id, observations[i].case.engine) == pair]
        if len({architecture(observations[i]) for i in mine}) > 1 and _size(own, mine) < _size(shared, mine):
            found.add(pair)
    return found


def _size(errors, rows):
    """Mean size of the errors that calibrations are for: of tokens under load, of whole batches otherwise."""
    return float(np.mean([abs(math.expm1(-errors[i].get("tpot", errors[i].get("e2e")))) for i in rows]))


def model_bands(observations, errors, rows, relatives=()):
    """90 % bands for models that nobody measured, from those that were left out: the widest that come out when any one
    of them is not counted. Rows of one model err alike, so their number says little of what the next model's will do.

    Two models do not show on which side a third will be: then what `relatives`, rows of other engines, show is in the
    band as well. That was chosen after such bands had held 63 % of one model's rows, and 2 % of another's.
    """
    names = {architecture(observations[i]) for i in rows}
    counted = [[errors[i] for i in rows if architecture(observations[i]) != name] for name in sorted(names)]
    bands = [fitting.spreads(mine) for mine in counted if mine] or [fitting.spreads([errors[i] for i in rows])]
    if len(names) < ENOUGH_MODELS and relatives:
        bands.append(model_bands(observations, errors, relatives))
    shared = set.intersection(*(set(band) for band in bands))
    return {
        metric: Spread(min(band[metric].low for band in bands), max(band[metric].high for band in bands))
        for metric in METRICS
        if metric in shared
    }
