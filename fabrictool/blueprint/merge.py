"""Trees into one tree: parts are disjoint, changes (overlays, scenarios) are laid over, defaults lie below.

=========  ===========================================  =====================================
verb       same key on both sides                       used for
=========  ===========================================  =====================================
`join`     an error that names both places              ``include``
`lay_over` mappings merge, the rest replaces, null      overlays, scenarios
           deletes
`under`    mappings merge, the upper one wins           ``defaults`` below each model
=========  ===========================================  =====================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import Problem
from fabrictool.blueprint.tree import Steps, YamlNode, dotted

if TYPE_CHECKING:
    from collections.abc import Collection

NAMED = frozenset({("models",), ("architectures",), ("tenants",), ("scenarios",), ("trust",), ("trust", "groups")})
"""Mappings of a blueprint that several files may fill, each name once."""
WHOLE = frozenset({"demand"})
"""Keys of a model that replace their default as a whole: a trace and a rate do not mix."""


def join(
    base: YamlNode, part: YamlNode, problems: list[Problem], *, skip: Collection[str] = (), path: Steps = ()
) -> YamlNode:
    """`base` with the keys of an included `part`."""
    if not isinstance(base.value, dict) or not isinstance(part.value, dict):
        return base
    merged = dict(base.value)
    for key, node in part.value.items():
        if not path and key in skip:
            continue
        here = merged.get(key)
        below = (*path, key)
        if here is None:
            merged[key] = node
        elif below in NAMED and isinstance(here.value, dict) and isinstance(node.value, dict):
            merged[key] = join(here, node, problems, path=below)
        else:
            message = f"`{dotted(below)}` is in two files"
            hint = "keep one; to change a value for one environment, use an overlay"
            problems.append(Problem("FT1303", message, node.key_place(dotted(below)), hint, also=(here.key_place(),)))
    return base.like(merged)


def lay_over(
    base: YamlNode, change: YamlNode, problems: list[Problem], *, skip: Collection[str] = (), path: Steps = ()
) -> YamlNode:
    """`base` changed by an overlay or a scenario."""
    if not isinstance(base.value, dict) or not isinstance(change.value, dict):
        return change
    merged = dict(base.value)
    for key, node in change.value.items():
        if not path and key in skip:
            continue
        below = (*path, key)
        if node.value is None:
            if key not in merged:
                message = f"nothing to delete: `{dotted(below)}` is not set"
                problems.append(Problem("FT1306", message, node.key_place(dotted(below)), "leave the key out"))
            merged.pop(key, None)
        elif key in merged:
            merged[key] = lay_over(merged[key], node, problems, path=below)
        else:
            merged[key] = node
    return base.like(merged)


def under(upper: YamlNode, lower: YamlNode) -> YamlNode:
    """`upper` with what `lower` says and it does not."""
    if not isinstance(upper.value, dict) or not isinstance(lower.value, dict):
        return upper
    merged = dict(upper.value)
    for key, node in lower.value.items():
        own = merged.get(key)
        if own is None:
            merged[key] = node
        elif key not in WHOLE and isinstance(own.value, dict) and isinstance(node.value, dict):
            merged[key] = under(own, node)
    return upper.like(merged)


def with_defaults(root: YamlNode) -> YamlNode:
    if not isinstance(root.value, dict):
        return root
    defaults, models = root.value.get("defaults"), root.value.get("models")
    if defaults is None or models is None or not isinstance(models.value, dict):
        return root
    filled = {name: under(model, defaults) for name, model in models.value.items()}
    return root.like({**root.value, "models": models.like(filled)})
