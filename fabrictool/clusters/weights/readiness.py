"""Whether units may start: the weights that their models are pinned to lie there whole."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.clusters.weights.depot import WeightsDepot
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.clusters.weights.depot import Compared, Runner


def not_ready(units: Sequence[NewUnit], cluster: str, runner: Runner) -> dict[str, FabrictoolError]:
    """Operation → why it must not start (FT5605), of those whose weights are not there as they are listed."""
    wanted: dict[str, dict[str, list[NewUnit]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        for staged in unit.spec.staged_sets if isinstance(unit.spec, AgentSpec) else ():
            folder, name = posixpath.split(staged)
            wanted[folder][name].append(unit)
    refused: dict[str, FabrictoolError] = {}
    for folder, sets in wanted.items():
        for compared in WeightsDepot(cluster, folder, runner).compare(sets, everything=False):
            if compared.condition != "whole":
                for unit in sets[compared.name]:
                    refused[unit.operation] = _refusal(unit, cluster, folder, compared)
    return refused


def _refusal(unit: NewUnit, cluster: str, folder: str, compared: Compared) -> FabrictoolError:
    words = {
        "absent": f"are not staged in {folder}",
        "partial": f"are staged in part only in {folder}",
        "damaged": f"are not what is listed in {folder}/{compared.name}: {', '.join(compared.files[:3])}",
    }
    commands = f"`fabrictool weights stage {cluster}`, or `fabrictool apply --stage`"
    if compared.condition == "damaged":
        commands = f"`fabrictool weights verify {cluster}`, then {commands}"
    return InvalidInputError.of(
        "FT5605",
        f"{unit.address}: its weights {words[compared.condition]}",
        thing=f"cluster/{cluster}",
        hint=f"{commands}; nothing was submitted for it",
    )
