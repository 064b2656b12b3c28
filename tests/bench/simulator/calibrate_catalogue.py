"""Fits every calibration of the catalogue from the measured slices: run this file.

Two passes: the first starts each pair of device and engine from literature constants; the second from what the same
engine showed on the other devices. Bands come from predictions of rows, models and devices that a fit has not seen.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

from measured import groups, held_out, load, sample

from fabrictool.catalog import accelerators
from fabrictool.catalog import calibrations as catalogue
from fabrictool.simulator import fitting
from fabrictool.simulator.calibration import ANY, Calibration, dumps, of_vendor
from fabrictool.simulator.stepmodel import Factors

OUT = Path(catalogue.__file__).parent
MOST = 80
FOLDS = 3
SOURCES = {
    "online": "ai-dynamo/aiconfigurator 095f58a, silicon_sample.csv (InferenceX and NVIDIA runs of 2025-10 to 2026-04)",
    "static": "argonne-lcf/LLM-Inference-Bench 4211f5d, All_results.csv (2024)",
}


def _fit(task):
    observations, prior, rounds = task
    return fitting.fit(observations, prior, rounds=rounds)


def main():
    """Writes one file a pair, one an engine and one for all."""
    observations = [o for o in load("silicon") if o.case.mode == "agg"] + load("argonne")
    pairs = {k: v for k, v in groups(observations).items() if len(v) >= 20}
    train = {k: sample([o for o in v if not held_out(o)], MOST) for k, v in pairs.items()}
    test = {k: [o for o in v if held_out(o)] for k, v in pairs.items()}
    with ProcessPoolExecutor(2) as pool:
        first = dict(zip(train, pool.map(_fit, [(o, Factors(), 6) for o in train.values()]), strict=True))
        priors = {k: _prior(k, first) for k in pairs}
        second = dict(zip(train, pool.map(_fit, [(rows, priors[k], 8) for k, rows in train.items()]), strict=True))
        left = [(k, m) for k in pairs for m in sorted({o.case.model.id for o in pairs[k]})]
        left = [(k, m) for k, m in left if any(o.case.model.id != m for o in train[k])]
        tasks = [(sample([o for o in train[k] if o.case.model.id != m], 50), priors[k], 5) for k, m in left]
        blind = dict(zip(left, pool.map(_fit, tasks), strict=True))
        folds = [(k, fold) for k in pairs for fold in range(FOLDS)]
        tasks = [
            (sample([o for i, o in enumerate(pairs[k]) if i % FOLDS != fold], MOST), second[k], 4) for k, fold in folds
        ]
        folded = dict(zip(folds, pool.map(_fit, tasks), strict=True))
    for k, mine in pairs.items():
        seen = [o.log_errors(folded[k, i % FOLDS]) for i, o in enumerate(mine)]
        print(k, "held-out quarter:", _summary([o.log_errors(second[k]) for o in test[k]]))
        unseen = [
            o.log_errors(blind[k, m])
            for m in {o.case.model.id for o in mine}
            if (k, m) in blind
            for o in sample([o for o in mine if o.case.model.id == m], 40)
        ]
        _write(k, second[k], seen, unseen, mine)
        print(k, len(mine), _summary(seen), "| other models:", _summary(unseen), flush=True)
    for scope in ("online", "static"):
        for engine in sorted({k[1] for k in pairs if k[2] == scope} | {ANY}):
            mine = [k for k in pairs if k[2] == scope and engine in (k[1], ANY)]
            for vendor in sorted({accelerators()[k[0]].vendor for k in mine}):
                _shared(
                    of_vendor(vendor),
                    engine,
                    scope,
                    [k for k in mine if accelerators()[k[0]].vendor == vendor],
                    second,
                    pairs,
                )
            _shared(ANY, engine, scope, mine, second, pairs)


def _shared(device, engine, scope, mine, fitted, pairs):
    """What stands for devices that were never measured, and how wrong it is when each device is left out in turn."""

    def without(out):
        return fitting.average([*(fitted[k] for k in mine if k[0] != out), Factors()])

    errors = [o.log_errors(without(k[0])) for k in mine for o in sample(pairs[k], 60)]
    _write((device, engine, scope), without(None), errors, errors, [o for k in mine for o in pairs[k]])
    print((device, engine, scope), "left-out devices:", _summary(errors), flush=True)


def _prior(mine, fitted):
    """What the same engine showed on other devices; with none, what all others did."""
    device, engine, scope = mine
    same = [f for (d, e, s), f in fitted.items() if e == engine and s == scope and d != device]
    others = [f for (d, _, s), f in fitted.items() if s == scope and d != device]
    return fitting.average([*same, Factors()]) if len(same) > 1 else fitting.average([*others, Factors()])


def _write(k, factors, seen, unseen, observations):
    device, engine, scope = k
    one = Calibration(
        device=device,
        engine=engine,
        scope=scope,
        factors=factors,
        spreads=fitting.spreads(seen),
        unseen=fitting.spreads(unseen),
        hull=fitting.hull(observations),
        points=len(observations),
        version="1",
        source=SOURCES[scope],
    )
    name = "-".join(part.replace("*", "any").replace("/", "-") for part in k)
    (OUT / f"{name}.toml").write_text(dumps(one))


def _summary(errors):
    import numpy as np

    parts = []
    for metric in ("ttft", "tpot", "e2e"):
        found = np.array([abs(np.exp(-e[metric]) - 1) for e in errors if metric in e])
        if len(found):
            parts.append(f"{metric} {100 * found.mean():.1f} % (median {100 * np.median(found):.1f})")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
