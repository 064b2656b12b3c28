"""`make validate-simulator`: the simulator's errors on real measurements, in one table, won or lost.

Arguments: [--write PAGE] [--open-loop FOLDER]. Each row is forecast by fits from which its model, its device or its
shape was left out (minutes); none was ever fitted to it. Targets are those of the project's own plan.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from pathlib import Path
from statistics import NormalDist

import numpy as np
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).parent))

import hierarchy
import kernel_check
import openloop
from measured import DATA, architecture, groups, held_out, key, load, sample
from replay import RUNS, play

from fabrictool.catalog import accelerators
from fabrictool.simulator import fitting, physics
from fabrictool.simulator.calibration import choose, of_vendor, shipped
from fabrictool.simulator.cases import predict
from fabrictool.simulator.stepmodel import Factors

METRICS = ("ttft", "tpot", "e2e")
NOT_MEASURED = (
    "- Saturation throughput (TensorRT-LLM tables, MLPerf, ML.ENERGY), Splitwise and Vidur's operators.",
    "- A100 with 80 GB, GH200, MI250, GB200, GB300 and all others without a row above: nothing was fitted for them.",
)
"""What the plan names and this page does not show."""
GROUPS = 6
"""That a table of errors lists."""
WHY = {
    "online E2E, unseen model": "One release of vLLM on H200 decodes Qwen3-235B 1.65 times slower than all other"
    " engines there.",
    "online TTFT, unseen model": "First tokens wait for what clients send at once and for what an engine's front end"
    " does with it, and releases differ in both.",
    "disaggregated TTFT": "The rows do not say how many prompts and tokens a prefill worker takes in a step. Four rows"
    " on H100 wait 5 to 12 s for prompts of 1,024 tokens with 6 to 60 requests in flight, which nothing here explains;"
    " on H200 a few pairs are thought full that were not.",
    "static batch E2E, unseen model": "Engines of 2024. On MI300X a step of 16 to 256 sequences gets a fortieth of the"
    " units' peak, and the cache is read anew for query heads that share it: a factor for each (`tile`, `reuse`) has"
    " made the errors of 70B models there a quarter to a third smaller.",
}
"""What is known of the reasons."""
WHY_OTHERS = """\
**Order of configurations**: most of those that come in the wrong order are measured less than a tenth apart.

**Recommendation**: for a model that nobody measured the band is a factor of three wide; the room that 90 % confidence
takes of it costs throughput, and without that room one pick in five misses its limit.

**Open loop with the shipped calibration**: it adds 20 to 30 ms to each first token, as the older releases did that it
was learned from. A hundred requests of one's own mend that (`calibrate`).
"""
REASONS = {
    "speculative": "of sessions in which a model with heads that draft tokens decodes over a tenth faster than trusted"
    " runs of the same setting or on twice as many devices: several tokens a step, which the rows do not state",
    "cached": "whose prompts would take up to 85 % of the units' peak at 8 bits, where no other run takes over 44 %:"
    " a prefix cache knew them",
    "cold": "of one release whose first tokens took 5 to 12 s as soon as a step had many prompts, whatever the load:"
    " kernels were compiled while the clock ran",
}


def main(argv):
    """Prints the tables; with `--write PAGE` also as a page of the docs; `--open-loop FOLDER`: see `openloop`."""
    online, static = [o for o in load("silicon") if o.case.mode == "agg"], load("argonne")
    blind = hierarchy.blind(online, log=_progress)
    disaggregated = list(_disaggregated(blind))
    lines = [
        "## Against the targets",
        "",
        *_targets(online, blind),
        *_targets_of_pairs(blind),
        *_static_targets(static, unseen := _static_unseen_models(static)),
    ]
    lines += ["", "## Where the errors are", "", *_where(online, blind, unseen)]
    lines += ["", "## Servers under load by device and engine, the model left out", "", *_by_pair(online, blind)]
    lines += [
        "",
        "## Static batches by device and engine, a quarter of the shapes left out",
        "",
        *_static_pairs(static),
    ]
    lines += ["", "## What was not learned from", "", *_kept_out([*online, *static])]
    lines += ["", "## Real runs, request by request", "", *_replays()]
    lines += ["", "## Open loop", "", *_open_loop(argv)]
    lines += ["", "## Kernels by themselves", "", *_kernels()]
    lines += ["", "## What papers measured", "", *_papers()]
    lines += ["", "## Two phases (disaggregated)", "", *disaggregated]
    lines += ["", "## Speed and memory", "", *_speed()]
    lines += ["", "## Not measured", "", *NOT_MEASURED]
    text = "\n".join(lines)
    print(text)
    if "--write" in argv:
        page = Path(argv[argv.index("--write") + 1])
        page.write_text(HEAD + text + "\n")
    return 0


HEAD = """# How far the simulator has been wrong

Written by `make validate-simulator`. Errors are |predicted / measured - 1|. A row counts with the forecast of a fit
that has not seen its model (all rows of the same shapes of layers, whatever the weights), its device, or its lengths
and load, as the table says; a row that cannot be forecast counts as 100 %. Bands of rows under load are made from the
rows of other models (devices) only.
Slices and their sources: `tests/data/measured/SOURCE.md`.

"""


def _progress(line):
    print(line, file=sys.stderr, flush=True)


def _calibration(key):
    device, engine, scope = key
    return choose(shipped(), device, accelerators()[device].vendor, engine, scope)


def _signed(errors, rows, metric):
    """Predicted over measured less 1; a refusal is -1, a prediction of nothing."""
    known = [errors[i][metric] for i in rows if metric in errors[i]]
    return np.array([-1.0 if abs(error) == fitting.WORST else math.expm1(-error) for error in known])


def _targets(rows, blind):
    yield "| what | rows | mean | median | must | aim | verdict |"
    yield "|---|---|---|---|---|---|---|"
    dense, mixture = ([i for i, o in enumerate(rows) if bool(o.case.model.experts) is many] for many in (False, True))
    yield _verdict("online TPOT, unseen model, dense", _signed(blind.model, dense, "tpot"), 0.12, 0.08)
    yield _verdict("online TPOT, unseen model, mixture of experts", _signed(blind.model, mixture, "tpot"), 0.20, 0.15)
    every = range(len(rows))
    yield _verdict("online TTFT, unseen model", _signed(blind.model, every, "ttft"), 0.35, 0.20)
    yield _verdict("online E2E, unseen model", _signed(blind.model, every, "e2e"), 0.12, 0.08)
    for metric in ("tpot", "ttft", "e2e"):
        yield _verdict(f"online {metric.upper()}, unseen device", _signed(blind.device, every, metric), None, None)
    held = sorted(blind.shape)
    yield _verdict("online TPOT, unseen shape of a seen model", _signed(blind.shape, held, "tpot"), None, None)
    plain = {i: o.log_errors(Factors()) for i, o in enumerate(rows)}
    yield _verdict("online TPOT, constants of the literature alone", _signed(plain, every, "tpot"), None, None)
    for what, unit, errors in (
        ("model", architecture, blind.model),
        ("device", lambda o: o.case.device.id, blind.device),
    ):
        found = [_covered(rows, errors, unit, metric) for metric in ("ttft", "tpot")]
        inside, widths = ([x for part in parts for x in part] for parts in zip(*found, strict=True))
        wide = f"median width ×{np.exp(np.median(widths)):.1f}"
        yield _in_band(f"online value inside the 90 % band, unseen {what}", inside, wide)
    taus, weights = _taus(rows, blind.model, "tpot")
    tau = float(np.average(taus, weights=weights))
    verdict = "aim reached" if tau >= 0.95 else "reached" if tau >= 0.93 else "**missed**"
    cells = f"{sum(weights)} | {tau:.2f} | | 0.93 | 0.95 | {verdict}"
    yield f"| Kendall τ of configurations by TPOT, unseen model | {cells} |"
    right, pairs = _ordered(rows, blind.model, 0.1)
    yield f"| … of two whose TPOT is over 10 % apart, in the right order | {pairs} | {_percent(right)} | | | | |"
    yield from _picks(rows, blind.model)
    refused = sum(abs(e["tpot"]) == fitting.WORST for e in blind.model.values())
    yield f"| online rows refused | {len(rows)} | {refused} | | 0 | 0 | {'**missed**' if refused else 'aim reached'} |"


def _in_band(what, inside, wide=""):
    covered = float(np.mean(inside))
    verdict = "aim reached" if 0.87 <= covered <= 0.93 else "reached" if 0.85 <= covered <= 0.95 else "**missed**"
    return f"| {what} | {len(inside)} | {_percent(covered)} | {wide} | 85-95 % | 87-93 % | {verdict} |"


def _static_targets(rows, unseen):
    """Of the shipped calibrations, which are of pairs; models are left out by fitting again."""
    pairs = _static_groups(rows)
    held = [o for mine in pairs.values() for o in mine if held_out(o)]
    errors = {i: o.log_errors(_calibration(key(o)).factors) for i, o in enumerate(held)}
    yield _verdict("static batch E2E, unseen shape", _signed(errors, errors, "e2e"), None, None)
    yield _verdict("static batch E2E, unseen model, dense", unseen[1], 0.09, 0.06)
    yield _verdict("static batch E2E, unseen device", _static_unseen_devices(pairs), 0.14, 0.12)
    inside = []
    for one in held:
        low, high = predict(one.case, shipped()).bands["e2e"]
        inside.append(low <= one.e2e <= high)
    yield _in_band("static batch E2E inside the 90 % band, unseen shape", inside)


def _static_unseen_devices(pairs):
    """Each device is forecast with the median of its vendor's others and the literature."""
    signed = []
    for (device, engine, scope), rows in pairs.items():
        vendor = accelerators()[device].vendor
        relatives = [
            c.factors
            for c in shipped()
            if (c.scope, c.engine) == (scope, engine)
            and c.device in accelerators()
            and c.device != device
            and accelerators()[c.device].vendor == vendor
        ]
        if relatives:
            vectors = [factors.vector() for factors in (*relatives, hierarchy.PRIOR)]
            middle = Factors.of(np.median(vectors, axis=0))
            errors = {i: o.log_errors(middle) for i, o in enumerate(sample(rows, 60))}
            signed += list(_signed(errors, errors, "e2e"))
    return np.array(signed)


def _static_groups(rows):
    return {k: mine for k, mine in groups(rows).items() if k[1] != "llama.cpp"}


def _static_unseen_models(static):
    """(rows, signed errors) of forecasts by fits to the other models of the same device and engine."""
    tasks, tests = [], []
    for (device, engine, scope), rows in _static_groups(static).items():
        vendor = accelerators()[device].vendor
        prior = choose([c for c in shipped() if c.device == of_vendor(vendor)], "", vendor, engine, scope).factors
        for name in sorted({o.case.model.id for o in rows if not o.case.model.experts}):
            (mine,) = {architecture(o) for o in rows if o.case.model.id == name}
            others = [o for o in rows if architecture(o) != mine]
            if others:
                tasks.append((sample(others, 50), prior))
                tests.append(sample([o for o in rows if o.case.model.id == name], 40))
    with ProcessPoolExecutor(2) as workers:
        fitted = list(workers.map(_refit, tasks))
    errors = [o.log_errors(f) for f, rows in zip(fitted, tests, strict=True) for o in rows]
    signed = _signed(dict(enumerate(errors)), range(len(errors)), "e2e")
    return [o for rows in tests for o in rows], signed


def _refit(task):
    return fitting.fit(*task, rounds=5)


def _where(online, blind, unseen):
    every = range(len(online))
    phases = [o for mine in _pairs_of_phases().values() for o in mine]
    late = _phases(blind, phases)
    parts = {
        "online E2E, unseen model": (online, _signed(blind.model, every, "e2e")),
        "online TTFT, unseen model": (online, _signed(blind.model, every, "ttft")),
        "disaggregated TTFT": (phases, _signed(late, late, "ttft")),
        "static batch E2E, unseen model": unseen,
    }
    yield "The groups of rows that make most of a mean. Points are what one adds to it; the bias is a median."
    for what, (rows, signed) in parts.items():
        yield ""
        yield f"**{what}**: {WHY[what]}"
        yield ""
        yield "| model | device | engine | rows | mean | bias | points |"
        yield "|---|---|---|---|---|---|---|"
        by_group = defaultdict(list)
        for one, error in zip(rows, signed, strict=True):
            by_group[one.case.model.id, one.case.device.id, one.case.engine].append(error)
        worst = sorted(by_group.items(), key=lambda item: -np.abs(item[1]).sum())[:GROUPS]
        for (model, device, engine), errors in worst:
            sizes, points = np.abs(errors), 100 * np.abs(errors).sum() / len(signed)
            shape = f"{_percent(sizes.mean())} | {100 * np.median(errors):+.0f} % | {points:.1f}"
            yield f"| {model} | {device} | {engine} | {len(errors)} | {shape} |"
    yield ""
    yield from WHY_OTHERS.splitlines()


def _covered(rows, errors, unit, metric):
    """Whether each value lies in the band that all rows of other units with its engine give, and how wide that is."""
    inside, widths = [], []
    for name in sorted({unit(o) for o in rows}):
        mine = [i for i, o in enumerate(rows) if unit(o) == name and metric in errors[i]]
        for engine in sorted({rows[i].case.engine for i in mine}):
            others = [i for i, o in enumerate(rows) if unit(o) != name and o.case.engine == engine]
            others = others or [i for i, o in enumerate(rows) if unit(o) != name]
            if unit is architecture:
                relatives = [i for i, o in enumerate(rows) if unit(o) != name]
                band = hierarchy.model_bands(rows, errors, others, relatives)[metric]
            else:
                band = fitting.spreads([errors[i] for i in others])[metric]
            for i in mine:
                if rows[i].case.engine == engine and abs(errors[i][metric]) < fitting.WORST:
                    inside.append(band.low <= errors[i][metric] <= band.high)
                    widths.append(band.high - band.low)
    return inside, widths


def _by_work(rows):
    """Rows that differ in their widths and the number of requests in flight only."""
    by_work = defaultdict(list)
    for i, one in enumerate(rows):
        case = one.case
        work = (case.device.id, case.engine, architecture(one), case.precision, case.input_len, case.output_len)
        by_work[work].append(i)
    return by_work.values()


def _picks(rows, errors):
    """Of each set of configurations the one with most tokens that keeps a limit by its forecast, as `recommend` picks.

    The limits are the quartiles of what was measured. The room that a confidence takes comes from other models' rows.
    """
    room = {}
    for engine, name in {(o.case.engine, architecture(o)) for o in rows}:
        rest = [i for i, o in enumerate(rows) if architecture(o) != name]
        others = [i for i in rest if rows[i].case.engine == engine]
        room[engine, name] = hierarchy.model_bands(rows, errors, others or rest, rest)["tpot"].high
    for confidence, what in ((0.9, "with 90 % confidence"), (0.5, "by the forecast as it is")):
        kept, lost, none = [], [], 0
        for mine in (work for work in _by_work(rows) if len(work) >= 4):
            spare = NormalDist().inv_cdf(confidence) / NormalDist().inv_cdf(0.95) * room[_pair_of(rows[mine[0]])]
            forecast = {i: rows[i].tpot * math.exp(-errors[i]["tpot"]) for i in mine}
            for limit in np.quantile([rows[i].tpot for i in mine], (0.25, 0.5, 0.75)):
                able = [i for i in mine if forecast[i] * math.exp(spare) <= limit]
                none += not able
                if not able:
                    continue
                pick = max(able, key=lambda i: _tokens(rows[i], errors[i]))
                kept.append(rows[pick].tpot <= limit)
                best = max(_tokens(rows[i]) for i in mine if rows[i].tpot <= limit)
                lost += [1.0 - _tokens(rows[pick]) / best] if kept[-1] else []
        share, loss = float(np.mean(kept)), float(np.mean(lost))
        verdicts = ["", ""]
        if confidence > 0.5:
            verdicts = ["reached" if share >= 0.9 else "**missed**", "reached" if loss <= 0.05 else "**missed**"]
        also = f"none in {none} more" if none else ""
        cells = f"{len(kept)} | {_percent(share)} | {also} | 90 % | | {verdicts[0]}"
        yield f"| recommendation {what} keeps its TPOT limit | {cells} |"
        cells = f"{len(lost)} | {_percent(loss)} | | 5 % | | {verdicts[1]}"
        yield f"| … and loses of the best throughput that keeps it | {cells} |"


def _pair_of(one):
    return one.case.engine, architecture(one)


def _tokens(one, errors=None):
    """Output tokens/s of each device, measured or forecast."""
    factor = {metric: math.exp(-errors[metric]) if errors else 1.0 for metric in ("ttft", "tpot")}
    length = one.case.output_len
    seconds = one.ttft * factor["ttft"] + (length - 1) * one.tpot * factor["tpot"]
    return one.case.concurrency * length / seconds / one.case.devices


def _taus(rows, errors, metric):
    """Rank correlation over the configurations of one model and length, and how many there are."""
    taus, weights = [], []
    for mine in _by_work(rows):
        if len(mine) < 4 or any(abs(errors[i][metric]) == fitting.WORST for i in mine):
            continue
        measured = [getattr(rows[i], metric) for i in mine]
        predicted = [value * math.exp(-errors[i][metric]) for i, value in zip(mine, measured, strict=True)]
        tau = kendalltau(predicted, measured).statistic
        if np.isfinite(tau):
            taus.append(tau)
            weights.append(len(mine))
    return taus, weights


def _ordered(rows, errors, apart):
    """(share, number) of pairs of configurations, measured so far apart, that the forecasts put in the right order."""
    right = []
    for mine in (work for work in _by_work(rows) if len(work) >= 4):
        for a, b in combinations(mine, 2):
            measured = math.log(rows[a].tpot / rows[b].tpot)
            if abs(measured) > math.log1p(apart):
                forecast = measured - errors[a]["tpot"] + errors[b]["tpot"]
                right.append(measured * forecast > 0)
    return float(np.mean(right)), len(right)


def _by_pair(rows, blind):
    yield "| device | engine | own file | rows | metric | mean | median | bias | p90 | Kendall τ |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for device, engine in sorted({(o.case.device.id, o.case.engine) for o in rows}):
        mine = [i for i, o in enumerate(rows) if (o.case.device.id, o.case.engine) == (device, engine)]
        own = "yes" if (device, engine) in blind.own else "no"
        for metric in ("ttft", "tpot"):
            values = _signed(blind.model, mine, metric)
            taus, weights = _taus([rows[i] for i in mine], [blind.model[i] for i in mine], metric)
            tau = f"{np.average(taus, weights=weights):.2f}" if taus else "–"
            yield f"| {device} | {engine} | {own} | {len(mine)} | {metric.upper()} | {_distribution(values)} | {tau} |"


def _static_pairs(rows):
    yield "| device | engine | rows | metric | mean | median | bias | p90 |"
    yield "|---|---|---|---|---|---|---|---|"
    for pair, mine in groups(rows).items():
        errors = {i: o.log_errors(_calibration(pair).factors) for i, o in enumerate(mine) if held_out(o)}
        yield f"| {pair[0]} | {pair[1]} | {len(errors)} | E2E | {_distribution(_signed(errors, errors, 'e2e'))} |"


def _distribution(values):
    sizes = np.abs(values)
    middle = f"{_percent(np.median(sizes))} | {100 * np.median(values):+.1f} %"
    return f"{_percent(sizes.mean())} | {middle} | {_percent(np.quantile(sizes, 0.9))}"


def _kept_out(rows):
    for mark, why in REASONS.items():
        yield f"- {len(load('silicon', mark))} rows {why}."
    bad = sum(bool(physics.forbidden(o)) for o in rows)
    yield f"- {bad} of the other {len(rows)} rows are faster than their device can be at the peaks of its datasheet."
    yield "- Runs that another dump holds, too, count once; runs whose number of replicas is not stated do not count."


def _replays():
    yield "RTX PRO 6000, vLLM 0.19, calibrated from kernel times and the first hundred requests of the Llama run; the"
    yield "other two hundred of each run are compared. Qwen3-30B-A3B ran on two devices with data-parallel attention;"
    yield "nothing was fitted to that run, nor to any other that deals experts out over two such devices."
    yield ""
    yield "| run | metric | mean: forecast, measured | error of the mean | of the 99th percentile | per request |"
    yield "|---|---|---|---|---|---|"
    factors = choose(shipped(), "rtxpro6000", "nvidia", "vllm", "online").factors
    for name in RUNS:
        for metric, (found, real) in play(name, factors, start=100).items():
            tail = np.quantile(found, 0.99) / np.quantile(real, 0.99) - 1
            yield (
                f"| {name} | {metric.upper()} | {found.mean():.3g} s, {real.mean():.3g} s"
                f" | {100 * (found.mean() / real.mean() - 1):+.1f} % | {100 * tail:+.1f} %"
                f" | {_percent(np.abs(found / real - 1).mean())} |"
            )


def _open_loop(argv):
    yield "vLLM 0.15.1 on H100 under constant rates, prefix cache on (inference-sim/sim-to-real-accuracy-validation"
    yield "dcec3fd; it has no licence, so its rows are not kept here and this part needs `--open-loop FOLDER`). Runs"
    yield "whose clients gave up are left out. Peers on these runs, whole-run E2E and TTFT means, as it has them:"
    yield "Vidur 9 and 18 % (four runs), BLIS 7 and 18 %, AIConfigurator 17 and 809 %, LLMServingSim 38 and over 70 %."
    yield ""
    if "--open-loop" not in argv:
        yield "Not measured in this run."
        return
    folder = Path(argv[argv.index("--open-loop") + 1])
    yield from openloop.table(folder, _calibration(("h100-sxm", "vllm", "online")).factors)


def _kernels():
    yield "H100, vLLM 0.24.0, kernels of 30 microseconds and more, as aiconfigurator-core 0.12.0 has them; nothing was"
    yield "fitted to these. Shares of the datasheet's peaks and biases are medians; the forecast is that of the shipped"
    yield "calibration for vLLM on H100, which was fitted to serving runs."
    yield ""
    rows = kernel_check.read(DATA / "kernels-h100.csv.gz")
    yield from kernel_check.table(rows, "h100-sxm", _calibration(("h100-sxm", "vllm", "online")).factors)
    yield ""
    yield "All-reduces of 8 KiB to 256 MiB in one node, of the same source, by the constants of the literature, which"
    yield "were chosen by these kernels; calibrations for servers are held near them."
    yield ""
    yield from kernel_check.all_reduces(kernel_check.read(DATA / "all-reduce.csv.gz"), Factors())


def _speed():
    yield "On two shared cores; the job and its peers' figures stand in `tests/bench/simulator_speed.py`."
    yield ""
    yield from _module(Path(__file__).parents[1] / "simulator_speed.py").rows()


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _papers():
    yield "Requests/s of one saturated instance in OpenTela's first experiment; nothing was fitted to these, or to A100"
    yield "with 80 GB and GH200 at all."
    yield ""
    yield "| model | device | measured | forecast | error |"
    yield "|---|---|---|---|---|"
    instances = _module(Path(__file__).parents[3] / "examples" / "opentela" / "instances.py")
    for model_id, prompt, answer, tp, measured in instances.CASES:
        for device, value in measured.items():
            found = instances.forecast(model_id, device, prompt, answer, tp)
            yield f"| {model_id} | {device} | {value} | {found:.2f} | {100 * (found / value - 1):+.0f} % |"


def _disaggregated(found):
    yield "Factors of single servers of the same maker and engine, used for pairs; nothing was fitted to these rows."
    yield ""
    yield "| device | engine | rows | TTFT mean (median) | TPOT mean (median) | refused |"
    yield "|---|---|---|---|---|---|"
    for (device, engine, _), mine in _pairs_of_phases().items():
        errors = _phases(found, mine)
        ttft, tpot = (_signed(errors, errors, metric) for metric in METRICS[:2])
        cells = [f"{_percent(np.abs(v).mean())} ({_percent(np.median(np.abs(v)))})" for v in (ttft, tpot)]
        yield f"| {device} | {engine} | {len(mine)} | {cells[0]} | {cells[1]} | {int((tpot == -1.0).sum())} |"


def _targets_of_pairs(found):
    errors = _phases(found, [o for mine in _pairs_of_phases().values() for o in mine])
    yield _verdict("disaggregated TPOT", _signed(errors, errors, "tpot"), 0.25, 0.10)
    yield _verdict("disaggregated TTFT", _signed(errors, errors, "ttft"), 0.50, 0.25)


def _pairs_of_phases():
    return groups([o for o in load("silicon") if o.case.mode == "disagg"])


def _phases(found, rows):
    factors = [found.whole.factors(o.case.device, o.case.engine, hierarchy.OWN) for o in rows]
    return {i: o.log_errors(f) for i, (o, f) in enumerate(zip(rows, factors, strict=True))}


def _verdict(what, values, must, aim):
    if not len(values):
        return f"| {what} | 0 | – | – | | | not measured |"
    values = np.abs(values)
    mean = float(np.nanmean(values))
    verdict = "" if must is None else "aim reached" if mean <= aim else "reached" if mean <= must else "**missed**"
    bounds = ("", "") if must is None else (_percent(must, 0), _percent(aim, 0))
    middle = _percent(np.nanmedian(values))
    return f"| {what} | {len(values)} | {_percent(mean)} | {middle} | {bounds[0]} | {bounds[1]} | {verdict} |"


def _percent(value, digits=1):
    return f"{100 * value:.{digits}f} %"


if __name__ == "__main__":
    began = time.monotonic()
    code = main(sys.argv[1:])
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
