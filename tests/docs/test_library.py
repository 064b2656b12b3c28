"""The page for researchers: its examples run, and it names what the package exports."""

import re
from pathlib import Path

import pytest

import fabrictool.simulator

PAGE = (Path(__file__).parents[2] / "docs/reference/simulator-library.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
def test_an_example_runs(example, capsys):
    exec(compile(example, "simulator-library.md", "exec"), {"__name__": "example"})  # noqa: S102 - our own page
    assert capsys.readouterr().out


def test_the_page_names_what_is_exported_and_nothing_else():
    table = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)", line.split("|")[1])}
    named |= {name for line in table for name in re.findall(r"→ `(\w+)`", line)}
    assert named == set(fabrictool.simulator.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'guess'"):
        fabrictool.simulator.guess  # noqa: B018
