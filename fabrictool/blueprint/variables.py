"""``${NAME:?message}`` in text, filled from the environment after merging; nothing else is a template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabrictool.base.errors import Problem
from fabrictool.blueprint.scalars import TrapError, resolve
from fabrictool.blueprint.tree import Steps, YamlNode, dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORM = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*):\?([^{}]+)\}|\$\{[^}]*\}?")


def fill(root: YamlNode, environment: Mapping[str, str], names: set[str], problems: list[Problem]) -> YamlNode:
    """`root` with its variables replaced; adds the names that were used. ``$${`` stands for ``${`` itself."""
    return _fill(root, environment, names, problems, ())


def _fill(
    node: YamlNode, environment: Mapping[str, str], names: set[str], problems: list[Problem], path: Steps
) -> YamlNode:
    value = node.value
    if isinstance(value, dict):
        return node.like({k: _fill(v, environment, names, problems, (*path, k)) for k, v in value.items()})
    if isinstance(value, list):
        return node.like([_fill(v, environment, names, problems, (*path, i)) for i, v in enumerate(value)])
    if not isinstance(value, str) or "${" not in value:
        return node

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$" if value.startswith("{", match.end()) else "$$"
        name, message = match[1], match[2]
        place = node.place(dotted(path))
        if name is None:
            hint = "write ${NAME:?what to set it to}; $${ stands for ${ itself"
            problems.append(Problem("FT1311", f"`{match[0]}` is not a variable of this format", place, hint))
            return match[0]
        names.add(name)
        content = environment.get(name)
        if not content:
            problems.append(Problem("FT1310", f"the variable {name} is not set: {message}", place, f"export {name}=…"))
            return match[0]
        return content

    text = _FORM.sub(replace, value)
    if not node.plain:
        return node.like(text, text)
    try:
        return node.like(resolve(text), text)
    except TrapError as trap:
        problems.append(Problem(trap.code, f"after filling in: {trap.message}", node.place(dotted(path)), trap.hint))
        return node
