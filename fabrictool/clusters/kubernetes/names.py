"""Names and labels of a unit's objects; pure.

The API server lets one object of a kind bear a name, and a unit's name is its operation's: that is what makes a start
happen at most once.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "fabrictool.io/"
ADDRESS = f"{PREFIX}address"
OPERATION = f"{PREFIX}operation"
LINEAGE = f"{PREFIX}lineage"
FABRIC = f"{PREFIX}fabric"
UNIT = f"{PREFIX}unit"
STARTED = f"{PREFIX}started"
"""Annotation of a unit's ConfigMap: its Job or Deployment was seen."""
STOPPED = f"{PREFIX}stopped"
"""Annotation of a unit's ConfigMap: it was asked to leave, and is not started again."""
_LABEL = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
LONGEST = 63


def label_value(text: str) -> str:
    """`text` if a label can hold it, else its readable begin and a hash."""
    if not text or _LABEL.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    kept = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[: LONGEST - 17].rstrip("-")
    return f"{kept}-{digest}" if kept else digest


def object_name(text: str) -> str:
    """``ft-TEXT`` if an object can bear it, else a readable begin and a hash."""
    name = f"ft-{text}"
    if len(name) <= LONGEST and _NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[: LONGEST - 20].rstrip("-")
    return f"ft-{kept}-{digest}" if kept else f"ft-{digest}"


def selector(fabric: str, operations: Iterable[str] | None = None) -> str:
    """Selects a fabric's objects, or those of some of its operations."""
    selected = f"{FABRIC}={label_value(fabric)}"
    if operations is None:
        return selected
    return f"{selected},{OPERATION} in ({','.join(sorted(label_value(operation) for operation in operations))})"
