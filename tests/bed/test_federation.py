"""One apply over everything: two Slurm clusters, a plain host, the ingress, and the operator's own processes."""

import json
import os
import stat
from pathlib import Path

import pytest

from tests.bed.federation import KEY


@pytest.fixture(scope="module")
def whole(make_federation):
    """Applied once; the tests of this module look at it."""
    fed = make_federation("whole")
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"nodes": 2, "walltime": "60m"}}),
        "b": fed.cluster("b", {"normal": cpu | {"nodes": 2, "walltime": "60m"}}),
        "host": fed.cluster("host", {"cpu": cpu}, kind="ssh"),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
        "here": {"site": "op", "kind": "local", "partitions": {"cpu": cpu}},
    }
    pins = [{"cluster": name, "replicas": 1} for name in ("a", "b", "here", "host")]
    fed.write(clusters, {"tiny": {"replicas": {"min": 4, "max": 4}, "place": {"pin": pins}}})
    fed.up()
    return fed


def test_the_ingress_answers_from_every_cluster(whole):
    answers = {site: whole.ask("tiny", **{"x-fabric-providers": f"p-{site}"}) for site in ("a", "b", "host", "op")}
    assert {site: answer[0] for site, answer in answers.items()} == dict.fromkeys(answers, "200"), answers
    assert {units["cluster"] for units in whole.units().values()} == {"a", "b", "host", "ing", "here"}


def test_two_plans_after_it_show_no_change(whole):
    for _ in range(2):
        assert [a["kind"] for a in whole.plan()["actions"]] == ["keep"] * 5


def test_jobs_are_real_ones_with_our_mark(bed, whole):
    for cluster in ("a", "b"):
        name, comment, limit = bed.slurm(cluster, "squeue", "-h", "-o", "%j %k %l").stdout.split()
        assert name.startswith("ft-replica-tiny-")
        assert comment.startswith("ft1;lin=")
        assert f"op={name.removeprefix('ft-')}" in comment
        assert limit in ("1:00:00", "59:00", "58:00", "57:00", "56:00", "55:00", "54:00", "53:00", "52:00", "51:00")
    log = whole.run("logs", "replica/tiny/0").stdout
    assert "engine-ready" in log


def test_the_planted_secret_and_the_keys_are_in_no_artefact(bed, whole):
    """Not in argv, environment, comment, plan, state, journal or log of any machine; key files hold hashes."""
    whole.run("plan", "-o", "saved.plan")
    private = (whole.folder / "state/whole/trust/root.key").read_bytes().splitlines()[1]
    temporary = [Path(f"/proc/{bed.machine(name).process.pid}/root/tmp") for name in ("a-login", "a-n1", "b-n1")]
    files = [path for root in (whole.folder, bed.root) for path in root.rglob("*")]
    # Of what lies in /tmp only what the sites' users wrote is the fabric's: this checkout may lie there, too.
    files += [path for root in temporary for path in root.rglob("*") if path.lstat().st_uid != os.geteuid()]
    written = [path for path in files if path.is_file() and not path.is_symlink()]
    for path in written:
        data = path.read_bytes()
        assert KEY.encode() not in data, path
        assert private not in data or path.name == "root.key", path
    assert len(written) > 100
    for process in Path("/proc").glob("[0-9]*"):  # of all machines: their namespaces are inside of ours
        for what in ("cmdline", "environ"):
            try:
                assert KEY.encode() not in (process / what).read_bytes(), process
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    for cluster in ("a", "b"):
        assert KEY not in bed.slurm(cluster, "scontrol", "show", "job").stdout
    keys = [p for name in ("session.key", "keys.json") for p in bed.root.rglob(name)]
    assert keys
    assert {stat.S_IMODE(p.stat().st_mode) for p in keys} == {0o600}


def test_events_and_status_tell_of_units_behind_login_nodes(whole):
    events = json.loads(whole.run("events", "--json", "-n", "500").stdout)["events"]
    assert {"replica/tiny/0", "replica/tiny/1", "apply"} <= {event["source"] for event in events}
    units = whole.units()
    assert units["replica/tiny/0"]["job"]
    assert units["replica/tiny/0"]["ends_at"] > units["replica/tiny/0"]["begins_at"]
    whole.wait("the gateway sees not all", lambda: whole.status()["gateway"]["models"][0]["ready"] == 4)


def test_a_foreign_job_and_a_foreign_fabric_are_never_touched(bed, whole):
    stranger = bed.ssh("a-login", "sbatch", "--parsable", "--job-name=ft-replica-tiny-9-g1-00000000",
                       "--comment='ft1;lin=ffffffff;dep=whole;rep=replica/tiny/9;ser=1;op=replica-tiny-9-g1-00000000'",
                       "--wrap='sleep 600'").stdout.strip()  # fmt: skip
    try:
        found = json.loads(whole.run("reconcile", "--dry-run", "--prune", "--json").stdout.splitlines()[-1])
        assert found["type"] == "version"  # nothing else is said
        whole.run("plan")
        assert bed.job_state("a", stranger) in ("RUNNING", "PENDING")
    finally:
        bed.slurm("a", "scancel", stranger)


def test_destroy_leaves_nothing_behind(bed, whole):
    whole.run("destroy", "--yes")
    for cluster in ("a", "b"):
        whole.wait("jobs are left", lambda c=cluster: not bed.slurm(c, "squeue", "-h").stdout.strip())
    assert whole.units() == {}
    for user, name in (("alice", "a-login"), ("hostuser", "host"), ("web", "ing")):
        left = (
            bed.machine(name)
            .run(
                [
                    "find",
                    f"/home/{user}/.fabrictool/units",
                    "-type",
                    "f",
                    "-not",
                    "-name",
                    ".here",
                    "-not",
                    "-name",
                    ".owner*",
                ],
                check=False,
            )
            .stdout
        )
        assert left == "", name
