"""An architecture as the YAML of a part that blueprints include."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from fabrictool.catalog import ModelArchitecture

if TYPE_CHECKING:
    from collections.abc import Mapping


def written_fields(entry: ModelArchitecture) -> dict[str, int | bool]:
    """What has to be written of its numbers: those without a default, and those that differ from theirs; in order."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelArchitecture)}
    return {name: value for name, value in entry.numbers.items() if value != defaults[name]}


def part_text(entry: ModelArchitecture, origin: str) -> str:
    """A ``kind: Part`` with the entry under ``architectures``; `origin`, in its first line, says what it was read from.

    The text depends on its arguments alone, and `blueprint.load` makes the same entry of it.
    """
    fields: Mapping[str, int | bool | str] = {**written_fields(entry), "source": entry.source}
    return "\n".join(
        [
            f"# Written by `fabrictool catalogue add` from {origin}",
            "apiVersion: fabrictool/v1",
            "kind: Part",
            "architectures:",
            f"  {entry.id}:",
            *(f"    {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()),
            "",
        ]
    )
