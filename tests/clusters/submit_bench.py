"""The submit program under trouble: killed at each step, called twenty times at once, without locks, with lost answers.

The same cases run beside a fake Slurm (fast, on any machine) and on the testbed's real one.
"""

import io
import re
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor

from fabrictool.clusters.schedulers.shell import submit_program
from fabrictool.clusters.schedulers.slurm import Slurm

PROGRAM = submit_program(Slurm())
STEPS = PROGRAM.count("\n  : step") + PROGRAM.count("\n: step") + PROGRAM.count("\n    : step")

SUBMIT = (
    "sbatch --parsable --job-name=ft-{operation} '--comment=ft1;lin=aaaaaaaa;op={operation}' --output=/dev/null"
    ' "$(dirname "$0")/job.sh"\n'
)

FAKE_SBATCH = """#!/bin/sh
# A fake sbatch: counts jobs in a file, keeps names and comments.
for word; do case $word in --job-name=*) name=${word#*=};; --comment=*) comment=${word#*=};; esac; done
exec 8>>"$FAKE/lock"; flock 8
n=$(( $(wc -l <"$FAKE/jobs") + 1 ))
echo "$n $name $comment" >>"$FAKE/jobs"
echo "$n;cluster"
"""
FAKE_SQUEUE = """#!/bin/sh
# A fake squeue: prints what the fake sbatch took.
cat "$FAKE/jobs"
"""
STRIPPING = """#!/bin/sh
# What a site's job_submit plugin does: comments and names are gone.
for word; do shift; case $word in --comment=*) ;; *) set -- "$@" "$word";; esac; done
exec @sbatch@ "$@"
"""
LOST_ANSWER = """#!/bin/sh
# The controller took the job, and its answer was lost.
@sbatch@ "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""
NOT_TAKEN = """#!/bin/sh
# The controller was too busy, and took nothing.
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""
REFUSING = """#!/bin/sh
echo "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified" >&2
exit 1
"""
SILENT_SQUEUE = """#!/bin/sh
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


def archive(operations, script="#!/bin/sh\nsleep 300\n"):
    """Run folders with just what the program needs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for operation in operations:
            entry = tarfile.TarInfo(operation)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(entry)
            submit = SUBMIT.format(operation=operation)
            for name, text in {"submit": submit, "job.sh": script, "spec.json": "{}"}.items():
                entry = tarfile.TarInfo(f"{operation}/{name}")
                entry.size, entry.mode = len(text), 0o600
                tar.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def killed_at(step):
    """The program, which kills itself with -9 at its `step`-th mark."""
    marks = list(re.finditer(r": step$", PROGRAM, re.MULTILINE))
    mark = marks[step]
    return PROGRAM[: mark.start()] + "kill -9 $$" + PROGRAM[mark.end() :]


class Bench:
    """Runs the program somewhere; `run` takes argv, stdin and shims, and returns (status, stdout)."""

    def __init__(self, run, jobs):
        self.run = run
        self.jobs = jobs
        """Names of all jobs that the scheduler ever took, with repetition."""

    def submit(self, *operations, program=None, shims=None):
        code, out = self.run(program or PROGRAM, operations, archive(operations), shims or {})
        return code, [tuple(line.split("\t")[:3]) for line in out.splitlines()]


def check_kill_at_every_step(bench):
    for step in range(STEPS):
        operation = f"replica-k-{step}-g1-00000000"
        code, _ = bench.submit(operation, program=killed_at(step))
        assert code != 0, step
        (again,) = bench.submit(operation)[1]
        assert again[1] in ("submitted", "adopted", "already"), (step, again)
        (third,) = bench.submit(operation)[1]
        assert third == (operation, "already", again[2]), step
        assert bench.jobs().count(f"ft-{operation}") == 1, step


def check_twenty_at_once(bench, shims=None):
    operation = f"replica-p-{len(shims or {})}-g1-00000000"
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: bench.submit(operation, shims=shims)[1], range(20)))
    assert bench.jobs().count(f"ft-{operation}") == 1
    assert len({line[2] for lines in found for line in lines}) == 1
    verdicts = sorted(line[1] for lines in found for line in lines)
    assert verdicts == ["already"] * 19 + ["submitted"]


def check_a_lost_answer_is_adopted(bench, sbatch):
    operation = "replica-l-0-g1-00000000"
    (line,) = bench.submit(operation, shims={"sbatch": LOST_ANSWER.replace("@sbatch@", sbatch)})[1]
    assert line[1] == "adopted"
    assert bench.submit(operation)[1] == [(operation, "already", line[2])]
    assert bench.jobs().count(f"ft-{operation}") == 1


def check_an_unknown_end_is_looked_up_before_anything_is_submitted(bench):
    operation = "replica-u-0-g1-00000000"
    silent = {"sbatch": NOT_TAKEN, "squeue": SILENT_SQUEUE}
    for _ in range(2):
        (line,) = bench.submit(operation, shims=silent)[1]
        assert line[1] == "unknown"
    (line,) = bench.submit(operation, shims={"squeue": SILENT_SQUEUE})[1]
    assert line[1] == "unknown"  # it could submit, and must not
    assert bench.jobs().count(f"ft-{operation}") == 0
    (line,) = bench.submit(operation)[1]
    assert line[1] == "submitted"
    assert bench.jobs().count(f"ft-{operation}") == 1


def check_a_refusal_leaves_nothing(bench):
    operation = "replica-r-0-g1-00000000"
    (line,) = bench.submit(operation, shims={"sbatch": REFUSING})[1]
    assert line[1] == "refused"
    assert bench.submit(operation)[1][0][1] == "submitted"
    assert bench.jobs().count(f"ft-{operation}") == 1


def check_stripped_comments(bench, sbatch):
    operation = "replica-s-0-g1-00000000"
    shim = {"sbatch": STRIPPING.replace("@sbatch@", sbatch)}
    kept = PROGRAM.index("code=$?")
    after = PROGRAM[:kept] + "code=$?; kill -9 $$" + PROGRAM[kept + len("code=$?") :]
    assert bench.submit(operation, program=after, shims=shim)[0] != 0
    assert bench.submit(operation, shims=shim)[1][0][1] == "adopted"
    assert bench.jobs().count(f"ft-{operation}") == 1


def checked_anyhow(command, stdin):
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=120)
