"""The texts that stand under the attributes of a class."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def attribute_docstrings(described: type) -> dict[str, str]:
    """Attribute → the text under it, of the class and what it inherits from. Empty where there is no source."""
    texts: dict[str, str] = {}
    for part in reversed(described.__mro__):
        texts |= _texts_of_module(part.__module__).get(part.__qualname__, {})
    return texts


@functools.cache  # to read a source is slow, and a module has many classes
def _texts_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Class → attribute → the text under it."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return MappingProxyType({})
    return MappingProxyType({node.name: _texts(node) for node in tree.body if isinstance(node, ast.ClassDef)})


def _texts(described: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for attribute, text in pairwise(described.body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = inspect.cleandoc(words)
    return texts
