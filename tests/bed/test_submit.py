"""At most once, on the real Slurm: the same cases as beside the fake one."""

import itertools

import pytest

from tests.clusters import submit_bench as cases
from tests.clusters.submit_bench import Bench


@pytest.fixture(scope="module")
def bench(bed):
    login = bed.machine("a-login")
    home = "/home/alice"
    numbers = itertools.count()

    def run(program, operations, stdin, shims):
        shelf = f"{home}/shims/{next(numbers)}"
        for name, text in {"true": "#!/bin/sh\n", **shims}.items():
            login.run(["sh", "-c", f'mkdir -p {shelf}; cat >"$0"; chmod 755 "$0"', f"{shelf}/{name}"], user="alice",
                      stdin=text)  # fmt: skip
        command = login.command(
            ["env", "-i", f"PATH={shelf}:/usr/local/bin:/usr/bin:/bin", f"HOME={home}", "sh", "-c", program,
             "ft-submit", ".submit", "f", *operations],
            user="alice",
        )  # fmt: skip
        done = cases.checked_anyhow(command, stdin)
        return done.returncode, done.stdout.decode()

    def jobs():
        lines = bed.slurm("a", "squeue", "-h", "--me", "-t", "all", "-o", "%j").stdout.split()
        return [line for line in lines if line.startswith("ft-replica-")]

    yield Bench(run, jobs)
    bed.slurm("a", "scancel", "--me")


def test_kill_at_every_step(bench):
    cases.check_kill_at_every_step(bench)


@pytest.mark.parametrize("shims", [{}, {"flock": "#!/bin/sh\nexit 71\n"}], ids=["flock", "no locks"])
def test_twenty_at_once_are_one_job(bench, shims):
    cases.check_twenty_at_once(bench, shims)


def test_a_lost_answer_is_adopted(bench):
    cases.check_a_lost_answer_is_adopted(bench, "/usr/bin/sbatch")


def test_an_unknown_end_is_looked_up_before_anything_is_submitted(bench):
    cases.check_an_unknown_end_is_looked_up_before_anything_is_submitted(bench)


def test_a_refusal_leaves_nothing(bench):
    cases.check_a_refusal_leaves_nothing(bench)


def test_stripped_comments(bench):
    cases.check_stripped_comments(bench, "/usr/bin/sbatch")
