"""Getting to know a site, placing the agents' environment there, and checking it: on both real Slurm clusters."""

import json
import re
import signal

import pytest
import yaml

from tests.bed.federation import USERS


@pytest.fixture(scope="module")
def fed(make_federation):
    return make_federation("site")


# -- discover -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "device"), [("a", "a100-40g"), ("b", "h100-pcie")])
def test_discover_describes_a_cluster_that_validates(bed, fed, cluster, device):
    (key,) = bed.host_keys(f"{cluster}-login")
    done = fed.run(
        "discover", bed.address(f"{cluster}-login"), "--user", USERS[cluster], "--host-key", key,
        "--identity", str(bed.key_file), "--provider", "p", "--site", "campus",
    )  # fmt: skip
    found = yaml.safe_load(done.stdout)
    described = found["clusters"][cluster]
    assert {name: each["nodes"] for name, each in described["partitions"].items()} == {
        "normal": 2, "scavenger": 2, "debug": 1,
    }  # fmt: skip
    assert {each["device"] for each in described["partitions"].values()} == {device}
    assert [name for name, each in described["partitions"].items() if each.get("tier")] == ["scavenger"]
    assert ("accounting: slurmdbd" in done.stdout) == (cluster == "a")
    (fed.folder / "found.yaml").write_text(done.stdout)
    fed.write({}, {"tiny": {}}, gateway=None, trust={"groups": {"all": {"allow": ["p"]}}})
    fed.run("validate", "-i", "found.yaml")
    again = fed.run("discover", cluster, "-i", "found.yaml")
    assert yaml.safe_load(again.stdout) == found


def test_discover_tells_of_maintenance_and_of_a_plain_host(bed, fed):
    fed.write({"a": fed.cluster("a", {"normal": {"device": "cpu", "nodes": 1}})}, {"tiny": {}})
    name = bed.maintenance("a", 3600, 1800)
    try:
        assert f"# reservation {name} from " in fed.run("discover", "a", "-i", "inventory.yaml").stdout
    finally:
        bed.end_maintenance("a", name)
    (key,) = bed.host_keys("host")
    host = ["discover", f"hostuser@{bed.address('host')}", "--host-key", key, "--identity", str(bed.key_file)]
    assert "FT5501" in fed.run(*host, code=69).stderr  # Slurm's programs are there, and no Slurm
    assert yaml.safe_load(fed.run(*host, "--kind", "ssh").stdout)["clusters"]["host"]["kind"] == "ssh"


def test_discover_trusts_no_key_by_itself(bed, fed):
    address = bed.address("a-login")
    assert f"fabrictool trust host {address}" in fed.run("discover", address, "--user", "alice", code=64).stderr
    (other,) = bed.host_keys("b-login")
    done = fed.run("discover", address, "--user", "alice", "--host-key", other, code=None)
    assert done.returncode != 0
    assert "FT5303" in done.stderr


# -- bootstrap ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def placed(fed):
    """A fabric on cluster A whose inventory names no Python, and the environment placed there."""
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB", "walltime": "60m"}
    fed.write(
        {
            "a": fed.cluster("a", {"normal": cpu}, software={}),
            "host": fed.cluster("host", {"cpu": cpu}, kind="ssh", software={"engines": {"vllm": {}}}),
            "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
        },
        {"tiny": {"replicas": {"min": 1, "max": 1}, "place": {"pin": [{"cluster": "a", "replicas": 1}]}}},
    )
    fed.run("trust", "init")
    refused = fed.run("apply", "--yes", code=None)
    assert refused.returncode != 0
    assert "fabrictool bootstrap a" in refused.stderr
    fed.run("destroy", "--yes", code=None)
    return json.loads(fed.run("bootstrap", "a", "--json").stdout)


def current(bed, machine="a-login", user="alice"):
    return bed.machine(machine).run(["readlink", f"/home/{user}/.fabrictool/env/current"]).stdout.strip()


def test_bootstrap_places_an_environment(bed, placed):
    assert placed["uploaded"]
    assert placed["changed"]
    assert placed["source"] == "installed"
    assert current(bed) == f"rel/{placed['release']}"
    argv = ["/home/alice/.fabrictool/env/current/bin/python", "-P", "-c", "import aiohttp; print(aiohttp.__file__)"]
    said = bed.machine("a-n2").run(argv, user="alice").stdout
    assert said.startswith(f"/home/alice/.fabrictool/env/rel/{placed['release']}/lib/aiohttp")


def test_a_second_bootstrap_changes_nothing(bed, fed, placed):
    again = fed.run("bootstrap", "a", "--json")
    found = json.loads(again.stdout)
    assert (found["release"], found["changed"], found["uploaded"]) == (placed["release"], False, False)
    assert "it is there, whole and in use" in again.stderr
    assert bed.machine("a-login").run(["ls", "/home/alice/.fabrictool/env/rel"]).stdout.split() == [placed["release"]]


def test_a_corrupted_file_is_found_and_mended(bed, fed, placed):
    lib = f"/home/alice/.fabrictool/env/rel/{placed['release']}/lib"
    bed.machine("a-login").run(
        ["sh", "-c", f"chmod u+w {lib}/msgspec/__init__.py && echo x >>{lib}/msgspec/__init__.py"], user="alice"
    )
    assert "damaged (lib/msgspec/__init__.py)" in fed.run("bootstrap", "a", "--dry-run").stderr
    assert json.loads(fed.run("bootstrap", "a", "--json").stdout)["uploaded"]
    assert "whole and in use" in fed.run("bootstrap", "a", "--dry-run").stderr


def test_a_killed_upload_leaves_the_environment_in_use(bed, fed, placed):
    """The site's Python by another name makes another release."""
    other = ["bootstrap", "a", "--python", "/usr/bin/python3"]
    process = fed.start(*other)
    try:
        for line in process.stderr:
            if "sent" in line:
                break
        process.kill()
    finally:
        process.communicate(timeout=30)
    assert process.returncode == -9
    assert current(bed) == f"rel/{placed['release']}"
    assert "whole and in use" in fed.run("bootstrap", "a", "--dry-run").stderr
    second = json.loads(fed.run(*other, "--json").stdout)
    assert second["release"] != placed["release"]
    assert current(bed) == f"rel/{second['release']}"
    back = json.loads(fed.run("bootstrap", "a", "--json").stdout)
    assert (back["release"], back["uploaded"], back["changed"]) == (placed["release"], False, True)


def test_a_replica_serves_from_the_environment(bed, fed, placed):
    fed.run("apply", "--yes")
    fed.wait("nobody answers", lambda: fed.ask("tiny")[0] == "200")  # the gateway hears of it a moment later
    scripts = (
        bed.machine("a-login").run(["sh", "-c", "cat /home/alice/.fabrictool/units/*/*/job.sh"], user="alice").stdout
    )
    assert f"/home/alice/.fabrictool/env/rel/{placed['release']}/bin/python -P -m fabrictool.agent" in scripts
    # A release that a unit runs from stays, however many come after it.
    fed.run("bootstrap", "a", "--python", "/usr/bin/python3", "--keep", "1")
    assert placed["release"] in bed.machine("a-login").run(["ls", "/home/alice/.fabrictool/env/rel"]).stdout
    assert fed.ask("tiny")[0] == "200"
    fed.run("destroy", "--yes")
    done = fed.run("bootstrap", "a", "--python", "/usr/bin/python3", "--keep", "1")
    assert f"removed {placed['release']}" in done.stderr


@pytest.mark.usefixtures("placed")
def test_the_scripts_of_a_plan_are_what_is_submitted(bed, fed):
    assert "no job of a scheduler" not in fed.run("plan", "--out", "plan.json", "--render").stderr
    shown = json.loads(fed.run("show", "plan.json", "--scripts", "--json").stdout)["scripts"]
    assert [(each["address"], each["cluster"]) for each in shown] == [("replica/tiny/0", "a"), ("gateway/main", "ing")]
    text = fed.run("show", "plan.json", "--scripts").stdout
    assert all(each["script"] in text and each["command"] in text for each in shown)
    fed.run("apply", "plan.json", "--yes")
    operation = fed.units()["replica/tiny/0"]["operation"]
    folder = f"/home/alice/.fabrictool/units/site/{operation}"
    assert bed.machine("a-login").run(["cat", f"{folder}/job.sh"]).stdout == shown[0]["script"]
    submitted = bed.machine("a-login").run(["cat", f"{folder}/submit"]).stdout
    serial = re.compile(r";ser=\d+;")  # of the state, which changes as a plan is carried out
    assert serial.sub(";", submitted) == serial.sub(";", shown[0]["command"] + "\n")
    assert fed.run("plan", "--render").stderr.count("this plan submits no job") == 1
    fed.run("destroy", "--yes")


@pytest.mark.usefixtures("placed")
def test_bootstrap_of_a_plain_host_and_of_none(bed, fed):
    found = json.loads(fed.run("bootstrap", "host", "--json").stdout)
    argv = ["/home/hostuser/.fabrictool/env/current/bin/python", "-P", "-c", "import uvloop, fabrictool.gateway"]
    bed.machine("host").run(argv, user="hostuser")
    assert current(bed, "host", "hostuser") == f"rel/{found['release']}"
    assert "FT5505" in fed.run("bootstrap", "ing", code=1).stderr
    assert "FT5504" in fed.run("bootstrap", "a", "--python", "/usr/bin/perl", code=1).stderr
    assert "FT5341" in fed.run("bootstrap", "nowhere", code=64).stderr


# -- doctor -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(fed, placed):
    """The gateway runs, and the inventory of the checks has a partition with GPUs and cluster B besides."""
    assert placed["release"]
    fed.run("bootstrap", "a")
    fed.run("apply", "--yes")
    return write_checked(fed)


def write_checked(fed, login=None, job=None, cluster=None):
    inventory = json.loads((fed.folder / "inventory.yaml").read_text())
    gpu = {"device": "a100-40g", "devices_per_node": 4, "nodes": 1, "walltime": "5m", "job": job or {}}
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB", "walltime": "60m"}
    inventory["clusters"]["a"]["partitions"] = {"normal": cpu, "debug": gpu}
    inventory["clusters"]["a"]["login"][0] |= login or {}
    inventory["clusters"]["a"] |= cluster or {}
    inventory["clusters"]["b"] = fed.cluster("b", {"normal": cpu}) | {"site": "a"}
    (fed.folder / "checked.yaml").write_text(json.dumps(inventory))
    return ["-b", "blueprint.yaml", "-i", "checked.yaml", "--json"]


def checks(fed, *arguments, code):
    """Name → mark and text."""
    rows = json.loads(fed.run("doctor", *arguments, code=code).stdout)["checks"]
    return {
        row["name"]: ("FAIL" if not row["good"] else "note" if row["warning"] else "ok", row["text"]) for row in rows
    }


def left(bed, cluster="a"):
    """Jobs and folders of checks that are still there."""
    user = USERS[cluster]
    jobs = bed.slurm(cluster, "squeue", "-h", "-t", "PD,R", "-o", "%j").stdout.split()
    folder = bed.machine(f"{cluster}-login").run(["ls", f"/home/{user}/.fabrictool"], user=user, check=False).stdout
    return [name for name in jobs if name.startswith("ft-doctor-")] + [n for n in folder.split() if n == "doctor"]


def test_doctor_finds_both_clusters_sound(bed, fed, serving):
    found = checks(fed, "a", *serving, "--partition", "debug", code=0)
    assert {name: each for name, each in found.items() if each[0] != "ok"} == {}
    assert found["a: accelerator"][1].startswith("device 0")
    assert found["a: way to the gateway"][1] == f"a node connects to {bed.address('ing')}:8443"
    assert "a-n1 sees" in found["a: shared folder"][1]
    assert found["a: environment"][1].startswith("release ")
    assert found["a: accounting"][1] == "sacct answers"
    found = checks(fed, "b", *serving, code=0)
    assert {name for name, each in found.items() if each[0] == "FAIL"} == set()
    assert found["b: accounting"][1].startswith("none (")
    assert left(bed) == left(bed, "b") == []


def test_doctor_of_all_clusters_keeps_the_checks_of_this_machine(fed, serving):
    found = checks(fed, "--clusters", "--no-jobs", *serving, code=None)
    assert {"python", "trust", "a: login", "b: login", "host: login", "ing: login"} <= set(found)
    assert not any("job" in name or "gateway" in name for name in found if ": " in name)


def test_doctor_finds_a_cut_way_to_the_gateway(bed, fed, serving):
    bed.drop("ing", 8443)
    try:
        found = checks(fed, "a", *serving, code=1)
    finally:
        bed.undrop("ing", 8443)
    assert [name for name, each in found.items() if each[0] == "FAIL"] == ["a: way to the gateway"]
    assert "timed out" in found["a: way to the gateway"][1]
    assert left(bed) == []


@pytest.mark.extended  # 70 s of waiting for jobs; the checks of a node are tried one by one in tests/clusters
@pytest.mark.usefixtures("serving")
def test_doctor_finds_a_promise_that_a_compute_node_does_not_keep(bed, fed):
    """The job has the environment of replicas' jobs, and looks on the node where it runs."""
    bed.machine("a-login").run(["mkdir", "-p", "/home/alice/weights"], user="alice")
    environment = {"set": {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "hsn0"}}
    kept = {"weights": "/home/alice/weights", "environment": environment}
    found = checks(fed, "a", *write_checked(fed, cluster=kept), code=1)
    assert [name for name, each in found.items() if each[0] == "FAIL"] == ["a: GLOO_SOCKET_IFNAME"]
    assert found["a: weights on a node"][0] == found["a: NCCL_SOCKET_IFNAME"][0] == "ok"
    absent = {"environment": {"modules": ["no/such"]}}
    found = checks(fed, "a", *write_checked(fed, cluster=absent), code=1)
    assert found["a: job"][0] == "FAIL"
    assert "no/such" in found["a: job"][1] or "module" in found["a: job"][1]
    assert left(bed) == []


def test_doctor_finds_a_damaged_environment(bed, fed, serving):
    release = current(bed)
    file = f"/home/alice/.fabrictool/env/{release}/lib/aiohttp/web.py"
    bed.machine("a-login").run(["sh", "-c", f"chmod u+w {file} && echo >>{file}"], user="alice")
    found = checks(fed, "a", "--no-jobs", *serving, code=1)
    assert found["a: environment"] == ("FAIL", f"release {release.removeprefix('rel/')} is damaged: lib/aiohttp/web.py")
    fed.run("bootstrap", "a")


@pytest.mark.usefixtures("serving")
def test_doctor_tells_of_a_talking_shell_and_a_refused_job(bed, fed):
    noisy = write_checked(fed, login={"port": 2223, "user": "noisy", "host_keys": bed.host_keys("a-login", 2223)})
    assert checks(fed, "a", "--no-jobs", *noisy, code=1)["a: login noise"][0] == "note"  # 1: no environment there
    refused = write_checked(fed, job={"options": {"reservation": "nonsense"}})
    found = checks(fed, "a", "--partition", "debug", *refused, code=1)
    assert found["a: job"][0] == "FAIL"
    assert "reservation" in found["a: job"][1]
    assert left(bed) == []


@pytest.fixture
def full(bed):
    """No job starts on cluster A."""
    bed.slurm("a", "scontrol", "update", "nodename=a-n[1-2]", "state=drain", "reason=test", root=True)
    yield
    bed.slurm("a", "scontrol", "update", "nodename=a-n[1-2]", "state=resume", root=True)


@pytest.mark.usefixtures("full", "serving")
def test_doctor_does_not_wait_for_ever(bed, fed):
    found = checks(fed, "a", "--wait", "2", *write_checked(fed), code=0)
    assert found["a: job"][0] == "note"
    assert "did not start within 2 s" in found["a: job"][1]
    assert left(bed) == []


@pytest.mark.usefixtures("full", "serving")
def test_doctor_cancels_its_job_on_ctrl_c(bed, fed):
    process = fed.start("doctor", "a", "--wait", "600", *write_checked(fed))
    try:
        fed.wait("no job was submitted", lambda: any(name.startswith("ft-doctor-") for name in left(bed)), within_s=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert left(bed) == []
