"""Requirements as packages state them (``name[extra] (>=1); marker``), and all that follow from some; pure.

Versions are not looked at: what is packed is what is installed here, or what the lock file pins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?", re.DOTALL)
_TOKEN = re.compile(r"""\s*(\(|\)|'[^']*'|"[^"]*"|===|[<>=!~]=|[<>]|not\s+in\b|[A-Za-z_][A-Za-z0-9_.]*)""")
_VERSIONS = frozenset(["python_version", "python_full_version", "implementation_version"])


@dataclass(frozen=True, slots=True)
class TargetPlatform:
    """The interpreter for which packages are chosen: CPython on Linux."""

    version: tuple[int, int]
    machine: str
    """Such as ``x86_64``."""
    glibc: tuple[int, int] = (0, 0)
    """(0, 0): not known."""

    @property
    def minor(self) -> str:
        """Major and minor number: ``3.11``."""
        return ".".join(map(str, self.version))

    def markers(self, extra: str = "") -> dict[str, str]:
        """Values of the variables of environment markers (PEP 508)."""
        return {
            "python_version": self.minor,
            "python_full_version": f"{self.minor}.0",
            "implementation_version": f"{self.minor}.0",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
            "platform_release": "",
            "platform_version": "",
            "extra": extra,
        }


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of ``Requires-Dist``."""

    name: str
    extras: tuple[str, ...] = ()
    marker: str = ""


def normal(name: str) -> str:
    """The form in which PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(text: str) -> Requirement:
    """Raises ValueError for what is no requirement."""
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        message = f"not a requirement: {text!r}"
        raise ValueError(message)
    extras = tuple(normal(extra.strip()) for extra in (match[2] or "").split(",") if extra.strip())
    return Requirement(normal(match[1]), extras, (match[3] or "").strip())


def holds(marker: str, environment: Mapping[str, str]) -> bool:
    """Whether an environment marker (PEP 508) is true; an empty one is.

    Raises
    ------
    ValueError
        When it cannot be read.
    """
    return not marker or _Marker(marker, environment).result()


def closure(
    roots: Iterable[Requirement], requires: Callable[[str], Sequence[str] | None], target: TargetPlatform
) -> dict[str, bool]:
    """Name → whether its own requirements are known, for the roots and all that they need on `target`."""
    known: dict[str, bool] = {}
    done: set[tuple[str, str]] = set()
    waiting = [(root.name, extra) for root in roots for extra in ("", *root.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        texts = requires(name)
        known[name] = texts is not None
        for needed in map(requirement, texts or ()):
            if holds(needed.marker, target.markers(extra)):
                waiting += [(needed.name, wanted) for wanted in ("", *needed.extras)]
    return dict(sorted(known.items()))


def roots(own: Iterable[str], extras: Sequence[str], target: TargetPlatform) -> list[Requirement]:
    """What the given extras of a package add to it, its own extras among them resolved; nothing of the base set."""
    requirements, wanted, added = [requirement(text) for text in own], list(extras), []
    for extra in wanted:  # grows while it is read
        for needed in requirements:
            if holds(needed.marker, target.markers(extra)) and not holds(needed.marker, target.markers()):
                own_extras = [name for name in needed.extras if name not in wanted]
                if needed.name == "fabrictool":
                    wanted += own_extras
                else:
                    added.append(needed)
    return added


class _Marker:
    """A reader of one marker: comparisons, ``and``, ``or``, brackets."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self._text = text
        self._environment = environment
        self._tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._wrong()
            self._tokens.append(re.sub(r"\s+", " ", match[1]))
            at = match.end()

    def result(self) -> bool:
        value = self._any()
        if self._tokens:
            raise self._wrong()
        return value

    def _any(self) -> bool:
        value = self._all()
        while self._took("or"):
            value = self._all() or value
        return value

    def _all(self) -> bool:
        value = self._one()
        while self._took("and"):
            value = self._one() and value
        return value

    def _one(self) -> bool:
        if self._took("("):
            value = self._any()
            if not self._took(")"):
                raise self._wrong()
            return value
        left, left_name = self._operand()
        operator = self._next()
        right, right_name = self._operand()
        if {left_name, right_name} & _VERSIONS and operator not in ("in", "not in"):
            return _compared(operator, *_padded(_version(left), _version(right)), compatible=_version(right))
        if operator not in ("==", "!=", "in", "not in", "==="):
            raise self._wrong()
        if left_name == "extra" or right_name == "extra":
            left, right = normal(left), normal(right)
        return {"in": left in right, "not in": left not in right, "!=": left != right}.get(operator, left == right)

    def _operand(self) -> tuple[str, str]:
        token = self._next()
        if token[0] in "'\"":
            return token[1:-1], ""
        if token not in self._environment:
            raise self._wrong()
        return self._environment[token], token

    def _next(self) -> str:
        if not self._tokens:
            raise self._wrong()
        return self._tokens.pop(0)

    def _took(self, token: str) -> bool:
        if self._tokens[:1] == [token]:
            del self._tokens[0]
            return True
        return False

    def _wrong(self) -> ValueError:
        return ValueError(f"not an environment marker: {self._text!r}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0]))


def _padded(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = max(len(left), len(right))
    return left + (0,) * (size - len(left)), right + (0,) * (size - len(right))


def _compared(operator: str, left: tuple[int, ...], right: tuple[int, ...], *, compatible: tuple[int, ...]) -> bool:
    if operator == "~=":
        kept = max(1, len(compatible) - 1)
        return left >= right and left[:kept] == right[:kept]
    return {
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
        "!=": left != right,
    }.get(operator, left == right)
