"""What `apply` did, line by line, each line on disk before the step that it announces.

A journal belongs to one plan. ``intent`` stands before an action, ``done`` or ``failed`` after it, ``end`` after the
last. A journal without its end tells the next `apply` where to go on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.base.files import file_error
from fabrictool.planner.healing import Failures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabrictool.base.clock import Clock

EntryKind = Literal["begin", "intent", "started", "done", "failed", "capped", "interrupted", "end"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a journal."""

    at: float
    plan: str
    kind: EntryKind
    address: str = ""
    action: str = ""
    operation: str = ""
    text: str = ""


class Journal:
    """The journal of one plan."""

    def __init__(self, folder: Path, plan: str, clock: Clock) -> None:
        self._path = folder / f"{plan}.ndjson"
        self._plan = plan
        self._clock = clock

    def write(
        self,
        kind: EntryKind,
        *,
        address: str = "",
        action: str = "",
        operation: str = "",
        text: str = "",
    ) -> None:
        """Append a line and wait until it is on disk; raises FT4301 or FT4302 when it cannot be."""
        entry = Entry(
            at=self._clock.wall(),
            plan=self._plan,
            kind=kind,
            address=address,
            action=action,
            operation=operation,
            text=text,
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                line = msgspec.json.encode(entry) + b"\n"
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a crash or a full disk cut the last line: it must not take this one along
                while line:
                    line = line[os.write(descriptor, line) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise file_error(error, self._path) from error

    def entries(self) -> list[Entry]:
        """All lines; a last line that was cut off by a crash does not count."""
        return read_entries(self._path)

    @property
    def finished(self) -> bool:
        return any(entry.kind == "end" for entry in self.entries())


def read_entries(path: Path) -> list[Entry]:
    """The lines of one journal file; what cannot be read is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise file_error(error, path) from error
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError:
            continue
    return entries


def failures(entries: Sequence[Entry]) -> dict[str, Failures]:
    """Address → how often it failed in a row since it was last done; `entries` oldest first."""
    count: dict[str, Failures] = {}
    for entry in entries:
        if entry.kind == "done":
            count.pop(entry.address, None)
        elif entry.kind == "failed" and entry.action != "keep":  # what was only waited for was not started in vain
            before = count.get(entry.address)
            count[entry.address] = Failures(1 + (before.count if before is not None else 0), entry.at)
    return count


def history(folder: Path) -> list[Entry]:
    """All journals of a fabric, oldest line first."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".ndjson")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise file_error(error, folder) from error
    return sorted((entry for file in files for entry in read_entries(file)), key=lambda entry: entry.at)
