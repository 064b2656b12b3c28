"""Writes docs/schema/*.json again; a test fails when they are stale."""

from __future__ import annotations

import json
from pathlib import Path

from fabrictool.blueprint.schema import FILES, json_schema

if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "docs" / "schema"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name in FILES.items():
        (folder / name).write_text(json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n")
