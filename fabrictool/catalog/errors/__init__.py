"""What every error code means: one TOML file for each area, read together for ``fabrictool explain``."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class ErrorCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One code, as its TOML file explains it."""

    title: str
    text: str
    """What it means."""
    hint: str
    """What to do."""


@cache
def error_codes() -> Mapping[str, ErrorCode]:
    """Code → its explanation, sorted by code.

    Raises
    ------
    ValueError
        A code is documented twice: a mistake of ours, found by a test.
    """
    codes: dict[str, ErrorCode] = {}
    for entry in sorted(files("fabrictool.catalog.errors").iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".toml"):
            continue
        for code, row in tomllib.loads(entry.read_text("utf-8")).items():
            if code in codes:
                raise ValueError(f"{code} is documented twice, again in {entry.name}")
            codes[code] = msgspec.convert(row, ErrorCode)
    return MappingProxyType(dict(sorted(codes.items())))
