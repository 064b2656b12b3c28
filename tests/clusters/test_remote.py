"""A cluster behind a login node that says what it is told to: every trouble ends in a code, a hint and a transience."""

import json
import subprocess

import pytest

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.protocol import NewUnit
from fabrictool.clusters.remote import RemoteCluster
from fabrictool.clusters.schedulers.slurm import Slurm
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.specs import AgentSpec, decode_spec
from fabrictool.mesh.identity import describe_chain
from tests.clusters.test_cases import LOGIN
from tests.clusters.test_survey import NOW, OPERATION, files, health, job, text
from tests.manual_clock import ManualClock
from tests.mesh.signed_records import SESSIONS

DESCRIBED = ClusterSpec.model_validate(
    {"site": "s", "kind": "slurm", "partitions": {"gpu": {"device": "cpu", "nodes": 1, "memory_per_node": "1 GiB"}}}
    | {"software": {"python": {"venv": "/opt/ft"}}}
)
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
CLOCK = ManualClock(wall=NOW)
UNIT = NewUnit(OPERATION, "replica/m/0", SPEC, {}, "0123456789abcdef", 1)


class FakeConnection:
    """Answers each program by its name; an exception is raised instead."""

    def __init__(self, **answers):
        self.answers = {"ft-survey": text()} | {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.ran = []

    def run(self, argv, *, stdin=b"", timeout_s=0.0):
        name = argv[3] if argv[0] == "sh" else argv[0]
        self.ran.append((name, *argv[6:]))
        answer = self.answers.get(name, "")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Completed):
            return answer
        return Completed(0, answer.encode(), b"")

    def close(self):
        pass


def cluster(*connections):
    assert LOGIN
    return RemoteCluster("c", "f", DESCRIBED, Slurm(), lambda: connections, clock=CLOCK, pause=CLOCK.advance)


def verdict(word, why=""):
    return f"{OPERATION}\t{word}\t\t{why}\n"


@pytest.mark.parametrize(
    ("answer", "code", "transient"),
    [
        (verdict("refused", "exit 1: sbatch: error: invalid partition specified: gpuu"), "FT5404", False),
        (
            verdict("refused", "exit 1: sbatch: error: Invalid account or account/partition combination"),
            "FT5404",
            False,
        ),
        (verdict("refused", "exit 1: sbatch: error: Job violates accounting/QOS policy"), "FT5404", False),
        (verdict("refused", "exit 1: sbatch: error: QOSMaxSubmitJobPerUserLimit"), "FT5404", True),
        (verdict("refused", "exit 1: sbatch: error: AssocMaxSubmitJobLimit"), "FT5404", True),
        (
            verdict("refused", "exit 1: Requested time limit is invalid (exceeds some limit)"),
            "FT5404",
            False,
        ),
        (verdict("refused", "exit 1: AssocGrpSubmitJobsLimit"), "FT5404", True),
        (verdict("refused", "exit 1: Requested node configuration is not available"), "FT5404", False),
        (verdict("refused", "exit 1: Unable to contact slurm controller (connect failure)"), "FT5404", True),
        (verdict("unknown", "exit 1: Socket timed out on send/recv operation"), "FT5405", True),
        (verdict("unknown", "another call holds the lock"), "FT5405", True),
        (verdict("unplaced", "its files cannot be written in /home/u: No space left on device"), "FT5406", False),
        ("", "FT5405", True),  # the program was killed before it said anything
        (Completed(137, b"", b"Killed"), "FT5405", True),
    ],
)
def test_what_a_submission_ends_in(answer, code, transient):
    failed = cluster(FakeConnection(ft_submit=answer)).start([UNIT])
    (problem,) = failed[OPERATION].problems
    assert (problem.code, problem.transient) == (code, transient)
    assert problem.hint


@pytest.mark.parametrize("word", ["submitted", "already", "adopted"])
def test_what_runs_is_no_trouble(word):
    assert cluster(FakeConnection(ft_submit=f"{OPERATION}\t{word}\t17\t\n")).start([UNIT]) == {}


def test_a_lost_connection_is_the_callers_trouble_and_a_second_login_node_is_tried():
    lost = UnreachableError.of("FT5321", "lost", transient=True)
    with pytest.raises(FabrictoolError, match="FT5321"):
        cluster(FakeConnection(ft_submit=lost)).start([UNIT])
    second = FakeConnection(ft_submit=verdict("adopted"))
    assert cluster(FakeConnection(ft_submit=lost), second).start([UNIT]) == {}
    assert second.ran == [("ft-submit", OPERATION)]


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (UnreachableError.of("FT5301", "login.example refused", hint="h", transient=True), "refused"),
        (Completed(75, b"@now\n1\n", b"slurm_load_jobs error: Unable to contact slurm controller"), "does not answer"),
        ("@now\n1\n", "incomplete"),
        ("Welcome to the cluster!\n", "incomplete"),
    ],
)
def test_a_cluster_that_does_not_answer_is_unknown_and_never_empty(answer, word):
    facts = cluster(FakeConnection(ft_survey=answer)).observe()
    assert not facts.known
    assert word in facts.reason
    assert facts.hint
    assert facts.units == ()


def test_signals_name_the_job_and_what_was_refused_is_said():
    connection = FakeConnection(ft_survey=text(files=files(), jobs=[job()]), ft_signal="x\taccess denied\n")
    there = cluster(connection)
    there.observe()
    with pytest.raises(FabrictoolError, match="FT5409"):
        there.stop([OPERATION])
    assert connection.ran[-1] == ("ft-signal", OPERATION, "17")


@pytest.mark.parametrize(
    ("program", "verb", "code"), [("ft_signal", "kill", "FT5409"), ("ft_forget", "forget", "FT5406")]
)
def test_what_could_not_be_done_is_said(program, verb, code):
    there = cluster(FakeConnection(**{program: Completed(75, b"", b"Unable to contact slurm controller")}))
    with pytest.raises(FabrictoolError) as caught:
        getattr(there, verb)([OPERATION])
    (problem,) = caught.value.problems
    assert (problem.code, problem.transient) == (code, True)
    assert problem.hint


def test_nothing_to_do_asks_nobody():
    connection = FakeConnection()
    there = cluster(connection)
    there.stop([])
    there.forget([])
    assert there.start([]) == {}
    assert connection.ran == []


def beating(period=15):
    """A login node whose unit beats on, by a clock that is `ahead` of ours."""

    class Beating(FakeConnection):
        ahead = 0.0

        def run(self, argv, **more):
            beat = CLOCK.wall() // period * period
            self.answers["ft-survey"] = text(
                files=files(health_json=health(age=NOW - beat)),
                jobs=[job()],
                now=[str(int(CLOCK.wall() + self.ahead))],
            )
            return super().run(argv, **more)

    return Beating()


@pytest.mark.parametrize("ahead", [-3600, -120, -15, 300, 1e6])
def test_a_wrong_clock_on_the_login_node_is_said_and_changes_nothing(ahead):
    node = beating()
    node.ahead = ahead
    facts = cluster(node).observe(patient=True)
    (unit,) = facts.units
    assert (unit.ready, unit.silent_s) == (True, 0.0)
    assert facts.skew_s == ahead


def test_patience_finds_out_who_gives_no_sign_of_life_and_ends():
    there = cluster(FakeConnection(ft_survey=text(files=files(health_json=health(age=9999)), jobs=[job()])))
    (unit,) = there.observe().units
    assert (unit.ready, unit.silent_s) == (False, 0.0)
    (unit,) = there.observe(patient=True).units
    assert unit.silent_s > 5000


@pytest.mark.parametrize(("breaks", "known"), [(1, True), (2, True), (3, False)])
def test_a_look_that_breaks_is_repeated_and_not_for_ever(breaks, known):
    class Breaking(FakeConnection):
        def run(self, argv, **more):
            if len(self.ran) < breaks:
                self.ran.append(argv)
                raise UnreachableError.of("FT5321", "the connection broke", transient=True)
            return super().run(argv, **more)

    assert cluster(Breaking()).observe().known is known


def test_what_will_be_the_same_next_time_is_not_repeated():
    node = FakeConnection(ft_survey=FabrictoolError.of("FT5303", "another host key"))
    assert not cluster(node).observe().known
    assert len(node.ran) == 1


def test_who_did_not_answer_is_not_asked_thrice_again_in_the_same_command():
    node = FakeConnection(ft_survey=UnreachableError.of("FT5301", "refused", transient=True))
    there = cluster(node)
    there.observe()
    there.observe()
    assert len(node.ran) == 4


def test_another_spec_is_placed_by_one_program_and_what_was_not_is_said(tmp_path):
    """The program itself, run here."""

    class Here(FakeConnection):
        def run(self, argv, *, stdin=b"", timeout_s=0.0):
            done = subprocess.run([*argv[:4], str(tmp_path), *argv[5:]], input=stdin, capture_output=True, check=False)
            return Completed(done.returncode, done.stdout, done.stderr)

    units = tmp_path / "units" / "f"
    (units / OPERATION).mkdir(parents=True)
    (units / OPERATION / "spec.json").write_bytes(b"{}")
    lost = NewUnit("gateway-x-g1-00000000", "gateway/x", SPEC, {})
    (units / OPERATION / "identity").mkdir()
    renewed = SESSIONS[0].chain_pem()
    given = NewUnit(OPERATION, "gateway/g", SPEC, {"keys.json": b"k", "identity/session.crt": renewed})
    failed = cluster(Here()).update([given, lost])
    assert {name: error.problems[0].code for name, error in failed.items()} == {lost.operation: "FT5406"}
    assert decode_spec((units / OPERATION / "spec.json").read_bytes()) == SPEC
    keys = units / OPERATION / "keys.json"
    assert (keys.read_bytes(), keys.stat().st_mode & 0o777) == (b"k", 0o600)
    assert (units / OPERATION / "identity/session.crt").read_bytes() == renewed
    meta = json.loads((units / OPERATION / "meta.json").read_bytes())
    assert meta["certificate_ends_at"] == describe_chain(renewed).end
    assert sorted(path.name for path in units.iterdir()) == [OPERATION]
