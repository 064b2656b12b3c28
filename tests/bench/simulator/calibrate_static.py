"""Fits the catalogue's calibrations of static batches from the measured slice: run this file (a quarter of an hour).

Pair by pair, because these engines are of 2024 and the hierarchy of servers under load forecast models that it had not
seen worse. Two passes: the first starts each pair of device and engine from the constants of the literature, the second
from the mean of that and of what the same engine showed on other devices. A quarter of the shapes is not fitted by what
ships; bands are of folds and of models that a pair's fit left out, though its start knows them from other devices.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import hierarchy
import numpy as np
from calibrate_catalogue import save
from measured import architecture, groups, held_out, load, sample

from fabrictool.catalog import accelerators
from fabrictool.simulator import fitting
from fabrictool.simulator.calibration import ANY, Calibration, of_vendor
from fabrictool.simulator.stepmodel import Factors

SOURCE = "argonne-lcf/LLM-Inference-Bench 4211f5d, All_results.csv (2024)"
LEAST = 20
"""Rows of a pair that gets a file."""
FITTED = 80
FOLDS = 3


def main():
    """Writes the files anew: one for each pair, for each maker's devices, and for all."""
    pairs = {k: rows for k, rows in groups(load("argonne")).items() if len(rows) >= LEAST}
    train = {k: sample([o for o in rows if not held_out(o)], FITTED) for k, rows in pairs.items()}
    models = {k: sorted({architecture(o) for o in rows}) for k, rows in pairs.items()}
    left = [(k, m) for k in pairs for m in models[k] if len(models[k]) > 1]
    folds = [(k, fold) for k in pairs for fold in range(FOLDS)]
    with ProcessPoolExecutor(2) as pool:

        def fitted(keys, rows, prior, rounds):
            tasks = [(rows(key), prior(key), rounds) for key in keys]
            return dict(zip(keys, pool.map(_fit, tasks), strict=True))

        first = fitted(pairs, lambda k: train[k], lambda _: hierarchy.PRIOR, 6)
        priors = {k: _prior(k, first) for k in pairs}
        second = fitted(pairs, lambda k: train[k], lambda k: priors[k], 8)
        blind = fitted(
            left,
            lambda at: sample([o for o in pairs[at[0]] if architecture(o) != at[1]], 50),
            lambda at: priors[at[0]],
            5,
        )
        folded = fitted(folds, lambda at: sample(_part(pairs, *at), FITTED), lambda at: priors[at[0]], 6)
    for k, rows in pairs.items():
        seen = [o.log_errors(folded[k, i % FOLDS]) for i, o in enumerate(rows)]
        chosen = [
            o for m in models[k] if (k, m) in blind for o in sample([o for o in rows if architecture(o) == m], 40)
        ]
        errors = dict(enumerate(o.log_errors(blind[k, architecture(o)]) for o in chosen))
        unseen = hierarchy.model_bands(chosen, errors, range(len(chosen))) if chosen else {}
        _write(k, second[k], fitting.spreads(seen), unseen, rows)
        print(k, len(rows), "other shapes", _mean(seen), "other models", _mean(errors.values()), flush=True)
    for engine in (ANY, *sorted({k[1] for k in pairs})):
        mine = [k for k in pairs if engine in (ANY, k[1])]
        for vendor in sorted({_vendor(k) for k in mine}):
            _shared(of_vendor(vendor), engine, [k for k in mine if _vendor(k) == vendor], second, pairs)
        _shared(ANY, engine, mine, second, pairs)


def _fit(task):
    rows, prior, rounds = task
    return fitting.fit(rows, prior, rounds=rounds)


def _part(pairs, k, fold):
    return [o for i, o in enumerate(pairs[k]) if i % FOLDS != fold]


def _vendor(k):
    return accelerators()[k[0]].vendor


def _prior(k, fitted):
    """What the same engine showed on other devices; where that is one at most, what all others did."""
    others = [factors for (device, engine, _), factors in fitted.items() if engine == k[1] and device != k[0]]
    if len(others) < 2:
        others = [factors for (device, _, _), factors in fitted.items() if device != k[0]]
    return average([*others, hierarchy.PRIOR])


def average(factors):
    """The geometric mean."""
    return Factors.of(np.mean([one.vector() for one in factors], axis=0))


def _shared(place, engine, mine, fitted, pairs):
    """For devices that nobody measured; its bands are of each device, left out in turn."""

    def without(device):
        return average([*(fitted[k] for k in mine if k[0] != device), hierarchy.PRIOR])

    errors = [o.log_errors(without(k[0])) for k in mine for o in sample(pairs[k], 60)]
    bands = fitting.spreads(errors)
    _write((place, engine, "static"), without(None), bands, bands, [o for k in mine for o in pairs[k]])
    print(place, engine, "devices left out", _mean(errors), flush=True)


def _write(k, factors, seen, unseen, rows):
    device, engine, scope = k
    one = Calibration(
        device=device,
        engine=engine,
        scope=scope,
        factors=factors,
        spreads=seen,
        unseen=unseen,
        hull=fitting.hull(rows),
        points=len(rows),
        version="2",
        source=SOURCE,
    )
    save(one)


def _mean(errors):
    sizes = [abs(math.expm1(-e["e2e"])) for e in errors]
    return f"{100 * np.mean(sizes):.1f} %" if sizes else "-"


if __name__ == "__main__":
    main()
