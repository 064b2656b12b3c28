"""A model's files and their hashes, in the format of ``sha256sum``; the list's own hash names the set that it lists."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_NAME = re.compile(r"[A-Za-z0-9_+=@][A-Za-z0-9_.+=@ -]*(/[A-Za-z0-9_+=@][A-Za-z0-9_.+=@ -]*)*")
"""Relative, and nothing that a shell, a list or a path up would take otherwise."""
_SIZE = re.compile(r"# ([0-9]{1,18})  (.+)")
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One file of a set."""

    name: str
    """Relative, with slashes."""
    sha256: str
    octets: int | None = None
    """None: not known, of a list that was made of files of this machine."""


@dataclass(frozen=True, slots=True)
class WeightsListing:
    """All files of one model at one revision."""

    files: tuple[WeightsFile, ...]

    @property
    def octets(self) -> int | None:
        """Of all files; None where that of one is not known."""
        known = [file.octets for file in self.files if file.octets is not None]
        return sum(known) if len(known) == len(self.files) else None

    def without(self, patterns: Iterable[str]) -> WeightsListing:
        """All that no pattern of shells matches; raises FT5602 when nothing is left."""
        out = tuple(patterns)
        files = tuple(file for file in self.files if not any(fnmatchcase(file.name, pattern) for pattern in out))
        check_names([file.name for file in files], "--exclude")
        return WeightsListing(files)

    @property
    def document(self) -> str:
        """The text with sizes, where they are known, as remarks that ``sha256sum`` skips: a plan needs no network."""
        known = (file for file in sorted(self.files, key=lambda file: file.name) if file.octets is not None)
        return "".join(f"# {file.octets}  {file.name}\n" for file in known) + self.text

    @property
    def text(self) -> str:
        """As ``sha256sum -c`` reads it; sorted by name, so that same files give same bytes."""
        return "".join(f"{file.sha256}  {file.name}\n" for file in sorted(self.files, key=lambda file: file.name))

    @property
    def sha256(self) -> str:
        """Of the text: what a blueprint pins."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def parse_listing(text: str, file: str) -> WeightsListing:
    """The inverse of `text`; raises FT5601 with the line."""
    files: list[WeightsFile] = []
    sizes: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            if size := _SIZE.fullmatch(line):
                sizes[size.group(2)] = int(size.group(1))
            continue
        match = _LINE.fullmatch(line)
        if match is None or _NAME.fullmatch(match.group(2)) is None:
            message = f"line {number} is not one of a list of weights: {line[:80]!r}"
            raise InvalidInputError.of("FT5601", message, file=file, hint="`fabrictool weights lock` writes it")
        files.append(WeightsFile(match.group(2), match.group(1)))
    if not files or len({entry.name for entry in files}) < len(files):
        raise InvalidInputError.of("FT5601", "it lists no file, or one of them twice", file=file)
    return WeightsListing(tuple(replace(entry, octets=sizes.get(entry.name)) for entry in files))


def list_folder(source: Path, progress: Callable[[int, int], None]) -> WeightsListing:
    """Hash a file, or all files below a folder; `progress` is told octets read and octets in all.

    Raises
    ------
    FabrictoolError
        FT4301 when something cannot be read, FT5602 when there is nothing, or a name cannot be listed.
    """
    try:
        paths = files_of(source)
        total, done, files = sum(path.stat().st_size for path in paths.values()), 0, []
        for name, path in sorted(paths.items()):
            digest = hashlib.sha256()
            with path.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
                    done += len(piece)
                    progress(done, total)
            files.append(WeightsFile(name, digest.hexdigest()))
    except OSError as error:
        raise file_error(error, source) from error
    return WeightsListing(tuple(files))


def files_of(source: Path) -> dict[str, Path]:
    """Name → path, of a file alone or of a folder; hidden ones are left out. Raises FT5602, OSError."""
    if source.is_file():
        paths = {source.name: source}
    else:
        every = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
        paths = {name: path for name, path in every.items() if not any(p.startswith(".") for p in name.split("/"))}
    check_names(paths, str(source))
    return paths


def check_names(names: Iterable[str], source: str) -> None:
    """Raises FT5602 when there are none, or one that cannot be listed."""
    every = sorted(names)
    wrong = [name for name in every if _NAME.fullmatch(name) is None]
    if wrong or not every:
        message = f"the name {wrong[0]!r} cannot be listed" if wrong else "there are no files"
        hint = "letters, digits, spaces and . _ - + = @ are taken" if wrong else "name the model's file, or its folder"
        raise FabrictoolError.of("FT5602", message, file=source, hint=hint)
