"""How much more may be stored: the file system's free space, or what quotas leave of it; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def free_octets(sections: Mapping[str, Sequence[str]]) -> int:
    """The least of what ``weights-look.sh`` printed; 0 when nothing is known, 1 when a quota is used up.

    ``@space``: free KiB and the file system's name, of ``df``. ``@quota``: rows of ``quota -w``, of which those of that
    file system count. ``@lustre``: rows of ``lfs quota -q`` for the folder, of its user, group and project.
    """
    free, _, name = next(iter(sections.get("space", ())), "").partition(" ")
    left = [int(free)] if free.isdecimal() else []
    rows = [line for line in sections.get("quota", ()) if line.split()[:1] == [name]]
    for line in (*rows, *sections.get("lustre", ())):
        left += _left(line)
    return max(1, min(left) << 10) if left else 0


def _left(row: str) -> list[int]:
    """KiB below the lower limit of ``NAME USED SOFT HARD …``: a model outlasts the soft one's time of grace."""
    numbers = [word.strip("[]").rstrip("*") for word in row.split()[1:4]]
    if len(numbers) < 3 or not all(number.isdecimal() for number in numbers):
        return []
    used, *limits = map(int, numbers)
    limit = min((limit for limit in limits if limit), default=0)
    return [max(0, limit - used)] if limit else []
