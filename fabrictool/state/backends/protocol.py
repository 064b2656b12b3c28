"""What every place for the state can do. One conformance suite asks all of them the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from fabrictool.domain.state import Lease, State
    from fabrictool.state.backends.document import Version


class StateStore(Protocol):
    """One state, and one lease at a time.

    Every method raises FT4202 (no answer, transient) and FT4203 (refused) besides what it names.
    """

    @property
    def place(self) -> str:
        """Where the state is, for messages and without secrets."""

    def read(self) -> State:
        """The state; an empty one when there is none yet; raises FT4001 when it is damaged."""

    def write(self, new: State, *, read: State) -> State:
        """Compare and set: returns what was written, which bears the serial after that of `read`.

        Raises
        ------
        StaleError
            FT4002 somebody wrote since `read`; FT4201 the lease of this store was taken away. Nothing was written.
        """

    def lease(self, purpose: str, *, now: float) -> AbstractContextManager[Lease]:
        """Be the one writer while the context lasts; raises FT4003 when another one is."""

    def holder(self) -> Lease | None:
        """The lease that counts now, if there is one."""

    def unlock(self, lease_id: str) -> Lease:
        """End the lease of that id, whosoever it is, and return it; raises FT4205 when it is not the one that counts.

        Its holder notices before its next write.
        """

    def history(self) -> Sequence[Version]:
        """Former states and the current one, youngest first, as far as this place keeps them and they are readable."""

    def raw(self) -> bytes | None:
        """The state as it lies there, readable or not; None when there is none."""

    def replace(self, new: State) -> State:
        """Put `new` there whatever is there now, under its own serial: for rebuilding, under the lease."""
