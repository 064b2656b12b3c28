"""Plans that were saved for a review."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.plan import PLAN_API, decode_plan

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.domain.plan import Plan


def read_plan(path: Path) -> Plan:
    """A saved plan; raises FT4006 when the file is something else."""
    try:
        plan = decode_plan(path.read_bytes())
    except OSError as error:
        raise file_error(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "make one with `fabrictool plan -o FILE`"
        raise InvalidInputError.of("FT4006", f"not a saved plan: {error}", file=str(path), hint=hint) from error
    if plan.api != PLAN_API:
        raise InvalidInputError.of("FT4006", f"the plan has version {plan.api}, not {PLAN_API}", file=str(path))
    return plan
