"""PBS, Flux and LSF: what their commands print was written here after their documentation, and recorded nowhere."""

import json
import subprocess
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint import load
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.schedulers.shell import signal_program, submit_program, survey_program
from fabrictool.domain.inventory import UNVERIFIED

NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
ROOT = Path(__file__).parents[1] / "cases" / "clusters"
BLUEPRINTS = ROOT.parent / "blueprint"
PER = "per_node: 8GiB}"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILmUnzB17gKWybRRj5qtR6JyJz4S5PO9d5jFtr/HAOpo"

PBS = {
    "offset": ["+0100"],
    "version": ["pbs_version = 2022.1.1"],
    "programs": ["/opt/pbs/bin/qsub"],
    "jobs": """\
Job Id: 17.head
    Job_Name = ft-replica-m-0-g1-0a1b2c3d
    Job_Owner = u@login1
    job_state = R
    queue = gpu
    ctime = Fri Jan 15 08:30:00 2027
    Resource_List.walltime = 24:00:00
    stime = Fri Jan 15 08:40:00 2027
    Variable_List = PBS_O_HOME=/home/u,PBS_O_LANG=C,
	PBS_O_PATH=/usr/bin

Job Id: 18.head
    Job_Name = ft-replica-m-1-g1-0a1b2c3d
    job_state = Q
    queue = gpu
    comment = Not Running: Insufficient amount of resource: ngpus
    ctime = Fri Jan 15 08:50:00 2027
    estimated.start_time = Fri Jan 15 10:00:00 2027

Job Id: 16.head
    Job_Name = STDIN
    job_state = F
    queue = gpu
""".splitlines(),
    "queues": """\
Queue: gpu
    queue_type = Execution
    state_count = Transit:0 Queued:2 Held:1 Waiting:0 Running:1 Exiting:0 Begun:0
    resources_max.walltime = 24:00:00
    enabled = True
    started = True

Queue: old
    enabled = False
    started = True
""".splitlines(),
}
FLUX = {
    "version": ["commands:    \t\t0.66.0", "libflux-core:\t\t0.66.0"],
    "programs": ["/usr/bin/flux"],
    "jobs": [
        "1717|RUN|gpu|1799999400.1|1799999700.5|1800082135.0||ft-replica-m-0-g1-0a1b2c3d",
        "1718|SCHED|gpu|1799999400.1|0.0|0.0|1800003600.0|ft-replica-m-1-g1-0a1b2c3d",
        "1716|INACTIVE|gpu|1799990000.0|1799990001.0|0.0||hostname",
    ],
    "queues": ["gpu|free|6|384|24", "gpu|allocated|2|128|8", "gpu|down|1|64|4", "cpu|free|0|0|0"],
}
LSF = {
    "offset": ["+0100"],
    "version": ["IBM Spectrum LSF Standard 10.1.0.13, Apr 15 2022"],
    "programs": ["/opt/lsf/bin/bsub"],
    "jobs": [
        "17|RUN|gpu|300 second(s)|22:48 L|ft-replica-m-0-g1-0a1b2c3d",
        "18|PEND|gpu|0 second(s)|-|ft-replica-m-1-g1-0a1b2c3d",
        "16|DONE|gpu|10 second(s)|-|hostname",
    ],
    "queues": [
        "QUEUE_NAME      PRIO STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN  SUSP  RSV PJOBS",
        "gpu              30  Open:Active       -    -    -    -     6     3     3     0    0     3",
        "old              30  Closed:Inact      -    -    -    -     0     0     0     0    0     0",
    ],
}


@pytest.mark.parametrize(
    ("kind", "sections", "version", "ends"),
    [("pbs", PBS, (2022, 1, 1), NOW - 1200 + 86400), ("flux", FLUX, (0, 66, 0), 1800082135.0),
     ("lsf", LSF, (10, 1, 0, 13), NOW + 22 * 3600 + 48 * 60)],
)  # fmt: skip
def test_what_the_documentation_shows_is_read(kind, sections, version, ends):
    facts = scheduler_of(kind).facts(sections, NOW)
    assert facts.version == version
    assert [(job.name, job.state) for job in facts.jobs[:2]] == [
        ("ft-replica-m-0-g1-0a1b2c3d", "running"),
        ("ft-replica-m-1-g1-0a1b2c3d", "pending"),
    ]
    assert facts.jobs[2].state == "ended"
    assert [job.ends_at for job in facts.jobs] == [ends, None, None]
    assert facts.queues["gpu"].up
    assert facts.programs == sections["programs"][0].rpartition("/")[0]


def test_times_of_pbs_are_the_login_nodes():
    running, waiting, _ = scheduler_of("pbs").facts(PBS, NOW).jobs
    assert (running.submitted_at, running.begins_at) == (NOW - 1800, NOW - 1200)
    assert waiting.begins_at == NOW + 3600
    assert waiting.reason.endswith("ngpus")


def test_queues():
    pbs, flux, lsf = (scheduler_of(k).facts(s, NOW).queues for k, s in (("pbs", PBS), ("flux", FLUX), ("lsf", LSF)))
    assert (pbs["gpu"].pending, pbs["gpu"].longest_s, pbs["old"].up) == (3, 86400.0, False)
    assert (flux["gpu"].nodes, flux["gpu"].idle, flux["gpu"].away) == (9, 6, 1)
    assert (flux["gpu"].devices, flux["gpu"].cpus) == (4, 64)
    assert (lsf["gpu"].pending, lsf["old"].up) == (3, False)


@pytest.mark.parametrize(
    ("kind", "jobs"),
    [("pbs", ["qstat: cannot connect to server"]), ("flux", ["flux-jobs: ERROR"]), ("lsf", ["LSF is down"])],
)
def test_words_instead_of_jobs_are_an_error_and_not_an_empty_list(kind, jobs):
    with pytest.raises(FabrictoolError) as caught:
        scheduler_of(kind).facts({"jobs": jobs}, NOW)
    assert caught.value.problems[0].code == "FT5401"


def test_no_job_at_all_is_an_answer():
    assert scheduler_of("lsf").facts({"jobs": ["No job found"]}, NOW).jobs == ()


@pytest.mark.parametrize("kind", sorted(UNVERIFIED - {"kubernetes"}))
def test_the_programs_are_shell(kind):
    scheduler = scheduler_of(kind)
    for text in (
        survey_program(scheduler, brief=False),
        submit_program(scheduler),
        signal_program(scheduler, kill=False),
        signal_program(scheduler, kill=True),
    ):
        done = subprocess.run(["sh", "-n"], input=text.encode(), capture_output=True, check=False, timeout=20)
        assert done.stderr == b""


def test_the_case_files_say_what_was_never_tried():
    for path in ROOT.rglob("*.json"):
        case = json.loads(path.read_text())
        assert case.get("unverified", False) is (case["kind"] in UNVERIFIED), path


@pytest.mark.parametrize("kind", sorted(UNVERIFIED))
def test_an_enabled_cluster_of_such_a_kind_is_warned_of(kind, tmp_path):
    (tmp_path / "b.yaml").write_text((BLUEPRINTS / "small.yaml").read_text())
    text = (BLUEPRINTS / "bad" / "schema-unit-missing-memory.inventory.yaml").read_text().replace("per_node: 8}", PER)
    other = {
        "site": "campus", "kind": kind, "partitions": {"gpu": {"device": "cpu", "memory_per_node": "8GiB", "nodes": 1}},
        "login": [{"host": "h", "user": "u", "host_keys": [KEY]}],
    }  # fmt: skip
    for enabled in (True, False):
        described = json.dumps(other | {"enabled": enabled})
        if kind == "kubernetes":
            where = {"kubernetes": {"context": "c", "namespace": "n"}, "login": []}
            described = json.dumps(other | where | {"enabled": enabled})
        (tmp_path / "i.yaml").write_text(text.replace("clusters:\n", f"clusters:\n  other: {described}\n"))
        loaded = load(tmp_path / "b.yaml", inventory_path=tmp_path / "i.yaml", environment={})
        found = [problem for problem in loaded.warnings if problem.code == "FT1240"]
        assert [problem.message.partition(":")[0] for problem in found] == ["clusters.other.kind"] * enabled
