"""Mistakes on the command line end in a code and a hint, never in a traceback."""

import os
import stat
import threading
from pathlib import Path

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import write_output
from fabrictool.base.settings import Settings
from fabrictool.cli.main import main
from fabrictool.clusters.local import _environment

ROOT = Path(__file__).parents[2]
LOCAL = ["-b", str(ROOT / "blueprints/local.yaml")]


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plan", "--budget", "inf", *LOCAL], 64, "FT9001"),
        (["plan", "--budget", "nan", *LOCAL], 64, "FT9001"),
        (["plan", "--budget", "2d", *LOCAL], 64, "not between 100ms and 24h"),
        (["apply", "--queue-wait", "5 x", *LOCAL], 64, "not a unit of a duration"),
        (["plan", "--budget", "1e300", *LOCAL], 64, "FT9001"),
        (["plan", "-o", "", *LOCAL], 1, "FT4302"),
        (["plan", "-o", "no/such/folder/plan.json", *LOCAL], 1, "FT4302"),
        (["status", "--url", "http://[::1"], 69, "FT5201"),
        (["status", "--url", "http://127.0.0.1:99999"], 69, "FT5201"),
        (["status", "--url", "http://a b"], 69, "FT5201"),
    ],
)
def test_a_mistake_has_a_code(capsys, arguments, code, said):
    assert main(arguments) == code
    assert said in capsys.readouterr().err


def test_a_home_folder_of_nobody(monkeypatch, capsys):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", "~no-such-user-here/x")
    assert main(["plan", *LOCAL]) == 65
    assert "FT4303" in capsys.readouterr().err


def test_relative_folders_are_made_absolute_for_units(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ours = {"FABRICTOOL_STATE_DIR": "state", "FABRICTOOL_CACHE_DIR": "cache", "PATH": "/bin"}
    assert Settings.from_environment(ours).state_path == tmp_path / "state"
    state, cache = str(tmp_path / "state"), str(tmp_path / "cache")
    assert _environment(ours) == {"FABRICTOOL_STATE_DIR": state, "FABRICTOOL_CACHE_DIR": cache, "PATH": "/bin"}
    assert _environment({"PATH": "/bin"}) == {"PATH": "/bin"}


def test_a_relative_state_folder_runs(fabric_bed):
    fabric_bed.environment |= {"FABRICTOOL_STATE_DIR": "state", "FABRICTOOL_CACHE_DIR": "cache"}
    fabric_bed.write(replicas=1)
    fabric_bed.up()
    assert fabric_bed.running() == ["gateway/main", "replica/tiny/0"]


def test_an_output_that_is_no_file_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"plan")
    reader.join(10)
    assert read == [b"plan"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_output_behind_a_link_goes_where_the_link_points(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_output(tmp_path / "link", b"plan")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"plan"


def test_a_setting_that_names_no_folder():
    with pytest.raises(InvalidInputError, match="FT4303"):
        _ = Settings(cache_dir="~no-such-user-here").cache_path
