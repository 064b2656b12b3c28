"""The texts that stand under the attributes of a class."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def attribute_docstrings(described: type) -> dict[str, str]:
    """Attribute → the text under it, of the class and what it inherits from. Empty where there is no source."""
    texts: dict[str, str] = {}
    for part in reversed(described.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for attribute, text in pairwise(getattr(tree, "body", ())):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name) and _is_text(text):
                texts[attribute.target.id] = inspect.cleandoc(text.value.value)
    return texts


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
