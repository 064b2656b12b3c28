"""What came back from a login node → what runs: present, absent or unknown, and never a guess."""

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.heartbeats import LOOK_AGAIN_S, Heartbeats
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.schedulers.slurm import Slurm
from fabrictool.clusters.survey import Looker, read_survey
from fabrictool.domain.specs import AgentSpec, GatewaySpec, HostPort, encode_spec, mark_of

NOW = 1_800_000_000
OPERATION = "replica-m-0-g1-0a1b2c3d"
SPEC = AgentSpec(
    fabric="f",
    provider="p",
    site="s",
    cluster="c",
    partition="gpu",
    replica="m/0",
    model="m",
    source="x",
    engine="vllm",
)
COMMENT = f"ft1;lin=01234567;dep=f;rep=replica/m/0;ser=1;op={OPERATION}"


def text(files=None, jobs=(), **sections):
    path = f"/home/u/.fabrictool/units/f/{OPERATION}"
    lines = [f"{path}/{name}:{content}" for name, content in (files or {}).items()]
    found = {
        "now": [str(NOW)], "host": ["login1", "/home/u"], "base": ["/home/u/.fabrictool"], "environment": [],
        "files": lines, "jobs": jobs, **sections,
    }  # fmt: skip
    return "".join(f"@{name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in found.items()) + "@end\n"


def job(
    number=17, state="RUNNING", begins=NOW - 60, ends=NOW + 3600, reason="None", name=f"ft-{OPERATION}", comment=COMMENT
):
    return f"{number}|{state}|gpu|n1|{NOW - 100}|{begins}|{ends}|{reason}|{name}|{comment}"


GATEWAY = GatewaySpec(
    fabric="f", provider="p", site="s", cluster="c", name="main", listen=HostPort("h", 1), mesh=HostPort("h", 2)
)
NOBODY = msgspec.UNSET
QUEUED = job(state="PENDING", begins="N/A", ends="N/A", reason="Resources")
BYE = '{"code": 0, "reason": "told to stop"}'


def files(**more):
    found = {"spec.json": encode_spec(SPEC).decode(), "meta.json": '{"lineage": "0123456789abcdef"}', "jobid": "17"}
    return found | {name.replace("_", "."): content for name, content in more.items()}


def health(age=1.0, **more):
    return msgspec.json.encode({"at": NOW - age, "ready": True, "text": "", **more}).decode()


def unit(**given):
    """As the second of two looks a minute apart shows it."""
    hearts = Heartbeats()
    for at in (0.0, 60.0):
        survey = read_survey(text(**given), Slurm(), thing="cluster/c", looker=Looker(NOW, at, hearts))
    (unit,) = survey.units
    return unit


@pytest.mark.parametrize(
    ("given", "state", "word"),
    [
        ({"files": files(), "jobs": [job()]}, "running", "starting"),
        ({"files": files(health_json=health()), "jobs": [job()]}, "running", ""),
        ({"files": files(), "jobs": [QUEUED]}, "pending", "Resources"),
        ({"files": files(), "jobs": [job(state="CONFIGURING")]}, "running", "starting"),
        ({"files": files(), "jobs": [job(state="COMPLETING")]}, "running", "starting"),
        ({"files": files(health_json=health()), "jobs": [job(state="SUSPENDED")]}, "running", "has suspended its job"),
        ({"files": files(exit_json=BYE), "jobs": [job(state="COMPLETING")]}, "ended", "told to stop"),
        ({"files": files(exit_json='{"code": 0, "reason": "the walltime ends soon"}')}, "ended", "the walltime ends"),
        ({"files": files(), "jobs": [job(state="TIMEOUT", reason="TimeLimit")]}, "killed", "TIMEOUT (TimeLimit)"),
        ({"files": files(), "jobs": [job(state="NODE_FAIL")]}, "killed", "NODE_FAIL"),
        ({"files": files(), "jobs": [job(state="PREEMPTED")]}, "killed", "PREEMPTED"),
        ({"files": files(), "jobs": [job(state="OUT_OF_MEMORY", reason="OutOfMemory")]}, "killed", "OUT_OF_MEMORY"),
        # not listed: only a sign of life says that it lives, only its absence that it does not
        ({"files": files(health_json=health(age=20))}, "running", "does not list it"),
        ({"files": files(health_json=health(age=600))}, "killed", "no longer known"),
        ({"files": files()}, "killed", "no longer known"),
        # its run says that it has ended and its job has not: its files and devices are still in use
        ({"files": files(exit_json=BYE, health_json=health(), claim="17"), "jobs": [job()]}, "running", "has not"),
        ({"files": files(exit_json=BYE, claim="17"), "jobs": [QUEUED]}, "pending", "Resources"),
        # the submission was cut off
        ({"files": files() | {"jobid": ""}}, "prepared", ""),
        ({"files": files(attempt="123") | {"jobid": ""}}, "pending", "may or may not"),
        ({"files": files(attempt="123") | {"jobid": ""}, "jobs": [job()]}, "running", "starting"),
        ({"files": files(claim="17") | {"jobid": ""}, "jobs": [job()]}, "running", "starting"),
        # a number that the scheduler uses again, for somebody else's job
        ({"files": files(), "jobs": [job(name="other", comment="(null)")]}, "killed", "no longer known"),
        ({"files": files() | {"spec.json": "{"}, "jobs": [job()]}, "damaged", "spec.json"),
    ],
)  # fmt: skip
def test_states(given, state, word):
    found = unit(**given)
    assert found.state == state
    assert word in found.detail + found.reason


def test_one_that_ended_for_want_of_requests_is_dormant_and_no_other():
    assert unit(files=files(exit_json=BYE) | {"dormant": "yes"}).dormant
    assert not unit(files=files(exit_json=BYE)).dormant
    killed = unit(files=files() | {"dormant": "yes"}, jobs=[job(state="NODE_FAIL")])
    assert (killed.state, killed.dormant) == ("killed", False), "it did not come to its end"
    ending = files(exit_json=BYE, health_json=health(), claim="17") | {"dormant": "yes"}
    assert not unit(files=ending, jobs=[job()]).dormant, "its job holds its devices yet"


def test_a_mute_unit_is_not_ready_and_says_for_how_long():
    found = unit(files=files(health_json=health(age=400)), jobs=[job()])
    assert (found.state, found.ready, found.silent_s) == ("running", False, 400.0)
    assert "no sign of life for 6 m 40 s" in found.detail


def test_a_node_whose_clock_is_wrong_is_believed_by_its_files_age():
    wrong = health(age=7200)
    found = unit(files=files(health_json=wrong) | {"health.json.mtime": f"{NOW - 3}.25"}, jobs=[job()])
    assert found.ready
    assert unit(files=files(health_json=wrong) | {"health.json.mtime": "x"}, jobs=[job()]).ready is False


def test_times_are_the_schedulers():
    found = unit(files=files(health_json=health(ends_at=NOW + 99)), jobs=[job()])
    assert (found.submitted_at, found.begins_at, found.ends_at) == (NOW - 100, NOW - 60, NOW + 3600)


def test_a_job_whose_folder_is_gone_is_found_by_its_comment():
    found = unit(jobs=[job()])
    assert (found.address, found.operation, found.state, found.lineage) == (
        "replica/m/0",
        OPERATION,
        "running",
        "01234567",
    )


def test_a_job_of_somebody_else_is_nothing_to_us():
    jobs = [
        job(comment="(null)"),
        job(18, comment="ft2;op=x;rep=y", name="ft-x"),
        job(19, comment="my own note", name="a|b"),
    ]
    assert read_survey(text(jobs=jobs), Slurm(), thing="c").units == ()


def test_of_two_jobs_with_one_name_the_living_one_counts():
    found = unit(files=files(), jobs=[job(17, state="CANCELLED"), job(18)])
    assert (found.state, found.begins_at) == ("running", NOW - 60)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("", "FT5407"),
        (text().removesuffix("@end\n"), "FT5407"),
        (text().replace("@now", "@then"), "FT5407"),
        (text(jobs=["17|RUNNING|gpu|ft-x"]), "FT5401"),
        (text(queues=["gpu|up"]), "FT5401"),
    ],
)
def test_an_answer_that_is_cut_or_strange_concludes_nothing(answer, code):
    with pytest.raises(FabrictoolError) as caught:
        read_survey(answer, Slurm(), thing="cluster/c")
    assert caught.value.problems[0].code == code
    assert caught.value.problems[0].transient == (code == "FT5407")


def test_queues():
    lines = ["gpu|up|3|64|512000|1-00:00:00|1/2|gpu:h100:2|mixed|n[1-3]", "gpu|up|1|64|9|1|0/0|gpu:h100:2|down*|n4"]
    lines += ["gpu|up|4|128|1031000|1-00:00:00|4/0|gpu:h100:4(S:0-1)|allocated|big[01-04]"]
    lines += ["cpu|down|10|64|256000|infinite|0/0|(null)|down|c[1-9,12]"]
    facts = read_survey(text(queues=lines, waiting=["gpu", "gpu,cpu"]), Slurm(), thing="c").scheduler
    gpu, cpu = facts.queues["gpu"], facts.queues["cpu"]
    assert (gpu.nodes, gpu.idle, gpu.away, gpu.pending, gpu.devices, gpu.device) == (8, 2, 1, 2, 4, "h100")
    assert (gpu.cpus, gpu.memory, gpu.longest_s) == (128, 1031000 * 2**20, 86400.0)
    assert (cpu.up, cpu.longest_s, cpu.pending, cpu.devices) == (False, None, 1, 0)
    assert [(kind.nodes, kind.devices, kind.device, kind.away) for kind in gpu.kinds] == [
        ("n[1-3]", 2, "h100", False), ("n4", 2, "h100", True), ("big[01-04]", 4, "h100", False),
    ]  # fmt: skip
    assert [kind.away for kind in cpu.kinds] == [True]


@pytest.mark.parametrize(
    ("states", "away"),
    [
        (["idle", "mixed", "allocated", "completing", "planned", "reserved", "idle~", "idle#", "mixed-"], False),
        (["down", "down*", "idle*", "drained", "draining", "drained*", "fail", "failing", "maint", "unknown"], True),
    ],
)
def test_states_in_which_nothing_starts_on_a_node(states, away):
    for state in states:
        line = f"gpu|up|1|64|9|1|{'1/0' if state == 'draining' else '0/1'}|gpu:h100:2|{state}|n1"
        (kind,) = read_survey(text(queues=[line]), Slurm(), thing="c").scheduler.queues["gpu"].kinds
        assert kind.away == away, state


def test_the_type_of_the_largest_nodes_counts_in_whatever_order_their_states_bring_them():
    lines = ["gpu|up|1|64|9|1|0/1|gpu:a100:4|idle|n1", "gpu|up|1|64|9|1|0/1|gpu:h100:8|idle|n2"]
    for order in (lines, lines[::-1]):
        queue = read_survey(text(queues=order), Slurm(), thing="c").scheduler.queues["gpu"]
        assert (queue.devices, queue.device) == (8, "h100")


@pytest.mark.parametrize(("line", "state"), [("a.1 running", "running"), ("a.1 ended", "killed"), ("", "killed")])
def test_plain_hosts(line, state):
    jobs = [f"{line} {OPERATION}"] if line else []
    (found,) = read_survey(text(files=files(), jobs=jobs), Processes(), thing="c").units
    assert found.state == state


RESERVED = f"ReservationName=m StartTime={NOW + 60} EndTime={NOW + 7200} NodeCnt=%s Nodes=%s Flags=MAINT,%s"
QUEUES = ["gpu|up|8|64|512000|1-00:00:00|1/7|gpu:h100:2|mixed|n[1-8]"]


@pytest.mark.parametrize(
    ("reserved", "nodes"),
    [
        ((8, "n[1-8]", "SPEC_NODES,ALL_NODES"), ()),
        ((8, "n[1-8]", "SPEC_NODES"), ()),
        ((2, "n[01-02]", "SPEC_NODES"), ("n01", "n02")),
    ],
)  # fmt: skip
def test_a_reservation_of_some_nodes_is_no_reservation_of_all(reserved, nodes):
    lines = [RESERVED % reserved]
    facts = read_survey(text(queues=QUEUES, reservations=lines), Slurm(), thing="c").scheduler
    (away,) = facts.away
    assert (away.nodes, away.partitions) == (nodes, ())


def test_the_living_job_counts_and_not_the_number_that_was_written_down():
    found = unit(files=files(), jobs=[job(17, state="CANCELLED"), job(18, state="PENDING", begins="N/A", ends="N/A")])
    assert (found.job, found.state) == ("18", "pending")


def test_a_stamp_from_the_future_is_no_sign_of_life():
    assert unit(files=files(health_json=health(age=-3600))).state == "killed"


def test_one_look_calls_nobody_mute_whose_job_runs():
    given = text(files=files(health_json=health(age=600)), jobs=[job()])
    survey = read_survey(given, Slurm(), thing="cluster/c")
    (mute,) = survey.units
    assert (mute.state, mute.ready, mute.silent_s, survey.unsure) == ("running", False, 0.0, {OPERATION})


def test_where_clocks_disagree_what_the_scheduler_does_not_list_is_looked_at_again():
    given = text(files=files(health_json=health(age=600)) | {"health.json.mtime": str(NOW - 700)})
    hearts = Heartbeats()
    looks = [
        read_survey(given, Slurm(), thing="c", looker=Looker(NOW, at, hearts)) for at in (0.0, LOOK_AGAIN_S)
    ]  # fmt: skip
    assert [survey.units[0].state for survey in looks] == ["running", "killed"]
    assert [survey.unsure for survey in looks] == [{OPERATION}, frozenset()]


def test_what_neither_the_scheduler_nor_its_heart_vouches_for_is_dead_at_once():
    survey = read_survey(text(files=files(health_json=health(age=600))), Slurm(), thing="cluster/c")
    assert (survey.units[0].state, survey.unsure) == ("killed", frozenset())


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        ("Resources", ""),
        ("Priority", ""),
        ("BeginTime", ""),
        ("ReqNodeNotAvail, Reserved for maintenance", ""),
        ("InvalidQOS", "invalid"),
        ("InvalidAccount", "invalid"),
        ("BadConstraints", "invalid"),
        ("QOSMaxWallDurationPerJobLimit", "invalid"),
        ("AssocMaxCpuPerJobLimit", "invalid"),
        ("PartitionTimeLimit", "invalid"),
        ("JobHeldAdmin", "held"),
        ("JobHeldUser", "held"),
        ("launch failed requeued held", "held"),
        ("AssocMaxJobsLimit", "limit"),
        ("QOSMaxJobsPerUserLimit", "limit"),
        ("QOSGrpCpuLimit", ""),
        ("AssocGrpGRES", ""),
        ("QOSMaxGRESPerUser", ""),
        ("QOSMaxGRESPerNode", "invalid"),
        ("QOSMinGRES", "invalid"),
        ("PartitionDown", "nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "nodes"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", ""),
    ],
)
def test_why_a_job_does_not_start_however_long_it_waits(reason, blocked):
    queued = unit(files=files(), jobs=[job(state="PENDING", begins="N/A", ends="N/A", reason=reason)])
    assert (queued.state, queued.blocked, queued.ready) == ("pending", blocked, False)
    assert reason in queued.detail


def test_a_job_that_ran_before_and_waits_again_was_requeued():
    assert unit(files=files(claim="17"), jobs=[QUEUED]).requeued
    assert not unit(files=files(), jobs=[QUEUED]).requeued


def test_a_run_that_has_ended_does_not_serve_while_its_job_lasts():
    ending = unit(files=files(exit_json=BYE, health_json=health(), claim="17"), jobs=[job()])
    assert (ending.ready, ending.waits_for) == (False, "leaving")


def test_the_schedulers_times_are_compared_with_the_schedulers_clock():
    """The login node's is two hours wrong; the controller's is the one that began and will end the job."""
    survey = read_survey(text(jobs=[job()], clock=[str(NOW - 7200)]), Slurm(), thing="cluster/c")
    assert (survey.now, survey.login_now) == (NOW - 7200, NOW)
    assert read_survey(text(clock=[]), Slurm(), thing="cluster/c").now == NOW


@pytest.mark.parametrize(
    ("way", "again", "in_force"),
    [
        (msgspec.UNSET, "", "current"),
        ("cron", "ing", "current"),
        ("cron", "", "former"),
        (msgspec.UNSET, "ing", "former"),
    ],
)
def test_a_gateway_that_would_not_come_back_as_it_should_is_not_as_it_was_told(way, again, in_force):
    """So that the next apply tries again what an earlier one could not."""
    written = encode_spec(msgspec.structs.replace(GATEWAY, after_reboot=way))
    told = health(spec=mark_of(written))
    there = files(spec_json=written.decode(), health_json=told) | ({"again": again} if again else {})
    found = unit(files=there, jobs=[job()])
    assert found.in_force == in_force
    assert ("after a reboot" in found.detail) == (in_force == "former")


def test_what_may_follow_a_job_from_inside_is_counted():
    place = f"/home/u/.fabrictool/units/f/{OPERATION}/next"
    lines = [f"{place}/{number}-replica-m-0-g{number}-0a1b2c3d/submit" for number in (2, 3)]
    seen = read_survey(text(files(), [job()], next=lines), Slurm(), thing="cluster/c")
    assert [unit.followers for unit in seen.units] == [("replica-m-0-g2-0a1b2c3d", "replica-m-0-g3-0a1b2c3d")]
    assert [unit.followers for unit in read_survey(text(files(), [job()]), Slurm(), thing="cluster/c").units] == [()]
