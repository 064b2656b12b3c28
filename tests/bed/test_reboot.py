"""A gateway's host reboots: cron starts the gateway again, as the same session, and nobody has to be there.

The host's init is played by the test: it starts a real cron after each boot.
"""

import shutil
import time

import pytest

pytestmark = pytest.mark.skipif(shutil.which("cron") is None, reason="no program cron")


class Host:
    """The ingress as a machine with a cron of its own, whose crontabs survive a reboot."""

    def __init__(self, fed):
        self.fed, self.bed = fed, fed.bed
        fed.bed.machine("ing").run(
            ["pkill", "-KILL", "-f", "fabrictool[.]gateway"], check=False
        )  # of modules that ended
        self.spool = fed.bed.root / "crontabs"
        self.spool.mkdir()
        self.spool.chmod(0o1730)
        shutil.chown(self.spool, group="crontab")
        self.on()

    def on(self):
        machine = self.bed.machine("ing")
        machine.run(["mount", "--bind", str(self.spool), "/var/spool/cron/crontabs"])
        machine.run(["sh", "-c", "cron"])  # becomes a daemon of that machine

    def reboot(self, *, in_order):
        if in_order:
            self.bed.machine("ing").run(["pkill", "-TERM", "-f", "fabrictool[.]gateway"])
            self.fed.wait("the gateway does not end", lambda: not self.pids(), within_s=40)
        self.bed.power_cut("ing")
        time.sleep(2)
        self.bed.boot("ing")
        self.on()

    def pids(self):
        return self.bed.machine("ing").run(["pgrep", "-f", "fabrictool[.]gateway "], check=False).stdout.split()

    def crontab(self):
        return self.bed.machine("ing").run(["crontab", "-l"], user="web", check=False).stdout


@pytest.fixture(scope="module")
def federation(make_federation):
    fed = make_federation("reboot")
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh", after_reboot="cron", logs={"keep": "1 h"}),
    }
    model = {"replicas": {"min": 1, "max": 1}, "place": {"pin": [{"cluster": "a", "replicas": 1}]}}
    fed.write(clusters, {"tiny": model}, client_port=8071, mesh_port=8493)
    return fed


@pytest.fixture(scope="module")
def host(federation):
    host = Host(federation)
    host.bed.machine("ing").run(["crontab", "-"], user="web", stdin="7 7 * * * true\n")
    federation.up()
    return host


def session(fed):
    return fed.status()["gateway"]["session"]


@pytest.mark.parametrize("in_order", [False, True], ids=["power", "order"])
def test_a_gateway_comes_back_with_its_host_and_serves_as_before(federation, host, in_order):
    before = session(federation)
    units = federation.units()
    host.reboot(in_order=in_order)
    federation.wait("it does not answer", lambda: federation.ask("tiny", machine="op")[0] == "200")
    assert session(federation) == before
    after = federation.units()
    assert {name: unit["operation"] for name, unit in after.items()} == {n: u["operation"] for n, u in units.items()}
    federation.wait("not all is well", lambda: federation.status()["good"])
    for _ in range(2):
        assert {action["kind"] for action in federation.plan()["actions"]} == {"keep"}


def test_a_stopped_gateway_is_said(federation, host):
    machine = host.bed.machine("ing")
    machine.run(["pkill", "-STOP", "-f", "fabrictool[.]gateway"])
    try:
        assert "SIGSTOP" in federation.run("status", code=1).stdout
    finally:
        machine.run(["pkill", "-CONT", "-f", "fabrictool[.]gateway"])
    assert "SIGSTOP" not in federation.run("status", code=None).stdout


def test_who_came_back_while_reconcile_looked_is_no_second_gateway(federation, host):
    """Whoever is first: one gateway serves, and the next look finds nothing to do."""
    host.reboot(in_order=False)
    federation.run("reconcile", code=None)
    federation.wait("it does not answer", lambda: federation.ask("tiny", machine="op")[0] == "200")
    federation.run("apply", "--yes")
    assert len(host.pids()) == 1
    assert {action["kind"] for action in federation.plan()["actions"]} == {"keep"}


def test_a_gateway_that_was_replaced_or_stopped_does_not_come_back(federation, host):
    (federation.folder / "blueprint.yaml").write_text(
        (federation.folder / "blueprint.yaml").read_text().replace(":8493", ":8494")
    )
    federation.run("apply", "--yes")
    host.reboot(in_order=False)
    federation.wait("it does not answer", lambda: federation.ask("tiny", machine="op")[0] == "200")
    assert len(host.pids()) == 1
    operation = federation.units()["gateway/main"]["operation"]
    federation.run("destroy", "--yes")
    assert host.crontab() == "7 7 * * * true\n"
    said = federation.run("logs", "gateway/main", "-n", "3")
    assert "is gone; this is the log that ing kept" in said.stderr
    assert "ended" in said.stdout
    assert said.stdout == federation.run("logs", operation, "-n", "3").stdout
    federation.run("logs", "gateway/none", code=64)
    host.reboot(in_order=False)
    time.sleep(3)
    assert host.pids() == []
