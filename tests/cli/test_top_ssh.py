"""`top --ssh`: real SSH servers, whose units' pages are those of servers in this process."""

import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import boot_id
from fabrictool.cli.live import LiveFeed, LiveStatus
from fabrictool.cli.main import main
from fabrictool.cli.source import Source
from fabrictool.cli.ssh_hosts import host_pages
from fabrictool.status.documents import encode
from fabrictool.tui.view import ScreenView
from tests.clusters.connections.conftest import _sshd, yard  # noqa: F401 - fixtures
from tests.clusters.connections.servers import descendants, eventually
from tests.tui.test_top import gateway


class Page:
    """Of a gateway that listens for clients at `listen`; its unit's folder lies in the home of `server`'s users."""

    def __init__(self, server, listen, *, fabric="swiss-ai", host=""):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = encode(gateway(listen=listen, fabric=fabric)) if self.path == "/status" else b"{}"
                self.send_response(200 if self.path == "/status" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.folder = server.folder / f".fabrictool/units/{fabric}/gateway-{listen.partition(':')[0]}-g1-0123abcd"
        self.folder.mkdir(parents=True)
        status = f"http://127.0.0.1:{self._server.server_address[1]}/status"
        (self.folder / "process.json").write_text(json.dumps({"pid": 1, "status": status}))
        lock = {"host": host or socket.gethostname(), "boot": boot_id()}
        (self.folder / "lock").write_text(json.dumps(lock))

    def kill(self):
        """It leaves no word."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def known(yard, monkeypatch):  # noqa: F811
    """Makes a server a host that the operator's `ssh` knows by a name."""
    home = Path(os.environ["HOME"])
    (home / ".ssh").mkdir()
    monkeypatch.chdir(home)

    def know(name):
        server = yard.server()
        endpoint = server.endpoint()
        with (home / ".ssh/config").open("a") as config:
            config.write(
                f"Host {name}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {endpoint.user}\n"
                f"  IdentityFile {yard.key}\n  UserKnownHostsFile {home}/.ssh/known_hosts\n"
            )
        with (home / ".ssh/known_hosts").open("a") as hosts:
            hosts.write(f"[127.0.0.1]:{server.port} {endpoint.host_keys[0]}\n")
        return server

    return know


def ssh_processes():
    """Clients that this process started."""
    names = [Path(f"/proc/{pid}/comm") for pid in descendants(os.getpid())]
    return [name.read_text() for name in names if name.exists() and name.read_text().strip() == "ssh"]


def feed(*names):
    return LiveStatus(None, "", "", host_pages(names, Source()))


def test_it_shows_a_gateway_behind_ssh_and_the_next_one_when_that_is_killed(known):
    east, west = Page(known("east"), "east:80"), Page(known("west"), "west:80")
    with feed("east", "west") as ask:
        looks = LiveFeed(ask, None)
        assert looks.look().live.listen == "east:80"
        assert looks.look().moved is None
        east.kill()
        failed = looks.look()
        assert failed.trouble
        look = looks.look()
        assert (look.live.listen, look.trouble) == ("west:80", "")
        line = ScreenView(look, look.at + 5).moved_line()
        assert line.startswith("~ the gateway east:80 does not answer since ")
        assert "no status from http://127.0.0.1:" in line
        assert ScreenView(look, look.at + 7200).moved_line() == ""
        assert ssh_processes()
        west.kill()
        looks.look()
        assert "none of the units on east answers" in looks.look().trouble
    assert eventually(lambda: not ssh_processes())


def test_the_first_host_that_cannot_be_entered_is_said(known):
    known("down").stop()
    Page(known("up"), "up:80")
    with feed("down", "up") as ask:
        assert ask().listen == "up:80"
        assert ask.moved.before == "down"
        assert "127.0.0.1" in ask.moved.why


def test_a_snapshot_of_it_is_printed(known, capsys):
    server = known("login")
    Page(server, "east:80")
    assert main(["top", "--ssh", "login", "--snapshot"]) == 0
    assert "view from the gateway east:80" in capsys.readouterr().out
    assert main(["top", "--ssh", f"127.0.0.1:{server.port}", "--snapshot"]) == 64, "by this name ssh knows no key"
    assert "FT5304" in capsys.readouterr().err


def test_who_is_not_there_is_told_apart(known):
    server = known("login")
    with feed("login") as ask:
        with pytest.raises(FabrictoolError, match="FT5207: no unit was started on login"):
            ask()
        elsewhere = Page(server, "node:80", host="n042")
        with pytest.raises(FabrictoolError, match="run on other machines"):
            ask()
        shutil.rmtree(elsewhere.folder)
        Page(server, "one:80", fabric="one")
        other = Page(server, "two:80", fabric="two")
        with pytest.raises(FabrictoolError, match=r"FT5208: .* one, two"):
            ask()
        (other.folder / "exit.json").write_text("{}")
        assert ask().fabric == "one"


def test_no_other_host_key_will_do(known):
    server = known("login")
    Page(server, "east:80")
    home = Path(os.environ["HOME"])
    hosts = home / ".ssh/known_hosts"
    right = hosts.read_text()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / "other"], check=True)
    wrong = " ".join((home / "other.pub").read_text().split()[:2])
    hosts.write_text(f"[127.0.0.1]:{server.port} {wrong}\n")
    with feed("login") as ask, pytest.raises(FabrictoolError, match="FT5303"):
        ask()
    hosts.write_text(f"{right}@revoked {right}")
    with pytest.raises(FabrictoolError, match="FT5304"):
        feed("login")
    hosts.write_text(right)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", hosts], check=True, capture_output=True)
    assert "127.0.0.1" not in hosts.read_text()
    with feed("login") as ask:
        assert ask().listen == "east:80", "names may be hashed"
    (home / ".ssh/config").write_text("Hots login\n")
    with pytest.raises(FabrictoolError, match="FT5343"):
        feed("login")


def test_mistakes_of_the_command_line(capsys):
    assert main(["top", "http://h:1", "--ssh", "h"]) == 64
    assert "either a URL or --ssh" in capsys.readouterr().err
    assert main(["top", "--demo", "--ssh", "h"]) == 64
    assert main(["top", "--ssh", "-oProxyCommand=x", "--snapshot"]) == 64
    assert "FT9002" in capsys.readouterr().err
