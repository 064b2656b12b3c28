"""Records that are old enough are forgotten; what they say of the models' demand is kept, hour by hour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import delete, insert, select, update

from fabrictool.gateway.tables import DEMANDED, IS_DEMAND, PROFILES, REQUESTS
from fabrictool.workload.profile import HOUR_S, Demanded, DemandSketch, sketched

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

MOST_HOURS = 24
"""Hours that are forgotten at a time: who was away for long must not hold the store for long."""


def forget(connection: Connection, fabric: str, before: float) -> int:
    """Forget the records of whole hours that ended at `before` (wall time, seconds) or earlier; returns how many.

    In one transaction: a record is either there or in its hour's sketch.
    """
    of, forgotten = REQUESTS.c, 0
    old = (of.fabric == fabric) & (of.at < before // HOUR_S * HOUR_S)
    for _ in range(MOST_HOURS):
        hour = connection.execute(select(of.hour).where(old).order_by(of.at).limit(1)).scalar()
        if hour is None:
            break
        # `at` has the index.
        mine = (of.fabric == fabric) & (of.at >= hour * HOUR_S) & (of.at < (hour + 1) * HOUR_S)
        rows = connection.execute(delete(REQUESTS).where(mine).returning(IS_DEMAND, *DEMANDED)).all()
        forgotten += len(rows)
        requests = sorted((Demanded(*row[1:]) for row in rows if row[0]), key=lambda request: request.at)
        for (model, _), sketch in sketched(requests).items():
            _add(connection, fabric, model, hour, sketch)
    return forgotten


def _add(connection: Connection, fabric: str, model: str, hour: int, sketch: DemandSketch) -> None:
    """To what is known of the hour: records may come late."""
    of = PROFILES.c
    row = (of.fabric == fabric) & (of.model == model) & (of.hour == hour)
    former = connection.execute(select(of.document).where(row)).scalar()
    if former is not None:
        sketch.merge(msgspec.json.decode(former, type=DemandSketch))
    document: dict[str, Any] = {"document": msgspec.json.encode(sketch).decode()}
    if former is not None:
        connection.execute(update(PROFILES).where(row).values(document))
    else:
        connection.execute(insert(PROFILES).values({"fabric": fabric, "model": model, "hour": hour} | document))
