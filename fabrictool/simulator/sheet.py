"""Cases as a CSV sheet: rows in, the same rows with forecasts out; a bad row is answered with a code."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.catalog.tables import accelerators, engines, model
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.cases import MODES, Case, PhaseWorkers, predict
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.slo import LatencyTarget
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS, Drafts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.catalog.architecture import ModelArchitecture
    from fabrictool.simulator.calibration import Calibration

REQUIRED = ("device", "model", "engine", "input_len", "output_len", "concurrency")
"""`rate` may take the place of the last."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "scheduler_recv_interval", "gpu_memory_utilization")
DRAFTS = ("draft_tokens", "draft_acceptance")
"""Speculative decoding: tokens guessed for each step, and the chance that a guess is right where all before it were."""
OPTIONAL = ("precision", "kv_precision", "tp", "pp", "ep", "dp", "mode", "rate", "price", *DRAFTS, *LIMITS)
TARGETS = ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
NOTES = ("id", "note", "version")
"""Columns that say nothing about the forecast; so do those whose name begins with ``note_``."""
PHASES = tuple(f"{phase}_{name}" for phase in ("prefill", "decode") for name in ("workers", "tp", "pp", "ep", "dp"))
RESULTS = ("ttft_ms", "tpot_ms", "e2e_ms", "tokens_per_s")
BANDS = ("ttft_lo", "ttft_hi", "tpot_lo", "tpot_hi", "e2e_lo", "e2e_hi")
QUANTILES = tuple(f"{metric}_{quantile}" for metric in ("ttft", "tpot", "e2e") for quantile in ("p50", "p90", "p99"))
FIGURES = (*QUANTILES, "requests_per_s", "attainment", "joules_per_token", "cost_per_million_tokens")
ANSWERS = (*RESULTS, *BANDS, *FIGURES, "error")
_SPELLINGS: Mapping[str, str] = {
    "system": "device",
    "hardware": "device",
    "gpu": "device",
    "backend": "engine",
    "isl": "input_len",
    "osl": "output_len",
    "batch_size": "concurrency",
    "kv_cache_precision": "kv_precision",
}
_ENGINES: Mapping[str, str] = {
    "trtllm": "tensorrt-llm",
    "trt-llm": "tensorrt-llm",
    "tensorrt_llm": "tensorrt-llm",
    "tensorrtllm": "tensorrt-llm",
    "llamacpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
    "deepspeed-mii": "deepspeed",
}
_PRECISIONS: Mapping[str, str] = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "nvfp4": "fp4",
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "fp8_block": "fp8",
    "e4m3": "fp8",
    "16": "bf16",
    "8": "fp8",
    "4": "int4",
}


def read(text: str, *, measured: bool = False) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows) of a sheet. Of measurements a cell in `error` says that there is none, and is kept; in a sheet
    of cases it is of an earlier forecast.

    Raises
    ------
    InvalidInputError
        FT2130 without the columns that every case needs, FT2135 for one that means nothing to us.
    """
    records = _records(text)
    header, whole = next(records, ([], True))
    if not whole:
        raise InvalidInputError.of("FT2130", "the first line of the sheet is not CSV")
    columns = [name.strip() for name in header]
    while columns and not columns[-1]:  # some programs end each line with a comma
        columns.pop()
    known = {_spelling(name) for name in columns}
    missing = [name for name in REQUIRED if name not in known and not (name == "concurrency" and "rate" in known)]
    if missing:
        raise InvalidInputError.of(
            "FT2130",
            f"the sheet lacks columns: {', '.join(missing)}",
            hint=f"needed: {', '.join(REQUIRED)}; optional: {', '.join((*OPTIONAL, *TARGETS, *PHASES))}",
        )
    unknown = [name or "one without a name" for name in columns if not _is_known(name)]
    if unknown:
        message = f"the sheet has columns that are not known: {', '.join(unknown)}"[:300]
        hint = f"known: {', '.join((*REQUIRED, *OPTIONAL, *TARGETS, *PHASES))}; measured: {', '.join(RESULTS[:3])};"
        raise InvalidInputError.of("FT2135", message, hint=f"{hint} your own: {', '.join(NOTES)}, note_…")
    for meaning, count in Counter(map(_spelling, columns)).items():
        if count > 1:
            twice = ", ".join(name for name in columns if _spelling(name) == meaning)
            raise InvalidInputError.of("FT2130", f"the sheet has {meaning} {count} times: {twice}")
    rows = []
    for cells, whole in records:
        row = dict.fromkeys(columns, "") | {name: cell.strip() for name, cell in zip(columns, cells, strict=False)}
        if not measured:
            row.pop("error", None)
        if not whole:
            row["error"] = "FT2131: the line is not CSV: an unclosed quote, or a very long cell"
        elif any(cells[len(columns) :]):
            row["error"] = "FT2131: more fields than columns"
        rows.append(row)
    return columns, rows


def _records(text: str) -> Iterator[tuple[list[str], bool]]:
    """(cells, whether the line can be read) of each line that is not empty; cells may hold line breaks.

    A quote that never closes, or closes where the number of cells shows that it is another's, costs its own line only.
    """
    # With an empty line at the end, a quote that is still open there takes that line, too.
    lines = [*io.StringIO(text, newline=""), "\n"]
    at, width = 0, 0
    while at < len(lines) - 1:
        try:
            reader = csv.reader(islice(lines, at, None))
            cells, used, whole = next(reader), reader.line_num, True
            if used > 1:
                strict = next(csv.reader(islice(lines, at, len(lines) - 1), strict=True))
                whole = len(strict) == (width or len(strict))
        except csv.Error:  # also for a cell of more than 128 KiB, which keeps the search for the other quote short
            whole = False
        if not whole:
            cells, used = _alone(lines[at]), 1
        if cells:
            yield cells, whole
            width = width or len(cells)
        at += used


def _alone(line: str) -> list[str]:
    """What can be told of the cells of a broken line."""
    try:
        return next(csv.reader([line]))
    except csv.Error:
        return [""]


def answer(
    rows: Sequence[Mapping[str, str]],
    calibrations: Sequence[Calibration],
    architectures: Mapping[str, ModelArchitecture] | None = None,
) -> Iterator[dict[str, str]]:
    """Each row with `ANSWERS` added; one that cannot be forecast keeps them empty, but for its error.

    `architectures` are further models beside the catalogue's, by what the sheet calls them.
    """
    for row in rows:
        done = {**row, **dict.fromkeys(ANSWERS, ""), "error": row.get("error", "")}
        if not done["error"]:
            try:
                done |= _forecast(case_of(row, architectures), calibrations)
            except FabrictoolError as error:
                problem = error.problems[0]
                done["error"] = f"{problem.code}: {problem.message}"
        yield done


def answered(
    rows: Sequence[Mapping[str, str]], own: Sequence[Calibration], architectures: Mapping[str, ModelArchitecture]
) -> list[dict[str, str]]:
    """`answer` for rows that were sent somewhere: after one's `own` calibrations come those that are shipped there."""
    return list(answer(rows, [*own, *shipped()], architectures))


def write(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    """The sheet as text: the given columns first, then the forecasts."""
    names = [*columns, *(name for name in ANSWERS if name not in columns)]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def case_of(row: Mapping[str, str], architectures: Mapping[str, ModelArchitecture] | None = None) -> Case:
    """One row as a case. Raises InvalidInputError FT2131-FT2134 that name the column."""
    cells = {_spelling(name): value for name, value in row.items() if value}
    is_open = cells.get("mode", "").lower() == "open" or ("rate" in cells and "mode" not in cells)
    for name in (*REQUIRED[:-1], "rate" if is_open else "concurrency"):
        if name not in cells:
            raise InvalidInputError.of("FT2131", f"{name} is empty")
    beside = "concurrency" if is_open else "rate"
    if beside in cells:
        hint = "a load is either requests/s (mode open) or requests in flight"
        raise InvalidInputError.of("FT2131", f"{beside} is {cells[beside]!r} beside the other kind of load", hint=hint)
    device = accelerators().get(cells["device"])
    if device is None:
        raise InvalidInputError.of("FT2132", f"no device {cells['device']!r} in the catalogue")
    architecture = (architectures or {}).get(cells["model"]) or model(cells["model"])
    if architecture is None:
        raise InvalidInputError.of("FT2133", f"no model {cells['model']!r} in the catalogue")
    engine = _ENGINES.get(cells["engine"].lower(), cells["engine"].lower())
    if engine not in engines():
        raise InvalidInputError.of("FT2134", f"no engine {cells['engine']!r} in the catalogue")
    mode = cells.get("mode", "open" if is_open else "agg").lower()
    if mode not in MODES:
        raise InvalidInputError.of("FT2131", f"mode is {mode!r}, not one of {', '.join(MODES)}")
    precision = _precision(cells.get("precision", ""), "bf16", OCTETS, "precision")
    narrow = "fp8" if OCTETS[precision] <= 1 and not engines()[engine].layer_split and "fp8" in device.flops else "bf16"
    if engines()[engine].compute_precision == "fp32":  # whatever the files hold, it is unpacked when it is loaded
        precision = narrow = "fp32"
    pools: dict[str, PhaseWorkers] = {}
    beside = next((name for name in PHASES if name in cells), "") if mode != "disagg" else ""
    if beside:
        hint = "prefill and decode are apart in mode disagg alone"
        raise InvalidInputError.of("FT2131", f"{beside} is {cells[beside]!r} in mode {mode}", hint=hint)
    if mode == "disagg":
        pools = {
            phase: PhaseWorkers(_cut(cells, f"{phase}_"), _whole(cells, f"{phase}_workers", 1))
            for phase in ("prefill", "decode")
        }
    return Case(
        device=device,
        model=architecture,
        engine=engine,
        precision=precision,
        kv_precision=_precision(cells.get("kv_precision", ""), narrow, KV_OCTETS, "kv_precision"),
        cut=_cut(cells, ""),
        input_len=_whole(cells, "input_len"),
        output_len=_whole(cells, "output_len"),
        concurrency=0 if is_open else _whole(cells, "concurrency"),
        mode=mode,
        rate=_positive(cells, "rate", 0.0),
        max_num_seqs=_whole(cells, "max_num_seqs", 0),
        max_num_batched_tokens=_whole(cells, "max_num_batched_tokens", 0),
        gpu_memory_utilization=_share(cells, "gpu_memory_utilization"),
        recv_interval=_whole(cells, "scheduler_recv_interval", 1),
        target=_target(cells),
        drafts=_drafts(cells),
        price=_positive(cells, "price", 0.0),
        prefill=pools.get("prefill"),
        decode=pools.get("decode"),
    )


def _forecast(case: Case, calibrations: Sequence[Calibration]) -> dict[str, str]:
    prediction = predict(case, calibrations)
    cells = {f"{metric}_ms": _figure(1e3 * getattr(prediction.estimate, metric)) for metric in ("ttft", "tpot", "e2e")}
    cells["tokens_per_s"] = _figure(prediction.estimate.tokens_per_s)
    for metric, (low, high) in prediction.bands.items():
        cells[f"{metric}_lo"], cells[f"{metric}_hi"] = _figure(1e3 * low), _figure(1e3 * high)
    full = prediction.report
    for name in QUANTILES:
        metric, _, quantile = name.partition("_")
        cells[name] = _figure(1e3 * full.latency[metric][quantile])
    cells["requests_per_s"] = _figure(full.finished / full.span_s)
    cells["attainment"] = _figure(full.attainment) if case.target else ""
    cells["joules_per_token"] = _figure(full.joules_per_token)
    cells["cost_per_million_tokens"] = _figure(full.cost_per_million_tokens) if case.price else ""
    if not prediction.estimate.tpot:  # no answer has a second token
        cells |= dict.fromkeys(("tpot_ms", "tpot_lo", "tpot_hi"), "")
    return cells


def _figure(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _spelling(name: str) -> str:
    """Our name of a column that other tools spell otherwise (``tp_size``, ``prefill_num_workers``, ``isl``)."""
    plain = name.strip().lower()
    plain = plain.removesuffix("_size") if plain not in _SPELLINGS else plain
    plain = plain.replace("num_workers", "workers").replace("attention_dp", "dp").replace("moe_ep", "ep")
    return _SPELLINGS.get(plain, _SPELLINGS.get(name.strip().lower(), plain))


def _is_known(name: str) -> bool:
    plain = _spelling(name)
    return (
        plain in (*REQUIRED, *OPTIONAL, *TARGETS, *PHASES, *NOTES)
        or plain.startswith("note_")
        or name in ANSWERS  # of an earlier forecast, or what was measured
    )


def _precision(text: str, default: str, known: Mapping[str, float], column: str) -> str:
    plain = text.lower()
    plain = _PRECISIONS.get(plain, plain) or default
    if plain not in known:
        raise InvalidInputError.of("FT2131", f"{column} is {text!r}, not one of {', '.join(known)}")
    return plain


def _cut(cells: Mapping[str, str], prefix: str) -> Parallelism:
    """Widths as they are written. Only a `dp` that is left out is filled in: with more expert ranks than `tp`,
    attention is replicated in groups, one for each `tp` of them.
    """
    tp, pp = (_whole(cells, f"{prefix}{name}", 1) for name in ("tp", "pp"))
    ep = 1 if cells.get(f"{prefix}ep") == "0" else _whole(cells, f"{prefix}ep", 1)  # engines say 0 for none
    groups = ep // tp if ep > tp and ep % tp == 0 else 1
    return Parallelism(tp, pp, ep, _whole(cells, f"{prefix}dp", groups))


def _target(cells: Mapping[str, str]) -> LatencyTarget | None:
    if not any(name in cells for name in TARGETS):
        return None
    ttft, tpot, e2e = (_positive(cells, name, math.inf) for name in TARGETS)
    return LatencyTarget(ttft / 1e3, tpot / 1e3, e2e / 1e3)


def _drafts(cells: Mapping[str, str]) -> Drafts | None:
    given = [name for name in DRAFTS if name in cells]
    if not given:
        return None
    if len(given) < len(DRAFTS):
        lacking = next(name for name in DRAFTS if name not in cells)
        hint = "engines' logs and metrics have it, such as vLLM's `vllm:spec_decode_num_accepted_tokens`"
        raise InvalidInputError.of("FT2131", f"{lacking} is empty beside {given[0]}", hint=hint)
    return Drafts(_whole(cells, "draft_tokens"), _share(cells, "draft_acceptance"))


def _share(cells: Mapping[str, str], name: str) -> float:
    value = _positive(cells, name, 0.0)
    if value > 1:
        raise InvalidInputError.of("FT2131", f"{name} is {cells[name]!r}, more than all of it", hint="such as 0.9")
    return value


def _positive(cells: Mapping[str, str], name: str, default: float) -> float:
    text = cells.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidInputError.of("FT2131", f"{name} is {text!r}, not a number above 0")
    return value


def _whole(cells: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = cells.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= 1e8:
        raise InvalidInputError.of("FT2131", f"{name} is {text!r}, not a whole number of at least 1")
    return int(value)
