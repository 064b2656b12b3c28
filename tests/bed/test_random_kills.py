"""A hundred times kill -9 of apply, at random moments (seeded): never a double job, never an orphan, the same end."""

import os
import random
from collections import Counter

import pytest

KILLS = int(os.environ.get("FTBED_KILLS", "15"))
"""`make test-bed` does a hundred, which takes minutes; fewer beside all other tests."""
SEED = 20261121


@pytest.fixture(scope="module")
def chaos(make_federation):
    return make_federation("chaos")


@pytest.fixture
def call(chaos):
    """Runs the command line on the operator's machine; with `kill_after` it is killed after so many seconds."""

    def run(*arguments, kill_after=None):
        done = chaos.run(*arguments, code=None, kill_after=kill_after)
        print(done.stdout[-1000:], done.stderr[-1000:])
        return done.returncode

    return run


def shape(chaos, variant):
    """Three blueprints: another placement, and another spec, which replaces what runs."""
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "a": chaos.cluster("a", {"normal": cpu | {"walltime": "60m"}}),
        "b": chaos.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "host": chaos.cluster("host", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
        "ing": chaos.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    counts = [{"a": 1, "b": 1, "host": 1}, {"a": 2, "b": 0, "host": 1}, {"a": 1, "b": 2, "host": 0}][variant]
    model = {
        "replicas": {"min": 3, "max": 3}, "max_num_seqs": 4 + variant,
        "place": {"pin": [{"cluster": name, "replicas": count} for name, count in counts.items()]},
    }  # fmt: skip
    chaos.write(clusters, {"tiny": model}, client_port=8031, mesh_port=8463)


def names_of_all_jobs_ever(bed):
    a = bed.slurm("a", "sacct", "-n", "-X", "-P", "-S", "now-2hours", "-o", "JobName").stdout.split()
    b = bed.slurm("b", "squeue", "-h", "-t", "all", "-o", "%j").stdout.split()
    return Counter(name for name in a + b if name.startswith("ft-replica-tiny-"))


LEAST_FINISHED = 4


@pytest.mark.timeout(900)
def test_random_kills(bed, chaos, call):
    dice = random.Random(SEED)
    shape(chaos, 0)
    assert call("trust", "init") == 0
    plan = str(chaos.folder / "p.plan")
    kills = finished = variant = 0
    codes = Counter()
    assert call("plan", "-o", plan) == 0
    while kills < KILLS or finished < LEAST_FINISHED:  # a busy machine kills most: the last ones may finish
        after = dice.uniform(0.05, 2.5) if kills < KILLS else None
        code = call("apply", plan, "--yes", "--queue-wait", "60", kill_after=after)
        codes[code] += 1
        if code == -9:
            kills += 1
            if dice.random() < 0.15:  # somebody plans anew instead of going on
                assert call("plan", "-o", plan) == 0
        else:
            assert code in (0, 5), codes
            if code == 0:
                finished += 1
                variant = (variant + 1) % 3
                shape(chaos, variant)
            assert call("plan", "-o", plan) == 0
    shape(chaos, 0)
    assert call("apply", "--yes") == 0
    actions = chaos.plan()["actions"]
    assert [action["kind"] for action in actions] == ["keep"] * 4
    units = chaos.units()
    assert sorted(unit["cluster"] for unit in units.values()) == ["a", "b", "host", "ing"]
    for cluster in ("a", "b"):
        jobs = bed.slurm(cluster, "squeue", "-h", "-t", "R,PD", "-o", "%A %k").stdout.splitlines()
        ours = [line.split()[0] for line in jobs if ";dep=chaos;" in line]
        assert ours == [unit["job"] for unit in units.values() if unit["cluster"] == cluster]
    counted = names_of_all_jobs_ever(bed)
    assert {name: n for name, n in counted.items() if n > 1} == {}
    assert sum(counted.values()) > finished
    alive = bed.machine("host").run(["sh", "-c", "grep -zlx fabrictool.agent /proc/[0-9]*/cmdline"], check=False)
    assert len(alive.stdout.splitlines()) == 1, alive.stdout
