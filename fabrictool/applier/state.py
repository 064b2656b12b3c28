"""The state of one fabric on the operator's side: a cache of facts and the count of what was ever started.

The truth is in the clusters. ``state.json`` holds what they cannot say: the fabric's *lineage* (a random id that marks
what is ours), the *serial* that every write raises by one, and per address the *generation* of its last start. Where it
lies, `stores` knows; journals, trust material and run folders are always in the fabric's folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fabrictool.applier.stores.document import Applied, Lease, Placed, State
from fabrictool.applier.stores.local import LocalStore
from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from fabrictool.applier.stores.protocol import StateStore
    from fabrictool.base.settings import Settings

__all__ = ["Applied", "FabricFolder", "Lease", "Placed", "State", "operation_id"]


@dataclass(frozen=True, slots=True)
class FabricFolder:
    """Where the files of one fabric lie on the operator's machine, and its state, which may lie elsewhere."""

    path: Path
    elsewhere: StateStore | None = None
    _here: LocalStore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """One store for the folder's life: it knows the lease that it holds."""
        object.__setattr__(self, "_here", LocalStore(self.path))

    @classmethod
    def of(cls, settings: Settings, fabric: str, elsewhere: StateStore | None = None) -> FabricFolder:
        """Under the state folder of the settings."""
        return cls(settings.state_path / fabric, elsewhere)

    @property
    def trust(self) -> Path:
        """Root and provider keys, mode 0700."""
        return self.path / "trust"

    @property
    def journal(self) -> Path:
        """One file a plan."""
        return self.path / "journal"

    @property
    def store(self) -> StateStore:
        """Where the state is."""
        return self.elsewhere or self._here

    def cluster(self, name: str) -> Path:
        """Run folders of a local cluster."""
        return self.path / "clusters" / name

    def read_state(self) -> State:
        """The state; an empty one when there is none yet.

        Raises
        ------
        FabrictoolError
            FT4302 no rights, FT4001 damaged or from a later release, FT4202 no answer, FT4226 another fabric's.
        """
        state = self.store.read()
        if state.fabric not in ("", self.path.name):
            message = f"the state there is that of fabric {state.fabric}, not of {self.path.name}"
            hint = "give each fabric a branch or an address of its own under `state` in its blueprint"
            raise InvalidInputError.of("FT4226", message, file=self.store.place, hint=hint)
        return state

    def write_state(self, new: State, *, read: State) -> State:
        """Compare and set: refuse when somebody wrote since `read`; returns what was written.

        Raises
        ------
        StaleError
            FT4002 somebody wrote, FT4201 the lease was lost.
        """
        return self.store.write(msgspec.structs.replace(new, fabric=self.path.name), read=read)

    def lease(self, purpose: str, *, now: float) -> AbstractContextManager[Lease]:
        """Be the one writer; raises FT4003 when another one is, with who and what for."""
        return self.store.lease(purpose, now=now)


def operation_id(lineage: str, address: str, generation: int) -> str:
    """The id under which a unit is started, at most once: readable, unique in the fabric, the same on a retry."""
    mark = hashlib.sha256(f"{lineage}|{address}|{generation}".encode()).hexdigest()[:8]
    return f"{address.replace('/', '-')}-g{generation}-{mark}"
