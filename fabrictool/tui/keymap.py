"""The operator's own keys: a YAML file of action ids, such as ``quit: x`` or ``filter: ["/", ctrl+f]``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from textual.keys import Keys, _character_to_key, key_to_character

from fabrictool.base.errors import InvalidInputError, Problem
from fabrictool.blueprint.reader import read
from fabrictool.tui.app import Top
from fabrictool.tui.keys import keys_of
from fabrictool.tui.screens.table import TableScreen
from fabrictool.tui.screens.text import LogScreen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from fabrictool.blueprint.tree import YamlNode

MODIFIERS = {"ctrl", "alt", "shift", "super"}
TAKEN = {"up", "down", "left", "right", "pageup", "pagedown", "home", "end", "enter", "tab", "ctrl+q", "ctrl+p"}
"""Keys by which one moves, opens a row or leaves, whatever else."""


def read_keymap(path: Path) -> dict[str, str]:
    """Action → its keys, as Textual writes them, for those that the file gives other keys.

    Raises
    ------
    InvalidInputError
        FT10xx it cannot be read, FT5209 with each entry that means nothing.
    """
    try:
        root = read(path)
    except InvalidInputError as error:
        if error.problems[0].code != "FT1019":
            raise
        message = "a keymap gives actions their keys, a line each"
        problem = Problem("FT5209", message, error.problems[0].place, "such as `quit: x`")
        raise InvalidInputError([problem]) from error
    problems: list[Problem] = []
    chosen: dict[str, tuple[str, ...]] = {}
    known = keys_of(Top, TableScreen, LogScreen)
    nodes = root.value if isinstance(root.value, dict) else {}
    for name, node in nodes.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"actions: {', '.join(known)}"
            problems.append(Problem("FT5209", f"there is no action `{name}`", node.key_place(), hint))
            continue
        keys = [(entry, _key(entry.written)) for entry in _entries(node)]
        problems += _wrong(keys) if keys else [Problem("FT5209", f"`{name}` has no key", node.key_place())]
        chosen[name] = tuple(key for _, key in keys if key)
    problems += [] if problems else _clashes(chosen, nodes)
    if problems:
        raise InvalidInputError(problems)
    return {name: ",".join(keys) for name, keys in chosen.items()}


def _entries(node: YamlNode) -> list[YamlNode]:
    return node.value if isinstance(node.value, list) else [node] if node.value is not None else []


def _key(written: str) -> str:
    """As Textual calls it; "": there is no such key."""
    *modifiers, last = written.split("+") if len(written) > 1 else [written]
    if not set(modifiers) <= MODIFIERS or not last:
        return ""
    if len(last) == 1:
        last = _character_to_key(last) if last.isprintable() else ""
    elif last not in {key.value for key in Keys} and key_to_character(last) is None:
        last = ""
    return "+".join([*modifiers, last]) if last else ""


def _wrong(keys: list[tuple[YamlNode, str]]) -> Iterator[Problem]:
    for entry, key in keys:
        if not key:
            hint = "a character, a name such as escape or f5, or one with ctrl+, alt+ or shift+ before it"
            yield Problem("FT5209", f"`{entry.written}` is no key", entry.place(), hint)
        elif key in TAKEN:
            text = f"`{entry.written}` moves in tables, opens a row or leaves: it cannot mean anything else"
            yield Problem("FT5209", text, entry.place(), "choose another key")


def _clashes(chosen: Mapping[str, tuple[str, ...]], nodes: Mapping[str, YamlNode]) -> Iterator[Problem]:
    """Two actions that one key would mean, on a screen that has both."""
    told = set()
    for screen in (TableScreen, LogScreen):
        whose: dict[str, str] = {}
        usual = {name: tuple(keys.split(",")) for name, keys in keys_of(Top, screen).items()}
        in_force = {name: chosen.get(name, keys) for name, keys in usual.items()}
        for name, keys in sorted(in_force.items(), key=lambda entry: entry[0] in chosen):  # who chose it is told
            for key in keys:
                other = whose.setdefault(key, name)
                if other != name and name in chosen and (name, key) not in told:
                    told.add((name, key))
                    text = f"`{name}` has the key of `{other}`"
                    yield Problem("FT5209", text, nodes[name].place(), f"give `{other}` another one, too")
