"""``mesh members``, ``mesh paths`` and ``mesh records``: ask a unit once and print what it says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import UsageError
from fabrictool.cli.fabric_answers import FleetAnswer, RecordsAnswer
from fabrictool.cli.mesh_asking import ASK_S, LiveFleet
from fabrictool.cli.mesh_text import member_lines, path_lines, record_lines
from fabrictool.cli.output import data, json_data
from fabrictool.status.client import fetch_records
from fabrictool.status.fleet import OVER

if TYPE_CHECKING:
    from fabrictool.cli.source import Source
    from fabrictool.status.fleet import FleetQuery, FleetStatus


def show_members(source: Source, url: str, wanted: FleetQuery, *, everybody: bool, as_json: bool) -> None:
    """`everybody`: also those whose session is over."""
    view = _fleet(source, url)
    matching = [member for member in view.members if wanted.wants(member)]
    shown = [member for member in matching if everybody or member.state not in OVER]
    if as_json:
        json_data(FleetAnswer(document=msgspec.structs.replace(view, members=shown)))
    else:
        data("\n".join(member_lines(view, shown, len(matching) - len(shown), time.time())))


def show_paths(source: Source, url: str, *, as_json: bool) -> None:
    view = _fleet(source, url)
    if as_json:
        json_data(FleetAnswer(document=view))
    else:
        data("\n".join(path_lines(view, time.time())))


def show_records(source: Source, url: str, wanted: str, *, as_json: bool) -> None:
    """Those whose key or owner begins with `wanted`, or that are about it."""
    with LiveFleet(source, url) as fleet:
        view = fetch_records(fleet.url, timeout_s=ASK_S)
    rows = [r for r in view.rows if r.key.startswith(wanted) or r.about.startswith(wanted)]
    if wanted and not rows:
        raise UsageError.of("FT9009", f"no record has the key {wanted!r}", hint="`fabrictool mesh records` lists them")
    if as_json:
        json_data(RecordsAnswer(document=msgspec.structs.replace(view, rows=rows)))
    else:
        data("\n".join(record_lines(view, rows, time.time())))


def _fleet(source: Source, url: str) -> FleetStatus:
    with LiveFleet(source, url) as ask:
        return ask()
