"""Each wrong file gives just the output beside it; `python tests/blueprint/goldens.py` writes the outputs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("goldens", Path(__file__).with_name("goldens.py"))
goldens = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(goldens)


@pytest.mark.parametrize("case", goldens.bad_files(), ids=lambda case: case.stem)
def test_output_is_the_golden_one(case):
    assert goldens.output(case) == goldens.expected_path(case).read_text()


def test_there_are_many_and_all_different():
    texts = {re.sub(r"bad/[^:]*", "", goldens.expected_path(case).read_text()) for case in goldens.bad_files()}
    assert len(texts) == len(goldens.bad_files()) >= 40
    assert "valid\n" not in texts


def test_no_golden_is_left_behind():
    cases = {case.with_suffix(".expected") for case in goldens.bad_files()}
    assert set(goldens.BAD.glob("*.expected")) == cases


def test_no_output_shows_the_planted_key():
    assert all("planted" not in goldens.expected_path(case).read_text() for case in goldens.bad_files())


def test_every_caret_is_under_the_column_that_the_head_line_names():
    for case in goldens.bad_files():
        for block in goldens.expected_path(case).read_text().split("\n\n"):
            head, *rest = block.splitlines()
            carets = [line for line in rest if re.fullmatch(r" {6}\| +\^+", line)]
            if carets:
                column = int(re.match(r"[^:]+:\d+:(\d+): ", head)[1])
                assert carets[0].index("^") - len("      | ") + 1 == column, case.name
