"""Bytes → tree: YAML through libyaml's composer, restricted to what every reader understands alike."""

from __future__ import annotations

import hashlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import yaml

from fabrictool.base.errors import InvalidInputError, Place, Problem
from fabrictool.blueprint.scalars import TrapError, resolve
from fabrictool.blueprint.syntax import character_problem, syntax_problem
from fabrictool.blueprint.tree import SourceFile, YamlNode, describe

if TYPE_CHECKING:
    from pathlib import Path

MAX_DEPTH = 32
"""Levels; the deepest key of any document of ours is at eight."""
MAX_OCTETS = 64 * 2**20
_TEXT = "tag:yaml.org,2002:str"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
# libyaml's C parser; Python's own, ten times slower, where PyYAML was built without it.
_BASE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def composer_of(base: Any) -> Any:
    """A loader that composes nodes and leaves the meaning of scalars to `scalars.resolve`."""

    class Composer(base):  # type: ignore[misc]
        def descend_resolver(self, *_: Any) -> None:
            """No resolving by path."""

        def ascend_resolver(self) -> None:
            """No resolving by path."""

        def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
            """The tag of a node that was written without one."""
            return _TEXT if kind is yaml.ScalarNode else _COLLECTIONS[kind is yaml.SequenceNode]

    return Composer


_COMPOSER = composer_of(_BASE)


def read(path: Path, name: str | None = None) -> YamlNode:
    """The document in a file; `name` is what complaints call it.

    Raises
    ------
    InvalidInputError
        FT10xx, all that can be found at once.
    """
    shown = name or str(path)
    try:
        if path.stat().st_size > MAX_OCTETS:
            raise _failure("FT1020", f"the file is larger than {MAX_OCTETS >> 20} MiB", shown, "split it with include")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise _failure("FT1001", f"cannot read the file: {reason}", shown, _near_file(path)) from error
    return parse(raw, path, shown)


def parse(raw: bytes, path: Path, shown: str) -> YamlNode:
    """The document in `raw`; see `read`."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = raw.rfind(b"\n", 0, error.start) + 1
        place = Place(shown, raw.count(b"\n", 0, error.start) + 1, error.start - start + 1)
        raise InvalidInputError(Problem("FT1002", "the file is not UTF-8", place, "save it as UTF-8")) from error
    source = SourceFile(path, shown, text, hashlib.sha256(raw).hexdigest())
    _refuse_sharing_and_depth(source)
    return _Builder(source).build(_compose(source))


def _compose(source: SourceFile) -> Any:
    loader = None
    try:
        loader = _COMPOSER(source.content)
        composed = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise InvalidInputError(syntax_problem(error, source)) from error
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        problem = character_problem(error if isinstance(error, yaml.YAMLError) else yaml.YAMLError(error), source)
        raise InvalidInputError(problem) from error
    except RecursionError as error:  # the slow parser only: it recurses in Python
        raise InvalidInputError(_too_deep(Place(file=source.name))) from error
    finally:
        if loader is not None:
            loader.dispose()
    if composed is None:
        raise _failure("FT1016", "the file is empty", source.name, "`fabrictool init` writes a first one")
    return composed


def _refuse_sharing_and_depth(source: SourceFile) -> None:
    """Anchors and aliases are refused with their places; so is depth, on which the C composer would recurse until
    the process crashes.

    One pass over the events finds both but costs as much as composing, so it is made only when a look at the text
    cannot rule both out.
    """
    text = source.content
    if "&" not in text and "*" not in text and not _may_be_deep(text):
        return
    problems, depth = [], 0
    try:
        event: Any
        for event in yaml.parse(text, Loader=_BASE):
            mark = event.start_mark
            if isinstance(event, yaml.events.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise InvalidInputError(_too_deep(source.place(mark.line, mark.column)))
            elif isinstance(event, yaml.events.CollectionEndEvent):
                depth -= 1
            anchor = getattr(event, "anchor", None)
            if anchor:
                word = ("alias", "*") if isinstance(event, yaml.events.AliasEvent) else ("anchor", "&")
                message = f"{word[0]} `{word[1]}{anchor}` is not supported"
                place = source.place(mark.line, mark.column, len(anchor) + 1)
                hint = "write the value where it is used, or once under `defaults`"
                problems.append(Problem("FT1017", message, place, hint))
    except (yaml.YAMLError, UnicodeEncodeError):
        return  # composing meets it again, and says where
    if problems:
        raise InvalidInputError(problems)


def _may_be_deep(text: str) -> bool:
    """False only when nesting is certainly below some thousand levels, which the C composer takes.

    A level of block nesting costs a column, one of flow nesting an opening bracket. Quotes and comments may hide
    closing brackets, so on such lines the opening ones count as never closed.
    """
    never_closed = 0
    for line in text.splitlines():
        if len(line) > 500:
            return True
        opened = line.count("[") + line.count("{")
        if opened and ("#" in line or '"' in line or "'" in line or opened != line.count("]") + line.count("}")):
            never_closed += opened
    return never_closed > 500


class _Builder:
    """Composed nodes → our tree, collecting whatever is outside the strict subset."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._problems: list[Problem] = []

    def build(self, composed: Any) -> YamlNode:
        root = self._node(composed, 0)
        if not self._problems and not isinstance(root.value, dict):
            message = f"a document is a mapping of keys, not {describe(root.value)}"
            self._problems.append(Problem("FT1019", message, root.place(), "start with `apiVersion: fabrictool/v1`"))
        if self._problems:
            raise InvalidInputError(self._problems)
        return root

    def _node(self, composed: Any, depth: int) -> YamlNode:
        start, end = composed.start_mark, composed.end_mark
        line, column = start.line, start.column
        width = end.column - column if end.line == line else 1
        tag = composed.tag
        if tag != _TEXT and tag not in _COLLECTIONS:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._say("FT1018", f"tag `{shown}` is not supported", line, column, 1, "leave the tag out")
        if composed.id == "scalar":
            return self._scalar(composed, line, column, width)
        if depth >= MAX_DEPTH:
            self._problems.append(_too_deep(self._source.place(line, column)))
            return YamlNode(self._source, None, line, column, width)
        if composed.id == "sequence":
            children = [self._node(child, depth + 1) for child in composed.value]
            return YamlNode(self._source, children, line, column, width)
        return YamlNode(self._source, self._mapping(composed, depth), line, column, width)

    def _scalar(self, composed: Any, line: int, column: int, width: int) -> YamlNode:
        text: str = composed.value
        if composed.style:
            return YamlNode(self._source, text, line, column, width, written=text)
        value: Any = text
        try:
            value = resolve(text)
        except TrapError as trap:
            self._say(trap.code, trap.message, line, column, width, trap.hint)
        return YamlNode(self._source, value, line, column, width, written=text, plain=True)

    def _mapping(self, composed: Any, depth: int) -> dict[str, YamlNode]:
        children: dict[str, YamlNode] = {}
        for key_node, value_node in composed.value:
            line, column = key_node.start_mark.line, key_node.start_mark.column
            if key_node.id != "scalar" or not key_node.value:
                self._say("FT1021", "a key must be plain text", line, column, 1, "write `name: value`")
                continue
            key: str = key_node.value
            if key == "<<" and not key_node.style:
                hint = "write what is shared once, under `defaults`"
                self._say("FT1022", "merge keys (`<<`) are not supported", line, column, 2, hint)
                continue
            child = self._node(value_node, depth + 1)
            child.key_line, child.key_column = line, column
            if key in children:
                first = children[key].key_place()
                hint = "one of the two would be lost: keep one, or rename it"
                problem = Problem("FT1004", f"duplicate key `{key}`", child.key_place(), hint, also=(first,))
                self._problems.append(problem)
                continue
            children[key] = child
        return children

    def _say(self, code: str, message: str, line: int, column: int, width: int, hint: str) -> None:
        self._problems.append(Problem(code, message, self._source.place(line, column, width), hint))


def _failure(code: str, message: str, shown: str, hint: str | None) -> InvalidInputError:
    return InvalidInputError(Problem(code, message, Place(file=shown), hint))


def _too_deep(place: Place) -> Problem:
    return Problem(
        "FT1020", f"nested more than {MAX_DEPTH} levels deep", place, "no document needs that: check brackets"
    )


def _near_file(path: Path) -> str:
    """The most similar file beside a missing one."""
    try:
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    except (OSError, ValueError):
        return "check the path"
    near = [name for name in get_close_matches(path.name, there, 1, 0.6) if name != path.name]
    return f"did you mean `{path.parent / near[0]}`?" if near else "check the path"
