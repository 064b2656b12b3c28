"""What ``calibrate`` does: measurements in, calibration files out."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.catalog import accelerators
from fabrictool.cli.output import data, json_data, say, table
from fabrictool.cli.simulating import architectures
from fabrictool.simulator import sheet
from fabrictool.simulator.calibration import Calibration, choose, dumps, shipped
from fabrictool.simulator.fitting import Observation, fit, hull, spreads

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.simulator.calibration import Scope

LEAST = 4
"""Measurements of one device and engine below which a fit would only repeat them."""
FOLDS = 4


def calibrate(source: Path, output: Path, *, as_json: bool) -> int:
    """One file for each device, engine and way of measuring that has enough rows."""
    try:
        text = source.read_text("utf-8-sig")
    except OSError as error:
        raise file_error(error, source) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT2130", f"{source} is not UTF-8 text: {error}") from error
    groups, bad = _observations(text)
    for line in bad[:20]:
        say(line)
    if not groups:
        raise InvalidInputError.of("FT2147", f"no row of {source} is a usable measurement ({len(bad)} are not)")
    summary = []
    for (device, engine, scope), found in sorted(groups.items()):
        if len(found) < LEAST:
            say(f"{device} × {engine}: {len(found)} measurements are too few ({LEAST} at least); left out")
            continue
        prior = choose(shipped(), device, accelerators()[device].vendor, engine, scope)
        say(f"fitting {device} × {engine} ({scope}) to {len(found)} measurements …")
        # What a fold says of the others is an honest error; the file's factors then use every row.
        errors = []
        for fold in range(FOLDS):
            others = fit([one for i, one in enumerate(found) if i % FOLDS != fold], prior.factors, rounds=6)
            errors += [one.log_errors(others) for one in found[fold::FOLDS]]
        before = [one.log_errors(prior.factors) for one in found]
        factors = fit(found, prior.factors)
        one = Calibration(
            device,
            engine,
            scope,
            factors,
            spreads(errors),
            {},
            hull(found),
            len(found),
            "1",
            "calibrate " + "".join(c if c.isalnum() or c in ".-_ " else "_" for c in source.name),
        )
        path = output / f"{device}-{engine}-{scope}.toml"
        write_atomic(path, dumps(one).encode())
        summary.append((device, engine, scope, len(found), _mean(before), _mean(errors), str(path)))
    if as_json:
        names = ("device", "engine", "scope", "measurements", "error_before", "error_after", "file")
        json_data(
            {
                "format_version": "1",
                "type": "calibration",
                "calibrations": [dict(zip(names, row, strict=True)) for row in summary],
                "unusable_rows": len(bad),
            }
        )
    else:
        headings = ("device", "engine", "scope", "rows", "error before", "after (unseen)", "file")
        data(table(headings, [[*map(str, r[:4]), f"{r[4]:.1%}", f"{r[5]:.1%}", r[6]] for r in summary]))
    return 0 if summary else 65


def _observations(text: str) -> tuple[dict[tuple[str, str, Scope], list[Observation]], list[str]]:
    _, rows = sheet.read(text)
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
        groups[case.device.id, case.engine, case.scope].append(Observation(case, **measured))
    return groups, bad


def _seconds(row: dict[str, str], metric: str) -> float:
    try:
        value = float(row.get(f"{metric}_ms") or "nan")
    except ValueError:
        return math.nan
    return value / 1e3 if math.isfinite(value) and value > 0 else math.nan


def _mean(errors: list[dict[str, float]]) -> float:
    every = [abs(math.exp(-value) - 1) for one in errors for value in one.values()]
    return sum(every) / max(1, len(every))
