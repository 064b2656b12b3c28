"""What a store of records says of the demand: requests to play again, and each model's sketches.

A request that its client cancelled is demand, though how long it took says nothing; one that failed is not counted, for
nobody knows how long its answer would have been.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import case, func, literal, select

from fabrictool.gateway.tables import DEMANDED, IS_DEMAND, PROFILES, REQUESTS
from fabrictool.workload.formats import of_records
from fabrictool.workload.profile import HOUR_S, Demanded, DemandSketch, merge, sketched

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import ColumnElement

    from fabrictool.gateway.store import RecordStore
    from fabrictool.workload.profile import Hours
    from fabrictool.workload.trace import Trace

MOST_REQUESTS = 2_000_000
"""The newest are read as a trace, which is held in memory: about a gigabyte."""
_of = REQUESTS.c
_NO_PREFIXES = (literal("").label("prefix_of"), literal(0).label("prefix_tokens"))
"""Of layouts that do not know them."""


class Choice(msgspec.Struct, frozen=True):
    """Records of ``since <= at < until`` (wall time, seconds)."""

    since: float
    until: float
    model: str = ""
    replica: str = ""
    """Both: empty for any."""

    @property
    def condition(self) -> ColumnElement[bool]:
        wanted = (_of.at >= self.since) & (_of.at < self.until)
        if self.model:
            wanted &= _of.model == self.model
        if self.replica:
            wanted &= _of.replica == self.replica
        return wanted


def replicas(store: RecordStore, choice: Choice) -> list[str]:
    """Names of those that answered; raises StoreAwayError."""
    query = select(_of.replica).where(choice.condition, IS_DEMAND).distinct().order_by(_of.replica)
    return [row[0] for row in store.read(query)]


def recorded(store: RecordStore, name: str, choice: Choice) -> Trace:
    """The requests with their prefix chains if they had any.

    Raises
    ------
    InvalidInputError
        FT2201 where there is none.
    StoreAwayError
        FT8120.
    """
    wanted = choice.condition
    columns: list[ColumnElement[Any]] = [func.count(), func.sum(case((IS_DEMAND, 1), else_=0))]
    ((every, demand),) = store.read(select(*columns).where(wanted))
    dropped = Counter(
        {
            "failed requests": every - int(demand or 0),
            f"older than the newest {MOST_REQUESTS:,}": max(0, int(demand or 0) - MOST_REQUESTS),
        }
    )
    times = [_of.end, _of.e2e_s, _of.ttft_s]
    prefixes = _NO_PREFIXES if store.layout < "0003" else (_of.prefix_of, _of.prefix_tokens)
    fields = (_of.id, _of.at, _of.model, _of.prompt_tokens, _of.completion_tokens, *times, *prefixes)
    query = select(*fields).where(wanted, IS_DEMAND).order_by(_of.at.desc()).limit(MOST_REQUESTS)
    names = [column.name for column in query.selected_columns]
    return of_records(_fields(names, store.stream(query)), name, dropped)


def demand_hours(store: RecordStore, *, since: float, until: float) -> Hours:
    """Sketches by model and hour of ``since <= at < until``: of records, and of hours whose records are forgotten and
    which began in that time. Raises StoreAwayError.
    """
    hours: Hours = {}
    of = PROFILES.c
    if store.layout >= "0003":
        forgotten = select(of.model, of.hour, of.document).where(of.hour * HOUR_S >= since, of.hour * HOUR_S < until)
        decode = msgspec.json.Decoder(DemandSketch).decode
        for model, hour, document in store.stream(forgotten):
            merge(hours, {(model, hour): decode(document)})
        columns: Sequence[Any] = DEMANDED
    else:
        columns = [_NO_PREFIXES[1] if column is _of.prefix_tokens else column for column in DEMANDED]
    query = select(*columns).where(_of.at >= since, _of.at < until, IS_DEMAND).order_by(_of.at)
    merge(hours, sketched(Demanded(*row) for row in store.stream(query)))
    return hours


def _fields(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        fields = dict(zip(names, row, strict=True))
        if fields["end"] != "answered":
            fields["e2e_s"] = fields["ttft_s"] = None
        yield fields
