"""Faults that real sites have: each by itself, then many from a seeded list, one after another, on one fabric.

Whatever happens: no job twice, no orphan that nobody speaks of, no more new starts than the cap, and in the end two
plans that change nothing. FTBED_FAULTS says how many (`make test-bed`: a hundred), FTBED_SEED which.
"""

import contextlib
import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from fabrictool.planner.healing import MOST_STARTS
from fabrictool.status.sightings import read_recording
from tests.bed.shown_faults import LASTING, PASSING, Fault, replayed
from tests.bed.terminal import Terminal
from tests.testbed.waiting import wait_until

FAULTS = int(os.environ.get("FTBED_FAULTS", "3"))
SEED = int(os.environ.get("FTBED_SEED", "20261122"))
WALLTIME_S = 3600
SETTLED_WITHIN_S = 240
CODES = {0, 3, 4, 5, 69}
"""Done, a job that cannot start, in part, somebody else writes or the plan is stale, a needed cluster was away."""


@pytest.fixture(scope="module")
def faulty(make_federation):
    fed = make_federation("faulty")
    (fed.folder / "state").mkdir()
    operator = fed.bed.machine("op")  # has its own view of the file system
    operator.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(fed.folder / "state")])
    write(fed)
    fed.up()
    yield fed
    fed.run("destroy", "--yes", code=None)
    operator.run(["umount", "-l", str(fed.folder / "state")])


def state_of(fed):
    """The operator's state folder, as it is seen from here."""
    return Path(f"/proc/{fed.bed.machine('op').process.pid}/root{fed.folder}/state")


def write(fed, **job):
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": f"{WALLTIME_S} s", "job": {"options": job}}}),
        "b": fed.cluster("b", {"normal": cpu | {"walltime": f"{WALLTIME_S} s"}}),
        "ing": fed.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    pins = [{"cluster": "a", "replicas": 1}, {"cluster": "b", "replicas": 1}]
    model = {"replicas": {"min": 2, "max": 2}, "place": {"pin": pins}}
    fed.write(clusters, {"tiny": model}, client_port=8041, mesh_port=8473)


# -- what is seen ---------------------------------------------------------------------------------------------------


def jobs(fed, cluster):
    """Address → (number, state) of our jobs that wait, run or end."""
    lines = fed.bed.slurm(cluster, "squeue", "-h", "-t", "R,PD,CF", "-o", "%A %T %k").stdout.splitlines()
    ours = [line.split() for line in lines if f";dep={fed.name};" in line]
    return [(comment.split("rep=")[1].split(";")[0], int(job), state) for job, state, comment in ours]


def only_job(fed, cluster):
    """Of the replica that is pinned there."""
    return wait_until(
        f"not one job on {cluster}", lambda: len(found := jobs(fed, cluster)) == 1 and found[0], within_s=60
    )


def starts(fed):
    return json.loads((state_of(fed) / fed.name / "state.json").read_text())["healed"]


def changes(fed):
    done = fed.run("plan", "--json", code=None)
    return [a for a in json.loads(done.stdout)["actions"] if a["kind"] != "keep"] if done.returncode == 0 else None


def settle(fed):
    """Apply until it is so, within a bound; then what must hold."""
    began = time.monotonic()
    while (done := fed.run("apply", "--yes", "--queue-wait", "60", code=None)).returncode != 0:
        print(
            f"  {time.monotonic() - began:.0f} s: apply ended with {done.returncode}\n{done.stdout}\n{done.stderr}",
            flush=True,
        )
        assert done.returncode in CODES
        assert time.monotonic() - began < SETTLED_WITHIN_S, "not settled"
        time.sleep(1)
    print(f"  settled in {time.monotonic() - began:.0f} s", flush=True)
    assert changes(fed) == []
    assert changes(fed) == []
    rows = fed.units()
    for cluster in ("a", "b"):
        seen = jobs(fed, cluster)
        assert [count for count in Counter(address for address, _, _ in seen).values() if count > 1] == [], seen
        assert {str(number) for _, number, _ in seen} <= {row["job"] for row in rows.values()}, "an orphan"
    assert sorted(rows) == ["gateway/main", "replica/tiny/0", "replica/tiny/1"]
    hour = time.time() - 3600
    cap = MOST_STARTS + 2 * 3600 // WALLTIME_S
    assert max([sum(at > hour for at in times) for times in starts(fed).values()], default=0) <= cap


# -- faults: each begins, and is over at its end --------------------------------------------------------------------

DATE = """#!/bin/sh
case $1 in +%s) echo $(($(/tmp/.date +%s) + $(cat /tmp/.ahead))) ;; *) exec /tmp/.date "$@" ;; esac
"""


@contextlib.contextmanager
def clock(fed, dice, cluster, ahead=None):
    """The login node's clock is wrong; its kernel's cannot be, so its `date` is."""
    ahead = ahead if ahead is not None else dice.choice([-7200, -300, -15, 15, 120, 300, 86400])
    login = fed.bed.machine(f"{cluster}-login")
    prepare = (
        f"cp /usr/bin/date /tmp/.date; echo {ahead} >/tmp/.ahead; cat >/tmp/.wrong;"
        " chmod 755 /tmp/.wrong /tmp/.date; chmod 644 /tmp/.ahead; mount --bind /tmp/.wrong /usr/bin/date"
    )
    login.run(["sh", "-c", prepare], stdin=DATE)
    try:
        yield
    finally:
        login.run(["umount", "/usr/bin/date"])


@contextlib.contextmanager
def requeue(fed, _dice, cluster):
    """By the site's staff, who allow it first."""
    for _, number, _ in jobs(fed, cluster)[:1]:
        fed.bed.slurm(cluster, "scontrol", "update", f"jobid={number}", "requeue=1", root=True, check=False)
        fed.bed.slurm(cluster, "scontrol", "requeue", str(number), root=True, check=False)
    yield


@contextlib.contextmanager
def cancel(fed, _dice, cluster):
    for _, number, _ in jobs(fed, cluster)[:1]:
        fed.bed.slurm(cluster, "scancel", str(number))
    yield


@contextlib.contextmanager
def drained(fed, _dice, cluster):
    """No node takes new jobs, and what ran is cancelled."""
    nodes = f"nodename={cluster}-n[1-2]"
    fed.bed.slurm(cluster, "scontrol", "update", nodes, "state=drain", "reason=test", root=True)
    try:
        with cancel(fed, _dice, cluster):
            yield
    finally:
        fed.bed.slurm(cluster, "scontrol", "update", nodes, "state=resume", root=True)


@contextlib.contextmanager
def hold(fed, dice, cluster):
    """A job waits, and the site's staff hold it."""
    held = []
    with drained(fed, dice, cluster):
        reconcile(fed)
        for _, number, state in jobs(fed, cluster):
            if state == "PENDING":
                fed.bed.slurm(cluster, "scontrol", "hold", str(number), root=True)
                held.append(number)
        yield
        for number in held:
            fed.bed.slurm(cluster, "scontrol", "release", str(number), root=True, check=False)


@contextlib.contextmanager
def qos(fed, dice, cluster):
    """The partition takes only jobs of a QoS that ours have not."""
    fed.bed.slurm(cluster, "scontrol", "update", "partitionname=normal", "allowqos=none", root=True, check=False)
    try:
        with cancel(fed, dice, cluster):
            yield
    finally:
        fed.bed.slurm(cluster, "scontrol", "update", "partitionname=normal", "allowqos=ALL", root=True, check=False)


@contextlib.contextmanager
def reboot(fed, dice, cluster):
    node = f"{cluster}-n{dice.choice((1, 2))}"

    def running():
        listed = fed.bed.slurm(cluster, "squeue", "-h", "-t", "R", "-w", node, "-o", "%A %S").stdout
        return set(listed.splitlines())

    before = running()
    fed.bed.power_cut(node)
    try:
        time.sleep(dice.uniform(0, 5))
        yield
    finally:
        fed.bed.boot(node)
        # Else what it broke shows in the middle of what comes next.
        fed.wait(f"the scheduler does not know that {node} was off", lambda: not before & running(), within_s=90)


@contextlib.contextmanager
def resets(fed, dice, cluster):
    """Connections to the login node break now and then."""
    killer = fed.bed.machine(f"{cluster}-login").popen(
        ["sh", "-c", f"while :; do sleep {dice.uniform(0.7, 3):.1f}; pkill -KILL -f '^sshd: .*@'; done"]
    )
    try:
        yield
    finally:
        killer.kill()
        killer.wait()


@contextlib.contextmanager
def full_disk(fed, _dice, _cluster):
    """Of the operator."""
    filler = state_of(fed) / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def killed_agent(fed, _dice, cluster):
    for node in (1, 2):
        fed.bed.machine(f"{cluster}-n{node}").run(["pkill", "-KILL", "-f", "fabrictool[.]agent"], check=False)
    yield


@contextlib.contextmanager
def stopped_agent(fed, dice, cluster):
    machines = [fed.bed.machine(f"{cluster}-n{node}") for node in (1, 2)]
    for machine in machines:
        machine.run(["pkill", "-STOP", "-f", "fabrictool[.]agent"], check=False)
    try:
        time.sleep(dice.uniform(1, 8))
        yield
    finally:
        for machine in machines:
            machine.run(["pkill", "-CONT", "-f", "fabrictool[.]agent"], check=False)


def reconcile(fed, kill_after=None):
    process = fed.start("reconcile", "--max-delete", "9")
    if kill_after is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=kill_after)
        process.kill()
        process.communicate()
        return
    _, stderr = process.communicate(timeout=150)
    assert "Traceback" not in stderr, stderr
    assert process.returncode in CODES | {1}, stderr
    assert process.returncode != 1 or "FT4301" in stderr, stderr  # a full disk


def nothing_double(fed):
    """At any time: an operation is one job at most, and an address two, the former and its successor."""
    for cluster in ("a", "b"):
        names = fed.bed.slurm(cluster, "squeue", "-h", "-t", "R,PD,CF,CG", "-o", "%j").stdout.split()
        assert [name for name, count in Counter(names).items() if count > 1] == []
        assert max(Counter(address for address, _, _ in jobs(fed, cluster)).values(), default=0) <= 2


HARMLESS = [clock, resets, full_disk, stopped_agent]
"""Faults that end no replica: nothing may be replaced."""
EVERY = [clock, requeue, cancel, drained, hold, qos, reboot, resets, full_disk, killed_agent, stopped_agent]


# -- each by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [300, pytest.param(-15, marks=pytest.mark.long)])
def test_a_wrong_clock_replaces_nothing_and_is_said(faulty, ahead):
    before = jobs(faulty, "a")
    with clock(faulty, None, "a", ahead):
        reconcile(faulty)
        assert jobs(faulty, "a") == before
        said = faulty.run("plan").stdout
        seconds = re.search(rf"clock of a's login node is (\d+) s {'ahead of' if ahead > 0 else 'behind'} ", said)
        assert seconds, said
        assert abs(int(seconds[1]) - abs(ahead)) <= 3
        assert "clock of a's" in faulty.run("status").stdout
    assert starts(faulty) == {}


def test_a_requeued_job_runs_once_and_its_successor_serves(bed, faulty):
    before = only_job(faulty, "a")
    with requeue(faulty, None, "a"):
        wait_until(
            "it was not requeued", lambda: [state for *_, state in jobs(faulty, "a")] == ["PENDING"], within_s=60
        )
        reconcile(faulty)
    settle(faulty)
    after = only_job(faulty, "a")
    assert after[1] != before[1]
    assert bed.job_state("a", before[1]) in ("CANCELLED", "COMPLETED", "FAILED")


@pytest.mark.long
def test_a_requeued_job_that_nobody_saw_waiting_ends_by_itself(bed, faulty):
    number = only_job(faulty, "b")[1]
    with requeue(faulty, None, "b"):
        bed.slurm("b", "scontrol", "update", f"jobid={number}", "starttime=now", root=True, check=False)
        wait_until("its second run does not end", lambda: bed.job_state("b", number) == "COMPLETED", within_s=180)
    reconcile(faulty)
    settle(faulty)


def test_a_held_job_is_said_by_all_and_no_success(faulty):
    with hold(faulty, None, "a"):
        done = faulty.run("plan", code=3)
        assert "FT5111" in done.stderr
        assert "JobHeldAdmin" in done.stderr
        assert "it is held" in faulty.run("status", code=1).stdout
        assert "FT5111" in faulty.run("apply", "--yes", code=4).stderr
    settle(faulty)


@pytest.mark.long
def test_another_account_resubmits(bed, faulty):
    before = only_job(faulty, "a")[1]
    write(faulty, account="proj01")
    assert [change["address"] for change in changes(faulty)] == ["replica/tiny/0"]
    settle(faulty)
    after = only_job(faulty, "a")[1]
    assert after != before
    assert bed.slurm("a", "squeue", "-h", "-j", str(after), "-o", "%a").stdout.strip() == "proj01"
    write(faulty)
    settle(faulty)


@pytest.mark.long
def test_connections_that_break_now_and_then_stop_nothing(faulty):
    number = only_job(faulty, "a")[1]
    with resets(faulty, random.Random(1), "a"):
        faulty.bed.slurm("a", "scancel", str(number))
        reconcile(faulty)
        reconcile(faulty)
    settle(faulty)


# -- all at random --------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(faulty):
    """`top`, which records all the while."""
    terminal = Terminal(faulty)
    faulty.wait("top sees nothing", lambda: [look for look in terminal.looks() if look.gateway and look.operator])
    yield terminal
    terminal.process.kill()


def nodes_of(fed, cluster):
    """Where our jobs run there."""
    return set(fed.bed.slurm(cluster, "squeue", "-h", "-t", "R", "-o", "%N").stdout.split())


@pytest.mark.timeout(240 + 150 * FAULTS)
def test_random_faults(faulty, watched):
    """Beside all else: who replays what `top` recorded sees each fault on the first screen."""
    dice = random.Random(SEED)
    told = []
    for number in range(FAULTS):
        fault = dice.choice(EVERY)
        cluster = dice.choice(("a", "b"))
        told.append(Fault(fault.__name__, cluster, time.time()))
        print(number, told[-1], flush=True)
        before = [jobs(faulty, name) for name in ("a", "b")]
        nodes = nodes_of(faulty, cluster)
        with fault(faulty, dice, cluster):
            for _ in range(dice.choice((1, 1, 2))):
                reconcile(faulty, kill_after=dice.uniform(0.5, 6) if dice.random() < 0.25 else None)
                nothing_double(faulty)
                assert fault not in HARMLESS or [jobs(faulty, name) for name in ("a", "b")] == before, fault
            if fault is reboot:  # of a node on which nothing of ours ran there is nothing to be seen
                told[-1].hits = any(not faulty.bed.machine(node).alive for node in nodes)
            until_seen(faulty, watched, told)
        settle(faulty)
        told[-1].ended = time.time()
    watched.end()
    lines = replayed(watched.record, told)
    for number, fault in enumerate(told):
        print(f"{number} {fault.name} {fault.cluster}: {lines[number] or 'not seen'}", flush=True)
    looks = read_recording(watched.record)
    unseen = [fault for number, fault in enumerate(told) if not lines[number]]
    assert [fault for fault in unseen if is_to_be_seen(fault, told, looks)] == []


def is_to_be_seen(fault, told, looks):
    """What lasts is waited for once; of what is healed soon, each that was there when `top` looked."""
    if not fault.hits or fault.name in PASSING:
        return False
    return first_of_its_kind(fault, told) if fault.name in LASTING else fault.known_in(looks)


def first_of_its_kind(fault, told):
    return next(other for other in told if other.name == fault.name) is fault


def until_seen(fed, watched, told):
    """A fault that lasts stays until somebody can have seen it; later ones of its kind may be over before a look."""
    if told[-1].name in LASTING and first_of_its_kind(told[-1], told):
        fed.wait(f"{told[-1]} is not seen", lambda: told[-1].shown_in(watched.looks()), within_s=90)
