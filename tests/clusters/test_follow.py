"""The program that submits a follower from inside a job, beside a fake Slurm: killed, asked twenty times, raced."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabrictool.clusters.schedulers.shell import (
    follow_program,
    forget_program,
    program,
    signal_program,
    submit_program,
)
from fabrictool.clusters.schedulers.slurm import Slurm
from tests.clusters.submit_bench import FAKE_SBATCH, FAKE_SQUEUE, REFUSING, SUBMIT, archive

PROGRAM = follow_program(Slurm())
MARKS = [mark.span() for mark in re.finditer(r": step$", PROGRAM, re.MULTILINE)]
FIRST, SECOND, THIRD = (f"replica-m-0-g{number}-00000000" for number in (1, 2, 3))


class Site:
    """A base folder with one unit, and the fake Slurm beside it."""

    def __init__(self, folder):
        self.folder = folder
        self.units = folder / "base/units/f"
        (folder / "fake").mkdir()
        (folder / "fake/jobs").touch()
        (folder / "tools").mkdir()
        for name, text in {"sbatch": FAKE_SBATCH, "squeue": FAKE_SQUEUE}.items():
            self.tool(name, text)
        self.next = self.units / FIRST / "next"
        for number, operation in ((1, SECOND), (2, THIRD)):
            there = self.next / f"{number}-{operation}"
            (there / "identity").mkdir(parents=True)
            (there / "identity/session.key").write_text(operation)
            (there / "submit").write_text(SUBMIT.format(operation=operation))
        (self.next / "lead").write_text("600\n")
        (self.next / "submit.sh").write_text(PROGRAM)

    def tool(self, name, text):
        (self.folder / "tools" / name).write_text(text)
        (self.folder / "tools" / name).chmod(0o755)

    def run(self, text, *arguments, stdin=b""):
        path = f"{self.folder / 'tools'}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(self.folder), "FAKE": str(self.folder / "fake")}
        argv = ["sh", "-c", text, "ft", str(self.folder / "base"), "f", *arguments]
        return subprocess.run(argv, input=stdin, capture_output=True, env=environment, check=False, timeout=120)

    def follow(self, text=PROGRAM, unit=FIRST, spare=f"1-{SECOND}"):
        done = self.run(text, unit, spare)
        return done.stdout.decode().split("\t")[:3] if done.returncode == 0 else []

    @property
    def jobs(self):
        return [line.split()[1] for line in (self.folder / "fake/jobs").read_text().splitlines()]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_a_follower_is_submitted_and_takes_along_what_follows_it(site):
    assert site.follow() == [SECOND, "submitted", "1"]
    assert site.jobs == [f"ft-{SECOND}"]
    assert (site.units / SECOND / "identity/session.key").read_text() == SECOND
    ahead = site.units / SECOND / "next"
    assert sorted(path.name for path in ahead.iterdir()) == [f"2-{THIRD}", "lead", "submit.sh"]
    assert [path.name for path in site.next.iterdir() if path.is_dir()] == []
    own = (ahead / "submit.sh").read_text()
    assert site.follow(own, SECOND, f"2-{THIRD}") == [THIRD, "submitted", "2"]
    assert site.follow(own, SECOND, f"2-{THIRD}") == [THIRD, "already", "2"]


@pytest.mark.parametrize("step", range(len(MARKS)))
def test_killed_anywhere_it_goes_on_and_there_is_one_job(site, step):
    begin, end = MARKS[step]
    assert site.follow(PROGRAM[:begin] + "kill -9 $$" + PROGRAM[end:]) == []
    operation, verdict, job = site.follow()
    assert (operation, job) == (SECOND, "1")
    assert verdict in ("submitted", "adopted", "already")
    assert site.jobs == [f"ft-{SECOND}"]
    assert (site.units / SECOND / f"next/2-{THIRD}/submit").exists()


def test_an_operator_at_the_same_time_makes_no_second_job(site):
    def operator(_):
        return site.run(submit_program(Slurm()), SECOND, stdin=archive([SECOND])).stdout.decode().split("\t")[:2]

    with ThreadPoolExecutor(6) as pool:
        ours = pool.submit(site.follow)
        theirs = list(pool.map(operator, range(5)))
    assert site.jobs == [f"ft-{SECOND}"]
    verdicts = [ours.result()[1], *(verdict for _, verdict in theirs)]
    assert set(verdicts) <= {"submitted", "already", "adopted", "unknown"}
    assert "submitted" in verdicts


def test_a_refusal_is_said_and_the_next_attempt_may_succeed(site):
    site.tool("sbatch", REFUSING)
    assert site.follow()[:2] == [SECOND, "refused"]
    site.tool("sbatch", FAKE_SBATCH)
    assert site.follow() == [SECOND, "submitted", "1"]


def test_who_is_told_to_leave_has_nobody_follow(site):
    done = site.run(signal_program(Slurm(), kill=False), FIRST, "-")
    assert done.returncode == 0, done.stderr
    assert not site.next.exists()
    assert site.follow()[:2] == [SECOND, "unplaced"], "a program that runs on finds nothing to submit"
    assert site.jobs == []


def test_another_spec_brings_other_followers_and_an_end_takes_their_keys_along(site):
    (site.units / FIRST / "spec.json").write_text("{}")
    told = site.run(program("update"), FIRST, stdin=archive([FIRST]))
    assert told.stdout.decode().split() == [FIRST]
    assert not site.next.exists(), "its new spec wants none"
    (site.next / f"1-{SECOND}/identity").mkdir(parents=True)
    assert site.run(forget_program(), "0", "-", FIRST).returncode == 0
    assert not (site.units / FIRST).exists()
