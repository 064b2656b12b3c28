"""What ``top`` shows at a moment: what a node says, and what the operator's side knows beside it.

A recording is such looks, one JSON document a line: what a kill leaves of it can be read but for the line it cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.state import ModelPromise
from fabrictool.status.documents import GatewayStatus
from fabrictool.status.fleet import FleetStatus, LiveDocument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class UnitView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A unit as its cluster sees it: a job in a queue, a process, or what became of it."""

    address: str
    cluster: str
    state: str
    ready: bool = False
    engine: str = ""
    job: str = ""
    operation: str = ""
    detail: str = ""
    """Why it waits or how it ended, in the scheduler's words or its own."""
    begins_at: float | None = None
    """Wall time at which the scheduler thinks that it starts."""
    ends_at: float | None = None


class JournalLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of an apply."""

    at: float
    plan: str
    kind: str
    address: str = ""
    action: str = ""
    text: str = ""


class OperatorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the state, the clusters and the journal say; only who has the blueprint knows it."""

    at: float
    units: list[UnitView] = []
    unknown: dict[str, str] = {}
    """Cluster that does not answer → why."""
    drift: list[str] = []
    """A sentence for each difference between blueprint and clusters."""
    warnings: list[str] = []
    journal: list[JournalLine] = []
    """Of the last apply, oldest first."""
    targets: dict[str, tuple[float | None, float | None]] = {}
    """Model → seconds to the first token and for each further one that its SLO allows."""
    forecasts: dict[str, ModelPromise] = {}
    """Model → what the last apply's plan forecasts of it."""
    trouble: str = ""
    """Why the newest look at all this failed; what stands here is of the one before."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody else answers now than before."""

    before: str
    """Who does not, in words."""
    since: float
    """Wall time at which that was noticed."""
    why: str


class Sighting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a screen is drawn from."""

    at: float
    """Wall time of the look, by the clock of who looks."""
    live: LiveDocument | None = None
    """The newest that was heard, however old that is."""
    heard_at: float | None = None
    """When that was, by the same clock; None: with this look."""
    fleet: FleetStatus | None = None
    """The mesh in the eyes of the same node, where it shows that."""
    operator: OperatorView | None = None
    trouble: str = ""
    """Why this look was not answered; "": it was."""
    asked: str = ""
    """The gateway or node that the look went to."""
    moved: Moved | None = None
    """Why it did not go to another one; None: the first that was asked still answers."""

    @property
    def heard(self) -> float:
        """When the newest answer came; its own time is of another's clock."""
        return self.at if self.heard_at is None else self.heard_at

    def after(self, earlier: Sighting) -> Sighting:
        """This look, with what an earlier one knows where this one was told nothing."""
        operator = self.operator or earlier.operator
        if self.live is not None:
            return msgspec.structs.replace(self, operator=operator)
        heard_at = None if earlier.live is None else earlier.heard
        fleet = self.fleet or earlier.fleet
        return msgspec.structs.replace(self, live=earlier.live, heard_at=heard_at, fleet=fleet, operator=operator)

    @property
    def gateway(self) -> GatewayStatus | None:
        return self.live if isinstance(self.live, GatewayStatus) else None

    @property
    def mesh(self) -> FleetStatus | None:
        """What is known of the members, whoever says so."""
        return self.live if isinstance(self.live, FleetStatus) else self.fleet


_decoder = msgspec.json.Decoder(Sighting)


def encode_sighting(look: Sighting) -> bytes:
    """A line of a recording."""
    return msgspec.json.encode(look) + b"\n"


def read_recording(path: Path) -> list[Sighting]:
    """All looks of a recording, oldest first.

    Raises
    ------
    FabrictoolError
        FT4301 or FT4302 it cannot be read, FT5206 it has no look.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise file_error(error, path) from error
    looks = list(_sightings(data))
    if not looks:
        message = f"{path} is no recording of `top`: no line of it is a look"
        raise InvalidInputError.of("FT5206", message, file=str(path), hint="`fabrictool top --record FILE` writes one")
    return looks


def _sightings(data: bytes) -> Iterator[Sighting]:
    for line in data.split(b"\n"):
        try:
            yield _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
