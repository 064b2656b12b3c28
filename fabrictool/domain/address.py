"""What a unit is called in the fabric: ``replica/MODEL/NUMBER`` or ``gateway/NAME``.

Files and documents hold the text; who needs a part of it parses it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from fabrictool.domain.specs import UnitSpec

UnitKind = Literal["replica", "gateway", "damaged"]


@dataclass(frozen=True, slots=True)
class Address:
    """A unit's address; ``damaged/OPERATION`` stands for one whose spec cannot be read."""

    kind: UnitKind
    name: str
    """``MODEL/NUMBER`` of a replica."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of an address in a file or a document; what is none counts as damaged."""
        kind, _, name = text.partition("/")
        if kind not in ("replica", "gateway", "damaged") or not name:
            return cls("damaged", text)
        return cls(cast("UnitKind", kind), name)

    @classmethod
    def of(cls, spec: UnitSpec) -> Address:
        return cls("replica", spec.replica) if isinstance(spec, AgentSpec) else cls("gateway", spec.name)

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def model(self) -> str:
        """Whose replica it is; "" for a gateway."""
        return model_of(self.name) if self.kind == "replica" else ""

    @property
    def operations(self) -> str:
        """How the ids of all its operations begin."""
        return f"{self}-g".replace("/", "-")


def model_of(replica: str) -> str:
    """Of ``MODEL/NUMBER``, as placements and specs name a replica."""
    return replica.rpartition("/")[0]


def number_of(replica: str) -> int:
    return int(replica.rpartition("/")[2])
