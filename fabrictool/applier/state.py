"""The state of one fabric on the operator's side: a cache of facts and the count of what was ever started.

The truth is in the clusters. ``state.json`` holds what they cannot say: the fabric's *lineage* (a random id that marks
what is ours), the *serial* that every write raises by one, and per address the *generation* of its last start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError, StaleError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.base.ids import random_id
from fabrictool.domain.specs import Phase, UnitSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fabrictool.base.settings import Settings

SCHEMA = 1


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a unit was put; what is remembered of clusters that do not answer."""

    cluster: str
    node: str
    tp: int = 1
    pp: int = 1
    phase: Phase = "unified"
    operation: str = ""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of the last approved plan."""

    cluster: str
    spec: UnitSpec
    summary: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """``state.json``."""

    schema: int = SCHEMA
    lineage: str = ""
    """Random, given with the first write: marks what is ours."""
    serial: int = 0
    applied_plan: str = ""
    """Id of the last plan that was carried out."""
    applied_blueprint: str = ""
    """Digest of what that plan was made of."""
    applied_units: dict[str, Applied] = {}
    """Address → what the last approved plan wants there: what `reconcile` heals to."""
    generations: dict[str, int] = {}
    """Address → how many units it ever had."""
    waits: dict[str, list[float]] = {}
    """``CLUSTER/PARTITION`` → seconds that our last jobs waited in its queue."""
    loads: dict[str, list[float]] = {}
    """Model → seconds from the start of its last replicas until they served."""
    units: dict[str, Placed] = {}
    """Address → where its unit was started and not stopped since."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes now."""

    id: str
    who: str
    host: str
    pid: int
    purpose: str
    at: float


@dataclass(frozen=True, slots=True)
class FabricFolder:
    """Where the files of one fabric lie on the operator's machine."""

    path: Path

    @classmethod
    def of(cls, settings: Settings, fabric: str) -> FabricFolder:
        """Under the state folder of the settings."""
        return cls(settings.state_path / fabric)

    @property
    def trust(self) -> Path:
        """Root and provider keys, mode 0700."""
        return self.path / "trust"

    @property
    def journal(self) -> Path:
        """One file a plan."""
        return self.path / "journal"

    def cluster(self, name: str) -> Path:
        """Run folders of a local cluster."""
        return self.path / "clusters" / name

    def read_state(self) -> State:
        """The state; an empty one when there is none yet.

        Raises
        ------
        FabrictoolError
            FT4302 no rights, FT4001 damaged or from a later release.
        """
        file = self.path / "state.json"
        try:
            state = msgspec.json.decode(file.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise file_error(error, file) from error
        except msgspec.DecodeError as error:
            hint = "restore it from a backup; without it, running units are found but no longer known as ours"
            raise InvalidInputError.of(
                "FT4001", f"state.json is damaged: {error}", file=str(file), hint=hint
            ) from error
        if state.schema != SCHEMA:
            message = f"state.json has schema {state.schema}, this release reads {SCHEMA}"
            raise InvalidInputError.of("FT4001", message, file=str(file), hint="use the release that wrote it")
        return state

    def write_state(self, new: State, *, read: State) -> State:
        """Compare and set: refuse when somebody wrote since `read`; returns what was written."""
        current = self.read_state()
        if (self.path / "state.json").exists() and (current.lineage, current.serial) != (read.lineage, read.serial):
            raise StaleError.of(
                "FT4002",
                f"the state moved from serial {read.serial} to {current.serial} meanwhile",
                file=str(self.path / "state.json"),
                hint="run the command again",
            )
        written = msgspec.structs.replace(new, serial=read.serial + 1, lineage=new.lineage or random_id())
        write_atomic(self.path / "state.json", msgspec.json.format(msgspec.json.encode(written), indent=1), mode=0o600)
        return written

    @contextlib.contextmanager
    def lease(self, purpose: str, *, now: float) -> Iterator[Lease]:
        """Be the one writer; the operating system ends the lease with the process, however it ends.

        Raises
        ------
        StaleError
            FT4003 when another process holds it, with who and what for.
        """
        file = self.path / "lease"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error(error, file) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise _held(file, os.pread(descriptor, 4096, 0)) from error
            user = os.environ.get("USER") or str(os.getuid())
            lease = Lease(
                id=random_id(4), who=user, host=socket.gethostname(), pid=os.getpid(), purpose=purpose, at=now
            )
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(lease), 0)
            except OSError as error:
                raise file_error(error, file) from error
            yield lease
        finally:
            os.close(descriptor)


def operation_id(lineage: str, address: str, generation: int) -> str:
    """The id under which a unit is started, at most once: readable, unique in the fabric, the same on a retry."""
    mark = hashlib.sha256(f"{lineage}|{address}|{generation}".encode()).hexdigest()[:8]
    return f"{address.replace('/', '-')}-g{generation}-{mark}"


def _held(file: Path, content: bytes) -> FabrictoolError:
    try:
        lease = msgspec.json.decode(content, type=Lease)
        who = f"{lease.who}@{lease.host} (pid {lease.pid}) since {lease.at:.0f} for {lease.purpose}"
    except msgspec.DecodeError:
        who = "another process"
    return StaleError.of(
        "FT4003",
        f"the fabric's lease is held by {who}",
        file=str(file),
        hint="wait for it to end; nothing was changed",
    )
