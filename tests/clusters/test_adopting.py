"""Taking a server in somebody's job under the mesh, on this machine: `srun` and `squeue` are fakes, nothing else is."""

import json
import os
import subprocess
import time

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.adopting import AdoptingCluster, RunningJob
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.specs import AgentSpec, BroughtEngine
from tests.clusters.test_cases import LOGIN

FAKE_SQUEUE = """#!/bin/sh
# A fake squeue: job 7 runs, and so do the steps that the fake srun noted.
case "$*" in
  *"-s -j 7"*) [ ! -e "$FAKE/away" ] || exit 1; [ ! -e "$FAKE/steps" ] || cat "$FAKE/steps" ;;
  *"-j 7 "*) echo "node1 1800000000" ;;
  *"-j 8 "*) echo "node1 Unknown" ;;
  *"-j 9 "*) ;;
  *"-j 11 "*) echo "node1 1800000000"; echo "node2 1800000000" ;;
  *"-j"*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""
FAKE_SRUN = """#!/bin/sh
# A fake srun: notes the step, and runs the command here.
for word; do
  case $word in --job-name=*) name=${word#*=};; --*) ;; *) break;; esac
  shift
done
echo "7.1 $name" >"$FAKE/steps"
"$@"
code=$?
rm -f "$FAKE/steps"
exit $code
"""
FAKE_AGENT = """#!/bin/sh
# A fake agent: says how it is, and leaves when it is told to. Called as: -P -m fabrictool.agent FOLDER END
echo "$5" >"$4/end"
echo '{"ready": true, "text": ""}' >"$4/health.json"
while [ ! -e "$FAKE/leave" ]; do sleep 0.1; done
echo '{"reason": "signal SIGTERM"}' >"$4/exit.json"
"""
SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="node1", replica="joined/1234", model="", source="",
    engine="external", brought=BroughtEngine(port=8000),
)  # fmt: skip


class HereConnection:
    """Runs what a login node would, with the fakes on its path."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "tools").mkdir()
        for name, text in {
            "squeue": FAKE_SQUEUE, "srun": FAKE_SRUN, "agent": FAKE_AGENT,
            "scancel": '#!/bin/sh\ntouch "$FAKE/leave"\necho "$@" >"$FAKE/cancelled"\n',
            "sinfo": '#!/bin/sh\n[ "$1" != --version ] || echo slurm 22.05.8\n',
        }.items():  # fmt: skip
            (folder / "tools" / name).write_text(text)
            (folder / "tools" / name).chmod(0o755)

    def run(self, argv, *, stdin=b"", timeout_s=60.0):
        path = f"{self.folder / 'tools'}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(self.folder), "FAKE": str(self.folder)}
        done = subprocess.run(argv, input=stdin, capture_output=True, env=environment, timeout=timeout_s, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)


def described(folder, kind="slurm"):
    return ClusterSpec.model_validate_json(json.dumps({
        "site": "s", "kind": kind, "login": [LOGIN], "partitions": {"gpu": {"device": "h100-sxm", "nodes": 1}},
        "software": {"python": {"path": str(folder / "tools/agent")}},
        "environment": {"set": {"NCCL_SOCKET_IFNAME": "hsn"}},
    }))  # fmt: skip


@pytest.fixture
def site(tmp_path):
    return AdoptingCluster("c", "f", described(tmp_path), HereConnection(tmp_path))


def until(condition):
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_job_of_ours_that_runs_is_found_and_no_other(site):
    assert site.job("7") == RunningJob("7", "node1", 1_800_000_000.0)
    assert site.job("8").ends_at is None
    with pytest.raises(FabrictoolError, match="no such job of this account runs"):
        site.job("9")
    with pytest.raises(FabrictoolError, match="Invalid job id"):
        site.job("10")
    with pytest.raises(FabrictoolError, match="name one"):
        site.job("11")
    for odd in ("7,8", "7+1", "-7", "7; true"):
        with pytest.raises(FabrictoolError, match="is not the number of a job"):
            site.job(odd)


def test_an_agent_starts_serves_and_leaves_and_takes_its_key_along(site, tmp_path):
    site.start(SPEC, "ft-adopted-7", site.job("7"), {"identity/session.key": b"secret"})
    until(lambda: site.look("ft-adopted-7").ready)
    folder = tmp_path / ".fabrictool/adopted/f/ft-adopted-7"
    assert (folder / "end").read_text() == "1800000000\n"
    assert (folder / "identity/session.key").stat().st_mode & 0o777 == 0o600
    assert "export NCCL_SOCKET_IFNAME=hsn" in (folder / "start.sh").read_text()
    with pytest.raises(FabrictoolError, match="already"):
        site.start(SPEC, "ft-adopted-7", site.job("7"), {})
    steps = (tmp_path / "steps").read_text()
    (tmp_path / "steps").unlink()  # as while a step is still being made
    with pytest.raises(FabrictoolError, match="already"):
        site.start(SPEC, "ft-adopted-7", site.job("7"), {})
    (tmp_path / "away").touch()
    with pytest.raises(FabrictoolError, match="does not say what runs"):
        site.leave("7", "ft-adopted-7")
    (tmp_path / "away").unlink()
    (tmp_path / "steps").write_text(steps)
    assert site.leave("7", "ft-adopted-7")
    assert (tmp_path / "cancelled").read_text() == "--quiet --signal=TERM 7.1\n"
    until(lambda: site.look("ft-adopted-7").over == "signal SIGTERM")
    until(lambda: not (folder / "identity").exists())
    assert not site.leave("7", "ft-adopted-7")


def test_the_last_words_of_an_agent_that_never_was_are_told(site, tmp_path):
    (tmp_path / "tools/agent").write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    site.start(SPEC, "ft-adopted-7", site.job("7"), {})
    until(lambda: site.look("ft-adopted-7").over)
    assert site.look("ft-adopted-7").over == "no such module"


def test_only_a_scheduler_that_starts_things_inside_jobs_will_do(tmp_path):
    with pytest.raises(FabrictoolError, match="FT5418"):
        AdoptingCluster("c", "f", described(tmp_path, "pbs"), HereConnection(tmp_path))
