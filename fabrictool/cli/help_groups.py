"""The list of commands as ``--help`` shows it: by what one wants to do, each with its whole first sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Begin": ("init", "demo", "validate", "schema", "explain", "version"),
    "Get to know and prepare sites": ("discover", "trust", "bootstrap", "doctor", "shell", "weights", "prune"),
    "Plan and carry out": ("plan", "show", "apply", "reconcile", "destroy", "observe", "state"),
    "Look at what runs": ("status", "top", "mesh", "logs", "events", "usage"),
    "Forecast": ("simulate", "recommend", "calibrate", "trace", "instance", "catalogue"),
    "Serve": ("gateway", "keys", "agent", "adopt"),
}
OTHERS = "Other"


class GroupedCommands(TyperGroup):
    """The root of the command tree, with a list of its own."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """A section for each group that has a command; nothing is cut, long sentences go on in the next line."""
        for title, names in grouped(list(self.commands)):
            with formatter.section(title):
                formatter.write_dl([(name, first_sentence(self.commands[name].help or "")) for name in names])


def grouped(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Every one of `names` once, in the order of `GROUPS`; what no group names comes last."""
    left = list(names)
    for title, members in GROUPS.items():
        there = [name for name in members if name in left]
        left = [name for name in left if name not in there]
        if there:
            yield title, there
    if left:
        yield OTHERS, left


def first_sentence(text: str) -> str:
    """Without its full stop."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return (paragraph.partition(". ")[0]).removesuffix(".")
