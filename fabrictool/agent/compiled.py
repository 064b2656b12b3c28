"""What an engine compiles at a start, kept for the next one on this node, and given to the other nodes.

Nodes that compile into one folder of a shared file system spoil each other's work (vLLM issue 24601), and a node with
an empty folder compiles for minutes. So each node has a folder of its own; once its engine serves, what is there is
copied into a *seed* that nobody writes into any more, and a node without a folder begins with a copy of that.

A seed is for one way to start an engine, on one node: of several, each compiles another part, and keeps it to itself.
What in it is of an earlier release of the engine does no harm: engines find what they have compiled by a hash of all
that it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
import socket
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.domain.specs import AgentSpec

MOST_OCTETS = 4 * 2**30
"""Of a seed: more is not copied, for folders have quotas."""
UNUSED_S = 90 * 86400.0
"""What no start used for so long is removed; long, for a replica on a plain host may serve for weeks."""


class CompiledCache:
    """One replica's part on this node; its methods block."""

    def __init__(self, spec: AgentSpec, cache: Path) -> None:
        """Below the agents' `cache`."""
        place = cache / "compiled"
        words = (
            spec.engine, spec.source, spec.tp, spec.pp, spec.precision, spec.device, platform.machine(),
            sorted(spec.options.items()),
            None if isinstance(spec.kv_precision, msgspec.UnsetType) else spec.kv_precision,
            None if isinstance(spec.install, msgspec.UnsetType) else msgspec.to_builtins(spec.install),
        )  # fmt: skip
        name = hashlib.sha256(msgspec.json.encode(words)).hexdigest()[:16]
        self.folder = place / socket.gethostname() / name
        """Where this node's engine keeps what it compiles."""
        self._seed = place / ".seeds" / name
        self._has_seed = spec.on_nodes == 1
        self._stop = threading.Event()

    def fill(self) -> bool:
        """Before a start: begin with the seed, where this node has nothing yet; whether it did."""
        for folder in (self.folder, self._seed):
            with contextlib.suppress(OSError):  # another node replaces it just now, or the file system is slow to tell
                os.utime(folder)
            _remove_unused(folder.parent)
        if self.folder.exists() or not self._has_seed or not self._seed.is_dir():
            return False
        return self._copied(self._seed, self.folder, _writable)

    def keep(self) -> bool:
        """Make a seed of what this node has, if that is more than the seed; whether it did."""
        if not self._has_seed or not _files(self.folder) - _files(self._seed):
            return False
        return self._copied(self.folder, self._seed, _read_only)

    def stop(self) -> None:
        """Have a copy that is under way end soon, without a trace."""
        self._stop.set()

    def _copied(self, source: Path, target: Path, then: Callable[[Path], None]) -> bool:
        """Whole, or not at all: also where another node does the same, or the disk is full."""

        def copy(file: str, to: str) -> None:
            if self._stop.is_set():
                raise _StoppedError
            shutil.copy2(file, to)
            then(Path(to))

        if _octets(source) > MOST_OCTETS:
            return False
        fresh = target.parent / f".new.{secrets.token_hex(6)}"
        former = fresh.with_name(f"{fresh.name}.former")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, fresh, copy_function=copy, symlinks=True)
            if target.exists() and target == self._seed:  # a node's own is in use: whoever was faster has it
                target.rename(former)
            fresh.rename(target)
        except (OSError, _StoppedError):  # an engine compiles what it does not find
            return False
        finally:
            for folder in (fresh, former):
                shutil.rmtree(folder, ignore_errors=True)
        return True


class _StoppedError(Exception):
    """No OSError: those of single files are collected while the copy goes on."""


def _files(folder: Path) -> set[str]:
    return {os.path.relpath(f"{at}/{name}", folder) for at, _, names in os.walk(folder) for name in names}


def _octets(folder: Path) -> int:
    """Of what changes meanwhile about so much."""
    total = 0
    for name in _files(folder):
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _remove_unused(parent: Path) -> None:
    """Broken copies as well."""
    long_ago = time.time() - UNUSED_S
    with contextlib.suppress(OSError):  # another node was faster
        for folder in parent.iterdir():
            if folder.stat().st_mtime < long_ago:
                shutil.rmtree(folder, ignore_errors=True)


def _writable(file: Path) -> None:
    file.chmod(file.stat().st_mode | stat.S_IWUSR)


def _read_only(file: Path) -> None:
    file.chmod(file.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
