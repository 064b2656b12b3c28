"""Every value after merging, with where it comes from: what ``show --resolved --origin`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fabrictool.base.errors import Place
from fabrictool.blueprint.tree import dotted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fabrictool.blueprint.load import Loaded
    from fabrictool.blueprint.tree import Steps, YamlNode

ALREADY_SHOWN = frozenset({"defaults", "include", "scenarios"})
"""Keys of a blueprint that have had their effect elsewhere."""


@dataclass(frozen=True, slots=True)
class Row:
    """One value of the merged documents, and where it comes from."""

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


def _rows(value: Any, node: YamlNode | None, path: Steps, prefix: Steps = ()) -> Iterator[Row]:
    if isinstance(value, BaseModel):
        if node is not None and not isinstance(node.value, dict):
            yield _row(value, node, (*prefix, *path))  # a short form, such as a length that is only its mean
            return
        fields = [(name, getattr(value, name)) for name in type(value).model_fields]
        given = [(name, below) for name, below in fields if below is not None]
        if node is not None and not given:
            yield Row(dotted((*prefix, *path)), "{}", node.place())  # written, though it says nothing
        yield from _below(given, node, path, prefix)
    elif isinstance(value, dict):
        yield from _below(value.items(), node, path, prefix)
    elif isinstance(value, tuple):
        yield from _below(enumerate(value), node, path, prefix)
    else:
        yield _row(value, node, (*prefix, *path))


def _below(
    children: Iterable[tuple[str | int, Any]], node: YamlNode | None, path: Steps, prefix: Steps
) -> Iterator[Row]:
    for step, value in children:
        yield from _rows(value, _child(node, step), (*path, step), prefix)


def _child(node: YamlNode | None, step: str | int) -> YamlNode | None:
    return None if node is None else node.child(step)


def _row(value: Any, node: YamlNode | None, path: Steps) -> Row:
    if node is not None and not isinstance(node.value, dict | list):
        return Row(dotted(path), node.written, node.place(dotted(path)))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Row(dotted(path), text, Place(thing=None))
