"""Make an environment and place it: choose the site's Python, gather the packages, send what is not there yet."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.environment import installed, locked
from fabrictool.clusters.environment.pack import packed, wrapper
from fabrictool.clusters.environment.requirements import TargetPlatform, closure, roots
from fabrictool.clusters.environment.site import CANDIDATES, EnvironmentFolder
from fabrictool.engines.adapter import adapter, engine_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.environment.pack import Release
    from fabrictool.clusters.environment.site import EnvironmentFacts, Interpreter
    from fabrictool.domain.inventory import ClusterSpec

KEEP = 3
MARGIN = 2
"""Free space must be so many times the unpacked size: the archive lies beside it for a while."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the operator chose; empty: as it is found."""

    python: str = ""
    machine: str = ""
    """Of the compute nodes, where it is not that of the login node."""
    lock: Path | None = None
    keep: int = KEEP
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """What was placed, and how."""

    release: str
    changed: bool
    """Whether something was sent or the link was switched."""
    uploaded: bool
    files: int
    size: int
    python: str
    """What the new Python said of itself; "": it was not run."""
    packages: int
    source: str
    """``installed`` or ``lock``."""


def bootstrap(
    name: str, described: ClusterSpec, connection: Connection, wishes: Wishes, say: Callable[[str], None]
) -> BootstrapResult:
    """Place the environment of one cluster; safe to repeat, and to interrupt at any time.

    Raises
    ------
    FabrictoolError
        FT5504 without a Python there, FT5505 where agents use another environment, FT5503 and FT5506 to FT5508 when the
        packages cannot be gathered, FT5509 when it was not placed, FT5510 when it does not run there.
    """
    module = _checked_way(name, described)

    def tell(text: str) -> None:
        say(f"{name}: {text}")

    site = EnvironmentFolder(name, described.folder, connection)
    python = wishes.python or described.software.python.path or ""
    look = site.look([python] if python else (["python3"] if module else CANDIDATES), module)
    chosen = choose(look.interpreters, name)
    tell(f"Python {chosen.version} at {chosen.path}, {chosen.target.machine}, glibc {_dotted(chosen.target.glibc)}")
    target = TargetPlatform(chosen.target.version, wishes.machine or chosen.target.machine, chosen.target.glibc)
    contents, packages, source = gather(extras_of(described), target, wishes.lock, tell)
    release = packed(contents, wrapper(chosen.path, module))
    version = installed.version_of(installed.OWN)
    what = f"fabrictool {version} and {packages} packages, {release.files} files, {release.size / 1e6:.0f} MB"
    tell(f"release {release.name}: {what}")
    runs = target.machine == chosen.target.machine
    state, answer = _bring(site, look, release, wishes, runs=runs, say=tell)
    return BootstrapResult(
        release=release.name,
        changed=(state != "whole" or look.current != release.name) and not wishes.dry_run,
        uploaded=state != "whole" and not wishes.dry_run,
        files=release.files,
        size=release.size,
        python=answer if runs else "",
        packages=packages,
        source=source,
    )


def _bring(
    site: EnvironmentFolder,
    look: EnvironmentFacts,
    release: Release,
    wishes: Wishes,
    *,
    runs: bool,
    say: Callable[[str], None],
) -> tuple[str, str]:
    """What was there of the release before (``whole``, ``damaged``, ``absent``), and what its Python said."""
    state, bad = site.verify(release.name)
    if state == "damaged":
        say(f"release {release.name} is there but damaged ({', '.join(bad[:3])}), so it must be sent again")
    if state == "whole" and look.current == release.name:
        say("it is there, whole and in use")
    elif wishes.dry_run:
        what = (
            "it is there and would be used"
            if state == "whole"
            else f"{len(release.archive) / 1e6:.0f} MB would be sent"
        )
        say(f"{what}; in use now: {look.current or 'none'}")
    if wishes.dry_run:
        return state, ""
    upload = ""
    if state != "whole":
        if 0 < look.free < MARGIN * release.size:
            room = f"{look.free / 1e6:.0f} MB free, but {MARGIN * release.size / 1e6:.0f} are needed"
            hint = "free some space, or choose another `folder` in the inventory"
            raise FabrictoolError.of("FT5509", f"{look.base} has {room}", thing=f"folder/{look.base}", hint=hint)
        upload = site.upload(release, lambda sent, size: say(f"sent {sent / 1e6:.0f} of {size / 1e6:.0f} MB"))
    answer, more = site.place(release, upload, wishes.keep, run=runs)
    for line in more:
        say(line)
    return state, answer


def extras_of(described: ClusterSpec) -> list[str]:
    """A plain host may have the gateway; engines that are in this package go wherever no others are chosen."""
    known = engine_names()
    chosen = [name for name in described.software.engines or known if name in known]
    engines = {adapter(name).capabilities.extra for name in chosen} - {""}
    return ["agent", *sorted(engines), *([] if described.queues else ["gateway"])]


def choose(interpreters: tuple[Interpreter, ...], cluster: str) -> Interpreter:
    """Ours in version if there is one, so that the packages of this installation serve; else the first.

    Raises
    ------
    FabrictoolError
        FT5504 with what each of them lacks.
    """
    fitting = [python for python in interpreters if not python.why_not]
    same = [python for python in fitting if python.target.version == sys.version_info[:2]]
    if fitting:
        return (same or fitting)[0]
    seen = "; ".join(f"{python.path} is {python.version}: {python.why_not}" for python in interpreters)
    hint = "name one: --python PATH, or `software: {python: {module: python/3.11}}` in the inventory"
    raise FabrictoolError.of(
        "FT5504",
        f"{cluster} has no Python for agents: {seen or 'none was found'}",
        thing=f"cluster/{cluster}",
        hint=hint,
    )


def gather(
    extras: list[str], target: TargetPlatform, lock: Path | None, say: Callable[[str], None]
) -> tuple[dict[str, bytes], int, str]:
    """The files under ``lib/``, how many packages they are, and whence: ``installed`` here, or by the ``lock``."""
    wanted = closure(roots(installed.requires(installed.OWN) or (), extras, target), installed.requires, target)
    missing = [name for name, there in wanted.items() if not there]
    if not wanted or missing:
        lacking = ", ".join(missing) or "fabrictool itself"
        hint = f"pip install 'fabrictool[{','.join(extras)}]' here first"
        raise FabrictoolError.of(
            "FT5508", f"not installed here, so their requirements are unknown: {lacking}", hint=hint
        )
    why = _why_locked(wanted, target)
    if not why:
        contents: dict[str, bytes] = {}
        for name in (*wanted, installed.OWN):
            contents |= installed.files_of(name)
        return contents, len(wanted), "installed"
    say(f"packages come from the lock file, for {why}")
    text = locked.subset(locked.read_lock(lock or locked.shipped_lock()), wanted)
    return locked.wheels_for(target, text) | installed.files_of(installed.OWN), len(wanted), "lock"


def _why_locked(wanted: dict[str, bool], target: TargetPlatform) -> str:
    """Why the packages of this installation do not serve; "": they do."""
    if target.machine != platform.machine():
        return f"the site is {target.machine}, this machine {platform.machine()}"
    if target.version != sys.version_info[:2]:
        return f"the site has Python {target.minor}, this machine {_dotted(sys.version_info[:2])}"
    return "; ".join(installed.misfits(wanted, target)[:3])


def _checked_way(name: str, described: ClusterSpec) -> str:
    """The environment module to load, if any; raises FT5505 where agents run from something else."""
    way = described.software.python
    if described.here:
        message = f"{name} is this machine: its units run from fabrictool's own Python"
        raise FabrictoolError.of("FT5505", message, thing=f"cluster/{name}", hint="nothing to do")
    other = "venv" if way.venv is not None else "container" if way.container is not None else ""
    if other:
        message = f"agents of {name} run from the {other} that the inventory names"
        hint = f"nothing to do; to run them from what is placed here, remove `software.python.{other}`"
        raise FabrictoolError.of("FT5505", message, thing=f"cluster/{name}", hint=hint)
    return way.module or ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) if any(version) else "unknown"
