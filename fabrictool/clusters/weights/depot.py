"""Sets of weights in one cluster's folder: a few programs on its login node, or on this machine.

A set lies in ``sha256-HASH``, the hash of its list; while it is staged, in ``part-sha256-HASH``. It gets its name when
every file has the hash that the list says. Files that another set has already are linked and not sent again. What is
broken off goes on at the octet where it stopped.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.schedulers.shell import program
from fabrictool.clusters.site_facts import sections_of
from fabrictool.clusters.weights.fetch import HUB
from fabrictool.clusters.weights.room import free_octets
from fabrictool.clusters.weights.sources import not_fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from fabrictool.clusters.weights.fetching import FetchReport, FetchWay
    from fabrictool.clusters.weights.listing import WeightsListing
    from fabrictool.clusters.weights.sources import RemoteSource

PART = 32 << 20
"""Octets sent at once."""
PART_SECONDS = 600.0
HASH_SECONDS = 6 * 3600.0
"""A terabyte at 50 MB/s."""

Condition = Literal["whole", "damaged", "partial", "absent"]


class Runner(Protocol):
    """What runs a command where the weights lie: a `Connection`, or this machine."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed: ...


class ThisMachine:
    """Where this tool itself runs."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        """Raises FT5603 when it takes too long."""
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise FabrictoolError.of("FT5603", f"a command was not over within {timeout_s:.0f} s") from error
        return Completed(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class StagedSet:
    """What lies there of one set."""

    name: str
    """``sha256-HASH``."""
    octets: int
    complete: bool
    units: int
    """Of any fabric of this account whose run folders name it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One set beside its list."""

    name: str
    condition: Condition
    files: tuple[str, ...] = ()
    """That are damaged or missing; some of them."""


def set_name(sha256: str) -> str:
    """The folder of a set by the hash of its list."""
    return f"sha256-{sha256}"


class WeightsDepot:
    """The sets of one cluster."""

    def __init__(self, cluster: str, folder: str, runner: Runner, endpoint: str = HUB) -> None:
        self._cluster, self._folder, self._endpoint = cluster, folder, endpoint
        self._runner = runner

    @property
    def folder(self) -> str:
        """In which the sets lie."""
        return self._folder

    def look(self, units: str) -> tuple[list[StagedSet], int]:
        """What is there, and octets that quotas and space leave free (0: not known). `units`: the fabrics' folder."""
        sections = sections_of(self._said("weights-look", [units]))
        sets = []
        for line in sections.get("sets", ()):
            name, kibibytes, units = line.split("\t")
            complete = name.startswith("sha256-")
            sets.append(StagedSet(name.removeprefix("part-"), int(kibibytes) << 10, complete, int(units)))
        return sets, free_octets(sections)

    def compare(self, sets: Iterable[str], *, everything: bool) -> list[Compared]:
        """Hash what changed since it was compared last, or `everything`."""
        names = sorted(set(sets))
        if not names:
            return []
        text = self._said("weights-compare", ["all" if everything else "changed", *names], timeout_s=HASH_SECONDS)
        return read_compared(text, names)

    def stage(self, listing: WeightsListing, paths: Mapping[str, Path], progress: Callable[[int, int], None]) -> bool:
        """Send what is missing, compare, and give the set its name; returns whether it was not there already.

        Raises
        ------
        FabrictoolError
            FT5603 when it could not be stored, FT5604 when what arrived is not what is listed, FT5609 when somebody
            fetches it there. Again goes on.
        """
        name = set_name(listing.sha256)
        opened = self._said("weights-open", [name, "send"], stdin=listing.text.encode()).splitlines()
        if opened and opened[0] == "staged":
            return False
        if opened and opened[0].startswith("busy\t"):
            raise self._held(name, opened[0].removeprefix("busy\t"))
        stored = {file: int(octets) for _, octets, file in (line.split("\t") for line in opened if "\t" in line)}
        sizes = {file.name: paths[file.name].stat().st_size for file in listing.files}
        done, total = 0, sum(sizes.values())
        for file in sorted(sizes):
            begin = stored.get(file, 0)
            if begin > sizes[file]:  # two that staged at once added to it
                begin = 0
            done += min(max(0, begin), sizes[file])
            progress(done, total)
            if begin >= 0:
                for octets in self._send(name, file, paths[file], begin, sizes[file]):
                    progress(done + octets, total)
                done += sizes[file] - begin
        last = self._said("weights-close", [name], timeout_s=HASH_SECONDS).splitlines()
        if last != ["staged"]:
            raise self._not_as_listed([line.removeprefix("damaged\t") for line in last])
        return True

    def fetch(
        self, listing: WeightsListing, source: RemoteSource, way: FetchWay, tell: Callable[[FetchReport], None]
    ) -> bool:
        """Have what is missing fetched there, compared, and named; returns whether it was not there already.

        Raises
        ------
        FabrictoolError
            As `stage`; FT5608 when the source does not give it. Again goes on.
        """
        name = set_name(listing.sha256)
        opened = self._said("weights-open", [name, "fetch"], stdin=listing.text.encode()).splitlines()
        if opened and opened[0] == "staged":
            return False
        close = ["sh", "-c", program("weights-close"), "ft-weights-close", self._folder, "-", name]
        files = [
            {"name": file.name, "octets": file.octets, **source.place(file.name)}
            for file in sorted(listing.files, key=lambda file: file.name)
        ]
        wanted = {"part": f"{self._folder}/part-{name}", "endpoint": self._endpoint, "files": files, "close": close}
        last = way.run(f"{self._folder}/.fetch-{name}", wanted, tell)
        if last.state == "busy":
            raise self._held(name, last.text)
        if last.state == "damaged":
            raise self._not_as_listed(last.text.splitlines())
        if last.state != "staged":
            kind = "network" if last.state == "ended" else last.kind
            raise not_fetched(kind, f"{self._cluster}: {last.text}", thing=f"cluster/{self._cluster}")
        return True

    def remove(self, sets: Iterable[str]) -> None:
        """Whether complete or not."""
        self._said("weights-remove", sorted(set(sets)), timeout_s=PART_SECONDS)

    # -- internals --------------------------------------------------------------------------------------------

    def _not_as_listed(self, files: Sequence[str]) -> FabrictoolError:
        message = f"{self._cluster}: not what is listed: {', '.join(files[:5]) or 'the list itself'}"
        hint = "were files changed since `weights lock`? What is damaged was removed there; stage it again"
        return FabrictoolError.of("FT5604", message, thing=f"cluster/{self._cluster}", hint=hint)

    def _held(self, name: str, machine: str) -> FabrictoolError:
        message = f"{self._cluster}: {name[:19]}… is being fetched already, on {machine}"
        hint = "`fabrictool weights plan` says how far it is; then run the command again"
        return FabrictoolError.of("FT5609", message, thing=f"cluster/{self._cluster}", hint=hint, transient=True)

    def _send(self, name: str, file: str, path: Path, begin: int, size: int) -> Iterable[int]:
        """Octets of this file that were sent, as they are."""
        with path.open("rb") as stream:
            stream.seek(begin)
            at = begin
            while True:
                part = stream.read(PART)
                arguments = [name, file, str(at), str(at + len(part)), str(size)]
                self._said("weights-part", arguments, stdin=part, timeout_s=PART_SECONDS)
                at += len(part)
                yield at - begin
                if at >= size or not part:
                    return

    def _said(self, name: str, arguments: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> str:
        argv = ["sh", "-c", program(name), f"ft-{name}", self._folder, "-", *arguments]
        done = self._runner.run(argv, stdin=stdin, timeout_s=timeout_s)
        if done.status != 0:
            why = " ".join(done.stderr.decode(errors="replace").split())[-300:] or f"it ended with {done.status}"
            full = "No space" in why or "quota" in why
            hint = f"make room in {self._folder}" if full else "run the command again: what is there already is kept"
            message = f"{self._cluster}: {why}"
            raise UnreachableError.of(
                "FT5603", message, thing=f"cluster/{self._cluster}", hint=hint, transient=not full
            )
        return done.stdout.decode(errors="replace")


def read_compared(text: str, names: Sequence[str]) -> list[Compared]:
    """What ``weights-compare.sh`` printed; pure. Raises FT5407 when a set is not in it."""
    conditions: dict[str, Condition] = {}
    files: dict[str, list[str]] = {}
    words: dict[str, Condition] = {"whole": "whole", "damaged": "damaged", "partial": "partial", "absent": "absent"}
    for line in text.splitlines():
        word, _, rest = line.partition("\t")
        name, _, file = rest.partition("\t")
        if word in words:
            conditions[name] = words[word]
            files.setdefault(name, []).extend([file] if file else [])
    if missing := [name for name in names if name not in conditions]:
        message = f"the login node's answer is incomplete: nothing of {missing[0]}"
        raise FabrictoolError.of("FT5407", message, hint="run the command again", transient=True)
    return [Compared(name, conditions[name], tuple(files[name])) for name in names]
