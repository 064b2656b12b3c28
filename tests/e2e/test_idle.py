"""A node joins without a model, says what it has, is assigned one, serves it, and is idle again."""

import json
import re
import signal

import msgspec
import pytest

from fabrictool.status.fleet import FleetStatus, engines_shown
from tests.e2e.test_join import Contributor, answers, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def side(fabric_bed):
    fabric_bed.write(replicas=1)
    fabric_bed.up()
    side = Contributor(fabric_bed)
    yield side
    side.clean_up()


def idle_members(bed, *options):
    printed = json.loads(bed.run("mesh", "members", "--idle", "--json", *options).stdout)
    return msgspec.convert(printed["document"], FleetStatus).members


def of_mesh(bed, session):
    printed = json.loads(bed.run("mesh", "members", "--json").stdout)
    return next(m for m in msgspec.convert(printed["document"], FleetStatus).members if m.session == session)


def test_an_idle_node_is_assigned_a_model_serves_it_and_is_idle_again(side):
    bed, model = side.bed, side.bed.values["model"]
    side.start_issuer()
    side.token("token", "--models", "borrowed,other")
    job = side.join("job", "token", "--idle", "--engines", "reference", "--allow", f"file://{model.parent}/*")
    wait_for(lambda: idle_members(bed), job)
    (member,) = idle_members(bed, "--device", "cpu", "--free", "1MiB")
    assert (member.provider, member.state, member.services) == ("beta", "serving", [])
    assert 0 < member.free[0] <= member.memory
    assert idle_members(bed, "--device", "a100") == idle_members(bed, "--free", "900TiB") == []
    (row,) = [r for r in json.loads(bed.run("status", "--json").stdout)["gateway"]["nodes"] if r["idle"]]
    assert (row["session"], row["device"], row["memory"]) == (member.session, "cpu", member.memory)
    listed = bed.run("mesh", "members").stdout
    assert any(member.session[:8] in line and "idle" in line for line in listed.splitlines())

    trust = str(bed.folder / "beta" / "trust")
    bed.run("trust", "controller", "beta", "--trust", trust, "-o", "controller")
    ours = ["--identity", "controller", "--gateway", f"127.0.0.1:{bed.values['mesh']}", "--wait", "2m"]
    what = ["--model", "borrowed", "--source", f"file://{model}", "--engine", "reference", "--context", "128"]
    said = json.loads(bed.run("agent", "assign", *what, *ours, "--device", "cpu", "--json").stdout)
    assert (said["session"], said["version"], said["state"]) == (member.session, 1, "serving")
    wait_for(lambda: answers(bed) == "beta", job, seconds=10)
    assert idle_members(bed) == []
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout, "it is not the plan's"

    short = member.session[:8]
    said = bed.run("agent", "unassign", short, *ours).stdout
    assert said == f"{short} is idle (assignment 2)\n"
    assert answers(bed) == ""
    assert [m.session for m in idle_members(bed)] == [member.session], "it is the same session, and still there"

    events = bed.run("events").stdout
    assert re.search(rf"assigned +{short} +borrowed, by [0-9a-f]{{8}}", events)
    assert re.search(rf"assigned +{short} +nothing, by [0-9a-f]{{8}}", events)

    # Each of these is refused by its code, and the node stays as it is.
    foreign = ["--trust", str(bed.folder / "state/t/trust"), "--provider", "alpha", *ours[2:]]
    assert "FT6106" in bed.run("agent", "assign", short, *what, *foreign, code=65).stderr
    others = [word if word != "borrowed" else "secret" for word in what]
    assert "FT6104" in bed.run("agent", "assign", short, *others, *ours, code=1).stderr
    elsewhere = [word if word != f"file://{model}" else "file:///etc/passwd" for word in what]
    refused = bed.run("agent", "assign", short, *elsewhere, *ours, code=1).stderr
    assert "FT6108" in refused
    assert "FT7106" in refused
    (dead,) = engines_shown(of_mesh(bed, member.session))
    assert (dead.given_up, dead.note[:6]) == (True, "FT7106")
    assert job.poll() is None

    assert "serves other" in bed.run("agent", "assign", short, *_renamed(what, "other"), *ours).stdout
    wait_for(lambda: answers(bed, "other") == "beta", job, seconds=10)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    assert answers(bed, "other") == ""
    assert "ended: told to stop" in side.log("job")


def _renamed(words, model):
    return [word if word != "borrowed" else model for word in words]


def told(side, count):
    return lambda: side.log("keeper").count("is told to serve borrowed (assignment 1)") == count


def test_a_model_is_kept_on_idle_nodes_that_come_and_go(side):
    bed, model = side.bed, side.bed.values["model"]
    side.start_issuer()
    side.token("token", "--uses", "2")
    gateway = f"127.0.0.1:{bed.values['mesh']}"
    ours = ["--trust", "trust", "--gateway", gateway, "--context", "128"]
    what = ["--model", "borrowed", "--source", f"file://{model}", "--engine", "reference", "--count", "1"]
    none = side.start("none", "agent", "keep", *what, *ours, "--once")
    assert none.wait(60) == 1, side.log("none")
    keeper = side.start("keeper", "agent", "keep", *what, *ours)
    wait_for(lambda: "borrowed shall be served by 1" in side.log("keeper"), keeper)
    for count, name in enumerate(("first", "second"), 1):
        job = side.join(name, "token", "--idle")
        wait_for(lambda: answers(bed) == "beta", job)
        wait_for(told(side, count), keeper)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
        assert answers(bed) == ""
    keeper.send_signal(signal.SIGINT)
    assert keeper.wait(30) == 130
