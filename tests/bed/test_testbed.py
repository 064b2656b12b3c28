"""The testbed is what it says: real Slurm, real refusals, real power cuts.

Waiting costs the time here: the node that loses its power first is looked at last.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from datetime import datetime

import pytest

from fabrictool.clusters.schedulers.protocol import Job, SchedulerFacts
from fabrictool.clusters.schedulers.slurm import Slurm
from tests.testbed.bed import Bed
from tests.testbed.state import BedError, Process
from tests.testbed.waiting import wait_until

KNOCK = """
import errno, socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as s:
        print(s.recv(100).decode())
except TimeoutError:
    print("silence")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
SERVE = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    print("listening", flush=True)
    while True:
        peer, (address, _) = server.accept()
        with peer:
            peer.sendall(address.encode())
"""


def knock(bed, source, address, port=9000):
    """What `source` hears from that port: the server's answer, or why there is none."""
    return bed.machine(source).run([sys.executable, "-c", KNOCK, address, str(port)]).stdout.strip()


@contextlib.contextmanager
def server(bed, machine, user):
    """Answers with the address that it sees; runs on the repository's Python as one of the machine's users."""
    with bed.machine(machine).popen([sys.executable, "-c", SERVE], user=user, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


def submit(bed, cluster, script, *options):
    """Through SSH from the operator, as the tool does it; the job's id."""
    done = bed.ssh(f"{cluster}-login", "sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_job(bed, cluster, job, *states, within_s=90):
    wait_until(
        f"job {job} on {cluster} is not {states}",
        lambda: bed.job_state(cluster, job) in states,
        within_s=within_s,
    )


def reason(bed, cluster, job):
    return bed.slurm(cluster, "squeue", "-h", "-j", job, "-o", "%r").stdout.strip()


@pytest.fixture(scope="module")
def cut_node(bed):
    """b-n2 has lost its power with a job on it that may be requeued."""
    job = submit(bed, "b", "sleep 600", "--requeue", "-w", "b-n2")
    wait_job(bed, "b", job, "RUNNING")
    bed.machine("b-n2").power_cut()
    yield job
    bed.slurm("b", "scancel", job)
    if not bed.machine("b-n2").alive:
        bed.machine("b-n2").boot()


@pytest.mark.usefixtures("cut_node")
def test_after_a_power_cut_a_machine_is_silent(bed):
    assert not bed.machine("b-n2").alive
    assert knock(bed, "b-login", bed.address("b-n2"), 6818) in {"EHOSTUNREACH", "silence"}
    with pytest.raises(BedError, match="b-n2 has no power"):
        bed.machine("b-n2").run(["true"])


@pytest.mark.parametrize(("cluster", "user"), [("a", "alice"), ("b", "u7781")])
def test_a_job_that_comes_through_ssh_gets_its_gpus(bed, cluster, user):
    job = submit(bed, cluster, "echo $CUDA_VISIBLE_DEVICES $(hostname) $(id -un)", "--gres=gpu:2", f"-w {cluster}-n1")
    wait_job(bed, cluster, job, "COMPLETED")
    assert bed.ssh(f"{cluster}-login", f"cat slurm-{job}.out").stdout == f"0,1 {cluster}-n1 {user}\n"


@pytest.mark.parametrize("way", ["gres", "gpus-per-node", "gpus"])
def test_slurm_takes_each_way_in_which_we_ask_for_gpus(bed, way):
    job = Job(
        operation="o", address="replica/m/0", fabric="f", lineage="", serial=1, folder="/", home="/", command=("true",),
        partition="normal", devices=2, devices_as=way,
    )  # fmt: skip
    asked = [word for word in Slurm().submission(SchedulerFacts(), job).argv if word.startswith(("--gres", "--gpus"))]
    assert [word.split("=")[0] for word in asked] == [f"--{way}"]
    number = submit(bed, "a", "echo $CUDA_VISIBLE_DEVICES", *asked)
    wait_job(bed, "a", number, "COMPLETED")
    assert bed.ssh("a-login", f"cat slurm-{number}.out").stdout == "0,1\n"


def test_a_job_that_asks_for_no_gpu_gets_none(bed):
    job = submit(bed, "a", "echo [$CUDA_VISIBLE_DEVICES]")
    wait_job(bed, "a", job, "COMPLETED")
    assert bed.ssh("a-login", f"cat slurm-{job}.out").stdout == "[]\n"


@pytest.mark.parametrize("port", [2222, 2223])
def test_the_login_node_has_other_sshds_with_other_keys(bed, port):
    assert bed.ssh("a-login", "hostname", port=port).stdout == "a-login\n"
    assert bed.host_keys("a-login", port) != bed.host_keys("a-login")


def test_the_noisy_user_talks_before_every_command(bed):
    done = bed.ssh("a-login", "echo answer", port=2223, user="noisy")
    assert done.stdout.endswith("answer\n")
    assert done.stdout.startswith("Welcome")
    assert "Authorised users only" in done.stderr


def test_the_second_sshd_allows_openssh_s_ten_sessions_a_connection(bed, tmp_path):
    master = [f"ControlPath={tmp_path}/c", "ControlPersist=30", "ControlMaster=auto"]
    assert bed.ssh("a-login", "true", port=2222, options=master).returncode == 0
    ssh = ["ssh", "-F", str(bed.ssh_config), "-p", "2222", "-o", f"ControlPath={tmp_path}/c", "-o", "ControlMaster=no"]
    command = [*ssh, "a-login", "echo in; cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(bed.operator_popen(command, **pipes)) for _ in range(10)]
        assert [session.stdout.readline() for session in sessions] == ["in\n"] * 10
        with bed.operator_popen(command, **pipes) as one_more:
            assert "refused by peer" in one_more.communicate(timeout=20)[1]
        for session in sessions:
            session.stdin.close()
    bed.operator_run([*ssh, "-O", "exit", "a-login"])


def test_only_pinned_hosts_and_known_keys_get_a_connection(bed, tmp_path):
    stranger = bed.new_key()
    only = [f"IdentityFile={stranger}", f"CertificateFile={stranger}-cert.pub"]
    options = ["IdentityAgent=none", *only]
    ssh = ["ssh", "-F", "/dev/null", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]
    known = f"UserKnownHostsFile={bed.known_hosts}"
    command = [*ssh, *(word for option in [known, *options] for word in ("-o", option)), "alice@a-login", "id -un"]
    assert "Permission denied" in bed.operator_run(command).stderr
    bed.certify(stranger, "alice")
    assert bed.operator_run(command).stdout == "alice\n"
    pinned = tmp_path / "known_hosts"
    pinned.write_text(f"a-login {bed.host_keys('b-login')[0]}\n")
    changed = [word.replace(str(bed.known_hosts), str(pinned)) for word in command]
    assert "HOST IDENTIFICATION HAS CHANGED" in bed.operator_run(changed).stderr


def test_the_plain_host_shows_a_certificate(bed, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority {bed.address('host')} {bed.host_authority}\n")
    by_authority = [f"UserKnownHostsFile={known}"]
    assert bed.ssh("host", "id -un", options=by_authority).stdout == "hostuser\n"
    assert "Host key verification failed" in bed.ssh("ing", "true", options=by_authority).stderr


@pytest.mark.parametrize(
    ("machine", "user"),
    [("a-login", "alice"), ("a-n1", "alice"), ("b-n1", "u7781"), ("ing", "web"), ("host", "hostuser")],
)
def test_users_of_every_machine_can_run_the_repository_s_python(bed, machine, user):
    code = "import fabrictool, msgspec, os; print(fabrictool.__file__, os.getuid())"
    done = bed.machine(machine).run([sys.executable, "-c", code], user=user)
    import fabrictool

    uid = bed.machine(machine).run(["id", "-u", user]).stdout.strip()
    assert done.stdout.split() == [fabrictool.__file__, uid]
    assert uid != "0"


def test_compute_nodes_reach_out_and_cannot_be_reached(bed):
    node = bed.address("a-n2")
    with server(bed, "ing", "web"), server(bed, "a-n2", "alice"):
        assert knock(bed, "a-n2", bed.address("ing")) == bed.address("a-gw")  # NAT
        assert knock(bed, "a-login", node) == bed.inner_address("a-login")
        assert knock(bed, "a-n1", node) == bed.address("a-n1")
        assert knock(bed, "op", node) == "EHOSTUNREACH"  # it has a route: the firewall says no
        assert knock(bed, "ing", node) == "ENETUNREACH"
        assert knock(bed, "b-n1", node) in {"ENETUNREACH", "EHOSTUNREACH"}
        assert knock(bed, "b-login", node) == "ENETUNREACH"
        assert knock(bed, "op", bed.address("a-gw")) == "ECONNREFUSED"


def test_a_thread_can_have_sockets_in_a_machine_s_network(bed):
    import socket

    here = {name for _, name in socket.if_nameindex()}
    with bed.sockets_in("op"), socket.create_connection((bed.address("a-login"), 22), timeout=5) as connection:
        assert connection.recv(4) == b"SSH-"
        assert connection.getsockname()[0] == bed.address("op")
    assert {name for _, name in socket.if_nameindex()} == here


def test_cluster_a_keeps_accounts_and_cluster_b_does_not(bed):
    job = submit(bed, "a", "true", "--comment=kept")
    wait_job(bed, "a", job, "COMPLETED")
    command = ["sacct", "-nPX", "-j", job, "-o", "JobID,Comment,Account,User"]
    wait_until(
        "sacct does not know the job",
        lambda: bed.slurm("a", *command).stdout == f"{job}|kept|proj01|alice\n",
        within_s=20,
    )
    refused = bed.slurm("b", "sacct", check=False)
    assert refused.returncode != 0
    assert "accounting storage is disabled" in refused.stderr


def test_a_cut_link_ends_ssh_and_a_mended_one_brings_it_back(bed):
    bed.cut_link("a-login")
    try:
        assert bed.ssh("a-login", "true", options=["ConnectTimeout=2"]).returncode == 255
        assert bed.node_states("a")["a-n1"] == "idle"  # the inside is another cable
    finally:
        bed.mend_link("a-login")
    wait_until("ssh does not come back", lambda: bed.ssh("a-login", "true").returncode == 0, within_s=20)


def test_a_dropped_port_says_nothing_at_all(bed):
    bed.drop("b-login", 22)
    try:
        done = bed.ssh("b-login", "true", options=["ConnectTimeout=1"])
        assert "timed out" in done.stderr
    finally:
        bed.undrop("b-login", 22)
    assert bed.ssh("b-login", "true").returncode == 0


def test_a_relay_delays_and_swallows(bed):
    with bed.relay("a-login", delay_s=0.1) as relay:
        begin = time.monotonic()
        assert bed.ssh("a-login", "hostname", via=relay).stdout == "a-login\n"
        # At least four round trips of an SSH login; a bound from below, which a slow machine cannot break.
        assert time.monotonic() - begin > 0.8
        relay.set(swallow=True)
        assert "timed out" in bed.ssh("a-login", "true", via=relay, options=["ConnectTimeout=1"]).stderr


def test_a_maintenance_holds_long_jobs_and_lets_short_ones_start(bed):
    window = bed.maintenance("a", starts_in_s=300, duration_s=600)
    long = submit(bed, "a", "true", "-t 30")
    try:
        wait_until("the long job has no reason", lambda: "Reserved" in reason(bed, "a", long), within_s=20)
        short = submit(bed, "a", "true", "-t 3")
        wait_job(bed, "a", short, "COMPLETED")
        assert bed.job_state("a", long) == "PENDING"
        estimate = bed.slurm("a", "sbatch", "--test-only", "-t", "30", "--wrap", "true").stderr
        start = datetime.fromisoformat(re.search(r"to start at (\S+)", estimate)[1])
        ends = re.search(r"EndTime=(\S+)", bed.slurm("a", "scontrol", "-o", "show", "res", window).stdout)[1]
        assert start >= datetime.fromisoformat(ends)
    finally:
        bed.end_maintenance("a", window)
    wait_job(bed, "a", long, "COMPLETED")


def test_a_controller_that_restarts_keeps_its_jobs(bed):
    running, held = submit(bed, "a", "sleep 600"), submit(bed, "a", "true", "-H")
    wait_job(bed, "a", running, "RUNNING")
    bed.restart_slurmctld("a")
    assert bed.job_state("a", running) == "RUNNING"
    assert bed.job_state("a", held) == "PENDING"
    bed.slurm("a", "scancel", running, held)
    wait_job(bed, "a", running, "CANCELLED")


def test_a_second_bed_is_refused(bed):
    with pytest.raises(BedError, match="a testbed is up already"):
        Bed.up()
    assert Bed.attach().root == bed.root


def test_the_id_of_a_process_that_is_no_more_is_not_touched():
    myself = Process.of(os.getpid())
    assert myself.alive
    stranger = Process(myself.pid, myself.started - 1)
    assert not stranger.alive
    stranger.kill()


def test_logs_can_be_collected(bed, tmp_path):
    bed.collect_logs(tmp_path)
    assert (tmp_path / "a-ctl" / "slurmctld.log").stat().st_size
    assert (tmp_path / "b-login" / "sshd-22.out").stat().st_size


def test_a_node_without_power_is_noticed_and_comes_back(bed, cut_node):
    wait_until("b-n2 is not down", lambda: bed.node_states("b")["b-n2"] == "down*", within_s=60)
    assert bed.job_state("b", cut_node) == "PENDING"  # requeued
    bed.machine("b-n2").boot()
    wait_until("b-n2 is not idle", lambda: bed.node_states("b")["b-n2"] == "idle", within_s=30)
