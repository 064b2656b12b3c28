"""A whole fabric whose state lies elsewhere."""

import json
import signal

import pytest

from tests.conftest import BLUEPRINT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

TOKEN = "planted-state-token"  # of the test server


@pytest.fixture(params=["git", "http"])
def bed(request, fabric_bed, shelf_of):
    shelf = shelf_of(request.param)
    if request.param == "git":
        state = f"state: {{git: {{url: {shelf.repository}, branch: states}}}}\n"
    else:
        state = f"state: {{http: {{address: {shelf.server.url}/state/t, token: secret://env/STATE_TOKEN}}}}\n"
        fabric_bed.environment["STATE_TOKEN"] = TOKEN
    fabric_bed.write(blueprint=BLUEPRINT + state, replicas=1)
    fabric_bed.shelf, fabric_bed.text = shelf, BLUEPRINT + state
    return fabric_bed


def test_a_fabric_whose_state_lies_elsewhere(bed):
    bed.up()
    assert not (bed.folder / "state/t/state.json").exists()
    state = json.loads(bed.shelf.content())
    assert (state["fabric"], sorted(state["units"])) == ("t", ["gateway/main", "replica/tiny/0"])
    assert "No changes" in bed.run("plan").stdout
    shown = json.loads(bed.run("state", "show", "--json").stdout)
    assert shown["state"] == state
    assert shown["lease"] is None
    bed.write(blueprint=bed.text.replace("fabric: t\n", "fabric: other\n"))
    assert "FT4226" in bed.run("plan", code=65).stderr
    bed.write(blueprint=bed.text)
    bed.shelf.spoil(b"rubbish")
    assert "FT4001" in bed.run("plan", code=65).stderr
    bed.run("state", "rebuild", "--yes")
    assert "No changes" in bed.run("plan").stdout
    bed.run("destroy", "--yes")
    assert json.loads(bed.shelf.content())["units"] == {}
    leaks = [p for p in bed.folder.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert leaks == []


def test_a_second_apply_is_refused_and_one_that_was_killed_is_unlocked(bed):
    bed.run("trust", "init")
    first = bed.start("apply", "--yes")
    assert first.stderr.readline()
    first.send_signal(signal.SIGSTOP)
    second = bed.run("apply", "--yes", code=5)
    assert "FT4003" in second.stderr
    assert f"pid {first.pid}" in second.stderr
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    lease = json.loads(bed.run("state", "show", "--json").stdout)["lease"]
    assert lease["pid"] == first.pid
    assert lease["id"] in bed.run("state", "show").stdout
    assert "FT4007" in bed.run("state", "unlock", lease["id"], code=64).stderr
    bed.run("state", "unlock", lease["id"], "--yes")
    bed.run("apply", "--yes")
    assert bed.running() == ["gateway/main", "replica/tiny/0"]
