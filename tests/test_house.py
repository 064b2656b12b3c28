"""What a linter does not know of: words that say nothing, and decisions that read sentences.

``python tests/test_house.py ROOM …`` lists what breaks these rules in some rooms.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fabrictool"
MODULES = sorted(PACKAGE.rglob("*.py"))
EMPTY_NAMES = {"found", "one", "each", "made", "said"}
SENTENCES = {"reason", "detail", "message", "text", "hint", "summary", "warning"}
READERS = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split", "find"}
FEWEST_WORDS = 4
MOST_LINES, MOST_PARAMETERS = 60, 6
REASON = re.compile(r"\s*# (Long|Wide): \w+")
"""Stands above a function that is longer or wider than others, and says why."""


def tree_of(path):
    return ast.parse(path.read_text())


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def empty_names(path):
    """Variables, parameters and loop names that say nothing about what they hold."""
    for node in ast.walk(tree_of(path)):
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        name = node.arg if isinstance(node, ast.arg) else name
        if name in EMPTY_NAMES:
            yield f"{node.lineno}: the name `{name}` does not say what it holds"


def empty_docstrings(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, kinds):
            continue
        words = (ast.get_docstring(node) or "").split()
        if 0 < len(words) < FEWEST_WORDS:
            yield f"{node.lineno}: the docstring of `{node.name}` says nothing: {' '.join(words)}"


def unexplained_size(path):
    lines = path.read_text().splitlines()
    for node in functions(tree_of(path)):
        if is_command(path, node):
            continue
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        parameters = len([name for name in names if name not in ("self", "cls")])
        length = node.end_lineno - node.lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (length > MOST_LINES or parameters > MOST_PARAMETERS) and not REASON.match(lines[first - 2]):
            yield f"{node.lineno}: `{node.name}` has {length} lines and {parameters} parameters, and no reason above it"


def is_command(path, node):
    """Typer reads a command's options from its parameters."""
    return path.parent.name == "cli" and any(
        name.startswith("typer.") or name.endswith("Option") for name in map(ast.unparse, annotations(node))
    )


def annotations(node):
    for arg in (*node.args.args, *node.args.kwonlyargs):
        if arg.annotation is not None:
            yield from (n for n in ast.walk(arg.annotation) if isinstance(n, ast.Name | ast.Attribute))


def decisions_by_sentence(path):
    """Comparisons with, and cuts of, what is written for people."""
    for node in ast.walk(tree_of(path)):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        literal = any(isinstance(side, ast.Constant) and isinstance(side.value, str) and side.value for side in sides)
        called = node.func if isinstance(node, ast.Call) else None
        cut = isinstance(called, ast.Attribute) and called.attr in READERS and is_sentence(called.value)
        if cut or (literal and any(is_sentence(side) for side in sides)):
            yield f"{node.lineno}: reads a sentence: {ast.unparse(node)}"


def is_sentence(node):
    return isinstance(node, ast.Attribute) and node.attr in SENTENCES


RULES = [empty_names, empty_docstrings, unexplained_size, decisions_by_sentence]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    assert [f"{path.relative_to(PACKAGE)}:{line}" for path in MODULES for line in rule(path)] == []


def test_a_class_name_is_used_once():
    places = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_rules_see_what_they_are_for(tmp_path):
    path = tmp_path / "bad.py"
    wide = ", ".join("abcdefg")
    path.write_text(
        f'def f({wide}):\n    """Talk."""\n    found = [one for one in a if "in the queue" in one.reason]\n'
        '    return found[0].text.removesuffix(".")\n'
    )
    assert [len(list(rule(path))) for rule in RULES] == [2, 1, 1, 2]


if __name__ == "__main__":
    for module in MODULES:
        where = str(module.relative_to(PACKAGE))
        if any(where.startswith(room) for room in sys.argv[1:]):
            for check in RULES:
                for complaint in check(module):
                    print(f"fabrictool/{where}:{complaint}")
