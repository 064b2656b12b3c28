"""The folder of one fabric on the operator's machine, and its state, which may lie elsewhere.

Journals, trust material and the run folders of local clusters are always in the folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.state.backends.local import LocalStore

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from fabrictool.domain.state import Lease, State
    from fabrictool.state.backends.protocol import StateStore


@dataclass(frozen=True, slots=True)
class FabricFolder:
    """Paths, and the state with its lease."""

    path: Path
    elsewhere: StateStore | None = None
    _here: LocalStore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """One store for the folder's life: it knows the lease that it holds."""
        object.__setattr__(self, "_here", LocalStore(self.path))

    @property
    def trust(self) -> Path:
        """Root and provider keys, mode 0700."""
        return self.path / "trust"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def store(self) -> StateStore:
        return self.elsewhere or self._here

    def cluster(self, name: str) -> Path:
        """Where a local cluster has its run folders."""
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
