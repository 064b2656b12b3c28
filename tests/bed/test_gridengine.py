"""A real Grid Engine on machine `host`: the same apply, another scheduler's words."""

import shutil

import pytest

from fabrictool.clusters.schedulers.gridengine import GridEngine
from fabrictool.clusters.schedulers.shell import submit_program
from tests.clusters import submit_bench
from tests.testbed.waiting import wait_until

PROGRAMS = ("sge_qmaster", "sge_execd", "qsub")
START = r"""
set -e
mkdir -p "$1/lib" "$1/spool"
if [ ! -e "$1/lib/default" ]; then cp -a /var/lib/gridengine/. "$1/lib/"; fi
mount --bind "$1/lib" /var/lib/gridengine
mount --bind "$1/spool" /var/spool/gridengine
mkdir -p /var/spool/gridengine/qmaster/job_scripts /var/spool/gridengine/execd /var/spool/gridengine/spooldb
mkdir -p /var/lib/gridengine/default/common
chown -R sgeadmin: /var/spool/gridengine /var/lib/gridengine/default
boot=/var/lib/gridengine/default/common/bootstrap
[ -e $boot ] || cp /usr/share/gridengine/default-bootstrap $boot
setpriv --reuid=sgeadmin --regid=sgeadmin --clear-groups /usr/share/gridengine/scripts/init_cluster \
  /var/lib/gridengine default /var/spool/gridengine/spooldb sgeadmin >/tmp/ge-init.log
echo host >/var/lib/gridengine/default/common/act_qmaster
chmod -R a+rX /var/lib/gridengine
cd /
setsid /usr/sbin/sge_qmaster </dev/null >/tmp/qmaster.log 2>&1
"""
CONFIGURE = r"""
setpriv --reuid=sgeadmin --regid=sgeadmin --clear-groups qconf -am root
qconf -ah host; qconf -as host
(qconf -sc; echo "gpu gpu INT <= YES YES 0 0") >/tmp/complexes; qconf -Mc /tmp/complexes
setsid /usr/sbin/sge_execd </dev/null >/tmp/execd.log 2>&1
cat >/tmp/queue <<X
qname llm.q
hostlist host
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH
ckpt_list NONE
pe_list NONE
rerun FALSE
slots 8
tmpdir /tmp
shell /bin/sh
prolog NONE
epilog NONE
shell_start_mode posix_compliant
starter_method NONE
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:60
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values gpu=4
projects NONE
xprojects NONE
calendar NONE
initial_state default
s_rt INFINITY
h_rt 12:00:00
s_cpu INFINITY
h_cpu INFINITY
s_fsize INFINITY
h_fsize INFINITY
s_data INFINITY
h_data INFINITY
s_stack INFINITY
h_stack INFINITY
s_core INFINITY
h_core INFINITY
s_rss INFINITY
h_rss INFINITY
s_vmem INFINITY
h_vmem INFINITY
X
qconf -Aq /tmp/queue
qconf -ssconf | sed "s/^schedule_interval.*/schedule_interval 0:0:1/; s/^flush_\([a-z]*\)_sec.*/flush_\1_sec 1/" \
  >/tmp/sconf && qconf -Msconf /tmp/sconf
"""
ENVIRONMENT = {"SGE_ROOT": "/var/lib/gridengine", "SGE_CELL": "default", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.fixture(scope="module")
def grid(bed):
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no Grid Engine here: {', '.join(missing)}; apt-get install gridengine-master gridengine-exec")
    host = bed.machine("host")
    folder = bed.root / "gridengine"
    folder.mkdir()
    folder.chmod(0o755)
    done = host.run(["sh", "-c", START, "start", str(folder)], env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    def answers():
        return host.run(["qconf", "-sh"], env=ENVIRONMENT, check=False).returncode == 0

    wait_until("the qmaster does not answer", answers, within_s=30)
    host.run(["sh", "-c", CONFIGURE], env=ENVIRONMENT, check=False)
    wait_until(
        "the queue is not there",
        lambda: "llm.q" in host.run(["qstat", "-f"], env=ENVIRONMENT, check=False).stdout,
        within_s=30,
    )
    return host


def qstat(grid, *arguments):
    return grid.run(["qstat", *arguments], user="hostuser", env=ENVIRONMENT, check=False).stdout


@pytest.mark.extended  # 100 s; what it submits is tried by the test below and by the unit tests of the scheduler
def test_apply_serves_from_a_grid_engine(grid, make_federation):
    fed = make_federation("grid")
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "g": fed.cluster("host", {"llm.q": cpu | {"walltime": "30m"}}, kind="gridengine"),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    fed.write(clusters, {"tiny": {"replicas": {"min": 1, "max": 1}}}, client_port=8041, mesh_port=8473)
    fed.up()
    assert fed.ask("tiny")[0] == "200"
    unit = fed.units()["replica/tiny/0"]
    assert unit["cluster"] == "g"
    assert f"ft-{unit['operation']}"[:10] in qstat(grid)
    assert [action["kind"] for action in fed.plan()["actions"]] == ["keep"] * 2
    fed.run("destroy", "--yes")
    wait_until("the job is left", lambda: not qstat(grid, "-u", "hostuser").strip(), within_s=30)


def test_kill_at_every_step_makes_one_job(grid, monkeypatch):
    program = submit_program(GridEngine())
    monkeypatch.setattr(submit_bench, "PROGRAM", program)
    submit = 'qsub -terse -N ft-{operation} -o /dev/null -j y -h "$(dirname "$0")/job.sh"\n'
    monkeypatch.setattr(submit_bench, "SUBMIT", submit)

    def run(text, operations, stdin, _shims):
        command = grid.command(["sh", "-c", text, "ft-submit", ".submit", "f", *operations], user="hostuser")
        done = submit_bench.checked_anyhow(command, stdin)
        return done.returncode, done.stdout.decode()

    def jobs():
        return [line.split()[-1] for line in qstat(grid, "-r").splitlines() if "Full jobname" in line]

    submit_bench.check_kill_at_every_step(submit_bench.Bench(run, jobs))
    grid.run(["qdel", "-u", "hostuser"], user="hostuser", env=ENVIRONMENT)
