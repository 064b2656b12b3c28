"""Models that a blueprint describes, against the catalogue: no number has two truths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabrictool.blueprint.complaints import nearest
from fabrictool.blueprint.inventory_check import ReferenceCheck
from fabrictool.catalog import model
from fabrictool.domain.architectures import MODEL_ID

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fabrictool.base.errors import Problem
    from fabrictool.blueprint.tree import YamlNode
    from fabrictool.domain.architectures import Architecture


class ArchitectureCheck(ReferenceCheck):
    """``architectures`` of a blueprint or a part."""

    def __init__(self, architectures: Mapping[str, Architecture], tree: YamlNode) -> None:
        super().__init__(tree)
        self._architectures = architectures

    def run(self) -> list[Problem]:
        """FT1281 for an id that the catalogue has with other numbers."""
        for name, described in self._architectures.items():
            known = model(name)
            if known is None:
                continue
            others = described.catalogued(name).differences(known)
            if others:
                hint = "remove it to use the catalogue's, or give yours another id and name that in `architecture:`"
                message = f"the catalogue knows this id with other numbers: {'; '.join(others)}"
                self.say("FT1281", ("architectures", name), message, hint)
        return self._problems


def unknown_model_hint(name: str, known: Collection[str]) -> str:
    """What to do about a model that nobody describes: another spelling, or its own config.json."""
    near = nearest(name, known)
    if near is not None:
        return f"did you mean `{near}`?"
    lists = "`fabrictool catalogue models` lists others"
    if not re.fullmatch(MODEL_ID, name):
        return f"write ORGANISATION/NAME; {lists}"
    return f"`fabrictool catalogue add config.json --id {name}` describes it; {lists}"
