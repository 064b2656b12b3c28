"""Requests that were recorded: a trace in a file, or a gateways' store of request records."""

from __future__ import annotations

import math
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.workload.recorded import read_trace

if TYPE_CHECKING:
    from fabrictool.gateway.store import RecordStore
    from fabrictool.workload.trace import Trace

_SQLITE = b"SQLite format 3\0"
_REFERENCE = re.compile(r"secret:/+")
"""How a `Path` writes ``secret://``."""


# Wide: what to choose from a store.
def read_requests(
    source: Path, *, since: str = "", until: str = "", model: str = "", replica: str = "", alone: bool = False
) -> Trace:
    """A trace in any known format, or the requests of a store: a SQLite file, or a reference to a database's address.

    `since` and `until` (see `moment`), `model` and `replica` choose from a store alone; `alone`: they must be of one
    replica.

    Raises
    ------
    UsageError
        FT9001.
    InvalidInputError
        FT2150 where several replicas answered, FT2201 where it is no trace or has no request, FT4301 for a file that
        cannot be read, FT812x for a store.
    """
    if not is_store(source):
        if replica:
            raise UsageError.of("FT9001", f"{source} is a trace, which does not say what answered", hint="--replica")
        if since or until:
            raise UsageError.of("FT9001", f"{source} is a trace, whose requests have no day", hint="--start, --end")
        return read_trace(source)
    from fabrictool.gateway.demand import Choice, recorded, replicas

    begin, end = window(since, until)
    store = open_store(as_given(source))
    try:
        chosen = Choice(begin, end, model, replica)
        if alone and len(names := replicas(store, chosen)) > 1:
            several = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            message = f"{as_given(source)} has requests that {len(names)} replicas answered"
            raise InvalidInputError.of("FT2150", message, hint=f"choose one with --replica: {several}")
        return recorded(store, as_given(source), chosen)
    finally:
        store.close()


def is_store(source: Path) -> bool:
    """Whether it is a store of records rather than a trace. Raises FT43xx for a file that cannot be read."""
    if _REFERENCE.match(str(source)):
        return True
    try:
        with source.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise file_error(error, source) from error


def as_given(source: Path) -> str:
    return _REFERENCE.sub("secret://", str(source), count=1)


def open_store(text: str) -> RecordStore:
    """For reading: a SQLite file, or a reference. Raises FT8120 to FT8122, FT14xx for a reference, FT9001."""
    from fabrictool.base.units import UnitError
    from fabrictool.blueprint.secrets import resolve
    from fabrictool.domain.secrets import SecretRef
    from fabrictool.gateway.store import RecordStore

    if not text.startswith("secret://"):
        return RecordStore(str(Path(text).absolute()), read_only=True)
    try:
        reference = SecretRef.parse(text)
    except UnitError as error:
        raise UsageError.of("FT9001", error.message, hint=error.hint) from error
    return RecordStore(resolve(reference, os.environ), read_only=True)


def window(since: str, until: str) -> tuple[float, float]:
    """Wall times; where nothing is said, all that there is."""
    now = time.time()
    begin = moment(since, now, "--since") if since else -math.inf
    return max(begin, 0.0), moment(until, now, "--until") if until else now + 1.0


def moment(text: str, now: float, option: str) -> float:
    """Wall time of a day, of a time in ISO 8601 (UTC where it says no zone), or of so long ago. Raises FT9001."""
    from fabrictool.base.units import Duration, UnitError

    try:
        there = datetime.fromisoformat(text)
        return (there if there.tzinfo is not None else there.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        pass
    try:
        return now - float(Duration.parse(text))
    except UnitError as error:
        raise UsageError.of(
            "FT9001", f"{option} {text}: neither a day nor a duration", hint="2026-11-01, or 7d"
        ) from error
