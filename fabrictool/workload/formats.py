"""Public traces and our own, recognised by their columns. A bad row is dropped and counted, never guessed.

Known: Azure LLM inference 2023 and 2024, BurstGPT 1 and 2, Mooncake, the Swiss AI serving trace, ShareGPT-style
conversations, splitwise-sim, our own lines (`trace.dumps`) and the records of our gateways. Columns are found by
name, in any order.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.prefixes import BLOCK_TOKENS
from fabrictool.workload.reuse import chains
from fabrictool.workload.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fabrictool.workload.trace import Ints

CHARACTERS_PER_TOKEN = 4.0
"""For conversations that come as text: the usual figure for English and byte-pair vocabularies."""
LONGEST = 10_000_000
FURTHEST = 1e12
"""Seconds from the epoch; what lies further away is no time."""
LOOKED_AT = 1000
"""Rows that are searched for known columns: the first ones may be broken."""
FAILED = ("fail", "error", "abort", "cancel", "timeout", "reject")


@dataclass(frozen=True, slots=True)
class Format:
    """Where a trace keeps what. Names are compared in lower case; the first that is there counts."""

    id: str
    title: str
    time: tuple[str, ...]
    scale: float
    """Seconds of one unit of `time`; 0: a date."""
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    model: tuple[str, ...] = ()
    prefix: str = ""
    block: int = 0
    finish: tuple[str, ...] = ()
    """When the answer ended, in the unit of `time`."""
    took: tuple[str, ...] = ()
    """Or how long it took, seconds."""
    status: str = ""
    ttft: tuple[str, ...] = ()
    """How long the first token took, seconds."""
    reuse: tuple[str, str, str] | None = None
    """A request's id, that of an earlier one whose prompt began alike, and how many tokens both have in common."""


RECORDS = Format(
    "records",
    "fabrictool's request records",
    ("at",),
    1.0,
    ("prompt_tokens",),
    ("completion_tokens",),
    ("model",),
    took=("e2e_s",),
    status="status",
    ttft=("ttft_s",),
    block=BLOCK_TOKENS,
    reuse=("id", "prefix_of", "prefix_tokens"),
)
FORMATS = (
    Format(
        "own", "fabrictool", ("t",), 1.0, ("in",), ("out",), ("model",), "prefix", 16, took=("latency",), ttft=("ttft",)
    ),
    RECORDS,
    Format("azure", "Azure LLM inference trace", ("timestamp",), 0.0, ("contexttokens",), ("generatedtokens",)),
    Format(
        "burstgpt",
        "BurstGPT",
        ("timestamp",),
        1.0,
        ("request tokens",),
        ("response tokens",),
        ("model",),
        took=("elapsed time",),
    ),
    Format("mooncake", "Mooncake", ("timestamp",), 1e-3, ("input_length",), ("output_length",), (), "hash_ids", 512),
    Format(
        "swiss-ai",
        "Swiss AI serving trace",
        ("created_at",),
        0.0,
        ("reported_token_input",),
        ("reported_token_output",),
        ("model",),
        finish=("finished_at",),
        status="status",
    ),
    Format("splitwise", "splitwise-sim", ("arrival_timestamp",), 1.0, ("prompt_size",), ("token_size",)),
    Format("aibrix", "AIBrix lengths", ("timestamp_ms",), 1e-3, ("prompt_len",), ("output_len",)),
)


def read(text: str, name: str = "the trace") -> Trace:
    """A trace from text. Raises InvalidInputError FT2201 when no known format fits or no row is usable."""
    rows, dropped = _rows(text)
    first = list(islice(rows, LOOKED_AT))
    if not first:
        raise InvalidInputError.of("FT2201", f"{name} has no requests ({_counts(dropped)})")
    if any("conversations" in row for row in first):
        return _conversations(chain(first, rows), dropped, name)
    return _collect(_recognise(first, name), chain(first, rows), dropped, name)


def of_records(rows: Iterable[Mapping[str, Any]], name: str, dropped: Counter[str]) -> Trace:
    """A trace from the fields of request records, in any order, and what else was `dropped`. Raises FT2201 where none
    is usable.
    """
    return _collect(RECORDS, rows, dropped, name)


def _rows(text: str) -> tuple[Iterator[Mapping[str, Any]], Counter[str]]:
    """Rows of JSON lines, a JSON array or CSV, with lower-case names; and the counter of what could not be read."""
    dropped: Counter[str] = Counter()
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("["):
        try:
            document = json.loads(start)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError.of("FT2201", f"this is not JSON: {error}") from error
        return _objects(document, dropped), dropped
    if start.startswith("{"):
        return _json_lines(start, dropped), dropped
    return _csv_lines(start, dropped), dropped


def _objects(document: Iterable[Any], dropped: Counter[str]) -> Iterator[Mapping[str, Any]]:
    for row in document:
        if isinstance(row, dict):
            yield _lower(row)
        else:
            dropped["not an object"] += 1


def _csv_lines(text: str, dropped: Counter[str]) -> Iterator[Mapping[str, Any]]:
    """A line is a row: no known trace has line breaks in a cell, and a stray quote must not swallow what follows."""
    names: list[str] | None = None
    for line in io.StringIO(text, newline=""):
        try:
            alone = csv.reader([line, "\n"])
            cells = next(alone)
        except csv.Error:
            dropped["not CSV"] += 1
            continue
        if alone.line_num > 1:  # a quote that is still open takes the next line, too
            dropped["not CSV"] += 1
        elif names is None:
            names = cells
        elif cells:
            yield _lower(dict(zip(names, cells, strict=False)))


def _json_lines(text: str, dropped: Counter[str]) -> Iterator[Mapping[str, Any]]:
    # Not splitlines: JSON may have U+2028 and its like within strings.
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            dropped["not JSON"] += 1
            continue
        yield from _objects([row], dropped)


def _lower(row: Mapping[Any, Any]) -> Mapping[str, Any]:
    return {str(key).strip().lower(): value for key, value in row.items() if key is not None}


def _recognise(rows: list[Mapping[str, Any]], name: str) -> Format:
    for row in rows:
        for known in FORMATS:
            if all(any(n in row for n in names) for names in (known.time, known.prompt, known.output)):
                return known
    columns = ", ".join(sorted(rows[0])[:20])
    raise InvalidInputError.of(
        "FT2201",
        f"{name} is in no known trace format; its columns are {columns[:200]}",
        hint=f"known: {', '.join(f.title for f in FORMATS)}, ShareGPT; or columns t, in, out",
    )


def _collect(known: Format, rows: Iterable[Mapping[str, Any]], dropped: Counter[str], name: str) -> Trace:
    times, prompts, outputs, which, latency, ttft = [], [], [], [], [], []
    prefixes: list[list[Any]] = []
    shared: list[tuple[str, str, int]] = []
    models: dict[str, int] = {}
    block = None
    for row in rows:
        if known.status and _failed(row.get(known.status)):
            dropped["failed requests"] += 1
            continue
        time = _time(_first(row, known.time), known.scale)
        prompt, output = _tokens(_first(row, known.prompt)), _tokens(_first(row, known.output))
        if time is None:
            dropped["no time"] += 1
            continue
        if prompt is None or output is None:
            dropped["no token count"] += 1
            continue
        ids = row.get(known.prefix)
        ids = ids if isinstance(ids, list) else []
        if ids and (size := _tokens(row.get("block"))):
            block = block or size
            if size != block:
                dropped["another block size"] += 1
                continue
        times.append(time)
        prompts.append(prompt)
        outputs.append(output)
        which.append(models.setdefault(_name(_first(row, known.model)), len(models)))
        end, took = _time(_first(row, known.finish), known.scale), _time(_first(row, known.took), 1.0)
        latency.append(end - time if end is not None and end >= time else _positive(took))
        ttft.append(_positive(_time(_first(row, known.ttft), 1.0)))
        prefixes.append(ids)
        if known.reuse:
            own, earlier, common = (row.get(column) for column in known.reuse)
            shared.append((str(own or ""), str(earlier or ""), _tokens(common) or 0))
    if not times:
        raise InvalidInputError.of("FT2201", f"{name}: no usable row ({_counts(dropped)})")
    order = np.argsort(np.array(times), kind="stable")
    arrival = np.array(times)[order]
    start: Ints | None = None
    blocks: Ints | None = None
    if any(common for *_, common in shared):
        start, blocks = _reused([shared[i] for i in order], [prompts[i] for i in order], known.block)
    elif any(prefixes):
        start, blocks = _prefixes([prefixes[i] for i in order], dropped)
    return Trace(
        arrival=arrival - arrival[0],
        prompt=np.array(prompts, dtype=np.int64)[order],
        output=np.array(outputs, dtype=np.int64)[order],
        models=tuple(models) if len(models) > 1 or "" not in models else ("",),
        model=np.array(which, dtype=np.int64)[order] if len(models) > 1 else None,
        chain_start=start,
        chain=blocks,
        block_tokens=(block or known.block) if blocks is not None else 0,
        latency=np.array(latency)[order] if np.isfinite(latency).any() else None,
        ttft=np.array(ttft)[order] if np.isfinite(ttft).any() else None,
        dropped=dict(+dropped),
    )


def _reused(shared: list[tuple[str, str, int]], prompts: list[int], block: int) -> tuple[Ints, Ints]:
    ids, earlier, common = zip(*shared, strict=True)
    return chains(ids, earlier, [tokens // block for tokens in common], [tokens // block for tokens in prompts])


def _prefixes(named: list[list[Any]], dropped: Counter[str]) -> tuple[Any, Any]:
    """Block ids, renumbered densely in order of appearance.

    Equal ids mean equal text up to there, so no request has one twice: where one comes again, its chain ends, which is
    counted, and the rest of its prompt is its own. The request itself is as good as any other.
    """
    dense: dict[Any, int] = {}
    flat: list[int] = []
    start = [0]
    for ids in named:
        numbers = [dense.setdefault(json.dumps(block), len(dense)) for block in ids]
        unique = _until_repeated(numbers)
        dropped["prefix chains cut at a repeated id"] += len(unique) < len(numbers)
        flat += unique
        start.append(len(flat))
    chain = np.unique(np.array(flat, dtype=np.int64), return_inverse=True)[1]
    return np.array(start, dtype=np.int64), chain.astype(np.int64)


def _until_repeated(numbers: list[int]) -> list[int]:
    seen: set[int] = set()
    for at, number in enumerate(numbers):
        if number in seen:
            return numbers[:at]
        seen.add(number)
    return numbers


def _conversations(rows: Iterable[Mapping[str, Any]], dropped: Counter[str], name: str) -> Trace:
    """ShareGPT: each turn of the assistant is a request; there are no times, so one request per second is assumed."""
    prompts, outputs = [], []
    for row in rows:
        turns = row.get("conversations")
        history = 0
        if not isinstance(turns, list):
            dropped["no conversation"] += 1
            continue
        for turn in turns:
            text = turn.get("value") if isinstance(turn, dict) else None
            if not isinstance(text, str):
                dropped["no text"] += 1
                continue
            tokens = max(1, round(len(text) / CHARACTERS_PER_TOKEN))
            if str(turn.get("from", "")).lower() in ("gpt", "assistant") and history:
                prompts.append(history)
                outputs.append(tokens)
            history += tokens
    if not prompts:
        raise InvalidInputError.of("FT2201", f"{name}: no conversation has an answer ({_counts(dropped)})")
    return Trace(
        arrival=np.arange(len(prompts), dtype=float),
        prompt=np.array(prompts, dtype=np.int64),
        output=np.array(outputs, dtype=np.int64),
        dropped=dict(dropped),
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _tokens(value: Any) -> int | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if math.isfinite(number) and 1 <= number <= LONGEST else None


def _time(value: Any, scale: float) -> float | None:
    if value is None:
        return None
    try:
        if scale:
            return _near(float(value) * scale)
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            # Epochs come in seconds or milliseconds; nobody served language models before 1973.
            return _near(number / 1e3 if number > 1e11 else number)
        text = str(value).strip().replace(" ", "T", 1).replace("Z", "+00:00")
        if "." in text:  # Azure writes seven digits
            whole, _, rest = text.partition(".")
            digits = rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
            text = f"{whole}.{digits[:6]:0<6}{rest[len(digits) :]}"
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _near(seconds: float) -> float | None:
    return seconds if abs(seconds) <= FURTHEST else None  # NaN is not either


def _positive(seconds: float | None) -> float:
    return seconds if seconds is not None and seconds >= 0 else math.nan


def _name(value: Any) -> str:
    """A model's name that can be written anywhere, lone surrogates of broken JSON included."""
    return str(value or "").encode("utf-8", "replace").decode()


def _failed(status: Any) -> bool:
    """Whether a status says that no answer was given; an unknown word does not."""
    text = str(status or "").lower()
    return (text.isdecimal() and int(text[:9]) >= 400) or any(word in text for word in FAILED)


def _counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in dropped.items()) or "nothing dropped"
