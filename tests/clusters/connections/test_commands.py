"""`fabrictool trust host` and `fabrictool shell` against a real sshd."""

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from fabrictool.cli.main import main
from tests.clusters.connections.servers import new_key, public

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {{p: {{}}}}
sites: {{s: {{provider: p}}}}
clusters:
  here:
    site: s
    kind: local
    partitions: {{cpu: {{device: cpu, nodes: 1}}}}
  alpha:
    site: s
    kind: ssh
    login:
      - {{host: 127.0.0.1, port: {port}, user: {user}, identity: {key}, host_keys: [{host_key}]{more}}}
    partitions: {{cpu: {{device: cpu, nodes: 1}}}}
"""


@pytest.fixture
def inventory(tmp_path):
    def written(server, key, host_key=None, more=""):
        endpoint = server.endpoint()
        path = tmp_path / "inventory.yaml"
        host_key = host_key or public(server.host_key)
        path.write_text(
            INVENTORY.format(port=server.port, user=endpoint.user, key=key, host_key=f"'{host_key}'", more=more)
        )
        return str(path)

    return written


@pytest.fixture
def server(yard):
    for kind in ("rsa", "ecdsa"):
        new_key(yard.folder / kind, kind)
    return yard.server(f"HostKey {yard.folder}/rsa\nHostKey {yard.folder}/ecdsa\n")


def printed(key):
    return subprocess.run(
        ["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def test_what_a_host_shows_can_be_pasted(server, yard, capsys, monkeypatch):
    monkeypatch.chdir(yard.folder)
    assert main(["trust", "host", f"127.0.0.1:{server.port}"]) == 0
    out, err = capsys.readouterr()
    for key in (server.host_key, yard.folder / "rsa", yard.folder / "ecdsa"):
        assert f"  - {public(key)}\n" in out
        assert printed(key) in out
    assert "compare" in err
    log = server.log.read_text()
    assert "Accepted" not in log
    assert "publickey" not in log


def test_a_pinned_key_is_confirmed(server, yard, inventory, capsys):
    path = inventory(server, yard.key)
    assert main(["trust", "host", f"127.0.0.1:{server.port}", "-i", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["type"]: row["pinned_by"] for row in found["shown"]} == {
        "ssh-ed25519": ["alpha"],
        "ecdsa-sha2-nistp256": [],
        "ssh-rsa": [],
    }
    assert found["pinned_and_not_shown"] == []


def test_a_pinned_key_that_is_not_shown_is_an_alarm(server, yard, inventory, capsys):
    other = new_key(yard.folder / "other")
    path = inventory(server, yard.key, public(other))
    assert main(["trust", "host", f"127.0.0.1:{server.port}", "-i", path]) == 1
    assert f"NOT shown: ssh-ed25519 {printed(other)}" in capsys.readouterr().err


def test_a_host_behind_another_is_asked_through_it(server, yard, inventory, capsys):
    hidden = yard.server()
    path = inventory(server, yard.key)
    assert main(["trust", "host", f"127.0.0.1:{hidden.port}", "--jump", f"127.0.0.1:{server.port}", "-i", path]) == 0
    assert printed(hidden.host_key) in capsys.readouterr().out
    assert "Accepted" in server.log.read_text()
    assert main(["trust", "host", f"127.0.0.1:{hidden.port}", "--jump", "127.0.0.1:1", "-i", path]) == 64
    assert "FT5304" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [("a b", 64, "FT9002"), ("-x", 64, "FT90"), ("127.0.0.1:1", 69, "FT5301"), ("h:0", 64, "FT9002")],
)
def test_a_host_that_cannot_be_asked(target, status, code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["trust", "host", target]) == status
    assert code in capsys.readouterr().err


def on_terminal(argv, typed=b"", seconds=40):
    """Run a command with a terminal; what it showed, and its status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "fabrictool.cli.main", *argv])  # noqa: S606 - in the child
    shown, until = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            shown += data
            if typed and b"ready>" in shown:
                os.write(terminal, typed)
                typed = b""
        else:
            os.kill(pid, 9)
        return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(terminal)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="sshd gives terminals only when it runs as root")


@as_root
def test_a_command_has_a_terminal_and_its_status_is_ours(server, yard, inventory):
    path = inventory(server, yard.key)
    script = "tty >/dev/null && echo a-terminal; printf '%s|' 'a  b' \"$1\"; exit 7"
    shown, status = on_terminal(["shell", "alpha", "-i", path, "--", "sh", "-c", script, "x", "it's"])
    assert b"a-terminal" in shown
    assert b"a  b|it's|" in shown
    assert status == 7


@as_root
def test_a_shell_is_spoken_to(server, yard, inventory):
    (server.folder / ".bashrc").write_text("PS1='ready>'\n")
    (server.folder / ".profile").write_text("PS1='ready>'\n")
    path = inventory(server, yard.key)
    shown, status = on_terminal(["shell", "alpha", "-i", path], b"echo $((6*7)) && exit 3\r")
    assert b"42" in shown
    assert status == 3, shown


def test_a_shell_does_not_open_where_the_key_is_another(server, yard, inventory):
    path = inventory(server, yard.key, public(new_key(yard.folder / "other")))
    shown, status = on_terminal(["shell", "alpha", "-i", path])
    assert b"FT5303" in shown
    assert status == 1


def test_clusters_without_a_login_node_are_told(server, yard, inventory, capsys):
    path = inventory(server, yard.key)
    assert main(["shell", "nowhere", "-i", path]) == 64
    assert main(["shell", "here", "-i", path]) == 64
    said = capsys.readouterr().err
    assert "FT5341" in said
    assert "FT5342" in said
