"""Tab after ``@`` in bash, whose line editor takes what stands before and behind it for words of their own.

The parser completes whole words, and bash puts what it gets in place of the part from the last ``@`` on.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ASKED_BY = "_FABRICTOOL_COMPLETE"
BREAK = "@"


@dataclass(frozen=True, slots=True)
class TypedLine:
    """What stands before the cursor, in words as the shell passes them to a program."""

    words: list[str]
    word: int
    """Number of the one that is completed."""
    typed: str
    """Of that word what bash keeps by itself: what stands before the last ``@``; empty where it was not parted."""


def joined(words: list[str], word: int) -> TypedLine:
    """`words` as bash parts them; an ``@`` alone is no word that any command takes."""
    whole: list[str] = []
    kept, glued = "", False
    for part in words[: word + 1]:
        if whole and (part == BREAK or glued):
            kept = whole[-1] if part == BREAK else kept
            whole[-1] += part
        else:
            whole.append(part)
            kept = ""
        glued = part == BREAK
    return TypedLine(whole, len(whole) - 1, kept)


@contextlib.contextmanager
def whole_words(environment: Mapping[str, str]) -> Iterator[None]:
    """Completion for bash inside sees words with their ``@``; what it prints comes out without what bash keeps."""
    if environment.get(ASKED_BY) != "complete_bash" or BREAK not in environment.get("COMP_WORDS", "").split("\n"):
        yield
        return
    line = joined(environment["COMP_WORDS"].split("\n"), int(environment["COMP_CWORD"]))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(line.words), str(line.word)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print("\n".join(name.removeprefix(line.typed) for name in printed.getvalue().splitlines()))
