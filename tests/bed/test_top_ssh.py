"""`top` through SSH to a login node: no port of a gateway's pages is open, and one gateway is killed meanwhile."""

import signal

import pytest

from fabrictool.tui.view import ScreenView
from tests.bed.terminal import Terminal

pytestmark = pytest.mark.timeout(300)

EAST, WEST = ("a-login", 8071, 8471), ("ing", 8072, 8472)


@pytest.fixture(scope="module")
def seen(make_federation):
    """A gateway on A's login node and one on the ingress; the login node is entered by OpenSSH's client."""
    fed = make_federation("seen")
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"cpu": cpu}, kind="ssh", login={"transport": "openssh"}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    gateways = {}
    for cluster, (machine, port, mesh) in {"a": EAST, "ing": WEST}.items():
        address = fed.bed.address(machine)
        gateways[cluster] = {"cluster": cluster, "listen": f"{address}:{port}", "mesh": f"{address}:{mesh}"}
    model = {"replicas": {"min": 1, "max": 1}, "place": {"pin": [{"cluster": "ing", "replicas": 1}]}}
    fed.write(clusters, {"tiny": model}, gateway=None, gateways=gateways)
    fed.up()
    return fed


def ssh_clients(fed):
    """On the operator's machine, to the login node."""
    done = fed.bed.machine("op").run(["pgrep", "-af", f"^([^ ]*/)?ssh .*{fed.bed.address('a-login')}"], check=False)
    return done.stdout.splitlines()


def listens(look):
    return look.gateway.listen if look.gateway is not None and not look.trouble else ""


def test_top_through_a_login_node_fails_over_when_its_gateway_is_killed(bed, seen):
    east, west = (f"{bed.address(machine)}:{port}" for machine, port, _ in (EAST, WEST))
    shown = seen.run("top", "--ssh", "a", "--snapshot").stdout
    assert f"view from the gateway {east}" in shown
    terminal = Terminal(seen, "--ssh", "a")
    seen.wait("nothing is seen", lambda: [look for look in terminal.looks() if listens(look) == east])
    assert ssh_clients(seen), "it goes through the program"
    bed.machine("a-login").run(["pkill", "-KILL", "-f", "fabrictool[.]gateway"])
    seen.wait("no other one is asked", lambda: listens(terminal.looks()[-1]) == west)
    looks = terminal.looks()
    line = ScreenView(looks[-1], looks[-1].at).moved_line()
    assert line.startswith(f"~ the gateway {east} does not answer since ")
    gap = next(look.at for look in looks if listens(look) == west) - max(
        look.at for look in looks if listens(look) == east
    )
    print(f"failed over after {gap:.1f} s")
    assert gap < 30
    assert terminal.end() == 0
    seen.wait("ssh is left behind", lambda: not ssh_clients(seen), within_s=10)


def test_ctrl_c_while_the_way_is_being_opened_leaves_nothing_behind(bed, seen):
    bed.drop("a-login", 22)
    try:
        process = seen.start("top", "--ssh", "a", "--snapshot")
        seen.wait("no client was started", lambda: ssh_clients(seen))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in said
        seen.wait("ssh is left behind", lambda: not ssh_clients(seen), within_s=30)
    finally:
        bed.undrop("a-login", 22)
