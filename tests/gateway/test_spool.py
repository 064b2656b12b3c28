"""Records reach the store once, whatever dies on the way."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Boolean, func, select

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway import inserting
from fabrictool.gateway.records import RequestRecord, StoreAwayError
from fabrictool.gateway.segments import Cursor, Segments, read_lines
from fabrictool.gateway.spool import RecordSpool
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.tables import COLUMNS, REQUESTS

COUNT = select(func.count(), func.sum(REQUESTS.c.prompt_tokens)).select_from(REQUESTS)


def record(number, **more):
    return RequestRecord(f"r{number}", 1e9 + number, "/v1/completions", 200, "answered", 0.1, prompt_tokens=2, **more)


def test_a_folder_without_segments_has_no_lines(tmp_path):
    """As a full disk leaves it: the folder was made, and no segment."""
    assert read_lines(tmp_path, Cursor(3, 40), 1000) == (b"", Cursor(3, 40))


def test_what_is_left_of_a_disk_is_left_to_others(tmp_path, monkeypatch):
    """tmpfs gives an allocation all that it has before it fails, and whoever writes meanwhile fails, too."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("allocated"))
    room = os.statvfs(tmp_path)
    segments = Segments(tmp_path, segment_octets=2 * room.f_bavail * room.f_frsize // 3, most_octets=1 << 62)
    with pytest.raises(OSError, match="No space left"):
        segments.prepare()
    assert list(tmp_path.iterdir()) == []


class Flaky:
    """A store that can be sent away, also after it has taken a batch and before it has said so."""

    def __init__(self, path):
        self.path = path
        self.process = StoreProcess(lambda: str(path))
        self.away = self.forgets = False

    def put(self, fabric, gateway, lines):
        if self.away:
            raise StoreAwayError.of("FT8120", "away")
        bad = self.process.put(fabric, gateway, lines)
        if self.forgets:
            self.forgets = False
            raise StoreAwayError.of("FT8120", "the connection was lost")
        return bad

    def ids(self):
        store = RecordStore(str(self.path), read_only=True)
        try:
            return sorted(row[0] for row in store.read(select(REQUESTS.c.id)))
        finally:
            store.close()


@pytest.fixture
def store(tmp_path):
    flaky = Flaky(tmp_path / "records.db")
    yield flaky
    flaky.process.close()


def spool_of(tmp_path, store, **more):
    return RecordSpool(tmp_path / "spool", store, fabric="f", gateway="g", **more)


def folders(tmp_path):
    return list((tmp_path / "spool").iterdir())


@pytest.mark.asyncio
async def test_records_reach_the_store_and_leave_nothing_behind(tmp_path, store):
    spool = spool_of(tmp_path, store)
    for number in range(100):
        assert spool.append(record(number))
    assert await spool.turn()
    assert len(store.ids()) == 100
    spool.append(record(100))
    spool.close()
    assert len(store.ids()) == 101
    assert folders(tmp_path) == []
    assert (tmp_path / "records.db").stat().st_mode & 0o077 == 0, "it says who asked when"


@pytest.mark.asyncio
async def test_what_comes_while_records_are_brought_waits_for_the_next_turn(tmp_path, store):
    spool, take, batches = spool_of(tmp_path, store), store.put, []

    def put(fabric, gateway, lines):
        batches.append(lines.count(b"\n"))
        if len(batches) < 5:
            spool.append(record(len(batches)))
        return take(fabric, gateway, lines)

    store.put = put
    spool.append(record(0))
    assert await spool.turn()
    assert batches == [1]
    for number in range(2, 5):
        assert await spool.turn()
        assert len(batches) == number
    spool.close()
    assert store.ids() == [f"r{number}" for number in range(5)]


def test_each_value_is_kept_as_it_was_whether_it_came_with_many_or_alone(tmp_path, postgres):
    """A statement inserts many rows, in other values than a row that is inserted by itself."""
    streams = ({"stream": True, "counted": True, "ttft_s": 0.5, "tpot_s": 0.0}, {"ttft_s": 0.0}, {"tpot_s": 0.25}, {})
    records = [record(number, **streams[number % 4]) for number in range(103)]
    names = ("id", "stream", "counted", "ttft_s", "tpot_s")
    for address in (str(tmp_path / "r.db"), postgres.url):
        process = StoreProcess(lambda address=address: address)
        for _ in range(2):  # the second time they are there
            assert process.put("f", "g", b"\n".join(map(msgspec.json.encode, records))) == 0
        process.close()
        with contextlib.closing(RecordStore(address, read_only=True)) as store:
            rows = store.read(select(*[REQUESTS.c[name] for name in names]))
        assert sorted(rows) == sorted(tuple(getattr(kept, name) for name in names) for kept in records)


@pytest.mark.asyncio
async def test_what_the_store_missed_comes_when_it_is_back_and_once(tmp_path, store):
    spool = spool_of(tmp_path, store, segment_octets=4096)
    store.away = True
    for number in range(200):
        spool.append(record(number))
        if number % 10 == 0:
            assert not await spool.turn()
    store.away, store.forgets = False, True
    assert not await spool.turn()
    assert await spool.turn()
    assert store.ids() == sorted(f"r{number}" for number in range(200))
    assert spool.lost == 0
    spool.close()


@pytest.mark.asyncio
async def test_a_full_spool_loses_what_is_new_and_counts_it(tmp_path, store):
    spool = spool_of(tmp_path, store, segment_octets=4096, most_octets=8192)
    store.away = True
    kept = sum([spool.append(record(number, tenant="x" * 100)) for number in range(100)])
    for _ in range(3):
        await spool.turn()
    store.away = False
    for _ in range(10):
        await spool.turn()
    assert kept < 100
    assert len(store.ids()) == 100 - spool.lost
    spool.close()


def test_a_writer_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path, store):
    argv = [sys.executable, Path(__file__).parent / "writer.py", tmp_path / "spool"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())}) as writer:
        said = [writer.stdout.readline() for _ in range(300)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    said = {line.decode().strip() for line in said if line.endswith(b"\n")}

    async def next_start():
        spool = spool_of(tmp_path, store)
        assert await spool.turn()
        spool.close()

    asyncio.run(next_start())
    ids = store.ids()
    assert said <= set(ids)
    assert len(ids) - len(said) <= 1, "the record after the last one that it said"
    assert folders(tmp_path) == []


def test_a_spool_whose_process_lives_is_left_alone(tmp_path, store):
    first, second = spool_of(tmp_path, store), spool_of(tmp_path, store)
    first.append(record(1))

    async def turn():
        await second.turn()

    asyncio.run(turn())
    assert len(folders(tmp_path)) == 2
    first.close()
    second.close()
    assert store.ids() == ["r1"]


def test_a_line_that_was_torn_ends_a_spool(tmp_path, store):
    folder = tmp_path / "spool" / "gone"
    folder.mkdir(parents=True)
    journal = Segments(folder, segment_octets=4096, most_octets=8192)
    journal.prepare()
    journal.append(b'{"id":"r1","at":1e9,"path":"/v1/completions","status":200,"end":"answered","e2e_s":1}\n')
    journal.append(b'{"id":"r2","at":1e9,"pa')

    async def turn():
        spool = spool_of(tmp_path, store)
        await spool.turn()
        spool.close()

    asyncio.run(turn())
    journal.close()
    assert store.ids() == ["r1"]


def test_a_line_that_is_no_record_is_counted_and_holds_nothing_up(tmp_path, store):
    assert store.process.put("f", "g", b'{\n{"id":1}\n') == 2
    spool = spool_of(tmp_path, store)
    spool.append(record(1))
    spool.close()
    assert store.ids() == ["r1"]


def test_the_process_of_a_store_is_killed_and_another_goes_on(tmp_path, store):
    store.process.put("f", "g", b"")
    killed = store.process._process
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(StoreAwayError) as raised:
        store.process.put("f", "g", b"")
    assert raised.value.problems[0].transient
    spool = spool_of(tmp_path, store)
    spool.append(record(1))
    spool.close()
    assert store.ids() == ["r1"]


def test_the_process_of_a_store_ends_with_its_gateway_and_when_nobody_needs_it(tmp_path, monkeypatch):
    argv = [sys.executable, Path(__file__).parent / "holder.py", tmp_path / "r.db"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        pid = int(holder.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        holder.kill()
    while Path(f"/proc/{pid}").exists():  # the test's timeout ends a wait without end
        time.sleep(0.05)
    process = StoreProcess(lambda: str(tmp_path / "r.db"))
    process.put("f", "g", b"")
    process.rest()
    assert process._process is not None
    monkeypatch.setattr("fabrictool.gateway.storeprocess.REST_S", 0.0)
    process.rest()
    assert process._process is None


def test_what_a_store_is_not_is_said_as_its_own_error(tmp_path):
    (tmp_path / "r.db").write_text("no database, and not a short text either: " + "x" * 4096)
    process = StoreProcess(lambda: str(tmp_path / "r.db"))
    for _ in range(2):
        with pytest.raises(FabrictoolError) as raised:
            process.put("f", "g", b"")
        assert raised.value.problems[0].code == "FT8122"
    process.close()


@pytest.mark.asyncio
async def test_postgresql_is_killed_and_comes_back(tmp_path, postgres):
    process = StoreProcess(lambda: postgres.url)
    spool = RecordSpool(tmp_path / "spool", process, fabric="f", gateway="g")
    for number in range(50):
        spool.append(record(number))
    assert await spool.turn()
    postgres.kill()
    for number in range(50, 150):
        spool.append(record(number))
    assert not await spool.turn()
    assert not await spool.turn()
    postgres.start()
    assert await spool.turn()
    spool.close()
    process.close()
    store = RecordStore(postgres.url, read_only=True)
    assert store.read(COUNT) == [(150, 300)]
    store.close()


def test_a_file_is_written_without_what_it_took_to_make_its_tables(tmp_path):
    path = tmp_path / "r.db"
    process = StoreProcess(lambda: str(path))
    lines = b"\n".join(msgspec.json.encode(record(number)) for number in range(50))
    assert process.put("f", "g", lines) == 0  # it makes the tables
    assert process.take("f:t", "total", wanted=70, limit=100) == 70
    assert process.take("f:t", "total", wanted=70, limit=100) == 30
    process.give("f:t", "total", 25)
    assert process.take("f:t", "total", wanted=70, limit=100) == 25
    assert process.put("f", "g", lines + b"\n" + msgspec.json.encode(record(50))) == 0
    pid = process._process.pid
    assert b"sqlalchemy" not in Path(f"/proc/{pid}/maps").read_bytes()

    def is_laden():
        return b"sqlalchemy" in Path(f"/proc/{pid}/maps").read_bytes()

    assert process.forget("f", 0.0) == 0, "nothing is old"
    assert not is_laden(), "and nothing was loaded to find that out"
    process.forget("f", 1e12)  # this needs it; it is the same process, and knows all that was written
    assert process.put("f", "g", lines) == 0
    assert not is_laden(), "what is seldom needed is not kept"
    process.read_keys("f", 0)
    assert is_laden(), "keys are asked for all the time"
    assert process.take("f:t", "total", wanted=1, limit=101) == 1
    assert process.put("f", "g", msgspec.json.encode(record(51))) == 0
    process.close()
    with contextlib.closing(RecordStore(str(path), read_only=True)) as store:
        assert store.read(COUNT) == [(51, 102)], "what was forgotten came again, with one more"


def test_a_row_has_its_values_in_the_order_of_its_table():
    assert ("id", "fabric", "gateway", "hour", *RequestRecord.__struct_fields__[1:]) == COLUMNS
    kinds = {"_truths": lambda column: isinstance(column.type, Boolean), "_times": lambda column: column.nullable}
    for name, of_kind in kinds.items():
        assert list(getattr(inserting, name)) == [column.name for column in REQUESTS.columns if of_kind(column)]


def test_rows_are_stored_as_they_are_whichever_others_come_with_them(tmp_path):
    """Many that have most in common, some that have it with few, and single ones."""
    records = [record(number, model="m", tenant="t", counted=True) for number in range(100)]
    records += [record(number, model="m", stream=True, ttft_s=0.5, tpot_s=number / 7) for number in range(100, 190)]
    records += [record(number, model=f"m{number % 9}", prefix_of="r1", prefix_tokens=16) for number in range(190, 260)]
    process = StoreProcess(lambda: str(tmp_path / "records.db"))
    try:
        for part in (records[:3], records):  # the second goes to a process that writes to a file by itself
            assert process.put("f", "g", b"".join(msgspec.json.encode(r) + b"\n" for r in part)) == 0
    finally:
        process.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as connection:
        connection.row_factory = sqlite3.Row
        stored = connection.execute("select * from fabrictool_requests order by at").fetchall()
    assert [tuple(row[name] for name in COLUMNS) for row in stored] == [
        (r.id, "f", "g", int(r.at // 3600), *msgspec.structs.astuple(r)[1:]) for r in records
    ]
