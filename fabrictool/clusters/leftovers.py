"""What fabrics left on a site and none of them uses: found, and removed, by one program on its login node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.schedulers import shell

if TYPE_CHECKING:
    from collections.abc import Collection

    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.schedulers.protocol import Scheduler

SECONDS = 600.0
"""Counting and removing a hundred thousand small files on a parallel file system takes its time."""
NO_SCHEDULER = 75
LeftoverKind = Literal["run", "adopted", "environment", "upload", "cache"]


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
    cluster: str,
    folder: str,
    connection: Connection,
    scheduler: Scheduler,
    *,
    keep_days: int,
    remove: Collection[Leftover] = (),
) -> list[Leftover]:
    """What is there; with `remove`, which of these were removed: what is in use by then stays.

    What was changed within `keep_days` stays, too: logs of run folders may still be asked for.

    Raises
    ------
    FabrictoolError
        FT5109 the scheduler does not answer, FT5406 something cannot be removed, FT5407 the answer was cut.
    """
    thing = f"cluster/{cluster}"
    verb = "remove" if remove else "list"
    argv = ["sh", "-c", shell.prune_program(scheduler), "ft-prune", folder, "-", verb, str(keep_days)]
    stdin = "".join(f"{item.path}\n" for item in remove).encode()
    done = connection.run(argv, stdin=stdin, timeout_s=SECONDS)
    why = done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.status}"
    if done.status == NO_SCHEDULER:
        message = f"nothing more is removed, because the scheduler does not say which jobs are alive: {why}"
        raise UnreachableError.of("FT5109", message, thing=thing, transient=True)
    if done.status != 0:
        raise FabrictoolError.of("FT5406", f"not all of it can be removed: {why}", thing=thing)
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
        raise FabrictoolError.of("FT5401", f"unexpected output of the login node: {line[:120]!r}", thing=thing)
    return Leftover(kind, int(numbers[0]) * 1024, int(numbers[1]), numbers[2])
