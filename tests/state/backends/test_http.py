"""What only a server can do to us."""

import json
import time

import pytest

from fabrictool.base.errors import FabrictoolError, StaleError
from fabrictool.domain.secrets import SecretRef
from fabrictool.domain.state import State
from fabrictool.domain.statebackend import HttpState
from fabrictool.state.backends.http import HttpStore


@pytest.fixture
def shelf(shelf_of):
    return shelf_of("http")


def code(error):
    (problem,) = error.value.problems
    return problem.code, problem.transient


def test_the_token_is_in_a_header_and_nowhere_else(shelf):
    store = shelf.open()
    with store.lease("apply", now=time.time()):
        store.write(State(), read=State())
    token = shelf.server.token
    assert {method for method, _, _ in shelf.server.seen} == {"GET", "POST", "LOCK", "UNLOCK"}
    for _, path, headers in shelf.server.seen:
        assert token not in path
        assert headers.pop("Authorization") == f"Bearer {token}"
        assert token not in str(headers)
    assert token.encode() not in shelf.server.state
    shelf.server.token = "another"
    with pytest.raises(FabrictoolError) as error:
        HttpStore(HttpState(address=shelf.server.url), lambda: token).read()
    assert code(error) == ("FT4203", False)
    assert token not in error.value.problems[0].render()


def test_a_token_that_no_header_can_have_is_not_repeated(shelf):
    with pytest.raises(FabrictoolError) as error:
        HttpStore(HttpState(address=shelf.server.url), lambda: "planted\r\nX-Other: 1").read()
    assert code(error) == ("FT4203", False)
    assert "planted" not in error.value.problems[0].render()
    assert error.value.__cause__ is None


def test_with_a_user_the_token_is_a_password(shelf):
    server = HttpState(address=shelf.server.url, user="ci", token=SecretRef("env", "PASS"))
    with pytest.raises(FabrictoolError):
        HttpStore(server, lambda: "pass").read()
    assert shelf.server.seen[-1][2]["Authorization"] == "Basic Y2k6cGFzcw=="


def test_a_redirect_is_not_followed(shelf):
    shelf.server.trouble["GET"] = 302
    with pytest.raises(FabrictoolError) as error:
        shelf.open().read()
    assert code(error) == ("FT4206", False)
    assert "302" in str(error.value)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_in_trouble_is_transient(shelf, status):
    shelf.server.trouble["GET"] = status
    with pytest.raises(FabrictoolError) as error:
        shelf.open().read()
    assert code(error) == ("FT4202", True)


def test_nobody_listens(shelf):
    store = shelf.open()
    shelf.server.close()
    shelf.server.close = lambda: None
    with pytest.raises(FabrictoolError) as error:
        store.read()
    assert code(error) == ("FT4202", True)


def test_a_write_whose_answer_was_lost_counts_as_done(shelf):
    store = shelf.open()
    shelf.server.trouble["POST"] = "hang up after doing it"
    written = store.write(State(), read=State())
    assert store.read() == written


def test_a_server_that_compares_tags_is_believed(shelf, monkeypatch):
    store = shelf.open()
    start = store.write(State(), read=State())
    get = store._get

    def then_another_writes():
        found = get()
        shelf.server.version += 1
        return found

    monkeypatch.setattr(store, "_get", then_another_writes)
    with pytest.raises(StaleError) as error:
        store.write(start, read=start)
    assert code(error)[0] == "FT4002"


def test_a_server_without_locks_is_refused(shelf):
    shelf.server.trouble["LOCK"] = 405
    with pytest.raises(FabrictoolError) as error, shelf.open().lease("apply", now=0.0):
        pytest.fail("no lease")
    assert code(error) == ("FT4206", False)
    assert "lock_method" in error.value.problems[0].hint


def test_another_tools_lock_is_respected_and_named(shelf):
    info = {
        "ID": "11-22",
        "Operation": "OperationTypeApply",
        "Info": "",
        "Who": "eve@far",
        "Created": "2026-01-01T00:00:00Z",
    }
    shelf.server.lock = info
    with pytest.raises(StaleError) as error, shelf.open().lease("apply", now=time.time()):
        pytest.fail("two writers")
    assert code(error) == ("FT4003", True)
    assert "eve@far" in str(error.value)
    assert shelf.server.lock == info
    assert shelf.open().unlock("11-22").host == "far"
    assert shelf.server.lock is None


def test_the_lock_info_is_what_other_tools_show(shelf):
    with shelf.open().lease("apply 1234", now=1_700_000_000.0) as lease:
        info = shelf.server.lock
        assert info["ID"] == lease.id
        assert info["Operation"] == "fabrictool apply 1234"
        assert info["Created"] == "2023-11-14T22:13:20Z"
        assert json.loads(info["Info"])["pid"] == lease.pid


def test_methods_and_addresses_are_those_of_the_blueprint(shelf):
    at = f"{shelf.server.url}/state/x"
    server = HttpState(address=at, lock_address=f"{at}/lock", lock_method="LOCK", unlock_address=f"{at}/free")
    store = HttpStore(server, lambda: shelf.server.token)
    with store.lease("apply", now=0.0):
        store.write(State(), read=State())
    seen = {(method, path.partition("?")[0]) for method, path, _ in shelf.server.seen}
    assert seen == {
        ("LOCK", "/state/x/lock"), ("UNLOCK", "/state/x/free"), ("GET", "/state/x"), ("POST", "/state/x"),
    }  # fmt: skip
