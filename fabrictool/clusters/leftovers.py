"""What fabrics left on a site and none of them uses: found, and removed, by one program on its login node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.schedulers import shell

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.schedulers.protocol import Scheduler

SECONDS = 600.0
"""Counting and removing a hundred thousand small files on a parallel file system takes its time."""
LeftoverKind = Literal["run", "environment", "upload", "cache"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """One file or folder."""

    kind: LeftoverKind
    octets: int
    days: int
    """Since it was changed last."""
    path: str
    """Below the site's folder."""


def leftovers(
    cluster: str, folder: str, connection: Connection, scheduler: Scheduler, *, keep_days: int, remove: bool
) -> list[Leftover]:
    """What is there, or with `remove` what was: the program decides and removes in one go.

    Run folders that are younger than `keep_days` stay: their logs may still be asked for.

    Raises
    ------
    FabrictoolError
        FT5109 the scheduler does not answer, FT5407 the answer was cut.
    """
    argv = ["sh", "-c", shell.prune_program(scheduler), "ft-prune", folder, "-", "remove" if remove else "list"]
    done = connection.run([*argv, str(keep_days)], timeout_s=SECONDS)
    thing = f"cluster/{cluster}"
    if done.status != 0:
        why = done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.status}"
        message = f"nothing was removed, for the scheduler does not say which jobs live: {why}"
        raise UnreachableError.of("FT5109", message, thing=thing, transient=True)
    lines = done.stdout.decode(errors="replace").splitlines()
    if lines[-1:] != ["@end"]:
        hint = "run the command again"
        raise FabrictoolError.of("FT5407", "the answer was cut off", thing=thing, hint=hint, transient=True)
    return [_leftover(line, thing) for line in lines if not line.startswith("@")]


def _leftover(line: str, thing: str) -> Leftover:
    word, _, rest = line.partition("\t")
    numbers = rest.split("\t", 2)
    kind = next((known for known in get_args(LeftoverKind) if known == word), None)
    if kind is None or len(numbers) != 3 or not all(number.lstrip("-").isdecimal() for number in numbers[:2]):
        raise FabrictoolError.of("FT5401", f"the login node printed {line[:120]!r}", thing=thing)
    return Leftover(kind, int(numbers[0]) * 1024, int(numbers[1]), numbers[2])
