"""At most once beside a fake Slurm; tests/bed/test_submit.py has the same cases on the real one."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabrictool.clusters.jobs import tar
from fabrictool.clusters.schedulers.shell import submit_program
from fabrictool.clusters.schedulers.slurm import Slurm
from tests.clusters import submit_bench as cases
from tests.clusters.submit_bench import Bench


@pytest.fixture
def bench(tmp_path):
    fake, tools = tmp_path / "fake", tmp_path / "tools"
    fake.mkdir()
    tools.mkdir()
    (fake / "jobs").touch()
    for name, text in {"sbatch": cases.FAKE_SBATCH, "squeue": cases.FAKE_SQUEUE}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    numbers = iter(range(10_000))

    def run(program, operations, stdin, shims):
        shelf = tmp_path / f"shims{next(numbers)}"
        shelf.mkdir()
        for name, text in shims.items():
            (shelf / name).write_text(text)
            (shelf / name).chmod(0o755)
        path = f"{shelf}:{tools}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", program, "ft-submit", str(tmp_path / "base"), "f", *operations], input=stdin,
            capture_output=True, env={"PATH": path, "HOME": str(tmp_path), "FAKE": str(fake)}, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout.decode()

    found = Bench(run, lambda: [line.split()[1] for line in (fake / "jobs").read_text().splitlines()])
    found.sbatch = str(tools / "sbatch")
    return found


NO_FLOCK = {"flock": "#!/bin/sh\nexit 71\n"}


def test_kill_at_every_step(bench):
    assert cases.STEPS >= 6
    cases.check_kill_at_every_step(bench)


@pytest.mark.parametrize("shims", [{}, NO_FLOCK], ids=["flock", "no locks on this file system"])
def test_twenty_at_once_are_one_job(bench, shims):
    cases.check_twenty_at_once(bench, shims)


def test_a_lost_answer_is_adopted(bench):
    cases.check_a_lost_answer_is_adopted(bench, bench.sbatch)


def test_an_unknown_end_is_looked_up_before_anything_is_submitted(bench):
    cases.check_an_unknown_end_is_looked_up_before_anything_is_submitted(bench)


def test_a_refusal_leaves_nothing(bench):
    cases.check_a_refusal_leaves_nothing(bench)


def test_stripped_comments(bench):
    cases.check_stripped_comments(bench, bench.sbatch)


def test_a_second_job_of_one_operation_ends_by_itself(tmp_path):
    """The last line of defence: even two jobs run the agent once."""
    from fabrictool.clusters.schedulers.protocol import Job
    from fabrictool.clusters.schedulers.script import job_script

    job = Job(
        operation="o", address="replica/m/0", fabric="f", lineage="l", serial=1, folder=str(tmp_path), home="/",
        command=(),
    )  # fmt: skip
    script = job_script(job, identity='"$ME"', ends_at="echo 0", programs="", run=["sh", "-c", "echo ran >>ran"])
    for number in ("7", "8", "7"):
        subprocess.run(["sh", "-c", script], env={"ME": number, "PATH": os.environ["PATH"]}, check=True)
    assert (tmp_path / "ran").read_text() == "ran\n", "neither 8 runs nor 7 again, which somebody requeued"


def test_files_that_cannot_be_written_are_said_for_every_operation(bench, tmp_path):
    (tmp_path / "base").write_text("a file where the folder should be")
    code, lines = bench.submit("a-g1-0", "b-g1-0")
    assert code == 0
    assert [line[:2] for line in lines] == [("a-g1-0", "unplaced"), ("b-g1-0", "unplaced")]


def owned(operation, lineage, who):
    files = {"submit": f"sbatch --parsable --job-name=ft-{operation} x\n".encode()}
    files["meta.json"] = f'{{"address":"replica/m/0","lineage":"{lineage}"}}\n'.encode()
    return tar({operation: files}, {".owner": f"{lineage} {who}\n".encode()})


def test_the_first_state_that_starts_something_owns_the_fabric_and_a_second_one_is_told(bench, tmp_path):
    def submit(operation, *whose):
        code, out = bench.run(submit_program(Slurm()), [operation], owned(operation, *whose), {})
        assert code == 0
        return out.split("\t")[1], out

    units = tmp_path / "base/units/f"
    assert submit("a-g1-0", "aaaaaaaa", "alice@op1")[0] == "submitted"
    verdict, out = submit("b-g1-0", "bbbbbbbb", "bob@op2")
    assert verdict == "foreign"
    assert "alice@op1 (lineage aaaaaaaa)" in out
    assert not (units / "b-g1-0").exists()
    assert submit("a-g2-0", "aaaaaaaa", "alice@laptop")[0] == "submitted", "the same state from another machine"
    for left in ("a-g1-0", "a-g2-0"):
        shutil.rmtree(units / left)
    assert submit("b-g1-0", "bbbbbbbb", "bob@op2")[0] == "submitted", "nothing of hers is left"
    assert (units / ".owner").read_text() == "bbbbbbbb bob@op2\n"
    assert submit("a-g3-0", "aaaaaaaa", "alice@op1")[0] == "foreign"


def test_of_two_states_at_once_one_starts(bench):
    whose = {f"{who}-g1-0": (who * 8, f"{who}@op") for who in "cdef"}

    def submit(operation):
        return bench.run(submit_program(Slurm()), [operation], owned(operation, *whose[operation]), {})[1].split("\t")[
            1
        ]

    with ThreadPoolExecutor(4) as pool:
        verdicts = sorted(pool.map(submit, whose))
    assert verdicts == ["foreign"] * 3 + ["submitted"]


def test_while_another_call_decides_whose_it_is_nothing_is_started(bench):
    taken = {"flock": "#!/bin/sh\nexit 1\n"}
    _, out = bench.run(submit_program(Slurm()), ["c-g1-0"], owned("c-g1-0", "cccccccc", "c@op"), taken)
    assert out.split("\t")[1] == "unknown"
    assert "holds the lock" in out
