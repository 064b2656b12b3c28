"""One suite for all SSH adapters: the same question to a real sshd has the same answer, whoever carries it."""

import base64
import dataclasses
import os
import pwd
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections.factory import connect
from fabrictool.clusters.connections.identities import certificate_end, check_certificate
from fabrictool.clusters.connections.settings import ConnectionLimits
from tests.clusters.connections.links import Echo, Relay
from tests.clusters.connections.servers import Server, descendants, eventually, new_key, public, sign
from tests.ports import free_port

QUICK = ConnectionLimits(connect_s=3, login_s=10, keepalive_s=1, keepalive_count=2, refused_s=15)
NASTY = [
    "",
    " two  words ",
    "line\nend\r\n",
    "tab\tbell\a",
    "'single' \"double\" `back` $HOME ${x} $(id) !! !x",
    "\\ \\\\ \\n \\0101 %s %% %b",
    "*?[a]{b,c}~#&|;<>()^=",
    "-n",
    "--",
    "ä€😀",
    os.fsdecode(bytes(range(1, 256))),
]


@pytest.fixture(params=["asyncssh", "openssh", "fabric"])
def how(request):
    return request.param


@pytest.fixture
def opened(how):
    """Connections of the adapter under test; what they leave behind when closed is an error."""
    before = set(threading.enumerate())
    children = set(descendants(os.getpid()))
    made = []

    def opened(endpoint, **options):
        made.append(connect(endpoint, how, **{"limits": QUICK, **options}))
        return made[-1]

    opened.made = made
    yield opened
    for connection in made:
        connection.close()
    eventually(lambda: set(threading.enumerate()) <= before)
    servers = set(descendants(os.getpid())) - children
    assert not [pid for pid in servers if Path(f"/proc/{pid}/comm").read_text() == "ssh\n"]


@pytest.fixture
def server(yard):
    return yard.server()


@pytest.fixture
def node(opened, server, yard):
    return opened(server.endpoint(yard.key))


@contextmanager
def fails(code, *, transient, match=None):
    with pytest.raises(FabrictoolError, match=match) as caught:
        yield
    (problem,) = caught.value.problems
    assert (problem.code, problem.transient) == (code, transient), problem
    assert problem.hint
    assert problem.place.thing.startswith("host/")


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# -- commands --------------------------------------------------------------------------------------------------


def test_arguments_arrive_as_they_are(node):
    done = node.run(["printf", "%s\\0", *NASTY])
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in NASTY]
    assert (done.status, done.stderr) == (0, b"")


@pytest.mark.parametrize("shell", ["dash", "csh", "tcsh", "fish", "zsh", "ksh"])
def test_arguments_arrive_through_other_login_shells(opened, yard, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    # sshd's ForceCommand stands for the account's shell: it is run by bash, then this one reads our line.
    server = yard.server(f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"\n')
    done = opened(server.endpoint(yard.key)).run(["printf", "%s\\0", *NASTY])
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in NASTY]


def test_programs_are_the_systems_and_not_the_shells(node):
    assert node.run(["echo", "a\\nb"]).stdout == b"a\\nb\n"


def test_stdin_and_stdout_of_megabytes_are_exact(node):
    data = os.urandom(5_000_000)
    done = node.run(["cat"], stdin=data)
    assert done.stdout == data
    assert node.run(["sha256sum"], stdin=data).stdout[:64] == node.run(["sha256sum"], stdin=done.stdout).stdout[:64]


def test_a_command_need_not_read_its_stdin(node):
    assert node.run(["true"], stdin=b"x" * 5_000_000).status == 0


def test_output_and_errors_are_apart_and_neither_blocks_the_other(node):
    script = "i=0; while [ $i -lt 300 ]; do head -c 1000 /dev/zero; head -c 1000 /dev/zero >&2; i=$((i+1)); done"
    done = node.run(["sh", "-c", script])
    assert (len(done.stdout), len(done.stderr)) == (300_000, 300_000)


@pytest.mark.parametrize("status", [0, 1, 77, 126, 254, 255])
def test_a_status_is_an_answer(node, status):
    done = node.run(["sh", "-c", f"echo out; echo err >&2; exit {status}"])
    assert done == type(done)(status, b"out\n", b"err\n")


@pytest.mark.parametrize(("signal", "status"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
def test_a_signal_is_a_status(node, signal, status):
    assert node.run(["sh", "-c", f"kill -{signal} $$"]).status == status


def test_a_missing_program_is_an_answer(node):
    assert node.run(["ft-no-such-program"]).status == 127
    assert node.run(["/etc/passwd"]).status == 126


def test_commands_begin_at_the_home(node):
    assert node.run(["pwd"]).stdout.strip().decode() == pwd.getpwuid(os.getuid()).pw_dir


def test_a_command_without_a_name_is_a_defect_of_the_caller(node):
    for argv in ([], [""], ["-x"], ["a\0b"]):
        with pytest.raises(ValueError, match="command"):
            node.run(argv)


def test_a_command_that_takes_too_long_is_ended(node):
    node.run(["true"])
    begin = time.monotonic()
    with fails("FT5323", transient=True, match="it was stopped"):
        node.run(["sh", "-c", "trap '' HUP; echo begun; sleep 987 & sleep 987"], timeout_s=1)
    assert time.monotonic() - begin < 60
    assert node.run(["true"]).status == 0


def test_a_slow_shell_is_waited_for(opened, yard):
    server = yard.server('ForceCommand sleep 2; exec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    assert opened(server.endpoint(yard.key)).run(["echo", "x"]).stdout == b"x\n"


def test_noise_of_the_login_shell_is_cut_off(opened, yard):
    noise = yard.folder / "noise"
    noise.write_bytes(b"Welcome!\nno newline at the end: \xff ft-0000")
    server = yard.server(f'ForceCommand cat {noise}; cat {noise} >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    node = opened(server.endpoint(yard.key))
    assert node.run(["sh", "-c", "echo out; echo err >&2"]) == type(node.run(["true"]))(0, b"out\n", b"err\n")
    node.put(b"data", str(yard.folder / "file"))
    assert node.get(str(yard.folder / "file")) == b"data"
    with node.stream(["echo", "line"]) as lines:
        assert list(lines) == [b"line"]


def test_an_account_without_commands_is_told(opened, yard):
    server = yard.server("ForceCommand echo This account is closed.; exit 1\n")
    with fails("FT5324", transient=False, match="This account is closed"):
        opened(server.endpoint(yard.key)).run(["true"])


def test_fifty_commands_at_once_through_ten_sessions(node):
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda number: node.run(["echo", str(number)]).stdout, range(50)))
    assert found == [f"{number}\n".encode() for number in range(50)]


def test_a_refused_session_is_tried_again(opened, yard):
    server = yard.server("MaxSessions 2\n")
    node = opened(server.endpoint(yard.key))
    with ThreadPoolExecutor(8) as pool:
        assert {done.status for done in pool.map(lambda _: node.run(["sleep", "0.2"]), range(8))} == {0}


def test_sessions_that_stay_refused_are_told(opened, yard):
    server = yard.server("MaxSessions 0\n")
    limits = dataclasses.replace(QUICK, refused_s=0.5)
    with fails("FT5322", transient=True):
        opened(server.endpoint(yard.key), limits=limits).run(["true"])


def test_the_agent_stays_here(opened, server, yard, monkeypatch):
    with agent(yard.folder, yard.key) as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        done = opened(server.endpoint()).run(["sh", "-c", "echo agent=$SSH_AUTH_SOCK x=$DISPLAY; tty"])
    assert done.stdout.startswith(b"agent= x=\nnot a tty")


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_files_arrive_whole_with_their_mode(node, tmp_path, size):
    data, path = os.urandom(size), tmp_path / "a file's name"
    path.write_bytes(b"before")
    node.put(data, str(path), mode=0o640)
    assert path.read_bytes() == data == node.get(str(path))
    assert path.stat().st_mode & 0o7777 == 0o640
    assert [found.name for found in tmp_path.iterdir() if found.name.startswith(".ft")] == []


def test_relative_paths_begin_at_the_home(node):
    home = Path(os.fsdecode(node.run(["pwd"]).stdout.strip()))
    name = f"-ft-test-{os.getpid()}"
    try:
        node.put(b"x", name)
        assert node.get(name) == b"x" == (home / name).read_bytes()
    finally:
        (home / name).unlink(missing_ok=True)


def test_what_cannot_be_read_or_written_is_told(node, tmp_path):
    with fails("FT5331", transient=False):
        node.get(str(tmp_path / "nothing"))
    with fails("FT5331", transient=False):
        node.put(b"x", str(tmp_path / "no" / "folder"))
    with fails("FT5334", transient=False, match="directory"):
        node.put(b"x", str(tmp_path))
    with fails("FT5334", transient=False, match="directory"):
        node.get(str(tmp_path))


@contextmanager
def disk(folder, options):
    """A small file system of its own, for which one must be root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_without_rights_is_told(node, tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may write into every folder")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with fails("FT5332", transient=False):
        node.put(b"x", str(closed / "file"))


def test_a_read_only_disk_is_told(node, tmp_path):
    with disk(tmp_path / "disk", "ro") as folder, fails("FT5332", transient=False):
        node.put(b"x", str(folder / "file"))


def test_a_full_disk_leaves_the_old_file(node, tmp_path):
    with disk(tmp_path / "disk", "size=64k") as folder:
        node.put(b"old", str(folder / "file"))
        with fails("FT5333", transient=False):
            node.put(b"x" * 1_000_000, str(folder / "file"))
        assert list(folder.iterdir()) == [folder / "file"]
        assert node.get(str(folder / "file")) == b"old"


def test_a_put_that_breaks_off_leaves_the_old_file(opened, yard, server, tmp_path):
    relay = Relay(server.port)
    node = opened(server.endpoint(yard.key, port=relay.port))
    path = tmp_path / "file"
    path.write_bytes(b"old")
    node.run(["true"])
    relay.limit = 300_000  # then the link goes
    with relay, fails("FT5321", transient=True):
        node.put(os.urandom(3_000_000), str(path))
    assert path.read_bytes() == b"old"
    eventually(lambda: not list(path.parent.glob(".ft-*")))


# -- host keys -------------------------------------------------------------------------------------------------


def test_a_host_key_that_is_not_pinned_is_refused(opened, yard, server):
    other = new_key(yard.folder / "other")
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    with fails("FT5303", transient=False, match=fingerprint.replace("+", r"\+")):
        opened(server.endpoint(yard.key, host_keys=(public(other),))).run(["true"])
    assert "Accepted" not in server.log.read_text()


def test_a_host_key_of_another_kind_is_refused(opened, yard, server):
    other = new_key(yard.folder / "other", "ecdsa")
    with fails("FT5303", transient=False, match="SHA256"):
        opened(server.endpoint(yard.key, host_keys=(public(other),))).run(["true"])


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_one_of_several_pinned_keys_is_enough(opened, yard, kind):
    other, mine = new_key(yard.folder / "other"), new_key(yard.folder / "mine", kind)
    server = yard.server(host_key=mine)
    pinned = (public(other), public(new_key(yard.folder / "third")), public(mine))
    assert opened(server.endpoint(yard.key, host_keys=pinned)).run(["true"]).status == 0


def test_a_changed_host_key_is_refused_after_it_was_accepted(opened, yard, server):
    node = opened(server.endpoint(yard.key))
    node.run(["true"])
    server.stop()
    other = Server(yard.folder / "changed", port=server.port)
    yard.servers.append(other)
    for name in ("authorized", "principals", "user_ca.pub"):
        shutil.copy(server.folder / name, other.folder / name)
    other.start()

    def refused():
        with pytest.raises(FabrictoolError) as caught:
            node.run(["true"])
        return caught.value.problems[0].code == "FT5303"

    eventually(refused)  # the first answer may be that the old connection broke
    assert "Accepted" not in other.log.read_text()


def test_there_is_no_trust_on_first_use(opened, yard, server):
    known = Path(os.environ["HOME"], ".ssh")
    known.mkdir(mode=0o700)
    (known / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {public(server.host_key)}\n")
    with fails("FT5304", transient=False):
        opened(server.endpoint(yard.key, host_keys=())).run(["true"])
    with fails("FT5305", transient=False):
        opened(server.endpoint(yard.key, host_keys=("ssh-ed25519 AAAA",))).run(["true"])


HOST_CERTIFICATES = {
    "good": ({"principals": "127.0.0.1"}, None),
    "another name": ({"principals": "elsewhere"}, "FT5303"),
    "expired": ({"principals": "127.0.0.1", "validity": "-2d:-1d"}, "FT5303"),
}


@pytest.mark.parametrize("case", HOST_CERTIFICATES)
@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_pinned_authority_vouches_for_a_host(opened, yard, case, kind):
    options, code = HOST_CERTIFICATES[case]
    mine = new_key(yard.folder / "mine", kind)
    folder = yard.folder / "server0"
    server = yard.server(
        f"HostCertificate {folder}/host-cert.pub\n",
        host_key=mine,
        prepare=lambda key: sign(yard.host_ca, key, "-h", **options),
    )
    node = opened(server.endpoint(yard.key, host_keys=(f"@cert-authority {public(yard.host_ca)}",)))
    if code is None:
        assert node.run(["true"]).status == 0
        return
    with fails(code, transient=False):
        node.run(["true"])


def test_another_authority_vouches_for_nothing(opened, yard):
    server = yard.server(
        f"HostCertificate {yard.folder}/server0/host-cert.pub\n",
        prepare=lambda key: sign(yard.user_ca, key, "-h", principals="127.0.0.1"),
    )
    pinned = (f"@cert-authority {public(yard.host_ca)}",)
    with fails("FT5303", transient=False):
        opened(server.endpoint(yard.key, host_keys=pinned)).run(["true"])


def test_a_plain_pin_holds_where_the_server_also_has_a_certificate(opened, yard):
    server = yard.server(
        f"HostCertificate {yard.folder}/server0/host-cert.pub\n",
        prepare=lambda key: sign(yard.host_ca, key, "-h", principals="127.0.0.1"),
    )
    assert opened(server.endpoint(yard.key)).run(["true"]).status == 0


# -- logging in ------------------------------------------------------------------------------------------------


@contextmanager
def agent(folder, *keys):
    sock = str(folder / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    try:
        eventually(Path(sock).exists)
        for key in keys:
            subprocess.run(["ssh-add", "-q", key], env=os.environ | {"SSH_AUTH_SOCK": sock}, check=True)
        yield sock
    finally:
        process.terminate()
        process.wait()


def test_an_unknown_key_is_refused(opened, yard, server):
    with fails("FT5306", transient=False, match="refused the login"):
        opened(server.endpoint(new_key(yard.folder / "stranger"))).run(["true"])


def test_no_key_at_all_is_refused(opened, server):
    with fails("FT5306", transient=False):
        opened(server.endpoint()).run(["true"])


def test_a_missing_key_file_is_told(opened, server):
    with fails("FT5309", transient=False):
        opened(server.endpoint("~/nothing")).run(["true"])


def test_a_locked_key_is_told(opened, yard, server):
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", yard.key], check=True)
    with fails("FT5309", transient=False, match="passphrase"):
        opened(server.endpoint(yard.key)).run(["true"])


def test_a_locked_key_that_the_agent_holds_opens(opened, yard, server, monkeypatch):
    with agent(yard.folder, yard.key, new_key(yard.folder / "other")) as sock:
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", yard.key], check=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        assert opened(server.endpoint(yard.key)).run(["true"]).status == 0


def test_the_usual_keys_are_tried(opened, yard, server):
    folder = Path(os.environ["HOME"], ".ssh")
    folder.mkdir(mode=0o700)
    for end in ("", ".pub"):
        shutil.copy(f"{yard.key}{end}", folder / f"id_ed25519{end}")
    assert opened(server.endpoint()).run(["true"]).status == 0


@pytest.mark.parametrize(
    ("validity", "code"), [("-1h:+1h", None), ("-2d:-1d", "FT5307"), ("+1d:+2d", "FT5307"), ("-1h:+1h", "FT5306")]
)
def test_a_certificate_opens_while_it_is_valid(opened, yard, server, validity, code):
    mine = new_key(yard.folder / "mine")
    sign(yard.host_ca if code == "FT5306" else yard.user_ca, mine, validity=validity)
    node = opened(server.endpoint(mine))
    if code is None:
        assert node.run(["true"]).status == 0
        return
    with fails(code, transient=False):
        node.run(["true"])


def test_a_certificate_of_the_agent_opens(opened, yard, server, monkeypatch):
    mine = new_key(yard.folder / "mine")
    sign(yard.user_ca, mine, validity="-1h:+1h")
    with agent(yard.folder, mine) as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        assert opened(server.endpoint()).run(["true"]).status == 0
        assert 3000 < certificate_end(server.endpoint()) - time.time() < 3601


# -- the way there ---------------------------------------------------------------------------------------------


def test_a_refused_port_is_told(opened, server, yard):
    with fails("FT5301", transient=True):
        opened(server.endpoint(yard.key, port=free_port())).run(["true"])


def test_an_unknown_name_is_told(opened, server, yard):
    with fails("FT5301", transient=True):
        opened(server.endpoint(yard.key, host="ft-no-such-host.invalid")).run(["true"])


def test_a_name_that_is_an_option_is_refused(opened, server, yard):
    for change in ({"host": "-oProxyCommand=x"}, {"user": "-l"}, {"host": "a b"}, {"user": "a\nb"}):
        with fails_anywhere("FT5313"):
            opened(server.endpoint(yard.key, **change))


@contextmanager
def fails_anywhere(code):
    with pytest.raises(FabrictoolError) as caught:
        yield
    assert caught.value.problems[0].code == code


def test_a_port_that_says_nothing_is_told(opened, server, yard):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        limits = dataclasses.replace(QUICK, connect_s=1, login_s=1)
        endpoint = server.endpoint(yard.key, port=silent.getsockname()[1])
        with fails("FT5302", transient=True):
            opened(endpoint, limits=limits).run(["true"])


def test_a_port_that_speaks_no_ssh_is_told(opened, server, yard):
    with Relay(server.port, greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n") as relay:
        with pytest.raises(FabrictoolError) as caught:
            opened(server.endpoint(yard.key, port=relay.port)).run(["true"])
        assert caught.value.problems[0].code in {"FT5301", "FT5310"}


@contextmanager
def while_it_runs(folder, act):
    """A command that says when it runs; only then is `act` called, however slow the machine is."""
    sign = folder / "runs"

    def wait():
        eventually(sign.exists)
        act()

    watcher = threading.Thread(target=wait)
    watcher.start()
    try:
        yield ["sh", "-c", 'touch "$1"; sleep 50', "sh", str(sign)]
    finally:
        watcher.join()


def test_a_cut_is_told_and_mended_by_the_next_command(node, server, tmp_path):
    told = fails("FT5321", transient=True, match="whether it ran is not known")
    with while_it_runs(tmp_path, server.cut) as command, told:
        node.run(command)
    assert node.run(["echo", "again"]).stdout == b"again\n"


def test_a_cut_between_commands_is_mended(node, server):
    node.run(["true"])
    server.cut()
    codes = []

    def works():
        try:
            return node.run(["true"]).status == 0
        except FabrictoolError as error:
            codes.append(error.problems[0].code)
            return False

    eventually(works)
    assert set(codes) <= {"FT5321"}


def test_a_silent_link_is_found_by_keepalives(opened, server, yard, tmp_path):
    with Relay(server.port) as relay:
        node = opened(server.endpoint(yard.key, port=relay.port))
        with while_it_runs(tmp_path, relay.silent.set) as command, fails("FT5321", transient=True):
            node.run(command, timeout_s=40)


def test_a_chain_of_hosts_each_with_its_own_keys(opened, yard):
    first, second, last = yard.server(), yard.server(), yard.server()
    jumps = (first.endpoint(yard.key), second.endpoint(yard.key))
    node = opened(last.endpoint(yard.key, jumps=jumps))
    assert node.run(["echo", "x"]).stdout == b"x\n"
    with node.forward("127.0.0.1", first.port) as address:
        assert banner(address).startswith(b"SSH-2.0")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_key_on_the_way_is_refused_there(opened, yard, wrong):
    servers = [yard.server(), yard.server(), yard.server()]
    stranger = (public(new_key(yard.folder / "other")),)
    jumps = [server.endpoint(yard.key) for server in servers[:2]]
    jumps[wrong] = servers[wrong].endpoint(yard.key, host_keys=stranger)
    with fails("FT5303", transient=False, match=f":{servers[wrong].port} shows"):
        opened(servers[2].endpoint(yard.key, jumps=tuple(jumps))).run(["true"])
    assert "Accepted" not in servers[wrong].log.read_text()


def test_a_host_that_the_last_jump_cannot_reach_is_told(opened, yard, server):
    port = free_port()
    endpoint = server.endpoint(yard.key, port=port, jumps=(server.endpoint(yard.key),))
    with fails("FT5301", transient=True, match=f":{port} "):
        opened(endpoint).run(["true"])


# -- forwards and streams --------------------------------------------------------------------------------------


def banner(address):
    with socket.create_connection(address, 10) as there:
        return there.recv(100)


def test_a_forward_leads_there_while_it_lasts(node, server):
    with node.forward("127.0.0.1", server.port) as address:
        assert address[0] == "127.0.0.1"
        assert [banner(address)[:4] for _ in range(3)] == [b"SSH-"] * 3
        assert node.run(["true"]).status == 0
    with pytest.raises(OSError, match="refused"):
        banner(address)


def test_a_forward_carries_megabytes_both_ways(node):
    data = os.urandom(2_000_000)
    with (
        Echo() as echo,
        node.forward("127.0.0.1", echo.port) as address,
        socket.create_connection(address, 10) as there,
    ):
        sender = threading.Thread(target=lambda: (there.sendall(data), there.shutdown(socket.SHUT_WR)))
        sender.start()
        back = b"".join(iter(lambda: there.recv(1 << 16), b""))
        sender.join()
    assert back == data


def test_lines_come_as_they_are_said_and_leaving_ends_the_command(node):
    with node.stream(["sh", "-c", "echo $$; echo; echo b; sleep 986 & exec sleep 987"]) as lines:
        pid = int(next(lines))
        assert [next(lines), next(lines)] == [b"", b"b"]
        assert not gone(pid)
    eventually(lambda: gone(pid))
    assert node.run(["true"]).status == 0


def test_a_stream_that_ends_is_over(node):
    with node.stream(["printf", "a\\nb"]) as lines:
        assert list(lines) == [b"a", b"b"]


def test_a_stream_that_breaks_says_so_and_ends_the_command(node, server):
    with node.stream(["sh", "-c", "echo $$; exec sleep 987"]) as lines:
        pid = int(next(lines))
        for session in server.sessions():  # the processes of the login node that serve us; the command lives on
            for part in (
                *[p for p in descendants(session) if Path(f"/proc/{p}/comm").read_text() == "sshd\n"],
                session,
            ):
                os.kill(part, 9)
        with fails("FT5321", transient=True):
            list(lines)
    eventually(lambda: gone(pid))


def test_streams_do_not_starve_commands(node):
    from contextlib import ExitStack

    with ExitStack() as stack:
        for _ in range(5):
            lines = stack.enter_context(node.stream(["sh", "-c", "echo x; exec sleep 987"]))
            assert next(lines) == b"x"
        assert node.run(["echo", "y"]).stdout == b"y\n"


def test_close_is_not_the_end(node):
    node.close()
    assert node.run(["echo", "a"]).stdout == b"a\n"
    node.close()
    node.close()
    with node:
        assert node.run(["echo", "b"]).stdout == b"b\n"


# -- certificates before planning ----------------------------------------------------------------------------------


def test_a_certificate_that_would_end_in_the_middle_is_refused_before(yard, server):
    mine = new_key(yard.folder / "mine")
    endpoint, now = server.endpoint(mine), time.time()
    assert certificate_end(endpoint) is None
    check_certificate(endpoint, now, 1e9)
    sign(yard.user_ca, mine, validity="-1h:+2h")
    end = certificate_end(endpoint)
    assert 7100 < end - now < 7300
    check_certificate(endpoint, now, 3600)
    with fails("FT5308", transient=False):
        check_certificate(endpoint, now, 3 * 3600)
    with fails("FT5307", transient=False, match="expired"):
        check_certificate(endpoint, end, 0)
    with fails("FT5307", transient=False, match="not valid before"):
        check_certificate(endpoint, now - 2 * 3600, 0)
    with fails("FT5308", transient=False):
        check_certificate(server.endpoint(yard.key, jumps=(endpoint,)), now, 3 * 3600)


def test_a_pin_names_its_fingerprint(yard):
    from fabrictool.clusters.connections.pins import fingerprint

    blob = base64.b64decode(public(yard.key).split()[1])
    shown = subprocess.run(["ssh-keygen", "-lf", f"{yard.key}.pub"], capture_output=True, text=True, check=True).stdout
    assert fingerprint(blob) in shown
