"""What every kind of cluster can do: say what is there, and start and stop units, many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.base.errors import FabrictoolError
    from fabrictool.domain.observed import ClusterFacts
    from fabrictool.domain.plan import Outlook
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.status.documents import StatusDocument


@dataclass(frozen=True, slots=True)
class NewUnit:
    """A unit that shall be started under an operation's id, at most once."""

    operation: str
    address: str
    spec: UnitSpec
    files: Mapping[str, bytes]
    """Relative name → bytes, readable by the owner alone: identity and keys."""
    lineage: str = ""
    """Whose it is."""
    serial: int = 0
    """Of the state at the start: a late writer is seen by it."""
    followers: tuple[NewUnit, ...] = ()
    """Units that may be submitted from inside it, one after the other."""
    lead_s: float = 0.0
    """Seconds before its end at which the first of them is to be."""


@dataclass(frozen=True, slots=True)
class JobScript:
    """What a scheduler would be given for a unit."""

    address: str
    cluster: str
    command: str
    """That submits it, as a line of a shell."""
    script: str


class Cluster(Protocol):
    """One cluster of the inventory.

    `observe` never raises for a cluster that does not answer: it says ``known=False`` and why. The other verbs
    raise coded errors and are safe to repeat: an operation id is started at most once.
    """

    @property
    def name(self) -> str:
        """As the inventory names it."""

    @property
    def poll_s(self) -> float:
        """Seconds between two looks while something is awaited: login nodes belong to everybody."""

    def observe(self, *, brief: bool = False, patient: bool = False) -> ClusterFacts:
        """What is there now; reads only.

        `brief`: units alone, without queues and reservations. `patient`: look again, for up to a minute, where only
        that can say whether a unit lives.
        """

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """Place and start units that do not run and have not run; the failed ones with their errors.

        Raises
        ------
        FabrictoolError
            The cluster was lost on the way: which of them were started is not known, and calling again finds out.
        """

    def update(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """Write another spec, and the files beside it, into the folders of units that run and take it over; the failed
        ones with their errors. The spec comes last: it says that all is there.
        """

    def stop(self, operations: Iterable[str]) -> None:
        """Ask units to leave (TERM), and end those that wait in a queue; nothing for those that do not live."""

    def kill(self, operations: Iterable[str]) -> None:
        """End units that do not leave."""

    def forget(self, operations: Iterable[str]) -> None:
        """Remove the files of units that do not run; identity material goes first."""

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        """What a scheduler expects of units that would be started now, and warnings; submits nothing."""

    def scripts(self, units: Sequence[NewUnit]) -> list[JobScript]:
        """What its scheduler would be given for units that would be started now; submits nothing. Empty where there is
        no scheduler, or what is started is no script.
        """

    def spec(self, operation: str) -> UnitSpec:
        """What a unit was told; raises FT5104 when that cannot be read."""

    def certificate(self, operation: str) -> bytes:
        """The chain of a unit's session, PEM; raises FT5104 when that cannot be read."""

    def document(self, operation: str) -> StatusDocument | None:
        """The unit's own status document; None when there is none."""

    def page(self, operation: str) -> AbstractContextManager[str]:
        """URL of the unit's loopback status page, as it can be reached from here while the context lasts; "": none."""

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """The last lines of its log."""

    def former_log(self, start: str, lines: int) -> list[str]:
        """The same of a unit that is gone: the youngest whose operation begins with `start`; empty if none is kept."""

    def close(self) -> None:
        """End connections; a later call opens them again."""
