"""Who judges what a node says of the software that it runs, without what it takes to check signatures: a gateway of a
static list has no nodes, and loads no cryptography for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fabrictool.mesh.records import NodeBody


class Attestation(Protocol):
    """Judges the evidence of nodes."""

    def refusal(self, node: NodeBody) -> str:
        """Why nothing is sent to this node, in words; "" where something may be."""


class NoAttestation:
    """Every node is taken as it is."""

    def refusal(self, node: NodeBody) -> str:
        return ""
