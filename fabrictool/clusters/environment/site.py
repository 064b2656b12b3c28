"""What a site has for an environment, and how one gets there: four programs over any connection."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.environment.requirements import TargetPlatform
from fabrictool.clusters.schedulers.shell import program
from fabrictool.clusters.site_facts import sections_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabrictool.clusters.connections.protocol import Completed, Connection
    from fabrictool.clusters.environment.pack import Release

OLDEST_PYTHON = (3, 11)
CANDIDATES = ("python3.13", "python3.12", "python3.11", "python3")
PART = 8 << 20
"""Octets of one part of an upload."""
PART_SECONDS = 600.0
PLACE_SECONDS = 1800.0
"""A parallel file system may take its time for thousands of small files."""
RUNS = (
    "import platform, sys; import fabrictool, fabrictool.agent.__main__; "
    "print(fabrictool.__version__, 'python', platform.python_version(), sys.platform, platform.machine())"
)
_UNPLACED, _DOES_NOT_RUN = 3, 4


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python of the site."""

    path: str
    target: TargetPlatform
    version: str
    """In full, such as ``3.11.2``."""
    why_not: str = ""
    """Why it cannot run agents; "": it can."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """What a login node says."""

    base: str
    free: int
    """Octets; 0: not known."""
    interpreters: tuple[Interpreter, ...]
    current: str
    """Release in use; "": none."""
    releases: tuple[str, ...]


class EnvironmentFolder:
    """The programs of one cluster's folder; `connection` may be any."""

    def __init__(self, cluster: str, folder: str, connection: Connection) -> None:
        self._cluster = cluster
        self._folder = folder
        self._connection = connection

    def look(self, candidates: Iterable[str] = CANDIDATES, module: str = "") -> EnvironmentFacts:
        """Reads only; raises FT5407 for a cut answer."""
        done = self._run("environment-look", [module, *candidates])
        return read_look(done.stdout.decode(errors="replace"), thing=f"cluster/{self._cluster}")

    def verify(self, release: str) -> tuple[str, list[str]]:
        """``whole``, ``damaged`` or ``absent``, and files that are not as the manifest says."""
        done = self._run("environment-verify", [release], timeout_s=PLACE_SECONDS)
        lines = done.stdout.decode(errors="replace").split("\n")
        if lines[0] not in ("whole", "damaged", "absent"):
            raise self._failed(f"{release} cannot be compared with its manifest: {_failure(done)}", transient=True)
        return lines[0], [line for line in lines[1:] if line]

    def upload(self, release: Release, progress: Callable[[int, int], None]) -> str:
        """In parts; `progress` is told octets sent and octets in all. Returns a token for `place`."""
        token, size = secrets.token_hex(8), len(release.archive)
        for begin in range(0, size, PART):
            end = min(begin + PART, size)
            part = release.archive[begin:end]
            done = self._run("environment-part", [token, str(begin), str(end)], stdin=part, timeout_s=PART_SECONDS)
            if done.status != 0:
                raise self._failed(f"the upload failed: {_failure(done)}", transient="No space" not in _failure(done))
            progress(end, size)
        return token

    def place(self, release: Release, upload: str, keep: int, *, run: bool) -> tuple[str, list[str]]:
        """Verify, unpack, try and switch; `upload` is "" for a release that is there. What its Python said, what else.

        Raises
        ------
        FabrictoolError
            FT5509 when it was not placed, FT5510 when it does not run there; the environment that was is still in use.
        """
        arguments = [upload or "-", release.name, release.digest if upload else "-", str(keep), RUNS if run else ""]
        done = self._run("environment-place", arguments, timeout_s=PLACE_SECONDS)
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        if done.status == _DOES_NOT_RUN:
            message = f"{self._cluster}: the new environment does not run on its login node: {' '.join(lines[-3:])}"
            raise FabrictoolError.of("FT5510", message[:600], thing=f"cluster/{self._cluster}")
        if done.status != 0 or not lines or not lines[0].startswith("used "):
            why = " ".join(lines) or _failure(done)
            raise self._failed(f"the environment was not placed: {why[:400]}", transient="No space" not in why)
        return lines[0].removeprefix("used "), lines[1:]

    def _run(self, name: str, arguments: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        argv = ["sh", "-c", program(name), f"ft-{name}", self._folder, "-", *arguments]
        return self._connection.run(argv, stdin=stdin, timeout_s=timeout_s)

    def _failed(self, message: str, *, transient: bool) -> FabrictoolError:
        hint = (
            "the environment that was there before is still in use; check space and quota, then run the command again"
        )
        thing = f"cluster/{self._cluster}"
        return UnreachableError.of("FT5509", f"{self._cluster}: {message}", thing=thing, hint=hint, transient=transient)


def read_look(text: str, *, thing: str) -> EnvironmentFacts:
    """What ``environment-look.sh`` printed; pure."""
    sections = sections_of(text)
    if "end" not in sections or not sections.get("base"):
        message = f"the login node's answer is incomplete: {text[-120:]!r}"
        raise FabrictoolError.of("FT5407", message, thing=thing, hint="run the command again", transient=True)
    glibc = _glibc(" ".join(sections.get("machine", ())))
    interpreters: dict[str, Interpreter] = {}
    for line in sections.get("pythons", ()):
        parts = line.split("|")
        if len(parts) == 7:
            interpreter = _interpreter(parts, glibc)
            interpreters.setdefault(interpreter.path, interpreter)
    link = next(iter(sections.get("current", ())), "")
    space = next(iter(sections.get("space", ())), "")
    return EnvironmentFacts(
        base=sections["base"][0],
        free=int(space) * 1024 if space.isdecimal() else 0,
        interpreters=tuple(interpreters.values()),
        current=link.removeprefix("rel/"),
        releases=tuple(name for line in sections.get("releases", ()) for name in line.split()),
    )


def _interpreter(parts: Sequence[str], glibc: tuple[int, int]) -> Interpreter:
    minor, implementation, abi, machine, libc, version, path = parts
    number = tuple(int(part) for part in minor.split("."))
    why = ""
    if number < OLDEST_PYTHON:
        why = "older than 3.11"
    elif implementation != "CPython":
        why = f"it is {implementation}, not CPython"
    elif re.match(r"cpython-\d+t", abi):
        why = "a build without the global interpreter lock"
    elif "musl" in libc or "musl" in abi:
        why = "it is linked with musl, but packages need glibc"
    return Interpreter(path, TargetPlatform((number[0], number[1]), machine, max(glibc, _glibc(libc))), version, why)


def _glibc(text: str) -> tuple[int, int]:
    match = re.search(r"glibc[ -](\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _failure(done: Completed) -> str:
    return done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.status}"
