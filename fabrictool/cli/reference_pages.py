"""The pages of ``docs/reference/`` that are written from the code; a test fails when a committed one is stale."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import UsageError
from fabrictool.base.files import write_atomic
from fabrictool.base.settings import Settings
from fabrictool.blueprint.schema import FILES, SchemaKind, json_schema
from fabrictool.catalog import accelerators, engines, links, models
from fabrictool.catalog.errors import error_codes
from fabrictool.cli.answer_schemas import COMMANDS, answer_schema, file_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HEADER = "<!-- Written by `make docs`; edit the code that it comes from, not this page. -->\n\n"


def pages(root: Any) -> dict[str, str]:
    """File name under ``docs/reference`` → text; `root` is the whole command."""
    return {
        "cli.md": _cli(root),
        "blueprint.md": _schema_page("blueprint"),
        "inventory.md": _schema_page("inventory"),
        "policy.md": _schema_page("policy"),
        "errors.md": _errors(),
        "settings.md": _settings(),
        "catalogue.md": _catalogue(),
    }


def schemas() -> dict[str, str]:
    """File name under ``docs/schema`` → text."""
    of_answers = {f"answers/{file_of(command)}": schema_text(command) for command in COMMANDS}
    return {name: schema_text(kind) for kind, name in FILES.items()} | of_answers


def schema_text(document: str) -> str:
    """Of a kind of file, or of what a command prints; raises UsageError FT9001 for another word."""
    if document in COMMANDS:
        schema = answer_schema(document)
    elif document in FILES:
        schema = json_schema(document)
    else:
        known = [*FILES, *COMMANDS]
        near = difflib.get_close_matches(document, known, 3) or [*FILES, "a command that has --json"]
        message = f"no document is called {document!r}"
        raise UsageError.of("FT9001", message, hint=f"nearest: {', '.join(near)}")
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_pages(root: Any, folder: Path) -> list[Path]:
    """Write the pages into `folder` and the schemas beside it; returns what was written."""
    files = {folder / name: text for name, text in pages(root).items()}
    files |= {folder.parent / "schema" / name: text for name, text in schemas().items()}
    (folder.parent / "schema" / "answers").mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_atomic(path, text.encode())
    return list(files)


def _cli(root: Any) -> str:
    about = (
        "Data goes to stdout, talk to stderr. Exit codes and JSON: [status.md](status.md).\n\n"
        "On a terminal, text that is longer than the screen goes through `PAGER`, or `less`, told `FRX` where `LESS`\n"
        "is not set. `fabrictool --no-pager COMMAND`, `PAGER=cat` and an empty `PAGER` print it at once.\n"
        "In terminals that are known to have links, the place of a diagnostic opens its file; `FORCE_HYPERLINK=0` or\n"
        "`1` decides it.\n"
    )
    lines = [HEADER, "# Commands\n\n", about]
    for name, command in _commands(root, "fabrictool"):
        lines.append(f"\n## {name}\n\n{(command.help or '').strip()}\n\n")
        rows = [_parameter(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines.append(_table(("parameter", "default", "meaning"), rows))
    return "".join(lines)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, depth first."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for part, sub in below.items():
        yield from _commands(sub, f"{name} {part}")


def _parameter(parameter: Any) -> tuple[str, str, str]:
    option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in parameter.opts) if option else f"`{parameter.name.upper()}`"
    written = getattr(parameter, "show_default", None)
    default = written if isinstance(written, str) else parameter.default
    shown = "required" if parameter.required else "" if default in (None, False, "") else f"`{default}`"
    return names, shown, getattr(parameter, "help", None) or ""


def _schema_page(kind: SchemaKind) -> str:
    schema = json_schema(kind)
    lines = [HEADER, f"# {kind.capitalize()} files\n\n{schema.get('description', '')}\n\n"]
    lines.append(f"JSON Schema for editors: [{FILES[kind]}](../schema/{FILES[kind]}). Units: [units.md](units.md).\n")
    lines += [f"\n## {kind.capitalize()}\n\n", _fields(schema)]
    for name, part in schema["$defs"].items():
        described = part if "properties" in part else part.get("anyOf", [{}])[-1]
        if "properties" in described:
            lines.append(f"\n## {name}\n\n{described.get('description', '')}\n\n{_fields(described)}")
    return "".join(lines)


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field)
        rows.append((f"`{name}`", value_words(field), default, str(field.get("description", ""))))
    return _table(("key", "value", "default", "meaning"), rows)


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value in (None, {}, [], ()) else f"`{json.dumps(value, ensure_ascii=False)}`"


def value_words(field: dict[str, Any]) -> str:
    """A field's type in words; a variable stands for any text and is left out."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for word in ("anyOf", "allOf", "oneOf"):
        if word in field:
            kinds = [
                value_words(option)
                for option in field[word]
                if not str(option.get("description", "")).startswith("a variable")
            ]
            return " or ".join(dict.fromkeys(kind for kind in kinds if kind not in ("null", "")))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "examples" in field:
        return "such as " + ", ".join(f"`{example}`" for example in field["examples"])
    if field.get("type") == "array":
        return f"list of {value_words(field.get('items', {}))}".rstrip()
    if field.get("type") == "object":
        below = next(iter(field.get("patternProperties", {}).values()), field.get("additionalProperties"))
        return f"by name: {value_words(below)}" if isinstance(below, dict) and below else "keys and values"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(field.get("type", ""), "")


def _errors() -> str:
    lines = [HEADER, "# Error codes\n\n`fabrictool explain CODE` prints the same, offline.\n"]
    for code, entry in error_codes().items():
        lines.append(f"\n## {code}: {entry.title}\n\n{entry.text}\n\n*What to do:* {entry.hint}\n")
    return "".join(lines)


def _settings() -> str:
    rows = [
        (f"`{field.metadata['variable']}`", f"`{field.default}`", field.metadata["text"])
        for field in dataclasses.fields(Settings)
    ]
    text = "# Settings\n\nEnvironment variables; everything else is in the blueprint and the inventory.\n\n"
    return HEADER + text + _table(("variable", "default", "meaning"), rows)


def _catalogue() -> str:
    devices = [
        (
            f"`{entry.id}`",
            entry.title,
            f"{entry.memory / 1e9:.4g}",
            f"{entry.memory_bandwidth / 1e9:.4g}",
            ", ".join(f"{precision} {value / 1e12:.4g}" for precision, value in entry.flops.items()),
            f"`{entry.link}`" if entry.link else "",
            f"{entry.tdp_w:.4g}",
            entry.source,
        )
        for entry in accelerators().values()
    ]
    kinds = [(f"`{entry.id}`", f"{entry.bandwidth / 1e9:.4g}", entry.source) for entry in links().values()]
    served = [
        (
            f"`{entry.id}`",
            f"{entry.parameters / 1e9:.4g}",
            f"{entry.active_parameters / 1e9:.4g}",
            str(entry.layers),
            f"{entry.heads}/{entry.kv_heads}",
            str(entry.max_context),
            entry.licence,
            entry.source,
        )
        for entry in models().values()
    ]
    engine_rows = [
        (
            f"`{entry.id}`",
            entry.title,
            ", ".join(f"{precision} {octets:g}" for precision, octets in entry.weight_bytes.items()),
            str(entry.default_max_num_seqs),
            entry.source,
        )
        for entry in engines().values()
    ]
    return "".join(
        [
            HEADER,
            "# Catalogue\n\nDense peaks, decimal units. `sources.*` of single numbers are in the data files.\n",
            "\n## Accelerators\n\n",
            _table(("id", "name", "GB", "GB/s", "TFLOP/s or TOP/s", "link", "W", "source"), devices),
            "\n## Links\n\n",
            _table(("id", "GB/s, one direction", "source"), kinds),
            "\n## Models\n\n",
            _table(("id", "10⁹ weights", "active", "layers", "heads/KV", "context", "licence", "source"), served),
            "\n## Engines\n\n",
            _table(("id", "name", "octets per weight", "requests at once", "source"), engine_rows),
        ]
    )


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |\n"

    return line(headings) + "|" + "---|" * len(headings) + "\n" + "".join(line(row) for row in rows)
