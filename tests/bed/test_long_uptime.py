"""Steady load through everything that ends a replica: walltime, preemption, maintenance, power cuts, lost controllers.

One fabric, one load, one `reconcile --watch` beside it; each part waits for its own states while the load goes on.
"""

import json
import signal
import subprocess
import time

import pytest

from tests.bed.load import Load


@pytest.fixture(scope="module")
def storm(make_federation):
    fed = make_federation("storm")
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster(
            "a", {"normal": cpu | {"walltime": "3m"}, "scavenger": cpu | {"walltime": "2h", "tier": "scavenger"}}
        ),
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "2h"}}),
        "ing": fed.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    pins = [
        {"cluster": "a", "partition": "normal", "replicas": 1},
        {"cluster": "a", "partition": "scavenger", "replicas": 1},
        {"cluster": "b", "replicas": 1},
    ]
    models = {"tiny": {"replicas": {"min": 2, "max": 3}, "place": {"pin": pins}}}
    fed.write(clusters, models, client_port=8021, mesh_port=8453)
    fed.up()
    return fed


@pytest.fixture(scope="module")
def watched(storm):
    """The reconciler, as an operator runs it."""
    log = (storm.folder / "reconcile.log").open("w")
    process = storm.bed.operator_popen(
        storm.command("reconcile", "--watch", "--interval", "3"), env=storm.environment, cwd=storm.folder,
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    yield storm
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(90) == 0
    finally:
        process.kill()
        log.close()
        print((storm.folder / "reconcile.log").read_text()[-6000:])


def unit_in(storm, partition):
    """The youngest living unit of a partition, as status shows it."""
    found = [u for u in storm.status()["units"] if u["cluster"] == partition[0] and u["job"]]
    for unit in found:
        line = storm.bed.slurm(partition[0], "squeue", "-h", "-j", unit["job"], "-o", "%P %N %T", check=False).stdout
        if line.split()[:1] == [partition[1]]:
            return unit | {"node": line.split()[1], "native": line.split()[-1]}
    return None


@pytest.mark.extended  # 200 s of waiting for a walltime; every lane of CI would wait for it
@pytest.mark.usefixtures("watched")
def test_zero_requests_fail_while_replicas_are_handed_over_preempted_and_maintained(bed, storm):
    began = time.time()
    first = storm.wait("the first job runs", lambda: unit_in(storm, ("a", "normal")))
    with Load(bed, (storm.gateway, storm.client_port), model="tiny") as load:
        storm.wait("nobody answers", lambda: load.verdicts()["ok"] > 5)

        # The controller of A restarts, then its login node is cut off for a while.
        bed.restart_slurmctld("a")
        bed.cut_link("a-login")
        storm.wait(
            "the cut is not said", lambda: "unreachable" in (storm.folder / "reconcile.log").read_text(), within_s=90
        )
        bed.mend_link("a-login")
        storm.wait("a is not back", lambda: storm.status()["unknown_clusters"] == {}, within_s=60)

        # Somebody with better rights takes the node of the scavenger replica.
        victim = storm.wait("no scavenger replica", lambda: unit_in(storm, ("a", "scavenger")))
        thief = bed.slurm(
            "a", "sbatch", "--parsable", "-p", "debug" if victim["node"] == "a-n1" else "normal", "-w", victim["node"],
            "-c", "32", "--mem=1G", "--wrap", "sleep 45",
        ).stdout.strip()  # fmt: skip
        storm.wait(
            "the scavenger replica was not brought back",
            lambda: (u := unit_in(storm, ("a", "scavenger"))) and u["job"] != victim["job"],
            within_s=120,
        )
        bed.slurm("a", "scancel", thief, check=False)

        # B goes into maintenance: its replica leaves before, and comes back after it.
        before = unit_in(storm, ("b", "normal"))
        name = bed.maintenance("b", starts_in_s=180, duration_s=60)
        try:
            waiting = storm.wait(
                "the replica did not leave",
                lambda: (u := unit_in(storm, ("b", "normal"))) and u["job"] != before["job"] and u,
                within_s=60,
            )
            assert waiting["native"] == "PENDING"
        finally:
            bed.end_maintenance("b", name)

        # The first job ends by its walltime; its successor has taken over before.
        storm.wait("it did not end", lambda: time.time() > began + 200, within_s=220)
        second = storm.wait("no successor runs", lambda: unit_in(storm, ("a", "normal")))
        assert second["job"] != first["job"]
        assert second["address"] == first["address"]
        storm.wait("the successor serves nobody", lambda: load.served(second["address"].removeprefix("replica/")) > 3)
    assert load.bad() == []
    assert load.verdicts()["ok"] > 100
    native = bed.slurm("a", "sacct", "-n", "-X", "-j", first["job"], "-o", "State").stdout.split()
    assert native == ["COMPLETED"]  # it left in order, before its time


@pytest.mark.usefixtures("watched")
def test_a_power_cut_breaks_streams_in_order_and_fails_nothing_else(bed, storm):
    storm.wait("not all serve", lambda: all(u["ready"] for u in storm.status()["units"]), within_s=120)
    victim = unit_in(storm, ("b", "normal"))
    with Load(bed, (storm.gateway, storm.client_port), model="tiny", streams=4, plain=2) as load:
        address = victim["address"].removeprefix("replica/")
        storm.wait("the victim serves nobody", lambda: load.served(address) > 2)
        bed.power_cut(victim["node"])
        cut = time.time()
        storm.wait("the others do not serve", lambda: sum(o.at > cut + 6 for o in load.outcomes) > 20)
        storm.wait("it was not brought back", lambda: load.served(address, since=cut + 10) > 0, within_s=150)
        bed.boot(victim["node"])
    verdicts = load.verdicts()
    assert verdicts["refused"] == 0, load.bad()
    assert verdicts["torn"] == 0, load.bad()
    assert all(abs(o.at - cut) < 30 for o in load.bad())


@pytest.mark.extended
def test_all_of_it_was_visible(storm):
    log = (storm.folder / "reconcile.log").read_text()
    for word in ("ending", "unreachable", "maintenance", "ended"):
        assert word in log, word
    events = json.loads(storm.run("events", "--json", "-n", "2000").stdout)["events"]
    assert any(e["source"] == "apply" and e["kind"] == "done" for e in events)
