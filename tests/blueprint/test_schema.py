from __future__ import annotations

import json
import re

import jsonschema
import pytest
import yaml

from fabrictool.blueprint.schema import FILES, json_schema
from fabrictool.blueprint.starter import starter_files


@pytest.mark.parametrize("kind", FILES)
def test_the_committed_file_is_up_to_date(kind, root):
    committed = (root / "docs" / "schema" / FILES[kind]).read_text()
    assert committed == json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n", (
        "run tests/blueprint/write_schemas.py"
    )


@pytest.mark.parametrize("kind", FILES)
def test_each_is_a_schema_of_its_dialect(kind):
    jsonschema.Draft202012Validator.check_schema(json_schema(kind))


def complaints(kind, document):
    validator = jsonschema.Draft202012Validator(json_schema(kind))
    return list(validator.iter_errors(document))


def test_good_files_satisfy_it(cases, root):
    for path, kind in [
        (root / "blueprints/local.yaml", "blueprint"),
        (root / "inventory/local.yaml", "inventory"),
        (cases / "good/fabric.yaml", "blueprint"),
        (cases / "inventory.yaml", "inventory"),
        (cases / "good/parts/qwen.yaml", "part"),
        (cases / "good/parts/tenants.yaml", "part"),
        (cases / "good/overlays/test.yaml", "part"),
    ]:
        assert complaints(kind, yaml.safe_load(path.read_text())) == [], path
    for name, text in starter_files().items():
        assert complaints(name.partition(".")[0], yaml.safe_load(text)) == []


BAD = [
    "schema-unknown-key", "schema-unknown-top-key", "schema-missing-source", "schema-no-models", "schema-unit-missing",
    "schema-unit-unknown", "schema-unit-of-another-kind", "schema-negative", "schema-attain-as-number", "schema-choice",
    "schema-endpoint", "schema-literal-key", "schema-range", "schema-source", "schema-name", "schema-text-for-list",
    "schema-unit-letter-case.inventory", "schema-unit-missing-memory.inventory", "schema-price.inventory",
    "schema-between-three.inventory", "schema-secret-form", "schema-precision", "schema-other-version",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_editor_flags_what_the_loader_refuses(name, cases):
    document = yaml.safe_load((cases / "bad" / f"{name}.yaml").read_text())
    assert complaints("inventory" if name.endswith(".inventory") else "blueprint", document)


def test_units_are_text_with_a_pattern_and_examples_that_match():
    text = json.dumps(json_schema("blueprint")) + json.dumps(json_schema("inventory"))
    assert '"800ms"' in text
    assert '"80GiB"' in text

    def walk(node):
        if isinstance(node, dict):
            if "examples" in node:
                assert node["type"] == "string"
                assert all(re.search(node["pattern"], e) for e in node["examples"] if "…" not in e), node
            for below in node.values():
                walk(below)
        elif isinstance(node, list):
            for below in node:
                walk(below)

    walk(json_schema("blueprint"))
    walk(json_schema("inventory"))


def test_every_field_tells_what_it_is():
    for kind in ("blueprint", "inventory"):
        schema = json_schema(kind)
        for name, definition in {**schema["$defs"], "document": schema}.items():
            for each in definition.get("anyOf", [definition]):
                for field, body in each.get("properties", {}).items():
                    assert body.get("description") or "$ref" in body, f"{name}.{field}"


def test_variables_are_admitted_where_text_is():
    document = yaml.safe_load(starter_files()["blueprint.yaml"])
    document["gateway"]["listen"] = "${LISTEN:?the address for clients}"
    assert complaints("blueprint", document) == []
    document["gateway"]["listen"] = "${LISTEN}"
    assert complaints("blueprint", document)
