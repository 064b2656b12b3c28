"""The loader answers any file with a value or with coded problems, never with another exception."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.blueprint import load, reader
from fabrictool.blueprint.reader import _may_be_deep, parse
from fabrictool.blueprint.report import to_github, to_json

CASES = Path(__file__).parents[1] / "cases" / "blueprint"
GOOD = (CASES / "blueprint.yaml").read_bytes()
INVENTORY = (CASES / "inventory.yaml").read_bytes()
PIECES = [
    b"", b"\t", b": ", b"- ", b"[", b"]", b"{", b"}", b"&a ", b"*a", b"!!int ", b"<<: ", b"no", b"0x1", b"? ",
    b"|\n", b">\n",
    b'"', b"'", b"#", b"---\n", b"%TAG", b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"null", b"1e999", b"${",
    b"${X:?y}", b"$$", b"\r", b"@", b"`", b"9" * 30, b".inf", b"2026-01-01", b"[" * 40, b"- " * 40,
]  # fmt: skip


def problems_of(blueprint: bytes, inventory: bytes):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "b.yaml").write_bytes(blueprint)
        (Path(folder) / "i.yaml").write_bytes(inventory)
        try:
            load(Path(folder) / "b.yaml", inventory_path=Path(folder) / "i.yaml", environment={})
        except FabrictoolError as error:
            return error.problems
    return None


def try_load(blueprint: bytes, inventory: bytes = INVENTORY) -> None:
    problems = problems_of(blueprint, inventory)
    if problems is not None:
        assert problems
        assert all(problem.render() for problem in problems)
        assert to_github(problems).count("\n") == len(problems) - 1
        assert len(to_json(problems)) == len(problems)
        assert all(problem.code.startswith("FT1") for problem in problems)


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xef\xbb\xbf")
def test_any_bytes(raw):
    try_load(raw)
    try_load(GOOD, raw)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=4
    ),
    target=st.booleans(),
)
def test_mutated_files(edits, target):
    raw = GOOD if target else INVENTORY
    for position, length, piece in edits:
        raw = raw[:position] + piece + raw[position + length :]
    try_load(*((raw, INVENTORY) if target else (GOOD, raw)))


KEYS = [
    "models", "trust", "tenants", "gateway", "routing", "objective", "scenarios", "defaults", "include",
    "inventory", "fabric",
    "kind", "apiVersion", "clusters", "sites", "links", "x", "", "slo", "demand", "source", "place",
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_any_structure(value):
    head = {"apiVersion": "fabrictool/v1", "kind": "Blueprint"}
    try_load(yaml.safe_dump({**value, **head}).encode())
    try_load(GOOD, yaml.safe_dump({**value, **head, "kind": "Inventory"}).encode())


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "- " * 200_000 + "a", "{a: " * 200_000, "? " * 200_000, "[\n" * 200_000, '["]",\n' * 200_000],
    ids=["brackets", "dashes", "braces", "question-marks", "brackets-on-lines", "quoted-brackets"],
)
def test_depth_that_would_crash_the_c_composer_is_refused(text):
    assert _may_be_deep(text)
    with pytest.raises(InvalidInputError) as error:
        parse(text.encode(), Path("x.yaml"), "x.yaml")
    assert error.value.problems[0].code in {"FT1020", "FT1003"}


@pytest.fixture
def slow_parser(monkeypatch):
    """PyYAML without libyaml."""
    monkeypatch.setattr(reader, "_BASE", yaml.SafeLoader)
    monkeypatch.setattr(reader, "_COMPOSER", reader.composer_of(yaml.SafeLoader))


@pytest.mark.usefixtures("slow_parser")
def test_the_slow_parser_reads_the_same():
    assert problems_of(GOOD, INVENTORY) is None
    assert [p.code for p in problems_of(GOOD + b"x: 1\ny: no\n", INVENTORY)] == ["FT1005"]
    assert [p.code for p in problems_of(GOOD + b"\x07", INVENTORY)] == ["FT1025"]
    for deep in (b"[" * 450 + b"]" * 450, b"- " * 240 + b"a"):
        assert {p.code for p in problems_of(deep, INVENTORY)} == {"FT1020"}


def test_a_complaint_beside_a_literal_key_hides_it():
    planted = b"me: {grup: all, key: sk-planted-0123456789}"
    problems = problems_of(GOOD.replace(b"me: {group: all, key: secret://env/KEY}", planted), INVENTORY)
    assert {problem.code for problem in problems} == {"FT1101", "FT1102", "FT1118"}
    assert "planted" not in "".join(p.render() for p in problems) + to_github(problems) + repr(problems)
