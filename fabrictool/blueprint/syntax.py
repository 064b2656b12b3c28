"""libyaml's complaints in the words of ours: one code, one sentence, the mend."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabrictool.base.errors import Place, Problem

if TYPE_CHECKING:
    import yaml

    from fabrictool.blueprint.tree import SourceFile

_EXPLAINED: tuple[tuple[str, str, str, str], ...] = (
    ("expected a single document", "FT1023", "the file holds a second document", "one file holds one: remove `---`"),
    ("'\\t'", "FT1024", "a tab where spaces are needed", "indent with spaces"),
    (
        "mapping values are not allowed",
        "FT1003",
        "a `:` where no key can be",
        "quote text that contains `: `, or check the indentation",
    ),
    ("could not find expected ':'", "FT1003", "a key without `:`", "write `name: value`"),
    ("expected ',' or ']'", "FT1003", "missing `,` or `]` in a list", "close the bracket"),
    ("expected ',' or '}'", "FT1003", "missing `,` or `}` in a mapping", "close the brace"),
    ("unexpected end of stream", "FT1003", "unclosed quote", "add the closing quote"),
    ("cannot start any token", "FT1003", "a value cannot start with this character", "put the text in quotes"),
    ("expected <block end>", "FT1003", "wrong indentation: no block above has it", "align it with its neighbours"),
    ("did not find expected key", "FT1003", "wrong indentation: no block above has it", "align it with its neighbours"),
    ("expected node content", "FT1003", "a value is missing here, or a bracket is not closed", "write it"),
    ("undefined tag handle", "FT1018", "tags are not supported", "leave it out, or put the text in quotes"),
    ("undefined alias", "FT1017", "aliases are not supported", "write the value, or put the text in quotes"),
)


def syntax_problem(error: yaml.MarkedYAMLError, source: SourceFile) -> Problem:
    """A scanner's or parser's complaint, where it is and where its construct began."""
    mark = error.problem_mark or error.context_mark
    place = source.place(mark.line, mark.column) if mark is not None else Place(file=source.name)
    complaint = " ".join(part for part in (error.context, error.problem) if part)
    if place.source_line is not None and "\t" in place.source_line[: place.column]:
        complaint += " '\\t'"
    began = error.context_mark
    also: tuple[Place, ...] = ()
    if began is not None and mark is not None and began.line != mark.line:
        also = (Place(source.name, began.line + 1, began.column + 1),)
    for needle, code, message, hint in _EXPLAINED:
        if needle in complaint:
            return Problem(code, message, place, hint, also=also if code == "FT1003" else ())
    return Problem("FT1003", f"not YAML: {complaint}", place, "put text with special characters in quotes", also=also)


_FOREIGN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def character_problem(error: yaml.YAMLError, source: SourceFile) -> Problem:
    """Characters that YAML excludes; libyaml knows only an offset in its own encoding, so they are searched again."""
    match = _FOREIGN.search(source.content)
    if match is None:
        complaint = str(error).partition("\n")[0]
        return Problem("FT1003", f"not YAML: {complaint}", Place(file=source.name), "save the file as plain UTF-8 text")
    before = source.content[: match.start()]
    line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
    message = f"the character U+{ord(match[0]):04X} is not allowed in YAML"
    place = Place(source.name, line + 1, column + 1)
    return Problem("FT1025", message, place, "remove it; editors may show nothing there")
