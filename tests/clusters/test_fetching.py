"""Weights fetched on a site: the real program, from a fake hub, here and over a real sshd; broken off in every way."""

import ast
import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.clusters.connections.factory import connect
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.weights import fetch
from fabrictool.clusters.weights.depot import ThisMachine, WeightsDepot, set_name
from fabrictool.clusters.weights.fetching import FetchAtLogin, FetchHere, FetchInJob, partition_of
from fabrictool.clusters.weights.listing import parse_listing
from fabrictool.clusters.weights.room import free_octets
from fabrictool.clusters.weights.sources import UrlSource, lock_remote, remote_source
from fabrictool.domain.inventory import ClusterSpec
from tests.clusters.connections.conftest import _sshd, yard  # noqa: F401 - fixtures
from tests.clusters.fake_hub import (
    COMMIT,
    REPOSITORY,
    TOKEN,
    FakeHost,
    FakeHub,
    cut_after,
    says,
    send_file,
    without_ranges,
    wrong_octet,
)

LARGE = 70_000
BIG = "parts/one of two.safetensors"


@pytest.fixture
def files():
    rng = random.Random()
    return {"config.json": rng.randbytes(300), BIG: rng.randbytes(LARGE), "empty.txt": b""}


@pytest.fixture
def cdn():
    host = FakeHost()
    yield host
    host.stop()


@pytest.fixture
def hubs(cdn, files):
    made = []

    def make(**options):
        made.append(FakeHub(cdn, files, **options))
        return made[-1]

    yield make
    for hub in made:
        hub.stop()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """No token of the person who runs the tests, no proxy; tries come soon."""
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_ENDPOINT", "XDG_CACHE_HOME", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "pause", lambda tries, asked_s: asked_s or 0.0)


def locked(hub, **environment):
    return lock_remote(
        remote_source(f"hf://{REPOSITORY}@main"), {"HF_ENDPOINT": hub.url, **environment}, lambda *_: None
    )


class Impatient:
    """A way whose program pauses for nearly no time between tries."""

    def __init__(self, way):
        self.way = way

    def run(self, control, wanted, tell):
        return self.way.run(control, {**wanted, "pause": 0.001, "watch_s": 2.0}, tell)


def depot_of(tmp_path, hub):
    return WeightsDepot("here", str(tmp_path / "depot"), ThisMachine(), hub.url)


def fetched(tmp_path, hub, way=None, tell=lambda _: None):
    source, listing = locked(hub)
    depot = depot_of(tmp_path, hub)
    new = depot.fetch(listing, source, Impatient(way or FetchHere()), tell)
    return new, listing


def whole(tmp_path, listing, files):
    folder = tmp_path / "depot" / set_name(listing.sha256)
    assert {name: (folder / name).read_bytes() for name in files} == files
    (compared,) = WeightsDepot("here", str(tmp_path / "depot"), ThisMachine()).compare([folder.name], everything=True)
    assert compared.condition == "whole"
    assert sorted(path.name for path in (tmp_path / "depot").iterdir()) == [folder.name], "nothing else is left there"


# -- the list -----------------------------------------------------------------------------------------------------


def test_a_branch_becomes_a_commit_and_large_files_are_not_downloaded(hubs, cdn, files):
    hub = hubs()
    source, listing = locked(hub)
    assert source.text == f"hf://{REPOSITORY}@{COMMIT}"
    assert {file.name: file.sha256 for file in listing.files} == {
        name: hashlib.sha256(body).hexdigest() for name, body in files.items()
    }
    assert listing.octets == sum(map(len, files.values()))
    assert cdn.asked == []


def test_what_is_written_holds_sizes_and_is_still_a_list_of_sha256sum(hubs, files, tmp_path):
    _, listing = locked(hubs())
    read = parse_listing(listing.document, "f")
    assert (read.octets, read.sha256) == (listing.octets, listing.sha256)
    for name, body in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(body)
    subprocess.run(["sha256sum", "--strict", "-c"], input=listing.document, cwd=tmp_path, text=True, check=True)


def test_an_address_of_a_folder_has_its_own_list(cdn):
    body = b"weights"
    digest = hashlib.sha256(body).hexdigest()
    cdn.pages["/f/SHA256SUMS"] = (f"{digest} *a.gguf\n".encode(), {})
    cdn.files["/b.gguf"] = body
    _, listing = lock_remote(UrlSource(f"{cdn.url}/f/"), {}, lambda *_: None)
    assert [(file.name, file.sha256) for file in listing.files] == [("a.gguf", digest)]
    cdn.once(lambda handler, path, body: send_file(handler, body, cut=3))
    _, listing = lock_remote(UrlSource(f"{cdn.url}/b.gguf?x=1"), {}, lambda *_: None)
    assert [(file.name, file.sha256, file.octets) for file in listing.files] == [("b.gguf", digest, 7)]


def test_a_private_repository_needs_a_token_which_is_in_no_error(hubs, tmp_path):
    hub = hubs(private=True)
    with pytest.raises(InvalidInputError, match=r"FT5608.*401: there is no token"):
        locked(hub)
    with pytest.raises(InvalidInputError, match="does not open it") as refused:
        locked(hub, HF_TOKEN="hf_another")
    assert "hf_another" not in str(refused.value)
    (tmp_path / "t").write_text(f"{TOKEN}\n")
    assert locked(hub, HF_TOKEN_PATH=str(tmp_path / "t"))[1].octets
    with pytest.raises(InvalidInputError, match=r"FT5608.*404"):
        lock_remote(remote_source("hf://org/other"), {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}, lambda *_: None)


@pytest.mark.parametrize("text", ["hf://org", "hf://org/name@", "hf://../x/y", "https://me:planted@host/f"])
def test_what_is_no_source_is_refused(text):
    with pytest.raises(InvalidInputError, match="FT5602") as refused:
        remote_source(text)
    assert "planted" not in str(refused.value)


def test_the_program_needs_no_more_than_it_says():
    ast.parse(Path(fetch.__file__).read_text(), feature_version=(3, 8))
    alone = [sys.executable, "-I", "-S", fetch.__file__, "/nowhere.json"]
    assert "FileNotFoundError" in subprocess.run(alone, capture_output=True, text=True, check=False).stderr


# -- HTTP ---------------------------------------------------------------------------------------------------------


def test_a_token_goes_to_the_hub_and_never_on_to_another_host(hubs, cdn, tmp_path, monkeypatch):
    hub = hubs(private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    source, listing = locked(hub, HF_TOKEN=TOKEN)
    depot_of(tmp_path, hub).fetch(listing, source, FetchHere(), lambda _: None)
    assert all(headers.get("Authorization") == f"Bearer {TOKEN}" for _, headers in hub.asked)
    assert cdn.asked
    assert not [headers for _, headers in cdn.asked if TOKEN in str(headers)]
    assert TOKEN not in "".join(path.read_text() for path in (tmp_path / "depot").rglob(".*") if path.is_file())


def test_a_redirect_within_the_hub_keeps_the_token(hubs, files):
    hub = hubs(private=True)
    hub.redirected["/old"] = f"{hub.url}/{REPOSITORY}/resolve/{COMMIT}/config.json"
    web = fetch.Web({"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN})
    assert web.read(f"{hub.url}/old")[0] == files["config.json"]
    hub.redirected["/away"] = "file:///etc/passwd"
    with pytest.raises(fetch.FetchRefusedError):
        web.read(f"{hub.url}/away")


@pytest.mark.parametrize(
    ("url", "confidential"),
    [("https://hub.example", True), ("http://127.0.0.1:1", True), ("http://hub.example", False)],
)
def test_a_token_is_sent_only_where_nobody_reads_along(url, confidential):
    assert fetch.confidential(url) is confidential


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("99999", 600.0), ("Tue, 24 Nov 2026 00:00:30 GMT", 30.0), ("Mon, 23 Nov 2026 00:00:00 GMT", 0.0),
     ("soon", None), ("", None)],
)  # fmt: skip
def test_how_long_a_server_wants_us_to_wait(value, seconds):
    assert fetch.retry_after(value, 1795478400.0) == seconds


# -- the program here ---------------------------------------------------------------------------------------------


def test_all_arrives_and_a_second_time_asks_nobody(hubs, cdn, files, tmp_path):
    hub, states = hubs(), []
    new, listing = fetched(tmp_path, hub, tell=lambda told: states.append(told.state))
    assert new
    assert states[-1] == "staged"
    whole(tmp_path, listing, files)
    before = len(cdn.asked)
    assert fetched(tmp_path, hub)[0] is False
    assert len(cdn.asked) == before


@pytest.mark.parametrize(
    "fault",
    [
        cut_after(33_000),
        cut_after(0),
        cut_after(33_000, ranges=False),
        says(503, {"Retry-After": "0"}),
        says(429, {"Retry-After": "1"}),
        says(500),
        wrong_octet,
        without_ranges,
    ],
    ids=["cut", "cut-at-once", "cut-without-ranges", "503", "429", "500", "wrong-octet", "no-ranges"],
)
def test_what_passes_is_tried_again_until_all_is_there(hubs, cdn, files, tmp_path, fault):
    cdn.once(fault)
    cdn.once(cut_after(20_000))
    _, listing = fetched(tmp_path, hubs())
    whole(tmp_path, listing, files)


def test_after_a_cut_only_the_rest_is_asked_for(hubs, cdn, tmp_path):
    cdn.once(cut_after(33_000))
    fetched(tmp_path, hubs())
    assert [headers.get("Range") for _, headers in cdn.asked] == [None, "bytes=33000-"]


def test_a_server_that_cannot_go_on_begins_again(hubs, cdn, files, tmp_path):
    cdn.once(cut_after(33_000))
    cdn.faults.append(without_ranges)
    _, listing = fetched(tmp_path, hubs())
    whole(tmp_path, listing, files)


def test_retry_after_is_heeded_and_told(hubs, cdn, tmp_path):
    cdn.once(says(503, {"Retry-After": "20"}))
    told = []
    fetched(tmp_path, hubs(), tell=told.append)
    waits = [one.text for one in told if one.state == "waiting"]
    assert len(waits) == 1
    assert "503" in waits[0]
    assert "X-Signature" not in waits[0]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (says(403), "FT5608", "403"),
        (says(404), "FT5608", "404"),
        (says(503), "FT5608", "503"),
        (lambda handler, path, body: send_file(handler, body + b"x"), "FT5608", "when it was listed"),
        (wrong_octet, "FT5604", "one of two"),
        (cut_after(0), "FT5608", "broke"),
    ],
    ids=["denied", "absent", "overloaded", "larger", "wrong", "cut"],
)
def test_what_does_not_pass_is_said_and_what_is_there_is_kept(hubs, cdn, files, tmp_path, fault, code, words):
    hub = hubs()
    cdn.faults.append(fault)
    with pytest.raises(FabrictoolError, match=f"{code}.*{words}"):
        fetched(tmp_path, hub)
    _, listing = locked(hub)
    part = tmp_path / "depot" / f"part-{set_name(listing.sha256)}"
    assert (part / "config.json").read_bytes() == files["config.json"]
    assert not (part / BIG).exists()
    cdn.faults.clear()
    fetched(tmp_path, hub)
    whole(tmp_path, listing, files)


def test_a_disk_that_is_full_is_said_at_once(hubs, cdn, tmp_path):
    argv, listing = program_of(tmp_path, hubs())
    part = tmp_path / "depot" / f"part-{set_name(listing.sha256)}" / f"{BIG}.part"
    part.symlink_to("/dev/full")
    last = json.loads(subprocess.run(argv, capture_output=True, check=False).stdout.splitlines()[-1])
    assert (last["state"], last["kind"]) == ("failed", "full")
    assert "No space left" in last["text"]
    assert len(cdn.asked) == 1


# -- killed, and two at once --------------------------------------------------------------------------------------


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Slow:
    """Large files stop in the middle until they may go on."""

    def __init__(self, host):
        self.middle, self.go_on = threading.Event(), threading.Event()
        host.faults.append(self)
        self._host = host

    def __call__(self, handler, path, body):
        if len(body) < 10_000 or handler.headers.get("Range"):
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        self.middle.set()
        self.go_on.wait(30)
        with contextlib.suppress(OSError):
            handler.wfile.write(body[len(body) // 2 :])
        handler.close_connection = True
        return True


def program_of(tmp_path, hub):
    """A fetching program as a site runs it, and the part of the set that it fills."""
    kept = []

    class Kept(Exception):  # noqa: N818
        pass

    class Keep:
        def run(self, control, wanted, tell):
            folder = tmp_path / "run"
            folder.mkdir(exist_ok=True)
            document = {**wanted, "lock": f"{control}/lock", "progress": f"{folder}/progress", "watch_s": 8.0}
            (folder / "wanted.json").write_text(json.dumps(document))
            kept.append([sys.executable, "-I", fetch.__file__, str(folder / "wanted.json")])
            raise Kept

    source, listing = locked(hub)
    with pytest.raises(Kept):
        depot_of(tmp_path, hub).fetch(listing, source, Keep(), lambda _: None)
    return kept[0], listing


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_it_goes_on_where_it_stopped(hubs, cdn, files, tmp_path, sign):
    hub, slow = hubs(), Slow(cdn)
    argv, listing = program_of(tmp_path, hub)
    part = tmp_path / "depot" / f"part-{set_name(listing.sha256)}" / f"{BIG}.part"
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as first:
        assert slow.middle.wait(30)
        until(lambda: part.exists() and part.stat().st_size > 0)
        first.send_signal(sign)
        out = first.communicate()[0]
    stored = part.stat().st_size
    slow.go_on.set()
    if sign == signal.SIGTERM:
        assert json.loads(out.splitlines()[-1])["state"] == "ended"
    assert fetched(tmp_path, hub)[0]
    assert [headers.get("Range") for _, headers in cdn.asked] == [None, f"bytes={stored}-"]
    whole(tmp_path, listing, files)


@pytest.mark.parametrize("follows", [False, True])
def test_one_at_a_time_fetches_a_set(hubs, cdn, tmp_path, follows):
    hub, slow = hubs(), Slow(cdn)
    argv, listing = program_of(tmp_path, hub)
    lock = tmp_path / "depot" / f".fetch-{set_name(listing.sha256)}" / "lock"
    if follows:  # one that died an hour ago
        lock.parent.mkdir()
        with subprocess.Popen(["true"]) as dead:
            pass
        lock.write_text(f"{socket.gethostname()} {dead.pid} abc 00000003\n")
        os.utime(lock, (time.time() - 3600,) * 2)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as first:
        assert slow.middle.wait(30)
        with pytest.raises(FabrictoolError, match="FT5609"):
            depot_of(tmp_path, hub).fetch(listing, locked(hub)[0], FetchHere(), lambda _: None)
        with pytest.raises(FabrictoolError, match="FT5609"):
            depot_of(tmp_path, hub).stage(listing, {}, lambda *_: None)
        slow.go_on.set()
        out = first.communicate()[0]
    assert json.loads(out.splitlines()[-1])["state"] == "staged"
    assert not list(lock.parent.glob("lock*"))


def test_a_lock_of_another_machine_that_says_nothing_more_is_taken_over(hubs, files, tmp_path):
    hub = hubs()
    _, listing = locked(hub)
    control = tmp_path / "depot" / f".fetch-{set_name(listing.sha256)}"
    control.mkdir(parents=True)
    (control / "lock").write_text("another-node 17 abc 00000003\n")
    assert fetched(tmp_path, hub)[0]
    whole(tmp_path, listing, files)


@pytest.mark.parametrize("left", ["another-node 17 abc 00000003\n", "", None])
def test_of_many_that_want_a_lock_one_has_it(tmp_path, left):
    lock = tmp_path / "lock"
    if left is not None:
        lock.write_text(left)
    inside, held, most = [], [], []

    def want():
        try:
            with fetch.SetLock(str(lock), watch_s=1.0, beat_s=0.05):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.5)
                inside.pop()
        except fetch.HeldByAnotherError:
            held.append(1)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(held) == 6
    assert not list(tmp_path.iterdir())


def test_who_watched_a_dead_holder_for_long_takes_nothing_from_who_followed_it(tmp_path, monkeypatch):
    """Another goes its whole way in front of each step of the first. Time passes only where a lock waits, and whoever
    holds it writes into it meanwhile.
    """
    path, read, ends = str(tmp_path / "lock"), fetch._read, []
    now, beats = [0.0], itertools.count(1)

    def sleeping(seconds):
        now[0] += seconds
        for holder in holders:
            holder._write(next(beats))

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleeping))
    for interrupted in range(30):
        (tmp_path / "lock").write_text("another-node 17 abc 00000003\n")
        late, quick = (fetch.SetLock(path, watch_s=2.0, beat_s=3600.0) for _ in range(2))
        steps, holders = itertools.count(), []

        def reading(name, steps=steps, holders=holders, quick=quick, interrupted=interrupted):
            if threading.current_thread() is threading.main_thread() and next(steps) == interrupted:
                with contextlib.suppress(fetch.HeldByAnotherError):
                    holders.append(quick.__enter__())
            return read(name)

        monkeypatch.setattr(fetch, "_read", reading)
        with contextlib.suppress(fetch.HeldByAnotherError), late:
            ends.append("late, holding" if holders else "late")
        if holders:
            ends.append("quick" if quick._mine() else "quick, lost")
            quick.__exit__()
        assert not list(tmp_path.iterdir())
    assert set(ends) == {"late", "quick"}


def test_who_was_stopped_for_long_learns_that_another_follows(tmp_path):
    path = str(tmp_path / "lock")
    stopped, new = fetch.SetLock(path, watch_s=0.1, beat_s=3600.0), fetch.SetLock(path, watch_s=0.1, beat_s=0.01)
    with stopped, new:
        assert not stopped._mine()
        assert new._mine()


@pytest.mark.parametrize(("call", "number"), [("pwrite", errno.ENOSPC), ("link", errno.EPERM)])
def test_a_lock_that_cannot_be_written_is_said_and_leaves_nothing(hubs, tmp_path, monkeypatch, capsys, call, number):
    """A full disk, and a file system without hard links."""
    wanted = json.loads(Path(program_of(tmp_path, hubs())[0][-1]).read_text())
    folder = Path(wanted["lock"]).parent

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    assert fetch.Fetcher(wanted, {}).run() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["state"], last["kind"]) == ("failed", "full" if call == "pwrite" else "refused")
    assert os.strerror(number) in last["text"]
    assert not list(folder.glob("lock*"))


# -- room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "kibibytes"),
    [
        ({"space": ["1000 /dev/a"]}, 1000),
        ({"space": ["1000 /dev/a"], "quota": ["Disk quotas", "/dev/a 300 0 500 4 0 0", "/dev/b 0 1 1 1 0 0"]}, 200),
        ({"space": ["1000 /dev/a"], "quota": ["/dev/a 900* 800 900 6days 4 0 0"]}, 0),
        ({"space": ["1000 /dev/a"], "quota": ["/dev/a 300 0 0 4 0 0"]}, 1000),
        ({"space": ["1000 x@tcp:/l"], "lustre": ["/l/u 100 0 900 - 1 0 0 -", "/l/u [50] 120 0 - 1 0 0 -", ""]}, 70),
        ({"space": ["1000 x@tcp:/l"], "lustre": ["Cannot resolve path", "/l/u - - -"]}, 1000),
        ({"lustre": ["/l/u 100 0 900 - 1 0 0 -"]}, 800),
        ({}, None),
    ],
)  # fmt: skip
def test_the_room_that_space_and_quotas_leave(sections, kibibytes):
    expected = 0 if kibibytes is None else max(1, kibibytes << 10)
    assert free_octets(sections) == expected


# -- over a real sshd ---------------------------------------------------------------------------------------------


def site_of(tmp_path, **changes):
    partition = {"device": "cpu", "nodes": 1, "memory_per_node": "1GiB"}
    described = {
        "site": "s", "kind": "ssh", "weights": str(tmp_path / "depot"), "folder": str(tmp_path / "ft"),
        "software": {"python": {"venv": sys.prefix}}, "partitions": {"cpu": partition},
    } | changes  # fmt: skip
    return ClusterSpec.model_validate(described)


@pytest.fixture
def connection(yard):  # noqa: F811
    server = yard.server()
    with connect(server.endpoint(str(yard.key))) as opened:
        yield opened


@pytest.mark.parametrize("how", ["login", "job"])
def test_on_a_site_it_arrives_with_what_its_environment_says(hubs, files, tmp_path, connection, how):
    hub = hubs()
    other = FakeHost()  # a proxy that the site's environment names: it is asked for addresses of other hosts
    try:
        other.answer = lambda handler: send_file(handler, b"through the proxy")
        described = site_of(tmp_path, environment={"set": {"http_proxy": other.url, "no_proxy": "127.0.0.1"}})
        way = {"login": FetchAtLogin, "job": FetchInJob}[how]("box", described, connection, Processes())
        if how == "job":
            way._poll_s = 0.1
        _, listing = fetched(tmp_path, hub, way)
        whole(tmp_path, listing, files)
        digest = hashlib.sha256(b"through the proxy").hexdigest()
        source = UrlSource("http://weights.example/a.gguf")
        listing = parse_listing(f"{digest}  a.gguf\n", "f")
        assert depot_of(tmp_path, hub).fetch(listing, source, Impatient(way), lambda _: None)
        assert [path for path, _ in other.asked] == ["http://weights.example/a.gguf"]
    finally:
        other.stop()


@pytest.mark.parametrize("how", ["login", "job"])
def test_ctrl_c_ends_what_runs_there_and_keeps_what_arrived(hubs, cdn, files, tmp_path, connection, how):
    hub, slow = hubs(), Slow(cdn)
    way = {"login": FetchAtLogin, "job": FetchInJob}[how]("box", site_of(tmp_path), connection, Processes())
    if how == "job":
        way._poll_s = 0.1

    def press():
        slow.middle.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        fetched(tmp_path, hub, way)
    pressing.join()
    mark = f"{tmp_path}/depot/.fetch"
    until(lambda: subprocess.run(["pgrep", "-f", mark], capture_output=True, check=False).returncode)
    slow.go_on.set()
    assert fetched(tmp_path, hub, way)[0]
    _, listing = locked(hub)
    whole(tmp_path, listing, files)


def test_a_job_that_a_killed_command_left_is_awaited(hubs, cdn, files, tmp_path, connection):
    hub, slow = hubs(), Slow(cdn)
    described = site_of(tmp_path)

    class Killed(FetchInJob):
        """Ends like a command that was killed: nothing is cancelled or removed."""

        def _cancel(self, *_):
            pass

        def _clean(self, *_):
            pass

    def stop(_):
        if slow.middle.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetched(tmp_path, hub, Killed("box", described, connection, Processes(), poll_s=0.1), tell=stop)
    queued = []

    def tell(told):
        queued.append(told)
        slow.go_on.set()

    asked = len(cdn.asked)
    _, listing = fetched(tmp_path, hub, FetchInJob("box", described, connection, Processes(), poll_s=0.1), tell=tell)
    whole(tmp_path, listing, files)
    assert len(cdn.asked) == asked, "nothing was fetched anew"


def test_a_program_that_cannot_begin_says_why(hubs, tmp_path, connection):
    described = site_of(tmp_path, software={"python": {"venv": "/nowhere"}})
    with pytest.raises(FabrictoolError, match=r"FT5608.*nowhere"):
        fetched(tmp_path, hubs(), FetchAtLogin("box", described, connection, Processes()))


def test_the_partition_of_a_job():
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "1GiB"}
    partitions = {"gpu": {"device": "a100-sxm-80gb", "nodes": 1}, "cpu": cpu}
    described = ClusterSpec.model_validate({"site": "s", "kind": "slurm", "partitions": partitions})
    assert partition_of(described) == "cpu"
    wanted = {"weights": "/w", "weights_partition": "gpu"}
    described = ClusterSpec.model_validate({"site": "s", "kind": "slurm", "partitions": partitions} | wanted)
    assert partition_of(described) == "gpu"
