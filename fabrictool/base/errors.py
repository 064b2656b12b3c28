"""Errors are values with a place.

    FabrictoolError            1   failed
    ├── UsageError            64   the command line is wrong
    ├── InvalidInputError     65   blueprint, inventory, plan or another file is wrong
    ├── InfeasibleError        3   no placement satisfies the constraints
    ├── AppliedInPartError     4   some actions were carried out, some were not
    ├── StaleError             5   the plan's read set changed, or another writer holds the lease
    ├── PolicyDeniedError      6   a review rule forbids it
    ├── UnreachableError      69   a needed cluster did not answer
    └── InterruptedByUserError 130 Ctrl-C

A phase collects every `Problem` before it raises one `FabrictoolError` that carries them all. Codes are
documented in ``catalog/errors/*.toml``; ``fabrictool explain CODE`` prints them offline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AppliedInPartError",
    "FabrictoolError",
    "InfeasibleError",
    "InterruptedByUserError",
    "InvalidInputError",
    "Place",
    "PolicyDeniedError",
    "Problem",
    "StaleError",
    "UnreachableError",
    "UsageError",
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a problem is: a position in a file (1-based line and column), or the name of a running thing."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    thing: str | None = None
    """Such as ``cluster/alpha-local``, ``replica/smollm2/0`` or ``models.llama.slo``."""
    source_line: str | None = None
    """The text of the line, for the caret display."""
    width: int = 1
    """How many columns the caret underlines."""

    def __str__(self) -> str:
        """``file:line:col`` as far as it is known, else the thing's name."""
        if self.file is None:
            return self.thing or ""
        parts = [self.file, *(str(n) for n in (self.line, self.column) if n is not None)]
        return ":".join(parts)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: stable code, one line, where, and what to do."""

    code: str
    message: str
    place: Place = field(default_factory=Place)
    hint: str | None = None
    transient: bool = False
    severity: Literal["error", "warning"] = "error"
    also: tuple[Place, ...] = ()
    """Other places that matter, such as the first of two duplicate keys."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        out: dict[str, Any] = {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "file": self.place.file,
            "line": self.place.line,
            "column": self.place.column,
            "thing": self.place.thing,
            "hint": self.hint,
            "transient": self.transient,
        }
        if self.also:
            out["also"] = [str(place) for place in self.also]
        return out

    def render(self) -> str:
        """Several lines: ``where: severity[CODE]: message``, the source line with a caret, the hint."""
        where = str(self.place)
        lines = [
            f"{where}: {self.severity}[{self.code}]: {self.message}"
            if where
            else f"{self.severity}[{self.code}]: {self.message}"
        ]
        if self.place.source_line is not None and self.place.line is not None and self.place.column is not None:
            gutter = f"{self.place.line:>5} | "
            lines.append(gutter + self.place.source_line)
            caret = "^" * max(1, min(self.place.width, len(self.place.source_line) - self.place.column + 1))
            lines.append(" " * (len(gutter) - 2) + "| " + " " * (self.place.column - 1) + caret)
        lines.extend(f"      see also {place}" for place in self.also)
        if self.hint:
            lines.append(f"      hint: {self.hint}")
        return "\n".join(lines)


class FabrictoolError(Exception):
    """Base of everything that the tool raises on purpose; carries one or more problems."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("; ".join(f"{p.code}: {p.message}" for p in self.problems))

    def __reduce__(self) -> tuple[type[FabrictoolError], tuple[tuple[Problem, ...]]]:
        """Such that it is the same on its way from another process; an exception alone would send its text."""
        return type(self), (self.problems,)

    @classmethod
    def of(
        cls,
        code: str,
        message: str,
        *,
        thing: str | None = None,
        file: str | None = None,
        hint: str | None = None,
        transient: bool = False,
    ) -> FabrictoolError:
        """The error of this class with a single problem."""
        return cls(Problem(code, message, Place(file=file, thing=thing), hint, transient))


class UsageError(FabrictoolError):
    """The command line is wrong."""

    exit_code = 64


class InvalidInputError(FabrictoolError):
    """A file that the user wrote is wrong."""

    exit_code = 65


class InfeasibleError(FabrictoolError):
    """No placement satisfies the constraints."""

    exit_code = 3


class AppliedInPartError(FabrictoolError):
    """Some actions were carried out and some were not; running apply again resumes."""

    exit_code = 4


class StaleError(FabrictoolError):
    """The plan's read set changed, or another writer holds the lease."""

    exit_code = 5


class PolicyDeniedError(FabrictoolError):
    """A review rule forbids what was asked for."""

    exit_code = 6


class UnreachableError(FabrictoolError):
    """A cluster that is needed did not answer."""

    exit_code = 69


class InterruptedByUserError(FabrictoolError):
    """The user pressed Ctrl-C; nothing is half-done."""

    exit_code = 130
