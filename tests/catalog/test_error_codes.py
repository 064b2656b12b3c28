from __future__ import annotations

import re
from pathlib import Path

import fabrictool
from fabrictool.catalog.errors import error_codes


def used_codes():
    package = Path(fabrictool.__file__).parent
    files = [*package.rglob("*.py"), *(package.parent / "examples").rglob("*.py")]
    return {code for path in files for code in re.findall(r'"(FT\d{4})"', path.read_text())}


def test_every_code_is_explained_and_no_explanation_outlives_its_code():
    assert used_codes() == set(error_codes())


def test_explanations_are_complete():
    for code, entry in error_codes().items():
        assert re.fullmatch(r"FT\d{4}", code)
        assert entry.title
        assert not entry.title.endswith(".")
        assert entry.text.rstrip("`)").endswith("."), code
        assert entry.hint, code


def test_codes_are_sorted():
    assert list(error_codes()) == sorted(error_codes())
