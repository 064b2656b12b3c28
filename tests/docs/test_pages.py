"""Generated pages are what the code says now, and no link leads nowhere."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import typer

from fabrictool.blueprint import load
from fabrictool.blueprint.starter import starter_files
from fabrictool.catalog import accelerators, links, tables
from fabrictool.cli.commands import build
from fabrictool.cli.reference_pages import pages, schemas

ROOT = Path(__file__).parents[2]
KNOWN_FIELDS = files("fabrictool.catalog").joinpath("data", "config_fields.txt").read_text("utf-8").split()
COMMANDS = typer.main.get_command(build())
GENERATED = pages(COMMANDS)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_device_and_link_that_a_page_names_is_in_the_catalogue(document):
    text = document.read_text()
    named = {"device": accelerators(), "network": links(), "link": links()}
    for key, known in named.items():
        for name in re.findall(rf"[{{,]\s*{key}: ([a-z0-9][a-z0-9.-]*)", text):
            assert name in known, f"{document.name}: {key}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_option_that_a_page_names_is_there(document):
    """As far as lines of shell go; what a page says in the middle of a sentence, too."""
    lines = re.findall(r"^    fabrictool (.+)$|`fabrictool ([^`]+)`", document.read_text(), re.MULTILINE)
    for words in (first or second for first, second in lines):
        command, rest = COMMANDS, words.partition("  #")[0].partition(" -- ")[0].split()
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        for word in rest:
            if re.fullmatch(r"--[a-z][a-z-]*", word):
                assert word in known, f"{document.name}: fabrictool {words}"


def test_the_entries_that_the_how_to_shows_are_entries():
    """As the catalogue reads them; and the model's count of weights follows from its fields."""
    page = (ROOT / "docs/how-to/extend-the-catalogue.md").read_text()
    device, model = (
        tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    )
    ((device_id, row),) = device.items()
    assert device_id not in accelerators()
    assert tables._accelerator(device_id, row).vendor == "nvidia"
    ((model_id, row),) = model.items()
    entry = msgspec.convert({**row, "id": model_id}, tables.ModelArchitecture)
    assert entry.parameters == pytest.approx(entry.published_parameters, rel=1e-3)
    for field in re.findall(r"`([a-z_]+)`", page.split("| field of ours |")[1].split("\nGive ")[0].replace("|", "\n")):
        assert field in tables.ModelArchitecture.__struct_fields__ or field in KNOWN_FIELDS


def test_the_part_that_the_how_to_shows_is_included_and_used(tmp_path):
    """Its head and its indentation; and what it says of the blueprint."""
    page = (ROOT / "docs/how-to/extend-the-catalogue.md").read_text()
    part, use = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "nine-billion.yaml").write_text(part)
    (tmp_path / "inventory.yaml").write_text(starter_files()["inventory.yaml"])
    head = "apiVersion: fabrictool/v1\nkind: Blueprint\nfabric: x\ninventory: inventory.yaml\n"
    (tmp_path / "blueprint.yaml").write_text(f"{head}defaults: {{engine: reference}}\n{use}")
    blueprint = load(tmp_path / "blueprint.yaml", environment={}).blueprint
    nine, tuned = (blueprint.architecture(blueprint.models[name]) for name in ("nine", "tuned"))
    assert nine == tuned
    assert nine.parameters == 8_139_378_688
