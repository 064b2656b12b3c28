"""A provider contributes by itself: token, issuer, and an agent that nobody placed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import msgspec
import pytest

from fabrictool.status.fleet import FleetStatus
from tests.clocks import HOUR, clock_of, library, set_clock
from tests.e2e.test_apply import ask
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ENGINE = [sys.executable, "-m", "fabrictool.engines.reference", "--served-name", "borrowed", "--context", "128"]


class Contributor:
    """What provider beta runs on its own side: an issuer, and jobs that join. No state folder of the operator's."""

    def __init__(self, bed):
        self.bed, self.folder = bed, bed.folder / "beta"
        self.processes = {}
        (self.folder / "trust" / "providers").mkdir(parents=True)
        theirs = bed.folder / "state" / "t" / "trust"
        for name in ("root.crt", "providers/beta.crt", "providers/beta.key"):
            shutil.copy2(theirs / name, self.folder / "trust" / name)
        self.issuer = f"127.0.0.1:{free_port()}"

    def start(self, name, *arguments, **environment):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fabrictool.cli.main", *map(str, arguments)],
                cwd=self.folder,
                env=os.environ | {"FABRICTOOL_STATE_DIR": str(self.folder / "none"), "NO_COLOR": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.processes[name]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def start_issuer(self, name="issuer", **environment):
        arguments = ("trust", "issuer", "--provider", "beta", "--listen", self.issuer, "--trust", "trust")
        process = self.start(name, *arguments, **environment)
        wait_for(lambda: "issuer of beta at" in self.log(name), process)
        return process

    def token(self, name, *options):
        self.bed.run("trust", "token", "beta", "--issuer", self.issuer, "-o", f"beta/{name}", *options)
        return (self.folder / name).read_text().strip()

    def join(self, name, token, *command, **environment):
        return self.start(name, "agent", "join", token, "--folder", ".", *command, **environment)

    def clean_up(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def contributor(fabric_bed):
    fabric_bed.write(replicas=1)
    fabric_bed.up()
    side = Contributor(fabric_bed)
    yield side
    side.clean_up()


def wait_for(condition, process=None, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.05)


def answers(bed, model="borrowed"):
    try:
        return ask(bed, model=model)["provider"]
    except urllib.error.HTTPError as error:
        error.close()
        return ""


def octets_of_processes():
    for folder in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            try:
                yield folder / file, (folder / file).read_bytes()
            except OSError:
                continue


def test_a_job_joins_serves_leaves_and_its_token_is_spent(contributor):
    side, bed = contributor, contributor.bed
    issuer = side.start_issuer()
    token = side.token("token", "--models", "borrowed")
    command = [*ENGINE, "--model", bed.values["model"], "--host", "127.0.0.1", "--port", "{port}"]
    job = side.join("job", "token", "--", *command, SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    wait_for(lambda: answers(bed) == "beta", job)
    status = json.loads(bed.run("status", "--json").stdout)
    assert "borrowed" in [model["model"] for model in status["gateway"]["models"]]

    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout, "it is the job's, not the plan's"

    place = next(side.folder.glob("fabrictool-join-*"))
    assert place.stat().st_mode & 0o077 == 0
    key = (place / "identity" / "session.key").read_text()
    secrets = [token.encode(), "".join(key.splitlines()[1:-1]).encode()]
    assert all(len(secret) > 60 for secret in secrets)
    assert [path for path, octets in octets_of_processes() if any(s in octets for s in secrets)] == []
    private = {side.folder / "token", place / "identity" / "session.key"}
    files = [path for path in bed.folder.rglob("*") if path.is_file()]
    assert {path for path in files if any(s in path.read_bytes() for s in secrets)} == private
    assert [path for path in private if path.stat().st_mode & 0o077] == []

    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    assert "ended: told to stop" in side.log("job")
    assert answers(bed) == ""
    assert answers(bed, "tiny")
    assert not list(side.folder.glob("fabrictool-join-*")), "the key is gone with the job"
    assert re.search(r"service-down +joined/", bed.run("events").stdout)

    issuer.send_signal(signal.SIGTERM)
    assert issuer.wait(30) == 0
    side.start_issuer("issuer again")  # a restart forgets no use
    again = side.join("again", "token", "--", *command)
    assert again.wait(60) == 65
    assert "FT6405" in side.log("again")
    assert "FT6405" in side.log("issuer again")
    log = side.log("issuer")
    assert re.search(r"signed agent session [0-9a-f]{8} for 127\.0\.0\.1 with token [0-9a-f]{8}", log)
    assert token not in log


def test_a_server_that_runs_already_is_offered_and_left_running(contributor):
    side, bed = contributor, contributor.bed
    side.start_issuer()
    side.token("token")
    port = free_port()
    server = subprocess.Popen(
        [*ENGINE, "--model", bed.values["model"], "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    side.processes["server"] = server
    job = side.join("job", "token", "--url", f"http://127.0.0.1:{port}")
    wait_for(lambda: answers(bed) == "beta", job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    assert server.poll() is None


def test_an_operator_applies_for_another_provider_with_its_token_and_no_key_of_its(fabric_bed):
    """Nor with the root's key: the operator is one provider, and the other one's issuer counts and signs."""
    bed = fabric_bed
    bed.write()
    bed.run("trust", "init")
    side = Contributor(bed)
    try:
        ours = bed.folder / "state/t/trust"
        for name in ("root.key", "providers/beta.key", "providers/beta.crt"):
            (ours / name).unlink()
        refused = bed.run("apply", "--yes", code=None)
        assert refused.returncode != 0
        assert "trust accept" in refused.stderr
        assert bed.running() == [], "said before anything was started"

        side.start_issuer()
        gateway = f"127.0.0.1:{bed.values['mesh']}"
        words = ["--issuer", side.issuer, "--gateway", gateway, "--uses", "2", "-o", "token", "--trust", "trust"]
        made = side.start("token", "trust", "token", "beta", *words, "-b", bed.folder / "blueprint.yaml")
        assert made.wait(60) == 0, side.log("token")
        assert "2 agent sessions" in bed.run("trust", "accept", "beta/token").stderr
        bed.run("apply", "--yes")
        assert bed.running() == ["gateway/main", "replica/tiny/0", "replica/tiny/1"]
        assert "No changes" in bed.run("plan").stdout
        assert side.log("issuer").count("signed agent session") == 1

        for last in (False, True):
            os.kill(bed.units()["replica/tiny/1", "running"].pid, signal.SIGKILL)
            said = bed.run("reconcile", code=4 if last else 0).stderr
            assert ("FT6405" in said) == last, "the token's uses are the provider's to give"
    finally:
        side.clean_up()


@pytest.mark.skipif(library() is None, reason="Debian's package faketime is not installed")
def test_a_joined_agent_is_renewed_by_its_issuer_and_serves_on(contributor):
    """Both clocks are set twenty hours on: a certificate of twenty-six ends soon, by them."""
    bed, clock = contributor.bed, contributor.folder / "clock"
    contributor.start_issuer(**clock_of(clock))
    contributor.token("token")
    command = [*ENGINE, "--model", bed.values["model"], "--host", "127.0.0.1", "--port", "{port}"]
    agent = contributor.join("agent", "token", "--", *command, **clock_of(clock))
    wait_for(lambda: answers(bed) == "beta", agent, seconds=120)
    (before,) = joined_members(bed)
    set_clock(clock, 20 * HOUR)
    wait_for(
        lambda: re.search("renewed joined/[0-9a-f]+ its certificate", contributor.log("agent")), agent, seconds=120
    )
    set_clock(clock, 0)
    wait_for(lambda: joined_members(bed)[0].certificate_ends_at > before.certificate_ends_at + 1, agent)
    (after,) = joined_members(bed)
    assert after.session == before.session
    assert answers(bed) == "beta"
    assert f"renewed session {after.session[:8]}" in contributor.log("issuer")


def joined_members(bed):
    printed = json.loads(bed.run("mesh", "members", "--json").stdout)
    view = msgspec.convert(printed["document"], FleetStatus)
    return [m for m in view.members if m.services and m.services[0].replica.startswith("joined/")]
