"""What a shell offers after Tab: names from files, quickly, and nothing where nothing is known."""

import shlex

import pytest

from fabrictool.cli import completing
from tests.planner.test_companions import SMALL, loaded


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def test_names_that_begin_so(here):
    loaded(here, {"a": SMALL})
    assert completing.clusters("") == ["c"]
    assert completing.whys("m@c") == ["m@c/g", "m@cpu"]
    whole = completing.whys("m@")[0]
    assert shlex.split(f"fabrictool plan --why-not {whole}")[-1] == whole, "one word for a shell"
    assert completing.codes("ft120")[0] == "FT1201"
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in completing.models("HuggingFaceTB/")
    assert completing.units("") == [], "nothing was applied yet"


def test_where_nothing_is_known_nothing_is_said(here, capfd):
    assert completing.units("") == completing.clusters("") == completing.whys("") == []
    (here / "blueprint.yaml").write_text("models: [")
    assert completing.units("") == completing.clusters("") == completing.whys("") == []
    assert capfd.readouterr() == ("", "")
