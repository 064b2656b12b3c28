"""``explain models.slo``: what a key of a blueprint, an inventory or a file of review rules means, from its schema."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from fabrictool.blueprint.schema import json_schema
from fabrictool.cli.answers import FieldExplanation, FieldRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.blueprint.schema import SchemaKind

FILES: tuple[SchemaKind, ...] = ("blueprint", "inventory", "policy")
_NAME = "NAME"
_schema = functools.cache(json_schema)
"""Nobody here changes what it gives."""
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def explain_field(path: str) -> FieldExplanation | None:
    """Of a path with or without the file before it and with or without names in it: ``inventory.clusters.kind``,
    ``models.chat.slo``. None for what no file has. ``inventory`` alone is the file, not the blueprint's key.
    """
    words = path.split(".")
    for kind in FILES:
        if words[0] == kind:
            return _walked(_schema(kind), kind, words[1:])
    schemas = ((kind, _schema(kind)) for kind in FILES)
    mine = next(((kind, schema) for kind, schema in schemas if words[0] in schema["properties"]), None)
    return None if mine is None else _walked(mine[1], mine[0], words)


def paths() -> Iterator[str]:
    """Every key of every file down to the second level, without the file: the first file that has it is meant."""
    for kind in FILES:
        schema = _schema(kind)
        for name, field in schema["properties"].items():
            yield name
            by_name = _by_name(schema, field)
            yield from (f"{name}.{key}" for key in _keys(schema, field if by_name is None else by_name))


def _walked(schema: dict[str, Any], kind: str, words: list[str]) -> FieldExplanation | None:
    part, shown, required = schema, [kind], False
    for word in words:
        by_name = None if word in _keys(schema, part) else _by_name(schema, part)
        if by_name is not None:
            part = by_name
            shown.append(_NAME)
            if word not in _keys(schema, part):
                continue
        keys = _keys(schema, part)
        if word not in keys:
            return None
        required = word in _object(schema, part).get("required", ())
        part = keys[word]
        shown.append(word)
    by_name = _by_name(schema, part)
    inside = part if by_name is None else by_name
    below = _object(schema, inside)
    rows = [
        _row(schema, name, field, name in below.get("required", ())) for name, field in _keys(schema, inside).items()
    ]
    return FieldExplanation(
        file=kind,
        path=".".join(shown),
        **_figures(schema, part, required=required),
        text=_text(part) or _text(_object(schema, part)),
        keys=rows,
    )


def _row(schema: dict[str, Any], name: str, field: dict[str, Any], required: bool) -> FieldRow:
    text = _text(field) or _text(_object(schema, field))
    return FieldRow(key=name, **_figures(schema, field, required=required), text=text)


def _figures(schema: dict[str, Any], field: dict[str, Any], *, required: bool) -> dict[str, Any]:
    default = field.get("default")
    written = None if default in (None, {}, [], ()) else default if isinstance(default, str) else json.dumps(default)
    return {"value": _value(schema, field), "default": written, "required": required}


def _value(schema: dict[str, Any], field: dict[str, Any]) -> str:
    """In words; a type of ours, whose name says nothing to whoever writes the file, as what it looks like there."""
    from fabrictool.cli.reference_pages import value_words

    by_name = _by_name(schema, field)
    if by_name is not None and _keys(schema, by_name):
        return "by name, each with keys"
    if _keys(schema, field):
        return "a list, each with keys" if field.get("type") == "array" else "keys"
    return _LINK.sub(r"\1", value_words(field)).replace("`", "")


def _text(field: dict[str, Any]) -> str:
    return " ".join(str(field.get("description", "")).split())


def _object(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """What has keys: `part` itself, what it refers to, the last of several forms, or the items of a list."""
    if "$ref" in part:
        return _object(schema, schema["$defs"][part["$ref"].rpartition("/")[2]])
    for form in ("anyOf", "oneOf", "allOf"):
        for option in reversed(part.get(form, [])):
            below = _object(schema, option)
            if below.keys() & {"properties", "patternProperties", "additionalProperties"}:
                return below
    if "items" in part:
        return _object(schema, part["items"])
    return part


def _keys(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return dict(_object(schema, part).get("properties", {}))


def _by_name(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any] | None:
    """What each entry is, where the keys are names that one chooses."""
    whole = _object(schema, part)
    for entry in (*whole.get("patternProperties", {}).values(), whole.get("additionalProperties")):
        if isinstance(entry, dict) and entry:
            return entry
    return None
