"""Which accelerator of the catalogue a site means by its own word, such as the type of a GRES; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.catalog import accelerators

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.catalog import Accelerator

_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[^a-z0-9]+")
_SLICE = re.compile(r"\bmig\b|\d+g[._]\d+gb")
_MAKERS = frozenset(["nvidia", "tesla", "geforce", "amd", "radeon", "instinct", "intel", "quadro", "gpu", "generation"])


@dataclass(frozen=True, slots=True)
class Guess:
    """What a word may mean."""

    device: str
    """Id of the catalogue; "": none."""
    others: tuple[str, ...] = ()
    """Ids that it may mean as well; `device` is the one with the least memory and bandwidth: no plan hopes too much."""
    why: str = ""
    """Why there is none."""


def device_named(word: str, features: Iterable[str] = ()) -> Guess:
    """The accelerator behind a site's word; `features` of the nodes may tell variants apart.

    Only the family decides whether it is known: ``a100`` is, ``v100`` is not.
    """
    if _SLICE.search(word.lower()):
        return Guess("", why="slices of a device (MIG) cannot be described")
    family = _family(word)
    if not family:
        return Guess("", why="not in the catalogue")
    hints = [*_qualifiers(word), *(hint for feature in features for hint in _qualifiers(feature))]
    fitting = [accelerator for accelerator in family if all(_fits(accelerator, hint) for hint in hints)] or family
    fitting.sort(key=lambda accelerator: (accelerator.memory, accelerator.memory_bandwidth))
    return Guess(fitting[0].id, tuple(accelerator.id for accelerator in fitting[1:]))


def _family(word: str) -> list[Accelerator]:
    tokens = [token for token in re.findall(r"[a-z0-9]+", word.lower()) if token not in _MAKERS]
    families: dict[str, list[Accelerator]] = {}
    for accelerator in accelerators().values():
        if accelerator.kind != "cpu":
            families.setdefault(accelerator.id.partition("-")[0], []).append(accelerator)
    joined = {
        "".join(tokens[begin:end])
        for begin in range(len(tokens))
        for end in range(begin + 1, min(begin + 3, len(tokens)) + 1)
    }
    joined |= {phrase.removeprefix("rtx") for phrase in joined}  # "RTX A6000" is the catalogue's a6000
    named = [name for name in families if name in joined]
    return families[max(named, key=len)] if named else []


def _qualifiers(word: str) -> list[str]:
    """What tells variants of a family apart: ``80g``, ``sxm``, ``pcie``."""
    text = word.lower()
    qualifiers = [f"{size}g" for size in re.findall(r"(?<![a-z0-9.])(\d{2,3})gb?(?![a-z0-9])", text)]
    qualifiers += [form for form in ("sxm", "pcie", "nvl") if re.search(rf"(?<![a-z]){form}", text)]
    return [*qualifiers, "sxm"] if re.search(r"(?<![a-z0-9])hbm3(?![a-z0-9])", text) else qualifiers


def _fits(accelerator: Accelerator, hint: str) -> bool:
    if hint.endswith("g") and hint[:-1].isdecimal():
        return abs(int(hint[:-1]) * 1e9 - accelerator.memory) < 0.15 * accelerator.memory
    return hint in accelerator.id.split("-") or not {"sxm", "pcie"} & set(accelerator.id.split("-"))
