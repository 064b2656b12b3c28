"""What every kind of cluster can do: say what is there, and start and stop units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fabrictool.domain.observed import ClusterFacts, UnitState
    from fabrictool.domain.specs import UnitSpec


class Cluster(Protocol):
    """One cluster of the inventory.

    `observe` never raises for a cluster that does not answer: it says ``known=False`` and why. The other verbs
    raise coded errors and are safe to repeat: an operation id is started at most once.
    """

    @property
    def name(self) -> str:
        """As the inventory names it."""
        ...

    def observe(self) -> ClusterFacts:
        """What is there now; reads only."""
        ...

    def prepare(self, operation: str, spec: UnitSpec, secrets: dict[str, bytes]) -> None:
        """Place the unit's files: its spec, and `secrets` (relative name → bytes) readable by the owner alone."""
        ...

    def start(self, operation: str) -> None:
        """Start a prepared unit; does nothing when it runs or has run."""
        ...

    def stop(self, operation: str) -> None:
        """Ask a unit to leave (TERM); does nothing when it does not run."""
        ...

    def kill(self, operation: str) -> None:
        """End a unit that does not leave."""
        ...

    def spec(self, operation: str) -> UnitSpec:
        """What a unit was told."""
        ...

    def state(self, operation: str) -> UnitState | None:
        """Of one unit; None when there is no such unit."""
        ...

    def status_url(self, operation: str) -> str:
        """Where the unit publishes its status, or nothing yet."""
        ...

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """The last lines of its log."""
        ...

    def exit_reason(self, operation: str) -> str:
        """How it ended, if it said so."""
        ...

    def forget(self, operation: str) -> None:
        """Remove the files of a unit that does not run; identity material goes first."""
        ...
