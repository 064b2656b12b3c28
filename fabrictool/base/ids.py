"""Names and identifiers: what a name may look like, and random ids."""

from __future__ import annotations

import re
import secrets

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
"""Names of fabrics, models, clusters …: safe in paths, job names and labels."""

_NAME = re.compile(NAME_PATTERN)


def is_name(text: str) -> bool:
    """Whether `text` can name a thing of ours."""
    return _NAME.fullmatch(text) is not None


def random_id(octets: int = 8) -> str:
    """Hex of that many bytes from the operating system's random source."""
    return secrets.token_hex(octets)
