"""The SSH adapters on the testbed: real login nodes of other machines, their limits, and links that fail."""

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections.factory import connect
from fabrictool.clusters.connections.protocol import Endpoint
from fabrictool.clusters.connections.settings import ConnectionLimits
from tests.testbed.waiting import wait_until

LIMITS = ConnectionLimits(connect_s=5, login_s=15, keepalive_s=1, keepalive_count=3)


@pytest.fixture(params=["asyncssh", "openssh", "fabric"])
def how(request):
    return request.param


@pytest.fixture
def opened(bed, how, monkeypatch):
    """Connections of the adapter under test, from the operator's machine: their sockets and threads begin there."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = []

    def opened(endpoint, **options):
        made.append(connect(endpoint, how, **{"limits": LIMITS, **options}))
        return made[-1]

    with bed.sockets_in("op"):
        yield opened
        for connection in made:
            connection.close()


def endpoint(bed, name="a-login", user="alice", port=22, **changes):
    values = {
        "host": bed.address(name),
        "port": port,
        "user": user,
        "host_keys": tuple(bed.host_keys(name, port)),
        "identity": str(bed.key_file),
    }
    return Endpoint(**values | changes)


def code_of(work):
    with pytest.raises(FabrictoolError) as caught:
        work()
    return caught.value.problems[0].code, caught.value.problems[0].transient


def test_a_login_node_answers_as_the_user(bed, opened):
    node = opened(endpoint(bed))
    assert node.run(["id", "-un"]).stdout == b"alice\n"
    assert node.run(["hostname"]).stdout == b"a-login\n"
    assert node.run(["squeue", "--me", "--noheader"]).status == 0
    node.put(b"secret", "ft-connections", mode=0o600)
    assert node.run(["stat", "-c", "%a %U", "ft-connections"]).stdout == b"600 alice\n"
    assert node.get("ft-connections") == b"secret"
    node.run(["rm", "ft-connections"])


def test_fifty_commands_at_once_within_openssh_defaults(bed, opened):
    node = opened(endpoint(bed, port=2222))
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda number: node.run(["echo", str(number)]).stdout, range(50)))
    assert found == [f"{number}\n".encode() for number in range(50)]


def test_a_banner_and_a_talking_shell_are_not_part_of_the_answer(bed, opened):
    node = opened(endpoint(bed, port=2223, user="noisy"))
    done = node.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.status, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    node.put(bytes(range(256)), "ft-noise")
    assert node.get("ft-noise") == bytes(range(256))
    node.run(["rm", "ft-noise"])
    with node.stream(["printf", "a\\nb\\n"]) as lines:
        assert list(lines) == [b"a", b"b"]


def test_a_host_certificate_is_believed_of_its_authority_alone(bed, opened):
    pinned = (f"@cert-authority {bed.host_authority}",)
    assert opened(endpoint(bed, "host", "hostuser", host_keys=pinned)).run(["true"]).status == 0
    other = (f"@cert-authority {bed.host_keys('a-login')[0]}",)
    node = opened(endpoint(bed, "host", "hostuser", host_keys=other))
    assert code_of(lambda: node.run(["true"])) == ("FT5303", False)


def test_another_machines_key_is_refused(bed, opened):
    node = opened(endpoint(bed, host_keys=tuple(bed.host_keys("b-login"))))
    assert code_of(lambda: node.run(["true"])) == ("FT5303", False)


@pytest.mark.parametrize(("valid", "code"), [("-5m:+1h", None), ("-2h:-1h", "FT5307")])
def test_a_users_certificate_opens_while_it_is_valid(bed, opened, valid, code):
    key = bed.new_key()
    bed.certify(key, "alice", valid=valid)
    node = opened(endpoint(bed, identity=str(key)))
    if code is None:
        assert node.run(["id", "-un"]).stdout == b"alice\n"
    else:
        assert code_of(lambda: node.run(["true"])) == (code, False)


def test_a_stranger_is_refused(bed, opened):
    node = opened(endpoint(bed, identity=str(bed.new_key())))
    assert code_of(lambda: node.run(["true"])) == ("FT5306", False)


def test_the_way_through_two_hosts_to_a_node_that_nobody_else_reaches(bed, opened):
    jumps = (endpoint(bed, "ing", "web"), endpoint(bed, "host", "hostuser"))
    node = opened(endpoint(bed, jumps=jumps))
    assert node.run(["hostname"]).stdout == b"a-login\n"
    wrong = dataclasses.replace(jumps[0], host_keys=tuple(bed.host_keys("b-login")))
    node = opened(endpoint(bed, jumps=(wrong, jumps[1])))
    assert code_of(lambda: node.run(["true"])) == ("FT5303", False)


def test_a_port_inside_the_cluster_through_the_login_node(bed, opened):
    import socket

    node = opened(endpoint(bed))
    with (
        node.forward(bed.inner_address("a-ctl"), 6817) as address,
        socket.create_connection(address, 10),
    ):
        assert node.run(["true"]).status == 0


def test_a_closed_port_is_told(bed, opened):
    node = opened(endpoint(bed, port=22, host=bed.address("a-gw")))
    assert code_of(lambda: node.run(["true"])) in {("FT5301", True), ("FT5302", True)}


@pytest.mark.parametrize("weather", [{"delay_s": 0.15}, {"delay_s": 0.05, "jitter_s": 0.05}])
def test_a_long_line_only_takes_longer(bed, opened, weather):
    with bed.relay("a-login", **weather) as path:
        node = opened(dataclasses.replace(endpoint(bed), host=path.host, port=path.port))
        data = os.urandom(500_000)
        node.put(data, "ft-far")
        assert node.get("ft-far") == data
        node.run(["rm", "ft-far"])


def test_a_silent_link_is_found_and_left(bed, opened):
    with bed.relay("a-login") as path:
        node = opened(dataclasses.replace(endpoint(bed), host=path.host, port=path.port))
        node.run(["true"])
        path.set(swallow=True)
        assert code_of(lambda: node.run(["sleep", "50"], timeout_s=45)) == ("FT5321", True)
        assert code_of(lambda: node.run(["true"]))[0] in {"FT5302", "FT5301"}
        path.set(swallow=False)
        wait_until("the link does not come back", lambda: works(node), within_s=60)


def works(node):
    with contextlib.suppress(FabrictoolError):
        return node.run(["true"], timeout_s=10).status == 0
    return False


def test_a_half_open_connection_is_found(bed, opened):
    """The port is silent: packets are dropped on the login node, which neither hears nor answers any more."""
    node = opened(endpoint(bed, port=2222))
    node.run(["true"])
    bed.drop("a-login", 2222)
    try:
        begin = time.monotonic()
        code, transient = code_of(lambda: node.run(["sleep", "80"], timeout_s=70))
        assert (code, transient) == ("FT5321", True)
        assert time.monotonic() - begin < 60
        assert code_of(lambda: node.run(["true"])) == ("FT5302", True)
    finally:
        bed.undrop("a-login", 2222)
    wait_until("it does not come back", lambda: works(node), within_s=60)


def test_a_login_node_that_loses_power_comes_back(bed, opened):
    node = opened(endpoint(bed, "host", "hostuser"))

    def cut_while_it_runs():
        wait_until(
            "the command does not run", lambda: subprocess.call(["pgrep", "-xf", "sleep 80.125"]) == 0, within_s=30
        )
        bed.power_cut("host")

    watcher = threading.Thread(target=cut_while_it_runs)
    watcher.start()
    try:
        assert code_of(lambda: node.run(["sleep", "80.125"], timeout_s=70)) == ("FT5321", True)
    finally:
        watcher.join()
        bed.boot("host")
    wait_until("it does not come back", lambda: works(node), within_s=60)
    assert node.run(["hostname"]).stdout == b"host\n"


def test_a_pulled_cable_is_told_and_mended(bed, opened):
    node = opened(endpoint(bed, "host", "hostuser"))
    node.run(["true"])
    bed.cut_link("host")
    try:
        assert code_of(lambda: node.run(["sleep", "80"], timeout_s=70)) == ("FT5321", True)
    finally:
        bed.mend_link("host")
    wait_until("it does not come back", lambda: works(node), within_s=60)
