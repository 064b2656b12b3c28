"""The pages about blueprints say what the code does."""

from __future__ import annotations

import re

from fabrictool.base.units import Bandwidth, Carbon, Compute, Duration, Memory, Power, Rate, Share, Tokens
from fabrictool.blueprint import load


def test_every_unit_is_on_its_page(root):
    page = (root / "docs" / "reference" / "units.md").read_text()
    for kind in (Duration, Memory, Tokens, Rate, Bandwidth, Power, Carbon, Share, Compute):
        for unit in kind.UNITS:
            assert f"`{unit}`" in page, f"{kind.__name__}: {unit}"


def test_the_how_to_page_is_a_valid_fabric(root, tmp_path):
    page = (root / "docs" / "how-to" / "write-a-blueprint.md").read_text()
    blocks = re.findall(r"^```yaml\n(apiVersion.*?)^```", page, re.MULTILINE | re.DOTALL)
    inventory, blueprint = blocks
    scenarios = page[page.index("  scenarios:\n") :].partition("```")[0]
    (tmp_path / "inventory.yaml").write_text(inventory)
    (tmp_path / "blueprint.yaml").write_text(blueprint + "\n".join(line[2:] for line in scenarios.splitlines()) + "\n")
    assert load(tmp_path / "blueprint.yaml", environment={}).warnings == ()
    down = load(tmp_path / "blueprint.yaml", scenario="euler-down", environment={})
    assert not down.inventory.clusters["euler"].enabled
    assert [problem.code for problem in down.warnings] == ["FT1212"]
