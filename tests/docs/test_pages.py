"""Generated pages are what the code says now, and no link leads nowhere."""

import re
from pathlib import Path

import pytest
import typer

from fabrictool.cli.main import build
from fabrictool.cli.reference_pages import pages, schemas

ROOT = Path(__file__).parents[2]
GENERATED = pages(typer.main.get_command(build()))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_not_stale(name):
    assert (ROOT / "docs/reference" / name).read_text() == GENERATED[name], "run `make docs`"


@pytest.mark.parametrize(("name", "text"), schemas().items())
def test_a_schema_is_not_stale(name, text):
    assert (ROOT / "docs/schema" / name).read_text() == text, "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_readme_has_exactly_two_set_up_commands():
    text = (ROOT / "README.md").read_text()
    section = text.split("## Two commands", 1)[1].split("##", 1)[0]
    assert re.findall(r"^    (make \w+)", section, re.MULTILINE) == ["make demo", "make test"]
