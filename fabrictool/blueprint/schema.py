"""JSON Schemas of the documents, for editors and for the reference page; committed under ``docs/schema/``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import to_jsonable_python

from fabrictool.base.docstrings import attribute_docstrings
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.inventory import Inventory
from fabrictool.domain.policy import ReviewPolicy

if TYPE_CHECKING:
    from pydantic_core.core_schema import ModelSchema

    from fabrictool.domain.quantities import Document

SchemaKind = Literal["blueprint", "inventory", "part", "policy"]
FILES: dict[SchemaKind, str] = {
    "blueprint": "blueprint.v1.json",
    "inventory": "inventory.v1.json",
    "part": "part.v1.json",
    "policy": "policy.v1.json",
}
"""Kind → its committed file's name."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE: dict[str, Any] = {
    "type": "string",
    "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*:\?[^{}]+\}",
    "description": "a variable: ${NAME:?what to set it to}",
}


class _Generate(GenerateJsonSchema):
    """Defaults in the notation of the YAML files: a quantity as text, never as a bare number; and the docstrings of
    fields.
    """

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        texts = attribute_docstrings(schema["cls"])
        for name, field in schema["cls"].model_fields.items():
            if name in texts and field.description is None:
                described["properties"][field.alias or name]["description"] = texts[name]
        return described

    def encode_default(self, dft: Any) -> Any:
        return to_jsonable_python(dft, fallback=str, serialize_unknown=True) if dft is None else _as_written(dft)


def _as_written(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple | list):
        return [_as_written(item) for item in value]
    return value if type(value) in (str, int, float, bool) else str(value)


def json_schema(kind: SchemaKind) -> JsonSchemaValue:
    """The schema of one kind of document.

    A part (an included file or an overlay) is a blueprint of which nothing but the head is required, and in which
    null deletes.
    """
    models: dict[str, type[Document]] = {"inventory": Inventory, "policy": ReviewPolicy}
    model = models.get(kind, Blueprint)
    schema = model.model_json_schema(mode="validation", schema_generator=_Generate)
    schema = copy.deepcopy(schema)
    if "HourlyAmounts" in schema["$defs"]:
        hours = schema["$defs"]["HourlyAmounts"]
        schema["$defs"]["HourlyAmounts"] = {
            "anyOf": [hours["properties"]["week"] | {"description": "A day or a week."}, hours]
        }
    if "Length" in schema["$defs"]:
        # A length that is only its mean is written as text: `input: 64 tok`.
        length = schema["$defs"]["Length"]
        schema["$defs"]["Length"] = {"anyOf": [copy.deepcopy(length["properties"]["mean"]), length]}
    _tidy(schema, variables=kind != "policy")  # those who own the rules leave nothing to the environment
    if kind == "part":
        _loosen(schema)
    return {"$schema": DIALECT, **schema, "title": f"fabrictool {kind}"}


def _tidy(node: Any, *, variables: bool) -> None:
    """What pydantic says and people need not read: titles made from field names; ``null`` beside optional fields."""
    if isinstance(node, list):
        for child in node:
            _tidy(child, variables=variables)
        return
    if not isinstance(node, dict):
        return
    for name, field in (node.get("properties") or {}).items():
        _tidy_field(name, field)
    if "patternProperties" in node:
        node["additionalProperties"] = False
    if isinstance(node.get("description"), str):
        node["description"] = node["description"].replace("``", "`")
    if variables and node.get("type") == "string" and "pattern" in node:
        # Any text may come from a variable, whose content the editor cannot know.
        text = {key: node.pop(key) for key in ("type", "pattern", "examples") if key in node}
        node["anyOf"] = [text, dict(_VARIABLE)]
        return
    for key, child in list(node.items()):
        if key not in ("default", "propertyNames"):
            _tidy(child, variables=variables)


def _tidy_field(name: str, field: dict[str, Any]) -> None:
    _without_null(field)
    if field.get("title", "").replace(" ", "").lower() == name.replace("_", "").lower():
        field.pop("title", None)
    if isinstance(field.get("default"), dict):
        del field["default"]  # the fields of the object below tell theirs


def _without_null(field: dict[str, Any]) -> None:
    """An optional field is left out, never written as null."""
    options = field.get("anyOf")
    if not isinstance(options, list) or {"type": "null"} not in options:
        return
    rest = [option for option in options if option != {"type": "null"}]
    if field.get("default", 0) is None:
        del field["default"]
    if len(rest) == 1:
        del field["anyOf"]
        for key, value in rest[0].items():
            field.setdefault(key, value)
    else:
        field["anyOf"] = rest


def _loosen(schema: dict[str, Any]) -> None:
    definitions = schema.get("$defs", {})
    for definition in definitions.values():
        definition.pop("required", None)
        definition["properties"] = {
            name: {"anyOf": [field, {"type": "null"}]} for name, field in definition.get("properties", {}).items()
        }
    schema["required"] = ["apiVersion", "kind"]
    schema["properties"]["kind"] = {"const": "Part", "type": "string", "description": "What this file is."}
    for name in ("models", "architectures", "tenants"):
        field = schema["properties"][name]
        field.pop("minProperties", None)
        named = field["patternProperties"]
        field["patternProperties"] = {key: {"anyOf": [below, {"type": "null"}]} for key, below in named.items()}
