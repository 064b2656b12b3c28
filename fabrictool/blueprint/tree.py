"""A YAML document as a tree whose every value knows where it was written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Step = str | int
Steps = tuple[Step, ...]
Scalar = str | int | float | bool | None

MAX_SHOWN = 400
"""Characters; a longer line is not shown under a complaint."""
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


# A key, token or password that is no reference, wherever a complaint about another part of its line would show it.
_LITERAL = re.compile(r"""(?i)(?<![\w-])((?:key|token|password)["']?\s*:\s*["']?)(?!secret://|["'])([^\s,}"']+)""")

# A password in a URL, too.
_LOGIN = re.compile(r"(://[^/@\s:]*:)([^/@\s]+)(?=@)")


def _hide(match: re.Match[str]) -> str:
    """As many asterisks, so that columns stay."""
    return match[1] + "*" * len(match[2])


@dataclass(frozen=True)
class SourceFile:
    """One file: the name that complaints use, and its content for the caret display."""

    path: Path
    name: str
    content: str = field(repr=False)
    sha256: str

    def line(self, number: int) -> str | None:
        """The text of a line, counted from 0, if it is short enough to be shown."""
        text = self._lines[number] if 0 <= number < len(self._lines) else None
        return _LITERAL.sub(_hide, _LOGIN.sub(_hide, text)) if text is not None and len(text) <= MAX_SHOWN else None

    @cached_property
    def _lines(self) -> list[str]:
        return _BREAK.split(self.content)

    def place(self, line: int, column: int, width: int = 1, subject: str | None = None) -> Place:
        """A position that counts from 0, as YAML's do, as one that counts from 1, as people's do."""
        return Place(self.name, line + 1, column + 1, subject, self.line(line), max(1, width))


class YamlNode:
    """A value and where it is; mappings hold their children by key, sequences by position."""

    __slots__ = ("column", "key_column", "key_line", "line", "plain", "source", "value", "width", "written")

    # Wide: where a value stands is three numbers, and `__slots__` leaves no room for defaults in the class.
    def __init__(
        self,
        source: SourceFile,
        value: Scalar | dict[str, YamlNode] | list[YamlNode],
        line: int,
        column: int,
        width: int,
        *,
        written: str = "",
        plain: bool = False,
    ) -> None:
        self.source = source
        self.value = value
        self.line = line
        self.column = column
        self.width = width
        self.written = written
        """The text of a scalar."""
        self.plain = plain
        """Whether a scalar stood without quotes."""
        self.key_line = -1
        self.key_column = -1

    def place(self, subject: str | None = None) -> Place:
        """Where the value is; a collection that starts below its key, and an empty value, are shown at the key."""
        below = isinstance(self.value, dict | list) and self.key_line != self.line
        if self.key_line >= 0 and (below or self.value is None):
            return self.key_place(subject)
        return self.source.place(self.line, self.column, self.width, subject)

    def key_place(self, subject: str | None = None) -> Place:
        """Where the key of this value is; where the value is, if it has none."""
        if self.key_line < 0:
            return self.source.place(self.line, self.column, 1, subject)
        text = self.source.line(self.key_line) or ""
        width = len(text[self.key_column :].partition(":")[0].rstrip())
        return self.source.place(self.key_line, self.key_column, width, subject)

    def like(self, value: Scalar | dict[str, YamlNode] | list[YamlNode], written: str = "") -> YamlNode:
        """Another value at the same place."""
        node = YamlNode(self.source, value, self.line, self.column, self.width, written=written, plain=self.plain)
        node.key_line, node.key_column = self.key_line, self.key_column
        return node

    def child(self, step: Step) -> YamlNode | None:
        """One step down, if there is such a child."""
        if isinstance(self.value, dict):
            return self.value.get(step) if isinstance(step, str) else None
        if isinstance(self.value, list) and isinstance(step, int):
            return self.value[step] if 0 <= step < len(self.value) else None
        return None

    def nearest(self, path: Steps) -> tuple[YamlNode, Steps]:
        """The node at the longest known start of `path`, and that start."""
        node = self
        for index, step in enumerate(path):
            below = node.child(step)
            if below is None:
                return node, path[:index]
            node = below
        return node, path

    def data(self) -> Any:
        """Plain Python values; sequences as tuples, which frozen models want."""
        value = self.value
        if isinstance(value, dict):
            return {key: child.data() for key, child in value.items()}
        if isinstance(value, list):
            return tuple(child.data() for child in value)
        return value

    def leaves(self, path: Steps = ()) -> Iterator[tuple[Steps, YamlNode]]:
        """All scalars and empty collections, in the order of the file."""
        value = self.value
        if isinstance(value, dict) and value:
            for key, child in value.items():
                yield from child.leaves((*path, key))
        elif isinstance(value, list) and value:
            for index, child in enumerate(value):
                yield from child.leaves((*path, index))
        else:
            yield path, self


def dotted(path: Steps) -> str:
    """A path as people write it: ``models.llama.place.pin[0]``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def describe(value: Any) -> str:
    """What a value is, in the words of a complaint."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return "a number" if isinstance(value, int | float) else "text"
