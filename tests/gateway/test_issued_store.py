"""Issued keys in the store: changes in their order, none over another, and stores of the release before."""

import threading

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.keyrecords import IssuedKey, KeyState
from fabrictool.gateway.store import MIGRATIONS, RecordStore
from fabrictool.gateway.sums import usage


def state(number, **about):
    return KeyState(f"{number:064x}"[::-1], IssuedKey(id=str(number), created_at=1.0, changed_at=1.0, **about))


def stores_of(request, tmp_path, kind):
    address = str(tmp_path / "r.db") if kind == "sqlite" else request.getfixturevalue("postgres").url
    return lambda: RecordStore(address)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_changes_are_read_by_revision(request, tmp_path, kind):
    store = stores_of(request, tmp_path, kind)()
    first, second = state(1, alias="a"), state(2, alias="b", metadata={"x": [1, "\x00ü"]})
    assert store.keys("f", 0).states == []
    assert store.write_keys("f", [first, second]) == 1
    held = store.keys("f", 0)
    assert (held.revision, held.whole, sorted(its.key.id for its in held.states)) == (1, True, ["1", "2"])
    assert store.keys("f", 1).states == []
    assert store.keys("other", 0).states == [], "a database may be that of several fabrics"
    former = msgspec.structs.replace(second, revision=1)
    renamed = msgspec.structs.replace(former, key=state(2, alias="c").key)
    assert store.write_keys("f", [renamed]) == 2
    assert store.write_keys("f", [former]) == 0, "it was changed meanwhile"
    assert store.write_keys("f", [state(3, alias="b"), state(4, alias="a")]) == 0, "all or nothing"
    ended = msgspec.structs.replace(first, revision=1, ended=True)
    assert store.write_keys("f", [ended, state(4, alias="a")]) == 3
    assert {(its.key.id, its.ended) for its in store.keys("f", 2).states} == {("1", True), ("4", False)}
    assert store.keys("f", 0).states != []
    assert {its.key.id for its in store.keys("f", 0).states} == {"2", "4"}
    restored = store.keys("f", 99)
    assert (restored.whole, restored.revision) == (True, 3), "of another database, or of a copy from before"
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_gateways_that_write_at_the_same_time_miss_nothing(request, tmp_path, kind):
    """Whoever follows by revisions has every key in the end: none is committed behind a later one."""
    open_store = stores_of(request, tmp_path, kind)
    open_store().close()
    writers, each_writes, followed, stop = 3, 25, {}, threading.Event()

    def write(writer):
        store = open_store()
        for number in range(each_writes):
            assert store.write_keys("f", [state(1 + writer * 1000 + number)])
        store.close()

    def follow():
        store, since, last = open_store(), 0, False
        while True:
            changes = store.keys("f", since)
            followed.update((its.sha256, its) for its in changes.states)
            since = changes.revision
            if last:
                break
            last = stop.is_set()
        store.close()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    follower = threading.Thread(target=follow)
    for thread in (follower, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    follower.join()
    assert len(followed) == writers * each_writes


def test_a_store_of_the_release_before_is_read_as_it_is_and_gets_the_new_table_when_it_is_written(tmp_path):
    path = tmp_path / "r.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(MIGRATIONS))
        command.upgrade(config, "0001")
    engine.dispose()
    old = RecordStore(str(path), read_only=True)
    assert usage(old, ["tenant"], since=0, until=1e12, equals={}) == []
    old.close()
    store = RecordStore(str(path))
    assert store.write_keys("f", [state(1)]) == 1
    store.close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("update fabrictool_layout set version_num = '9999'"))
    engine.dispose()
    for read_only in (False, True):
        with pytest.raises(InvalidInputError) as refused:
            RecordStore(str(path), read_only=read_only)
        assert refused.value.problems[0].code == "FT8122"
