"""The state on a branch of a Git repository: every version is a commit, and a push is the compare-and-set.

The system's ``git`` does the work, with the user's own credentials, helpers and SSH agent; it never asks. Nothing is
checked out: commits are made in a bare repository beside the fabric's folder, which is only a cache. The branch's
other files are left alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, StaleError
from fabrictool.base.files import file_error
from fabrictool.domain.state import Lease
from fabrictool.state.backends import document
from fabrictool.state.backends.gitcommand import Git
from fabrictool.state.backends.heartbeat import TTL_S, LeaseHeartbeat, expired
from fabrictool.state.backends.local import locked_within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fabrictool.base.clock import Clock
    from fabrictool.domain.state import State

STATE, LEASE = "state.json", "lease.json"
TRIES = 8
"""Pushes of one write: the branch moves under it only when a lease is renewed or asked for."""
PAUSE_S = 0.05
PATIENCE_S = 5.0
"""For another process in the cache."""
LISTED = 50
"""Versions that `history` looks at."""


class GitStore:
    """``state.json`` and ``lease.json`` on `branch` of the repository at `url`; `cache` is a folder of ours."""

    def __init__(
        self,
        url: str,
        branch: str,
        cache: Path,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        self._git = Git(url, branch, cache, os.environ if environment is None else environment)
        self._cache = cache
        self._branch = branch
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._heart: LeaseHeartbeat | None = None
        self._threads = threading.Lock()
        self._head = ""
        """The branch as this store left it; "" when that is not known."""

    @property
    def place(self) -> str:
        return f"{self._git.url} {self._branch}:{STATE}"

    # -- state ------------------------------------------------------------------------------------------------

    def read(self) -> State:
        return document.state_of(self.raw(), self.place)

    def raw(self) -> bytes | None:
        with self._alone():
            self._head = self._git.fetch()
            return self._file(self._head, STATE)

    def write(self, new: State, *, read: State) -> State:
        """A commit on what is there; if the branch has moved, on that, as long as the state on it is the one read."""
        if self._heart is not None:
            self._heart.check()
        written = document.successor(new, read)

        def change(head: str) -> dict[str, bytes | None]:
            self._check_lease(head)
            document.check_unmoved(self._file(head, STATE), read, self.place)
            return {STATE: document.encode_state(written)}

        self._push(change, f"state {written.serial}")
        return written

    def replace(self, new: State) -> State:
        def change(head: str) -> dict[str, bytes | None]:
            self._check_lease(head)
            return {STATE: document.encode_state(new)}

        self._push(change, f"state {new.serial}, rebuilt")
        return new

    def history(self) -> list[document.Version]:
        versions = []
        with self._alone():
            for commit, at in self._git.log(self._git.fetch(), STATE, LISTED):
                with contextlib.suppress(FabrictoolError):
                    data = self._file(commit, STATE)
                    if data is not None:
                        versions.append(document.Version(at=at, state=document.decode_state(data, self.place)))
        return versions

    # -- lease ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, purpose: str, *, now: float) -> Iterator[Lease]:
        """Put ``lease.json`` there, unless one is there that counts; renew it; take it away at the end."""
        lease = document.new_lease(purpose, now=now, expires=self._clock.wall() + self._ttl_s)

        def take(head: str) -> dict[str, bytes | None]:
            other = self._counting(head)
            if other is not None:
                raise document.held(other, self.place, now=self._clock.wall())
            return {LEASE: _encode(lease)}

        self._push(take, f"lease: {purpose}")
        heart = LeaseHeartbeat(lease, self._renew, clock=self._clock, place=self.place, ttl_s=self._ttl_s)
        self._heart = heart
        try:
            with heart.beating():
                yield lease
        finally:
            self._heart = None
            self._give_back(lease)

    def holder(self) -> Lease | None:
        with self._alone():
            return self._counting(self._git.fetch())

    def unlock(self, lease_id: str) -> Lease:
        ended: list[Lease] = []

        def change(head: str) -> dict[str, bytes | None]:
            lease = self._lease_at(head)
            if lease is None or lease.id != lease_id:
                raise document.no_such_lease(lease_id, lease, self.place)
            ended.append(lease)
            return {LEASE: None}

        self._push(change, f"lease {lease_id} unlocked by hand")
        return ended[-1]

    def _renew(self, lease: Lease) -> None:
        def change(head: str) -> dict[str, bytes | None]:
            there = self._lease_at(head)
            if there is None or there.id != lease.id:
                raise document.lost(lease, document.taken_by(there), self.place)
            return {LEASE: _encode(lease)}

        self._push(change, f"lease {lease.id} renewed")

    def _give_back(self, lease: Lease) -> None:
        """If that fails, it runs out by itself: what was done is done, and no error of this may hide another."""

        def change(head: str) -> dict[str, bytes | None]:
            there = self._lease_at(head)
            return {LEASE: None} if there is not None and there.id == lease.id else {}

        with contextlib.suppress(FabrictoolError):
            self._push(change, f"lease {lease.id} ended")

    def _check_lease(self, head: str) -> None:
        if self._heart is not None:
            there = self._lease_at(head)
            if there is None or there.id != self._heart.id:
                raise self._heart.gone(document.taken_by(there))

    def _counting(self, head: str) -> Lease | None:
        lease = self._lease_at(head)
        return None if lease is None or expired(lease, self._clock.wall()) else lease

    def _lease_at(self, head: str) -> Lease | None:
        data = self._file(head, LEASE)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Lease)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # nobody can hold what nobody can read

    # -- commits ----------------------------------------------------------------------------------------------

    def _push(self, change: Callable[[str], Mapping[str, bytes | None]], message: str) -> None:
        """Make `change(head)`, file → content or None, the branch's next commit; asked again when the branch moved."""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * attempt)
            with self._alone():
                known, head = self._head, self._head or self._git.fetch()
                try:
                    files = change(head)
                except StaleError:
                    if not known:
                        raise
                    self._head = ""  # it may be only what we knew that is stale
                    continue
                if not files:
                    return
                commit = self._git.commit(head, files, f"fabrictool: {message}")
                self._head = ""
                if self._git.push(head, commit):
                    self._head = commit
                    return
        message = f"the branch moved {TRIES} times while it was to be written"
        raise FabrictoolError.of("FT4202", message, file=self.place, hint="run the command again", transient=True)

    def _file(self, head: str, name: str) -> bytes | None:
        return self._git.content(head, name) if head else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time in the cache, and one process; who finds it taken for long uses one of its own."""
        with self._threads, self._cache_lock() as locked:
            if locked:
                yield
                return
            with tempfile.TemporaryDirectory(prefix="fabrictool-") as folder:
                usual, self._head = self._git, ""
                self._git = usual.elsewhere(Path(folder) / "state.git")
                try:
                    yield
                finally:
                    self._git, self._head = usual, ""

    @contextlib.contextmanager
    def _cache_lock(self) -> Iterator[bool]:
        """False when another process keeps it: a network that hangs, or Ctrl-Z."""
        file = self._cache.with_name(self._cache.name + ".lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error(error, file) from error
        try:
            yield locked_within(descriptor, PATIENCE_S)
        finally:
            os.close(descriptor)


def _encode(lease: Lease) -> bytes:
    return msgspec.json.format(msgspec.json.encode(lease), indent=1) + b"\n"
