"""What ``calibrate`` does: measurements in, calibration files out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UsageError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.catalog import accelerators
from fabrictool.cli.forecast_answers import CalibrationAnswer, CalibrationRow
from fabrictool.cli.interpreted import say_if_interpreted
from fabrictool.cli.interrupts import Interrupts
from fabrictool.cli.output import data, json_data, say, table
from fabrictool.cli.reading import read_requests
from fabrictool.cli.simulating import architectures
from fabrictool.simulator import replay, sheet
from fabrictool.simulator.calibration import Calibration, choose, dumps, shipped
from fabrictool.simulator.fitting import WORST, Observation, fit, hull, spreads
from fabrictool.simulator.physics import IMPOSSIBLE, forbidden
from fabrictool.simulator.stand import factors_on

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.catalog import Accelerator
    from fabrictool.simulator.calibration import Scope
    from fabrictool.simulator.stepmodel import Factors
    from fabrictool.workload.trace import Trace

    Errors = list[dict[str, float]]
    Row = tuple[str, str, str, int, float, float, str]

LEAST = 4
"""Measurements of one device and engine below which a fit would only repeat them."""
FOLDS = 4
LEAST_REQUESTS = 50
"""Compared requests of a run below which a fit would say little: a quarter of them has to judge the others."""
WORST_ERROR = 1.0
"""Mean error on unseen measurements above which a fit says nothing: forecasts of zero would be no worse."""
MOST_BAD = 20
"""Rows that cannot be used which are said one by one."""
MOST_REQUESTS = 20_000
"""Requests of a run that are played; a fit plays them some hundred times."""


def calibrate(source: Path, output: Path, *, as_json: bool) -> int:
    """One file for each device, engine and way of measuring that has enough rows; Ctrl-C writes none."""
    with Interrupts(at_once=True) as stop:
        return _calibrate(source, output, stop, as_json=as_json)


def _calibrate(source: Path, output: Path, stop: Interrupts, *, as_json: bool) -> int:
    try:
        text = source.read_text("utf-8-sig")
    except OSError as error:
        raise file_error(error, source) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT2130", f"{source} is not UTF-8 text: {error}") from error
    groups, bad = _observations(text)
    for line in bad[:MOST_BAD]:
        say(line)
    if len(bad) > MOST_BAD:
        say(f"… and {len(bad) - MOST_BAD} more rows that cannot be used")
    if not groups:
        raise InvalidInputError.of("FT2147", f"no row of {source} is a usable measurement ({len(bad)} rejected)")
    say_if_interpreted()
    useless: list[str] = []
    fitted: list[tuple[Calibration, Errors, Errors]] = []
    for (device, engine, scope), rows in sorted(groups.items()):
        if len(rows) < LEAST:
            say(f"{device} × {engine}: {len(rows)} measurements are too few ({LEAST} at least); left out")
            continue
        prior = _prior(accelerators()[device], engine, scope, rows[0].case.precision)
        say(f"fitting {device} × {engine} ({scope}) to {len(rows)} measurements …")
        # What a fold says of the others is an honest error; the file's factors then use every row.
        errors = []
        for fold in range(FOLDS):
            seen = [row for i, row in enumerate(rows) if i % FOLDS != fold]
            others = fit(seen, prior, rounds=6, progress=lambda _: stop.check())
            errors += [row.log_errors(others) for row in rows[fold::FOLDS]]
        if why := _useless(errors):
            useless.append(f"{device} × {engine}: {why}")
            say(f"{useless[-1]}; left out")
            continue
        before = [row.log_errors(prior) for row in rows]
        factors = fit(rows, prior, progress=lambda _: stop.check())
        calibration = Calibration(
            device,
            engine,
            scope,
            factors,
            spreads(errors),
            {},
            hull(rows),
            len(rows),
            "1",
            _source(source),
        )
        fitted.append((calibration, before, errors))
    if useless and not fitted:
        raise InvalidInputError.of("FT2152", "; ".join(useless))
    _tell([_written(calibration, output, *both) for calibration, *both in fitted], as_json, {"unusable_rows": len(bad)})
    return 0 if fitted else 65


# Wide: what was measured, on what, and which part of it counts.
def calibrate_records(
    source: Path,
    output: Path,
    configuration: dict[str, str],
    *,
    max_num_seqs: int | None,
    token_budget: int | None,
    replica: str,
    since: str,
    until: str,
    as_json: bool,
) -> int:
    """One file from the requests of a running replica; `configuration` are cells of a sheet (device, engine, …).

    `replica`, `since` and `until` choose from a store of records. Ctrl-C writes none.
    """
    with Interrupts(at_once=True) as stop:
        trace = read_requests(source, since=since, until=until, replica=replica, alone=True)
        say_if_interpreted()
        fitted, before, errors, told = _of_records(source, trace, configuration, max_num_seqs, token_budget, stop)
    _tell([_written(fitted, output, before, errors)], as_json, told)
    return 0


# Wide: what was measured, on what, and who may stop it.
def _of_records(
    source: Path,
    requests: Trace,
    configuration: dict[str, str],
    max_num_seqs: int | None,
    token_budget: int | None,
    stop: Interrupts,
) -> tuple[Calibration, Errors, Errors, dict[str, Any]]:
    """The calibration, the errors before it and those of unseen stretches, and what else to tell."""
    cells = {"input_len": "1", "output_len": "1", "concurrency": "1", **configuration}
    case = sheet.case_of(cells, architectures({cells["model"]}))
    trace = _of_one_model(requests, case.model.id, source)
    cut_off = max(0, len(trace) - MOST_REQUESTS)
    dropped = Counter(trace.dropped)
    if cut_off:
        trace = trace.only(slice(MOST_REQUESTS))
    given = len(trace) + sum(trace.dropped.values())
    run = replay.recorded(case, trace, max_num_seqs, token_budget)
    if len(run.refused):
        dropped["longer than the replica's cache"] += len(run.refused)
        trace = trace.only(np.setdiff1d(np.arange(len(trace)), run.refused))
        run = replay.recorded(case, trace, max_num_seqs, token_budget)
    late = int((run.usable & ~run.kept_up).sum())
    absurd = int(run.absurd.sum())
    without = len(trace) - int(run.usable.sum()) - absurd
    for why, count in (("no ttft and latency to compare with", without), ("an impossible ttft or latency", absurd)):
        if count:
            dropped[why] += count
    used = len(run.compared)
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(dropped.items())) or "none"
    counted = f"{late} arrived while the service did not keep up; dropped: {reasons}"
    if used < LEAST_REQUESTS:
        raise InvalidInputError.of("FT2150", f"{source}: {used} requests can be compared; {counted}")
    prior = _prior(case.device, case.engine, "online", case.precision)
    stretches = run.stretches()
    before = run.mean_errors(prior, stretches)
    if cut_off:
        say(f"only the first {MOST_REQUESTS:,} requests are played, the other {cut_off:,} are not")
    say(f"fitting {case.device.id} × {case.engine} to {used} of {given} requests …")
    say(counted)
    # As with rows, the error is that of parts which the fit had not seen; the file's factors use all.
    errors = []
    for fold in range(FOLDS):
        others = np.concatenate([stretch for i, stretch in enumerate(stretches) if i % FOLDS != fold])
        errors += run.mean_errors(replay.fit(run, others, prior, progress=stop.check), stretches[fold::FOLDS])
    if why := _useless(errors):
        raise InvalidInputError.of("FT2152", f"{source}: {why}")
    fitted = Calibration(
        case.device.id,
        case.engine,
        "online",
        replay.fit(run, run.compared, prior, progress=stop.check),
        spreads(errors),
        {},
        run.hull(),
        used,
        "1",
        _source(source),
    )
    return fitted, before, errors, {"dropped": dict(dropped), "overloaded": late}


def _prior(device: Accelerator, engine: str, scope: Scope, precision: str) -> Factors:
    """What forecasts go by until something is measured."""
    return factors_on(device, choose(shipped(), device.id, device.vendor, engine, scope), precision)


def _of_one_model(trace: Trace, model: str, source: Path) -> Trace:
    """The requests for one model, whatever the service calls it; the architecture's own name goes before."""
    if len(trace.models) == 1:
        return trace
    if model not in trace.models:
        several = ", ".join(trace.models[:5])
        raise InvalidInputError.of(
            "FT2150",
            f"{source} has requests for {several}, but none for {model}",
            hint="fabrictool trace export --model",
        )
    return trace.of_model(model)


def configured(device: str | None, engine: str | None, model: str | None, tp: int, precision: str) -> dict[str, str]:
    """What the records were measured on; empty for a sheet, whose rows say so. Raises UsageError FT9001 for a part."""
    given = {"device": device, "engine": engine, "model": model}
    missing = [f"--{name}" for name, value in given.items() if not value]
    if len(missing) == len(given):
        return {}
    if missing:
        raise UsageError.of("FT9001", f"records of requests also need {', '.join(missing)}")
    known = {name: value for name, value in given.items() if value}
    return {**known, "tp": str(tp), "precision": precision}


def _source(path: Path) -> str:
    return "calibrate " + "".join(c if c.isalnum() or c in ".-_ " else "_" for c in path.name)


def _written(
    calibration: Calibration, output: Path, before: list[dict[str, float]], after: list[dict[str, float]]
) -> Row:
    path = output / f"{calibration.device}-{calibration.engine}-{calibration.scope}.toml"
    write_atomic(path, dumps(calibration).encode())
    return (
        calibration.device,
        calibration.engine,
        calibration.scope,
        calibration.points,
        _mean(before),
        _mean(after),
        str(path),
    )


def _useless(errors: list[dict[str, float]]) -> str:
    """Why a fit with these errors must not be written; empty when it may."""
    error = _mean(errors)
    return (
        ""
        if error <= WORST_ERROR
        else f"forecasts of measurements that the fit had not seen are {error:.0%} off (n={len(errors)})"
    )


def _tell(summary: list[Row], as_json: bool, more: dict[str, Any]) -> None:
    if as_json:
        names = CalibrationRow.__struct_fields__
        calibrations = [msgspec.convert(dict(zip(names, row, strict=True)), CalibrationRow) for row in summary]
        json_data(CalibrationAnswer(calibrations=calibrations, **more))
    else:
        headings = ("device", "engine", "scope", "rows", "error before", "after (held out)", "file")
        data(table(headings, [[*map(str, r[:4]), f"{r[4]:.1%}", f"{r[5]:.1%}", r[6]] for r in summary]))
        say("to plan with them, name the files under `calibrations` in the inventory")


def _observations(text: str) -> tuple[dict[tuple[str, str, Scope], list[Observation]], list[str]]:
    _, rows = sheet.read(text, measured=True)
    models = architectures({row.get("model", "") for row in rows})
    groups: dict[tuple[str, str, Scope], list[Observation]] = defaultdict(list)
    bad = []
    for number, row in enumerate(rows, start=2):
        if row.get("error"):
            bad.append(f"row {number}: {row['error']}")
            continue
        try:
            case = sheet.case_of(row, models)
            measured = {m: _seconds(row, m) for m in ("ttft", "tpot", "e2e")}
        except FabrictoolError as error:
            bad.append(f"row {number}: {error.problems[0].code}: {error.problems[0].message}")
            continue
        if all(math.isnan(value) for value in measured.values()):
            bad.append(f"row {number}: FT2147: none of ttft_ms, tpot_ms, e2e_ms is a positive number")
            continue
        observation = Observation(case, **measured)
        if why := forbidden(observation):
            bad.append(f"row {number}: {IMPOSSIBLE}: {why}")
            continue
        groups[case.device.id, case.engine, case.scope].append(observation)
    return groups, bad


def _seconds(row: dict[str, str], metric: str) -> float:
    try:
        value = float(row.get(f"{metric}_ms") or "nan")
    except ValueError:
        return math.nan
    return value / 1e3 if math.isfinite(value) and value > 0 else math.nan


def _mean(errors: list[dict[str, float]]) -> float:
    """Mean relative error; a refusal counts as 100 %."""
    values = [value for row in errors for value in row.values()]
    every = [1.0 if value >= WORST else abs(math.exp(-value) - 1) for value in values]
    return sum(every) / len(every) if every else math.inf
