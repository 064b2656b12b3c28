"""What only the adapter over OpenSSH's client has: connections that a person opens, and the person's ssh_config."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections.openssh_connection import OpensshConnection
from fabrictool.clusters.connections.openssh_files import by_hand
from fabrictool.clusters.connections.settings import ConnectionLimits
from tests.clusters.connections.servers import eventually, new_key, public
from tests.ports import free_port

QUICK = ConnectionLimits(connect_s=3, login_s=10, refused_s=15)


@pytest.fixture
def by_person(yard, tmp_path_factory):
    """A server and the shared connection that a person has opened to it, with a key that we do not have."""
    server = yard.server()
    path = tmp_path_factory.mktemp("m") / "s"
    argv = ["ssh", "-M", "-N", "-S", path, "-i", yard.key, "-p", str(server.port), "-o", "StrictHostKeyChecking=no"]
    argv += ["-F", "none", "-o", "UserKnownHostsFile=/dev/null", "127.0.0.1"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        eventually(path.exists)
        yield server, str(path), process
        end(process)


def end(process):
    """A signal that reaches ssh between its look for signals and its wait is heard with the next thing that happens."""
    while process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)


def test_a_persons_connection_is_used_and_left_open(by_person):
    server, path, process = by_person
    connection = OpensshConnection(server.endpoint(), limits=QUICK, control_path=path)
    assert connection.run(["echo", "x"]).stdout == b"x\n"
    with connection.forward("127.0.0.1", server.port) as address, socket.create_connection(address, 10) as there:
        assert there.recv(4) == b"SSH-"
    with connection.stream(["echo", "y"]) as lines:
        assert list(lines) == [b"y"]
    connection.close()
    assert process.poll() is None
    assert subprocess.run(["ssh", "-S", path, "-O", "check", "x"], capture_output=True, check=False).returncode == 0


def test_a_persons_connection_that_is_not_open_is_asked_for(by_person):
    server, path, process = by_person
    connection = OpensshConnection(server.endpoint(), limits=QUICK, control_path=path)
    connection.run(["true"])
    end(process)
    with pytest.raises(FabrictoolError) as caught:
        connection.run(["true"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.transient) == ("FT5311", True)
    assert f"ssh -M -N -f -S {path} -p {server.port} " in problem.hint
    connection.close()


def test_the_command_to_type_goes_through_the_jumps(yard):
    server = yard.server()
    endpoint = server.endpoint(user="ann", port=2222, jumps=(server.endpoint(user="bob", port=22),))
    assert shlex.split(by_hand(endpoint, "/a b/s")) == [
        *("ssh", "-M", "-N", "-f", "-S", "/a b/s", "-p", "2222", "-J", "bob@127.0.0.1:22", "ann@127.0.0.1")
    ]


def test_where_a_person_is_wanted_the_hint_is_the_command(yard):
    server = yard.server("AuthenticationMethods publickey,keyboard-interactive\nKbdInteractiveAuthentication yes\n")
    with (
        OpensshConnection(server.endpoint(yard.key), limits=QUICK) as connection,
        pytest.raises(FabrictoolError, match="partial success") as caught,
    ):
        connection.run(["true"])
    assert "ssh -M -N -f -S ~/.ssh/ft-127.0.0.1 " in caught.value.problems[0].hint


def test_ssh_config_counts_only_when_asked_for_and_loosens_nothing(yard):
    server, other = yard.server(), new_key(yard.folder / "other")
    folder = Path(os.environ["HOME"], ".ssh")
    folder.mkdir(mode=0o700)
    (folder / "config").write_text(
        f"Host login-of-alpha\n  HostName 127.0.0.1\n  IdentityFile {yard.key}\n  ForwardAgent yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    )
    (folder / "config").chmod(0o600)
    endpoint = server.endpoint(host="login-of-alpha")
    with OpensshConnection(endpoint, limits=QUICK) as connection, pytest.raises(FabrictoolError, match="FT5301"):
        connection.run(["true"])
    with OpensshConnection(endpoint, limits=QUICK, ssh_config=True) as connection:
        assert connection.run(["echo", "x"]).stdout == b"x\n"
    strange = server.endpoint(host="login-of-alpha", host_keys=(public(other),))
    with (
        OpensshConnection(strange, limits=QUICK, ssh_config=True) as connection,
        pytest.raises(FabrictoolError, match="FT5303"),
    ):
        connection.run(["true"])


def test_a_missing_program_is_told(yard, monkeypatch):
    server = yard.server()
    monkeypatch.setenv("PATH", str(yard.folder))
    with OpensshConnection(server.endpoint(yard.key)) as connection, pytest.raises(FabrictoolError, match="FT5312"):
        connection.run(["true"])


KILLED = """
import sys, time
from fabrictool.clusters.connections.openssh_connection import OpensshConnection
from fabrictool.clusters.connections.protocol import Endpoint
host, port, user, key, identity = sys.argv[1:]
connection = OpensshConnection(Endpoint(host, int(port), user, (key,), (), identity))
connection.run(["true"])
print(connection._master.pid, flush=True)
time.sleep(60)
"""


def test_the_shared_connection_ends_when_we_are_killed(yard):
    server = yard.server()
    point = server.endpoint(yard.key)
    words = [point.host, str(point.port), point.user, point.host_keys[0], point.identity]
    with subprocess.Popen([sys.executable, "-c", KILLED, *words], stdout=subprocess.PIPE, text=True) as process:
        master = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    eventually(lambda: not server.sessions())
    eventually(lambda: not Path(f"/proc/{master}/cmdline").exists() or not Path(f"/proc/{master}/cmdline").read_bytes())


def test_nothing_is_left_in_the_private_folder(yard):
    server = yard.server()
    connection = OpensshConnection(server.endpoint(yard.key), limits=QUICK)
    for _ in range(3):
        connection.run(["true"])
    folder = connection._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["config", "err", "known0", "log0", "m"]
    connection.close()
    assert not folder.exists()
    assert not list(folder.parent.glob(f"{folder.name}*"))


def test_a_port_that_is_taken_meanwhile_is_not_used(yard, monkeypatch):
    server, numbers = yard.server(), []
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        OpensshConnection(server.endpoint(yard.key), limits=QUICK) as connection,
    ):
        numbers = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr("fabrictool.clusters.connections.openssh_connection._free_port", lambda: numbers.pop(0))
        wanted = numbers[1]
        with connection.forward("127.0.0.1", server.port) as address:
            assert address == ("127.0.0.1", wanted)
