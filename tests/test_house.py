"""What a linter does not know of: words that say nothing, and decisions that read sentences.

``python tests/test_house.py ROOM …`` lists what breaks these rules in some rooms.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fabrictool"
MODULES = sorted(PACKAGE.rglob("*.py"))
EMPTY_NAMES = {"found", "one", "each", "made", "said"}
SENTENCES = {"reason", "detail", "message", "text", "hint", "summary", "warning"}
LIBRARIES_SPEAK = {
    "blueprint/syntax.py",
    "clusters/connections/fabric_connection.py",
    "engines/reference/api.py",
    "gateway/openai.py",
}
"""Errors of YAML, paramiko and msgspec have nothing but their text to be told apart by."""
READERS = {
    "count",
    "index",
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
    "split",
    "find",
}
FEWEST_WORDS = 4
MOST_LINES, MOST_PARAMETERS = 60, 6
REASON = re.compile(r"\s*# (Long|Wide): \w+")
"""Stands above a function that is longer or wider than others, and says why."""


@functools.cache
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
    """Comparisons with, searches in and cuts of what is written for people, also under another name."""
    tree = tree_of(path)
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_sentence(node.value, ())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        reads = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = [side.value for side in sides if isinstance(side, ast.Constant)]
            reads = any(isinstance(word, str) and word for word in words) and any(
                is_sentence(side, aliases) for side in sides
            )
        elif isinstance(node, ast.Match):
            reads = is_sentence(node.subject, aliases)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            searched = ast.unparse(node.func.value) == "re" and any(is_sentence(arg, aliases) for arg in node.args)
            reads = searched or (node.func.attr in READERS and is_sentence(node.func.value, aliases))
        if reads:
            yield f"{node.lineno}: reads a sentence: {ast.unparse(node)}"


def is_sentence(node, aliases):
    """An attribute that people read, a name for it, an error as text, or one of these in small letters."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "strip"):
        return is_sentence(node.func.value, aliases)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return bool(node.args) and isinstance(node.args[0], ast.Name) and "error" in node.args[0].id
    if isinstance(node, ast.Name):
        return node.id in aliases
    return isinstance(node, ast.Attribute) and node.attr in SENTENCES


RULES = [empty_names, empty_docstrings, unexplained_size, decisions_by_sentence]


def complaints(path, rule):
    where = path.relative_to(PACKAGE).as_posix()
    if rule is decisions_by_sentence and where in LIBRARIES_SPEAK:
        return []
    return [f"{where}:{line}" for line in rule(path)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    assert [complaint for path in MODULES for complaint in complaints(path, rule)] == []


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


@pytest.mark.parametrize(
    "line",
    [
        'd = unit.detail\nx = "in the queue" in d',
        'x = re.search("gateway", unit.detail)',
        'x = "timeout" in str(error)',
        'x = unit.detail.lower().startswith("in the queue")',
        'match unit.detail:\n    case "": x = 1',
        'x = problem.message.count(":")',
    ],
)
def test_a_sentence_is_seen_under_any_name(tmp_path, line):
    (tmp_path / "bad.py").write_text(line)
    assert len(list(decisions_by_sentence(tmp_path / "bad.py"))) == 1


if __name__ == "__main__":
    for module in MODULES:
        where = str(module.relative_to(PACKAGE))
        if any(where.startswith(room) for room in sys.argv[1:]):
            for check in RULES:
                for complaint in complaints(module, check):
                    print(f"fabrictool/{complaint}")
