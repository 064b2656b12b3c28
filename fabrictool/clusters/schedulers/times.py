"""Times as schedulers write them, and options that a user may pass through where options have one letter."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Collection

    from fabrictool.clusters.schedulers.protocol import Job

_LENGTH = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+)")
_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?")


def local_clock(at: float, offset: str, form: str) -> str:
    """The wall second `at` in the time zone `offset` (``+0100``), written as `form` says."""
    sign = -1 if offset.startswith("-") else 1
    shift = sign * (int(offset[1:3]) * 3600 + int(offset[3:5]) * 60)
    return time.strftime(form, time.gmtime(at + shift))


def parse_clock(text: str, offset: str, form: str) -> float | None:
    """The inverse; None for what is no such time."""
    try:
        return datetime.strptime(f"{text.strip()} {offset}", f"{form} %z").timestamp()
    except ValueError:
        return None


def parse_length(text: str) -> float | None:
    """Seconds of ``HH:MM:SS``, ``MM:SS`` or seconds; None for anything else."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def parse_limit(text: str) -> float | None:
    """Seconds of Slurm's ``D-HH:MM:SS``, ``HH:MM:SS`` or ``MM:SS``; None for ``infinite`` and other words."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = match.groups()
    hours, minutes, seconds = (first, second, third) if third is not None else ("0", first, second)
    return int(days or 0) * 86400.0 + int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def passed_options(job: Job, ours: Collection[str]) -> list[tuple[str, str]]:
    """The user's options, sorted; raises FT1149 for one of `ours`, which decide what the job is and when it ends."""
    for name in job.options:
        if name in ours:
            hint = "fabrictool itself sets what marks a job as its own and lets it run only once"
            raise FabrictoolError.of("FT1149", f"`{name}` is not allowed as a job option", hint=hint)
    return sorted(job.options.items())
