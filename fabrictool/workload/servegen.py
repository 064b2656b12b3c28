"""ServeGen's clients (Alibaba, NSDI 2026; data under Apache-2.0) as a stream of requests.

A folder holds two files a client. ``chunk-N-trace.csv`` has no header and a row
``start,rate,cv,distribution,shape,scale`` a window of usually ten minutes; idle windows have no distribution.
``chunk-N-dataset.json`` maps the start of usually six hours to probabilities of token counts, each written as a text
``{808: 0.0009, …}``.

Each client's window is a stationary renewal process with the measured rate and coefficient of variation, so that the
expected number of requests is rate × length even for bursty clients. The file's shape and scale are not used: in one of
seven windows of the language models their mean gap is off the measured rate by a factor of 1.5 or more.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.arrivals import CVS, RATES, weibull_shape
from fabrictool.workload.lengths import LONGEST
from fabrictool.workload.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

Family = Literal["Gamma", "Weibull"]
FILE = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)")
MOST_REQUESTS = 10_000_000
"""More would not fit in the memory of a login node."""
LAST_WINDOW = 600.0
"""Seconds of a client's only window; others end where the next one begins, the last one is as long as that before."""
FURTHEST = 1e9
"""Seconds that a recording lasts at most."""
MISSING = 0.01
"""Probability that may be missing from a distribution, or be too much, before it counts as broken."""


@dataclass(frozen=True, slots=True)
class Pmf:
    """How probable token counts are."""

    tokens: Ints
    cumulative: Floats
    """Ascending to 1."""

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        return self.tokens[np.searchsorted(self.cumulative, rng.random(count), side="right")]


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """What one client does between two times, seconds."""

    client: int
    start: float
    end: float
    rate: float
    """Requests/s."""
    cv: float
    """Of the gaps."""
    family: Family
    prompt: Pmf
    output: Pmf


@dataclass(frozen=True, slots=True)
class Clients:
    """The windows of a folder in which requests come."""

    windows: tuple[ClientWindow, ...]
    span: tuple[float, float]
    """Seconds between which requests are drawn; idle windows count, too."""
    dropped: Mapping[str, int]
    """Why clients and windows were left out → how many."""


def read(folder: Path, hours: tuple[float, float] | None = None) -> Clients:
    """The clients in a folder, between two `hours` of the recording.

    Clients that cannot be used are counted and left out. Raises InvalidInputError FT2204 when none is left, OSError
    when the folder cannot be listed.
    """
    low, high = (3600.0 * hours[0], 3600.0 * hours[1]) if hours else (0.0, math.inf)
    files_of: dict[int, dict[str, Path]] = {}
    for path in folder.iterdir():
        if match := FILE.fullmatch(path.name):
            files_of.setdefault(int(match[1]), {})[match[2]] = path
    dropped: Counter[str] = Counter()
    windows: list[ClientWindow] = []
    spans = []
    for client, files in sorted(files_of.items()):
        try:
            rows, span = _rows(_text(files, "trace.csv", "trace"))
            lengths = _Lengths(_text(files, "dataset.json", "dataset"))
            inside = [row for row in rows if row[0] < high and row[1] > low]
            mine = [
                ClientWindow(client, start, end, rate, cv, family, *pair)
                for start, end, rate, cv, family in inside
                if (pair := lengths.at(start)) is not None
            ]
        except _BrokenError as error:
            dropped[f"clients {error}"] += 1
            continue
        if len(mine) < len(inside):
            dropped["windows without lengths"] += len(inside) - len(mine)
        windows += mine
        spans.append(span)
    if not spans:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "no chunk-N-trace.csv"
        raise InvalidInputError.of("FT2204", f"{folder} has no usable clients ({why})")
    start, end = max(low, min(s for s, _ in spans)), min(high, max(e for _, e in spans))
    if not windows:
        raise InvalidInputError.of("FT2204", f"{folder}: no client sends anything in these hours")
    return Clients(tuple(windows), (start, end), dict(dropped))


def draw(clients: Clients, seed: int, rate: float | None = None) -> Trace:
    """Requests of all clients; with `rate` every client is that much busier or calmer, so that it is their mean.

    The same seed gives the same requests, and at the same `rate` a client the same ones whatever others and hours there
    are; times count from the first. Raises InvalidInputError FT2202 for a rate that cannot be, FT2204 for too many
    requests or none.
    """
    low, high = clients.span
    expected = sum(w.rate * (min(w.end, high) - max(w.start, low)) for w in clients.windows)
    if rate is not None and not RATES[0] <= rate <= RATES[1]:
        raise InvalidInputError.of("FT2202", f"a rate of {rate:g} requests/s cannot be played")
    scale = 1.0 if rate is None else rate * (high - low) / expected
    if expected * scale > MOST_REQUESTS:
        raise InvalidInputError.of(
            "FT2204",
            f"that would be {expected * scale:.3g} requests; at most {MOST_REQUESTS:,} are drawn",
            hint="use fewer --hours, or a lower --rate",
        )
    times, prompts, outputs = [], [], []
    for window in clients.windows:
        rng = np.random.default_rng([seed, window.client, round(window.start)])
        at = window.start + _renewals(window.family, window.rate * scale, window.cv, window.end - window.start, rng)
        inside = (at >= low) & (at < high)
        times.append(at[inside])
        prompts.append(window.prompt.draw(len(at), rng)[inside])
        outputs.append(window.output.draw(len(at), rng)[inside])
    arrival = np.concatenate(times)
    if not len(arrival):
        raise InvalidInputError.of("FT2204", "these hours gave no requests", hint="use more --hours")
    order = np.argsort(arrival, kind="stable")
    return Trace(
        arrival=arrival[order] - arrival[order[0]],
        prompt=np.concatenate(prompts)[order],
        output=np.concatenate(outputs)[order],
        dropped=clients.dropped,
    )


def _renewals(family: Family, rate: float, cv: float, length: float, rng: np.random.Generator) -> Floats:
    """Times in [0, length) of a stationary renewal process: it did not begin at 0, but has always been going on.

    Its first gap is the rest of one that 0 fell into, longer gaps more likely than shorter ones.
    """
    mean = 1.0 / rate
    if family == "Gamma":
        shape = cv**-2.0
        unit = mean / shape
        hit = rng.gamma(shape + 1.0) * unit
    else:
        shape = weibull_shape(cv)
        unit = mean / math.gamma(1.0 + 1.0 / shape)
        hit = rng.gamma(1.0 + 1.0 / shape) ** (1.0 / shape) * unit
    at = hit * rng.random()
    parts = [np.array([at])]
    while at < length:
        count = 16 + math.ceil(1.1 * (length - at) * rate)
        gaps = rng.gamma(shape, unit, count) if family == "Gamma" else rng.weibull(shape, count) * unit
        parts.append(at + np.cumsum(gaps))
        at = float(parts[-1][-1])
    times = np.concatenate(parts)
    return np.asarray(times[times < length])


class _BrokenError(Exception):
    """Why a client cannot be used."""


def _text(files: Mapping[str, Path], name: str, what: str) -> str:
    if name not in files:
        raise _BrokenError(f"without a {what}")
    try:
        return files[name].read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _BrokenError(f"with an unreadable {what}") from error


def _rows(text: str) -> tuple[list[tuple[float, float, float, float, Family]], tuple[float, float]]:
    """(start, end, rate, cv, family) of the busy windows, and when the first began and the last ended."""
    cells = [line.split(",") for line in text.splitlines() if line.strip()]
    try:
        starts = [float(row[0]) for row in cells]
        # The shape and scale are read only to see that the row is whole.
        numbers = [(float(rate), float(cv), float(a), float(b)) for _, rate, cv, _, a, b in cells]
    except (ValueError, IndexError) as error:
        raise _BrokenError("with a broken trace") from error
    if not starts or not starts[0] >= 0 or not starts[-1] < FURTHEST or not all(a < b for a, b in pairwise(starts)):
        raise _BrokenError("with a broken trace")
    ends = [*starts[1:], starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else LAST_WINDOW)]
    busy: list[tuple[float, float, float, float, Family]] = []
    for start, end, row, (rate, cv, _, _) in zip(starts, ends, cells, numbers, strict=True):
        family = row[3].strip()
        if not family and rate == 0:
            continue
        if family not in ("Gamma", "Weibull") or not (RATES[0] <= rate <= RATES[1] and 0 <= cv < math.inf):
            raise _BrokenError("with a broken trace")
        known: Family = "Gamma" if family == "Gamma" else "Weibull"
        # One window in a thousand has a cv that double precision cannot reproduce.
        busy.append((start, end, rate, min(max(cv, CVS[0]), CVS[1]), known))
    return busy, (starts[0], ends[-1])


class _Lengths:
    """The distributions of one client, read when they are needed: a client has megabytes of them."""

    def __init__(self, text: str) -> None:
        try:
            document = json.loads(text)
            self._by_start = {int(start): fields for start, fields in sorted(document.items(), key=lambda f: int(f[0]))}
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise _BrokenError("with a broken dataset") from error
        self._known: dict[int, tuple[Pmf, Pmf] | None] = {}

    def at(self, start: float) -> tuple[Pmf, Pmf] | None:
        """(prompt, output) of the last six hours that began before and are not empty; None before the first."""
        for key in reversed(self._by_start):
            if key > start:
                continue
            if key not in self._known:
                fields = self._by_start[key]
                if not isinstance(fields, dict) or not {"input_tokens", "output_tokens"} <= set(fields):
                    raise _BrokenError("without input_tokens and output_tokens")
                prompt, output = _pmf(fields["input_tokens"]), _pmf(fields["output_tokens"])
                self._known[key] = (prompt, output) if prompt and output else None
            if (pair := self._known[key]) is not None:
                return pair
        return None


def _pmf(written: Any) -> Pmf | None:
    """A distribution from ``{808: 0.25, 874: 0.75}``; None for an empty one. A count of 0 is taken as 1."""
    if not isinstance(written, str):
        raise _BrokenError("with a broken dataset")
    body = written.strip().removeprefix("{").removesuffix("}").strip()
    if not body:
        return None
    try:
        table = np.array(body.replace(":", ",").split(","), dtype=float)
        tokens, shares = table.reshape(-1, 2).T
    except ValueError as error:
        raise _BrokenError("with a broken dataset") from error
    whole = (tokens == np.rint(tokens)) & (tokens >= 0) & (tokens <= LONGEST)
    total = shares.sum()
    # NaN fails every one of these.
    if not (whole.all() and (shares >= 0).all() and abs(total - 1.0) <= MISSING):
        raise _BrokenError("with a broken dataset")
    return Pmf(np.maximum(tokens, 1).astype(np.int64), np.cumsum(shares / total))
