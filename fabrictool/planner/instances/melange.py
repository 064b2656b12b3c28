r"""Which GPUs to rent for a histogram of requests: the problem of Mélange (Griggs et al., 2024), read from its JSON.

Each bucket of the histogram, requests of one (input, output) size, comes at a rate of its own; each GPU type serves it
at up to a throughput of its own, and a GPU that serves several buckets shares its time among them. Mélange cuts every
bucket into equal slices and gives each to one GPU type; what a type then has to do decides how many GPUs of it are
rented, and the price of all is minimised.

Nothing obliges a bucket to be cut into slices: routing sends any share of it anywhere. So `exact` lets shares
:math:`x_{bj}` be fractions, of which Mélange's slices are a special case. For GPU types j and buckets b with prices
:math:`c_j`, rates :math:`\lambda_b` and throughputs :math:`t_{bj}` it minimises :math:`\sum_j c_j n_j` subject to
:math:`\sum_j x_{bj} = 1`, :math:`\sum_b x_{bj} \lambda_b / t_{bj} \le n_j`, :math:`x \ge 0` and whole :math:`n`. Only
the GPU counts are whole numbers, so the proof is quick. `sliced` is Mélange's own problem, for comparison, with slices
of one bucket counted instead of told apart.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fabrictool.base.errors import InfeasibleError, InvalidInputError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["exact", "sliced"]
FORM = (
    "gpu_info: {NAME: {cost, tputs}}, workload_distribution, total_request_rate, slice_factor; tputs and"
    " workload_distribution are matrices of one shape, input sizes × output sizes"
)
MOST = 1e9
"""Larger prices, rates and throughputs are slips."""
MOST_SLICES = 10_000


@dataclass(frozen=True, slots=True)
class GpuType:
    """What one GPU of a kind costs and does."""

    name: str
    cost: float
    """Per hour."""
    throughputs: tuple[float, ...]
    """By bucket, requests/s of one GPU that does nothing else; 0: it does not serve them."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem of Mélange's."""

    gpus: tuple[GpuType, ...]
    rates: tuple[float, ...]
    """By bucket, requests/s."""
    slices: int
    """Equal parts that `sliced` cuts each bucket into."""


@dataclass(frozen=True, slots=True)
class Rental:
    """How many GPUs of each type to rent, and how busy they will be."""

    counts: tuple[int, ...]
    """By GPU type."""
    loads: tuple[float, ...]
    """By GPU type, in GPUs: how much of the count is busy."""
    cost: float
    bound: float
    """Nothing that serves all requests is cheaper."""
    optimal: bool


def read(text: str, file: str) -> Instance:
    """The problem in a JSON document of Mélange's form.

    Raises InvalidInputError FT2020 when it is not JSON, FT2021 for each field that is missing or impossible.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        place = Place(file=file, line=error.lineno, column=error.colno)
        raise InvalidInputError(Complaint("FT2020", f"not JSON: {error.msg}", place, FORM)) from error
    except RecursionError as error:
        raise InvalidInputError.of("FT2020", "not JSON: nested too deeply", file=file, hint=FORM) from error
    reader = _Reader(file)
    instance = reader.instance(document)
    if reader.complaints:
        raise InvalidInputError(reader.complaints)
    return instance


def solve(instance: Instance, kind: Kind, *, seconds: float, seed: int) -> Rental:
    """The cheapest GPUs. Raises InfeasibleError FT2022 for a bucket that no GPU serves, and as `Program.minimise`."""
    unserved = [
        b for b, rate in enumerate(instance.rates) if rate > 0 and not any(g.throughputs[b] for g in instance.gpus)
    ]
    if unserved:
        raise InfeasibleError.of(
            "FT2022",
            f"no GPU type serves bucket {', '.join(map(str, unserved[:5]))} (counted from 0, row by row)",
            hint="its throughput is 0 everywhere: leave the bucket out, or add a GPU type",
        )
    program = Program(whole=True)
    counts = [program.column(0, math.inf, whole=True) for _ in instance.gpus]
    loads: list[list[tuple[int, float]]] = [[] for _ in instance.gpus]
    for b, rate in enumerate(instance.rates):
        parts = 1 if kind == "exact" else instance.slices
        shares = []
        for j, gpu in enumerate(instance.gpus):
            if rate > 0 and gpu.throughputs[b] > 0:
                column = program.column(0, parts, whole=kind == "sliced")
                shares.append((column, 1.0))
                loads[j].append((column, rate / parts / gpu.throughputs[b]))
        if shares:
            program.row(parts, parts, shares)
    for count, load in zip(counts, loads, strict=True):
        program.row(-math.inf, 0, [*load, (count, -1.0)])
    prices = [(column, gpu.cost) for column, gpu in zip(counts, instance.gpus, strict=True)]
    answer = program.minimise(prices, seconds=seconds, seed=seed)
    if answer is None:
        message = "more GPUs always help, and yet there is no solution"
        raise RuntimeError(message)
    busy = tuple(math.fsum(w * float(answer.values[c]) for c, w in load) for load in loads)
    chosen = tuple(round(float(answer.values[column])) for column in counts)
    cost = math.fsum(count * gpu.cost for count, gpu in zip(chosen, instance.gpus, strict=True))
    return Rental(chosen, busy, cost, min(cost, answer.bound), answer.optimal)


class _Reader:
    """Collects what is wrong with a document."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.complaints: list[Complaint] = []

    def instance(self, document: Any) -> Instance:
        """The problem; nonsense when there are complaints."""
        if not isinstance(document, dict):
            self._wrong("the document", "is not an object")
            return Instance((), (), 1)
        known = ("gpu_info", "workload_distribution", "total_request_rate", "slice_factor")
        for name in sorted(set(document) - set(known)):
            self._wrong(name, "is not a field of this form")
        shares, shape = self._matrix("workload_distribution", document.get("workload_distribution"))
        rate = self._number("total_request_rate", document.get("total_request_rate"))
        slices = document.get("slice_factor", 1)
        if isinstance(slices, bool) or not isinstance(slices, int) or not 1 <= slices <= MOST_SLICES:
            self._wrong("slice_factor", f"is {_shown(slices)}, not a whole number from 1 to {MOST_SLICES}")
        gpus = tuple(self._gpus(document.get("gpu_info"), shape))
        return Instance(gpus, tuple(share * rate for share in shares), slices)

    def _gpus(self, given: Any, shape: tuple[int, int]) -> Iterator[GpuType]:
        if not isinstance(given, dict) or not given:
            self._wrong("gpu_info", "is not an object with GPU types")
            return
        for name, gpu in given.items():
            where = f"gpu_info.{name}"
            if not isinstance(gpu, dict):
                self._wrong(where, "is not an object with cost and tputs")
                continue
            cost = self._number(f"{where}.cost", gpu.get("cost"))
            throughputs, size = self._matrix(f"{where}.tputs", gpu.get("tputs"))
            if 0 not in (*size, *shape) and size != shape:
                self._wrong(f"{where}.tputs", f"is {size[0]} × {size[1]}, the histogram is {shape[0]} × {shape[1]}")
            yield GpuType(name, cost, tuple(throughputs))

    def _matrix(self, where: str, given: Any) -> tuple[list[float], tuple[int, int]]:
        """Its numbers row by row and its shape; (0, 0) when it is none."""
        rows = given if isinstance(given, list) and all(isinstance(row, list) for row in given) else []
        widths = {len(row) for row in rows}
        if len(widths) != 1 or 0 in widths:
            self._wrong(where, "is not a matrix: a list of lists of equal length")
            return [], (0, 0)
        numbers = [
            self._number(f"{where}[{i}][{j}]", value) for i, row in enumerate(rows) for j, value in enumerate(row)
        ]
        return numbers, (len(rows), widths.pop())

    def _number(self, where: str, given: Any) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < MOST:
            self._wrong(where, f"is {_shown(given)}, not a number from 0 to {MOST:g}")
            return 0.0
        return float(given)

    def _wrong(self, where: str, what: str) -> None:
        hint = None if self.complaints else FORM
        self.complaints.append(Complaint("FT2021", f"{where} {what}", Place(file=self._file, thing=where), hint))


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, default=str)
    return text if len(text) < 40 else f"{text[:37]}…"
