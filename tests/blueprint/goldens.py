"""Golden outputs of wrong files. `python tests/blueprint/goldens.py` writes them again; read the difference by eye."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint import load

CASES = Path(__file__).parents[1] / "cases" / "blueprint"
BAD = CASES / "bad"


def bad_files() -> list[Path]:
    return sorted(BAD.glob("*.yaml"))


def expected_path(case: Path) -> Path:
    return case.with_suffix(".expected")


def output(case: Path) -> str:
    """What `validate` prints for a case; NAME.inventory.yaml is an inventory, checked with a good blueprint."""
    folder = Path.cwd()
    os.chdir(CASES)
    try:
        name = case.relative_to(CASES)
        if case.name.endswith(".inventory.yaml"):
            load(Path("small.yaml"), inventory_path=name, environment={})
        else:
            load(name, environment={})
    except InvalidInputError as error:
        return "\n\n".join(problem.render() for problem in error.problems) + "\n"
    finally:
        os.chdir(folder)
    return "valid\n"


if __name__ == "__main__":
    for case in bad_files():
        expected_path(case).write_text(output(case))
        sys.stdout.write(f"=== {case.name}\n{expected_path(case).read_text()}\n")
