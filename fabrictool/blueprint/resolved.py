"""Every value after merging, with where it comes from: what ``show --resolved --origin`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fabrictool.base.errors import Place
from fabrictool.blueprint.tree import dotted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.blueprint.load import Loaded
    from fabrictool.blueprint.tree import Node, Steps

ALREADY_SHOWN = frozenset({"defaults", "include", "scenarios"})
"""Keys of a blueprint that have had their effect elsewhere."""


@dataclass(frozen=True, slots=True)
class Row:
    """One value."""

    path: str
    value: str
    """As written, or the default in the same notation."""
    origin: Place
    """A file's position; a place without a file for a default."""


def resolved(loaded: Loaded) -> list[Row]:
    """The blueprint's values, then the inventory's under ``inventory.``; within each, in the schema's order."""
    rows = list(_rows(loaded.blueprint, loaded.blueprint_tree, ()))
    rows = [row for row in rows if row.path.partition(".")[0].partition("[")[0] not in ALREADY_SHOWN]
    return rows + list(_rows(loaded.inventory, loaded.inventory_tree, (), ("inventory",)))


def _rows(value: Any, node: Node | None, path: Steps, prefix: Steps = ()) -> Iterator[Row]:
    if isinstance(value, BaseModel):
        if node is not None and not isinstance(node.value, dict):
            yield _row(value, node, (*prefix, *path))  # a short form, such as a length that is only its mean
            return
        for name in type(value).model_fields:
            below = getattr(value, name)
            if below is not None:
                yield from _rows(below, _child(node, name), (*path, name), prefix)
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _rows(below, _child(node, name), (*path, name), prefix)
    elif isinstance(value, tuple) and value and (isinstance(value[0], BaseModel) or node is None):
        for index, below in enumerate(value):
            yield from _rows(below, _child(node, index), (*path, index), prefix)
    elif isinstance(value, tuple) and value:
        for index, below in enumerate(value):
            yield _row(below, _child(node, index), (*prefix, *path, index))
    elif value != ():
        yield _row(value, node, (*prefix, *path))


def _child(node: Node | None, step: str | int) -> Node | None:
    return None if node is None else node.child(step)


def _row(value: Any, node: Node | None, path: Steps) -> Row:
    if node is not None and not isinstance(node.value, dict | list):
        return Row(dotted(path), node.written, node.place(dotted(path)))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Row(dotted(path), text, Place(thing=None))
