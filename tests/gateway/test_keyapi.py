"""The key API, asked as Waldur's site agent asks it (waldur-site-agent-litellm 1.0.7), on real sockets and stores."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import InvalidInputError, Problem
from fabrictool.domain.specs import encode_spec
from fabrictool.gateway.issued import ATTEMPTS, COPY_FILE
from fabrictool.gateway.keeping import RECORDS_FILE, issuing, records_folder, spooling
from fabrictool.gateway.keyfile import encode_keys
from fabrictool.gateway.keys import hash_key, keys_digest
from fabrictool.gateway.records import StoreAwayError
from fabrictool.gateway.reloading import KEYS_FILE
from fabrictool.gateway.run import run_on_mesh
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.sums import usage
from tests.gateway.conftest import Bed, until
from tests.gateway.test_run import unit

pytestmark = pytest.mark.asyncio
ADMIN = "admin-key-of-the-centre-0123"
CHAT = "/v1/chat/completions"
NO_LIMITS = {"max_budget": None, "tpm_limit": None, "rpm_limit": None, "budget_duration": None}
"""What the agent writes for a resource without limits: all of the fields, at each reconciliation."""


async def eventually(has_come):
    deadline = asyncio.get_running_loop().time() + 20
    while not await has_come():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


class KeyBed:
    """A gateway with a key API; `ask` is the agent's call, `status_of` a client's request with a key."""

    def __init__(self, bed, stack, folder):
        self.bed, self._stack, self.folder = bed, stack, folder

    @classmethod
    async def start(cls, folder, address="", name="g", clock=None):
        stack = contextlib.AsyncExitStack()
        bed = await Bed().start(clock=clock)
        stack.push_async_callback(bed.stop)
        folder.mkdir(exist_ok=True)
        store = StoreProcess(lambda: address or str(folder / RECORDS_FILE))
        stack.callback(store.close)
        spool = await stack.enter_async_context(spooling(folder, store, "test", name))
        bed.gateway.record_in(spool, opt_out=False)
        bed.gateway._keyring.admin = hash_key(ADMIN)
        more = {"fabric": "test", "group": "everyone", "look_s": 0.05}
        await stack.enter_async_context(issuing(bed.gateway, store, folder, bed.clock, **more))
        return cls(bed, stack, folder)

    async def stop(self):
        await self._stack.aclose()

    async def ask(self, method, path, body=None, key=ADMIN, **query):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        url = self.bed.url + path
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.request(method, url, params=query, data=data) as answer,
        ):
            return answer.status, json.loads(await answer.text())

    async def make(self, **fields):
        status, answer = await self.ask("POST", "/key/generate", fields)
        assert status == 200, answer
        assert re.fullmatch(r"sk-[A-Za-z0-9_-]{43}", answer["key"])
        assert answer["token"] == hashlib.sha256(answer["key"].encode()).hexdigest(), "as LiteLLM's"
        return answer

    async def listed(self, alias, size=100):
        """As the agent walks the pages."""
        keys, page = [], 1
        while True:
            query = {"key_alias": alias, "substring_matching": "true", "return_full_object": "true"}
            _, answer = await self.ask("GET", "/key/list", **query, page=page, size=size)
            keys += answer["keys"]
            if not answer["keys"] or page >= answer["total_pages"]:
                return keys
            page += 1

    async def client(self, key, **fields):
        body = {"model": "m", "messages": [], "max_tokens": 4} | fields
        return await self.ask("POST", CHAT, body, key)

    async def status_of(self, key, **fields):
        return (await self.client(key, **fields))[0]

    async def until_status(self, key, status):
        async def has_come():
            return await self.status_of(key) == status

        await eventually(has_come)


WRONG = [
    ("generate", b"{", (400, "FT8140")),
    ("generate", b"[1]", (400, "FT8140")),
    ("generate", b"\xff", (400, "FT8140")),
    ("generate", b"[" * 100_000, (400, "FT8140")),
    ("generate", b" " * 300_000, (413, "FT8108")),
    ("generate", {"key": "sk-mine"}, (400, "FT8140")),
    ("generate", {"guardrails": ["pii"]}, (400, "FT8140")),
    ("generate", {"max_budget": 10.0}, (400, "FT8144")),
    ("generate", {"budget_duration": "30d"}, (400, "FT8144")),
    ("generate", {"rpm_limit": 0}, (400, "FT8140")),
    ("generate", {"tpm_limit": 1.5}, (400, "FT8140")),
    ("generate", b'{"tpm_limit": 1e300}', (400, "FT8140")),
    ("generate", {"tpm_limit": "many"}, (400, "FT8140")),
    ("generate", {"duration": "soon"}, (400, "FT8140")),
    ("generate", {"duration": "999999999mo"}, (400, "FT8140")),
    ("generate", {"duration": "999999999w"}, (400, "FT8140")),
    ("generate", {"key_alias": "a\x00b"}, (400, "FT8140")),
    ("generate", b'{"key_alias": "\\ud800"}', (400, "FT8140")),
    ("generate", {"key_alias": "a" * 257}, (400, "FT8140")),
    ("generate", {"metadata": {"much": "x" * 20_000}}, (400, "FT8140")),
    ("generate", {"token_budget": {"tokens": 0}}, (400, "FT8140")),
    ("update", {"rpm_limit": 1}, (400, "FT8140")),
    ("update", {"key": "0" * 64}, (404, "FT8141")),
    ("delete", {}, (400, "FT8140")),
    ("delete", {"keys": ["0" * 64]}, (404, "FT8141")),
    ("delete", {"key_aliases": ["nobody"]}, (404, "FT8141")),
    ("%2F/regenerate", {}, (404, "FT8141")),
    ("regenerate", b"", (400, "FT8140")),
    ("list?size=101", None, (400, "FT8140")),
    ("list?page=0", None, (400, "FT8140")),
    ("list?page=%C2%B2", None, (400, "FT8140")),
    ("info", None, (400, "FT8140")),
]
"""Path, body (none: a GET) and what is said to it."""


def error_of(outcome):
    status, answer = outcome
    assert "enterprise" not in json.dumps(answer).lower(), "the agent takes the word for a missing licence"
    return status, answer["error"]["fabric_code"]


@pytest_asyncio.fixture
async def desk(tmp_path):
    started = await KeyBed.start(tmp_path / "g")
    yield started
    await started.stop()


async def test_the_life_of_a_resource_as_the_agent_leads_it(desk):
    assert await desk.ask("GET", "/health/readiness") == (200, {"status": "healthy", "db": "connected"})
    assert await desk.listed("res1-") == []
    first, second = [await desk.make(key_alias=f"res1-{slot}", models=["m"]) for slot in (1, 2)]
    await desk.make(key_alias="res1-extra-1")
    assert [await desk.status_of(made["key"]) for made in (first, second)] == [200, 200]
    assert error_of(await desk.client(first["key"], model="only-a")) == (403, "FT8124")
    listed = {record["key_alias"]: record for record in await desk.listed("res1-")}
    assert sorted(listed) == ["res1-1", "res1-2", "res1-extra-1"], "a substring; the agent narrows it"
    assert listed["res1-1"]["token"] == first["token"]
    assert not listed["res1-1"]["blocked"]
    assert NO_LIMITS.items() <= listed["res1-1"].items(), "or the agent would write them anew, for ever"

    limits = NO_LIMITS | {"rpm_limit": 1, "tpm_limit": 5000}
    assert (await desk.ask("POST", "/key/update", {"key": first["token"]} | limits))[0] == 200
    assert limits.items() <= (await desk.listed("res1-1"))[0].items()
    assert [await desk.status_of(first["key"]) for _ in range(2)] == [200, 429]
    assert (await desk.ask("POST", "/key/update", {"key": first["token"]} | NO_LIMITS))[0] == 200
    assert NO_LIMITS.items() <= (await desk.listed("res1-1"))[0].items()
    assert await desk.status_of(first["key"]) == 200

    assert (await desk.ask("POST", "/key/block", {"key": first["token"]}))[0] == 200
    status, answer = await desk.client(first["key"])
    assert (status, answer["error"]["message"].split(":")[0]) == (401, "the API key is blocked")
    assert (await desk.listed("res1-1"))[0]["blocked"] is True
    assert (await desk.ask("POST", "/key/unblock", {"key": first["token"]}))[0] == 200
    assert await desk.status_of(first["key"]) == 200

    status, renewed = await desk.ask("POST", f"/key/{first['token']}/regenerate", {})
    assert (status, renewed["key_alias"], renewed["models"]) == (200, "res1-1", ["m"])
    assert [await desk.status_of(made["key"]) for made in (first, renewed)] == [401, 200]
    assert error_of(await desk.ask("POST", "/key/block", {"key": first["token"]})) == (404, "FT8141")
    assert [record["token"] for record in await desk.listed("res1-1")] == [renewed["token"]]

    assert error_of(await desk.ask("POST", "/key/generate", {"key_alias": "res1-2"})) == (400, "FT8142")
    tokens = [renewed["token"], second["token"]]
    assert await desk.ask("POST", "/key/delete", {"keys": tokens}) == (200, {"deleted_keys": tokens})
    assert [await desk.status_of(made["key"]) for made in (renewed, second)] == [401, 401]
    assert error_of(await desk.ask("GET", f"/key/info?key={tokens[0]}")) == (404, "FT8141")
    assert await desk.make(key_alias="res1-2"), "a delete frees the alias"


async def test_a_key_that_is_made_blocked_lands_blocked(desk):
    made = await desk.make(key_alias="res-1", blocked=True, rpm_limit=60.0)
    assert await desk.status_of(made["key"]) == 401
    status, answer = await desk.ask("GET", f"/key/info?key={made['token']}")
    assert (status, answer["info"]["blocked"], answer["info"]["rpm_limit"]) == (200, True, 60)
    assert (await desk.ask("GET", f"/key/info?key={made['key']}"))[1]["key"] == made["token"]
    (event,) = [event for event in desk.bed.gateway.status().events if event.kind == "key-made"]
    assert (event.subject, event.text) == (made["token"][:12], "res-1")


async def test_pages_hold_every_key_once(desk):
    for slot in range(5):
        await desk.make(key_alias=f"res-{slot}")
        desk.bed.clock.advance(1)
    assert [record["key_alias"] for record in await desk.listed("res-", size=2)] == [f"res-{n}" for n in range(5)]
    _, page = await desk.ask("GET", "/key/list", page=9, size=2)
    assert page == {"keys": [], "total_count": 5, "current_page": 9, "total_pages": 3}
    _, page = await desk.ask("GET", "/key/list", key_alias="res-", size=2)
    assert (page["keys"], page["total_pages"]) == ([], 0), "an alias is meant wholly, unless one says otherwise"


async def test_only_the_admin_key_opens_it_and_nothing_else(desk):
    made = await desk.make(key_alias="res-1")
    for key in (None, "wrong", made["key"], desk.bed.KEY):
        for method, path in (("GET", "/key/list"), ("POST", "/key/nothing"), ("GET", "/health/readiness")):
            assert error_of(await desk.ask(method, path, key=key)) == (401, "FT8102")
    assert await desk.status_of(ADMIN) == 401, "it is no key for models"
    assert error_of(await desk.ask("GET", "/key/generate")) == (405, "FT8107")
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as http:
        answer = await http.get(desk.bed.url + "/key/generate")
    assert answer.headers["allow"] == "POST"
    assert error_of(await desk.ask("POST", "/key/nothing")) == (404, "FT8107")


async def test_without_a_key_api_there_are_no_such_paths(bed):
    desk = KeyBed(bed, None, None)
    for method, path in (("POST", "/key/generate"), ("GET", "/key/list"), ("GET", "/health/readiness")):
        assert error_of(await desk.ask(method, path, key=bed.KEY)) == (404, "FT8107")
        assert error_of(await desk.ask(method, path, key=ADMIN)) == (401, "FT8102")


async def test_what_is_wrong_is_told(desk):
    for path, body, refusal in WRONG:
        outcome = await desk.ask("GET" if body is None else "POST", f"/key/{path}", body)
        assert error_of(outcome) == refusal, (path, body)
    assert (await desk.ask("GET", "/key/list"))[1]["total_count"] == 0


async def test_terms_of_a_key(desk):
    made = await desk.make(user_id="anna", duration="1h", max_parallel_requests=7, metadata={"a": [1]})
    _, answer = await desk.ask("GET", f"/key/info?key={made['token']}")
    assert {"user_id": "anna", "max_parallel_requests": 7, "metadata": {"a": [1]}}.items() <= answer["info"].items()
    assert answer["info"]["expires"] == "2023-11-14T23:13:20+00:00"
    assert await desk.status_of(made["key"]) == 200
    desk.bed.clock.advance(3600)
    assert await desk.status_of(made["key"]) == 401
    assert (await desk.ask("POST", "/key/update", {"key": made["key"], "duration": None}))[0] == 200
    assert await desk.status_of(made["key"]) == 200

    # Of the budget's tokens a request sets aside what it could cost; a new secret does not begin it anew.
    assert (await desk.ask("POST", "/key/update", {"key": made["key"], "token_budget": {"tokens": 500}}))[0] == 200
    assert error_of(await desk.client(made["key"])) == (429, "FT8126")
    assert (await desk.ask("POST", "/key/update", {"key": made["key"], "token_budget": None}))[0] == 200
    assert await desk.status_of(made["key"]) == 200


async def test_usage_by_day_and_key(desk):
    """Of issued keys, also of those that ended meanwhile: they are to be paid for, too."""
    team = await desk.make(key_alias="res1-1", team_id="physics")
    other = await desk.make(key_alias="res2-1")
    assert [await desk.status_of(team["key"]) for _ in range(2)] == [200, 200]
    assert await desk.status_of(desk.bed.KEY) == 200, "a tenant of the blueprint, whose usage is not shown here"
    desk.bed.clock.advance(86400)
    _, renewed = await desk.ask("POST", f"/key/{team['token']}/regenerate", {})
    assert await desk.status_of(renewed["key"], model="only-a") == 200
    assert await desk.status_of(renewed["key"], model="nowhere") == 404
    assert await desk.status_of(other["key"]) == 200
    await desk.ask("POST", "/key/delete", {"keys": [renewed["token"], other["token"]]})

    async def activity(**query):
        days = {"start_date": "2023-11-01", "end_date": "2023-11-30", "include_current_utc_day": "true"}
        status, answer = await desk.ask("GET", "/user/daily/activity", **(days | query))
        assert status == 200
        return answer

    async def is_flushed():
        return (await activity())["metadata"]["total_api_requests"] == 5

    await eventually(is_flushed)
    first, second = (await activity(page=1, page_size=100))["results"]
    assert (first["date"], second["date"]) == ("2023-11-14", "2023-11-15")
    (metered,) = first["breakdown"]["api_keys"].values()
    assert metered["metadata"] == {"key_alias": "res1-1", "team_id": "physics", "user_id": None}
    assert (metered["metrics"]["prompt_tokens"], metered["metrics"]["completion_tokens"]) == (6, 4)
    assert metered["metrics"]["spend"] == 0.0
    by_alias = {its["metadata"]["key_alias"]: its["metrics"] for its in second["breakdown"]["api_keys"].values()}
    assert by_alias["res1-1"]["api_requests"] == 2
    assert (by_alias["res1-1"]["successful_requests"], by_alias["res1-1"]["failed_requests"]) == (1, 1)
    assert by_alias["res2-1"]["total_tokens"] == 5
    assert {model: its["metrics"]["total_tokens"] for model, its in second["breakdown"]["models"].items()} == {
        "m": 5,
        "only-a": 5,
    }
    pages = [await activity(page=page, page_size=1) for page in (1, 2, 3)]
    assert [[day["date"] for day in page["results"]] for page in pages] == [["2023-11-14"], ["2023-11-15"], []]
    assert [page["metadata"]["has_more"] for page in pages] == [True, False, False]
    assert pages[0]["metadata"]["total_pages"] == 2
    assert (await activity(end_date="2023-11-14"))["metadata"]["total_tokens"] == 10
    assert (await activity(api_key=team["token"]))["metadata"]["total_tokens"] == 10
    assert (await activity(model="only-a"))["metadata"]["total_tokens"] == 5
    store = RecordStore(str(desk.folder / RECORDS_FILE), read_only=True)
    rows = usage(store, ["tenant", "key"], since=0, until=2e9, equals={"model": "m"})
    store.close()
    assert {(row.group["tenant"], row.group["key"]): row.requests for row in rows} == {
        ("t1", hash_key(desk.bed.KEY)[:12]): 1,
        ("team/physics", team["key_name"]): 2,
        ("key/res2-1", other["key_name"]): 1,
    }
    for query in ({"start_date": "2023-11-01"}, {"start_date": "2023-12-01", "end_date": "2023-11-01"}):
        assert error_of(await desk.ask("GET", "/user/daily/activity", **query)) == (400, "FT8140")


async def test_two_gateways_on_one_database_agree(postgres, tmp_path):
    one, two = [await KeyBed.start(tmp_path / name, postgres.url, name) for name in ("one", "two")]
    made = await one.make(key_alias="res-1", models=["m"])
    assert [record["token"] for record in await two.listed("res-")] == [made["token"]], "who lists reads first"
    assert await two.status_of(made["key"]) == 200
    assert error_of(await two.ask("POST", "/key/generate", {"key_alias": "res-1"})) == (400, "FT8142")
    await two.ask("POST", "/key/block", {"key": made["token"]})
    assert await two.status_of(made["key"]) == 401
    await one.until_status(made["key"], 401)
    await one.ask("POST", "/key/unblock", {"key": made["token"]})
    await two.until_status(made["key"], 200)

    # Changes that cross: none is lost, and an alias is given once.
    fields = [{"rpm_limit": 60}, {"tpm_limit": 70_000}, {"max_parallel_requests": 8}, {"metadata": {"x": 1}}]
    turns = [(desk, its) for its, desk in zip(fields, (one, two, one, two), strict=True)]
    outcomes = await asyncio.gather(
        *(desk.ask("POST", "/key/update", {"key": made["token"]} | its) for desk, its in turns),
        *(desk.ask("POST", "/key/generate", {"key_alias": "res-2"}) for desk in (one, two)),
    )
    assert [status for status, _ in outcomes[:4]] == [200] * 4
    assert sorted(status for status, _ in outcomes[4:]) == [200, 400]
    (record,) = await one.listed("res-1")
    assert {key: value for its in fields for key, value in its.items()}.items() <= record.items()
    _, renewed = await two.ask("POST", f"/key/{made['token']}/regenerate", {})
    await one.until_status(made["key"], 401)
    assert await one.status_of(renewed["key"]) == 200
    pseudonyms = {desk.bed.gateway._keyring.pseudonym("key/res-1") for desk in (one, two)}
    assert len(pseudonyms) == 1
    assert pseudonyms != {""}
    for desk in (one, two):
        await desk.stop()


async def test_whatever_crosses_the_gateways_agree_in_the_end(tmp_path):
    """Who works by a key in the end is who the store says, at each of them, whatever was done where and when."""
    address = str(tmp_path / "shared.db")
    desks = [await KeyBed.start(tmp_path / name, address, name) for name in ("one", "two", "three")]
    secrets, draws = [], random.Random(5)

    async def work():
        for _ in range(12):
            desk, alias = draws.choice(desks), f"res-{draws.randrange(3)}"
            kind = draws.choice(["generate", "generate", "regenerate", "block", "unblock", "delete", "update"])
            body = {"key_alias": alias}
            if kind != "generate":
                records = await desk.listed(alias)
                token = records[0]["token"] if records else "0" * 64
                body = {"keys": [token]} if kind == "delete" else {"key": token}
                body |= {"metadata": {"x": draws.random()}} if kind == "update" else {}
            status, answer = await desk.ask("POST", f"/key/{kind}", body)
            assert status in (200, 400, 404), answer
            if status == 200 and kind in ("generate", "regenerate"):
                secrets.append(answer["key"])

    await asyncio.gather(*(work() for _ in range(6)))
    secrets.append((await desks[0].make(key_alias="res-last"))["key"])
    lists = [await desk.listed("res-") for desk in desks]
    assert lists[0] == lists[1] == lists[2]
    assert len({record["key_alias"] for record in lists[0]}) == len(lists[0])
    blocked = {record["token"]: record["blocked"] for record in lists[0]}
    statuses = [200 if blocked.get(hash_key(secret)) is False else 401 for secret in secrets]
    assert statuses[-1] == 200
    for desk in desks:
        assert [await desk.status_of(secret) for secret in secrets] == statuses
        await desk.stop()


async def test_keys_work_while_the_database_is_away_also_after_a_restart(postgres, tmp_path):
    desk = await KeyBed.start(tmp_path / "g", postgres.url)
    good, blocked, gone = [await desk.make(key_alias=f"res-{number}") for number in range(3)]
    await desk.ask("POST", "/key/block", {"key": blocked["token"]})
    await desk.ask("POST", "/key/delete", {"keys": [gone["token"]]})
    assert (desk.folder / COPY_FILE).stat().st_mode & 0o777 == 0o600
    assert good["key"] not in (desk.folder / COPY_FILE).read_text()
    postgres.kill()
    for restarted in (False, True):
        if restarted:
            await desk.stop()
            desk = await KeyBed.start(tmp_path / "g", postgres.url)
        assert [await desk.status_of(its["key"]) for its in (good, blocked, gone)] == [200, 401, 401]
        for path, body in (
            ("generate", {"key_alias": "res-9"}),
            ("block", {"key": good["token"]}),
            ("delete", {"keys": [good["token"]]}),
            ("regenerate", {"key": good["token"]}),
        ):
            assert error_of(await desk.ask("POST", f"/key/{path}", body)) == (503, "FT8143")
        assert error_of(await desk.ask("GET", "/key/list")) == (503, "FT8143")
        assert (await desk.ask("GET", "/health/readiness"))[0] == 503
        assert (
            error_of(await desk.ask("GET", "/user/daily/activity?start_date=2023-11-01&end_date=2023-11-30"))[0] == 503
        )
    stranger = await KeyBed.start(tmp_path / "other", postgres.url)
    assert error_of(await stranger.client(good["key"])) == (503, "FT8143"), "nobody knows whether it is a key"
    assert await stranger.status_of(stranger.bed.KEY) == 200
    postgres.start()
    await stranger.until_status(good["key"], 200)
    assert sorted(record["key_alias"] for record in await desk.listed("res-")) == ["res-0", "res-1"], (
        "nothing half-done"
    )
    assert await desk.make(key_alias="res-9")
    for bed in (desk, stranger):
        await bed.stop()


async def test_a_client_that_goes_does_not_undo_what_it_asked_for(desk):
    body = json.dumps({"key_alias": "res-1"}).encode()
    head = f"POST /key/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN}\r\ncontent-length: {len(body)}\r\n"
    _, writer = await asyncio.open_connection(desk.bed.host, desk.bed.port)
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    await until(lambda: desk.bed.gateway.connections)
    await asyncio.sleep(0.1)
    writer.close()
    await eventually(lambda: desk.listed("res-1"))


async def test_the_real_agents_backends(tmp_path):
    """Not a dependency of ours: 26 packages for a client of ten calls. `WALDUR_PYTHON` is a Python that has it."""
    python = os.environ.get("WALDUR_PYTHON")
    if python is None:
        pytest.skip("WALDUR_PYTHON names no Python with waldur-site-agent-litellm")
    desk = await KeyBed.start(tmp_path / "g", clock=SystemClock())
    script = Path(__file__).with_name("waldur_agent.py")
    agent = await asyncio.create_subprocess_exec(
        python, script, desk.bed.url, ADMIN, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said_out, said_err = await agent.communicate()
    await desk.stop()
    assert agent.returncode == 0, said_err.decode()
    assert json.loads(said_out) == {
        "ping": [True, True],
        "ids": ["-1", "-2"],
        "limited": [200, 200, 200, 429],
        "reconciled once": [None, None, True],
        "unlimited": [200, 200, 200, 200],
        "paused": [True, 401, 401],
        "active": False,
        "restored": [True, 200, 200],
        "rotated": [401, 200, 200],
        "exists": True,
        "money": True,
        "pruned": ["-2"],
        "deleted": [401, []],
        "billed": {"input_tokens": 33, "output_tokens": 22},
    }


async def test_a_gateway_of_a_fabric_has_it_without_a_tenant_and_takes_over_another_admin_key(tmp_path):
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, tenants={}, key_api="all")

    def admin_is(key):
        """As `apply` writes it: the key file, and its digest in the spec."""
        (folder.path / KEYS_FILE).write_bytes(encode_keys([], hash_key(key)))
        (folder.path / KEYS_FILE).chmod(0o600)
        return msgspec.structs.replace(spec, keys=keys_digest(spec.fabric, [], hash_key(key)))

    with pytest.raises(InvalidInputError) as refused:
        await run_on_mesh(spec, folder, SystemClock())
    assert refused.value.problems[0].code == "FT8005", "it never opens itself"
    secret = ""
    for turn in range(2):
        (folder.path / "process.json").unlink(missing_ok=True)
        first, second = f"{ADMIN}-{turn}-first", f"{ADMIN}-{turn}-second"
        spec = admin_is(first)
        folder.spec.write_bytes(encode_spec(spec))
        running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
        await until(lambda running=running: running.done() or folder.process().get("listen"), 20)
        desk = KeyBed(SimpleNamespace(url=f"http://{folder.process()['listen']}"), None, None)
        secret = secret or (await desk.ask("POST", "/key/generate", {}, key=first))[1]["key"]
        assert (await desk.ask("GET", "/v1/models", key=None))[0] == 401
        assert (await desk.ask("GET", "/v1/models", key=secret))[0] == 200
        folder.spec.write_bytes(encode_spec(admin_is(second)))

        async def is_taken_over(second=second, desk=desk):
            return (await desk.ask("GET", "/key/list", key=second))[0] == 200

        await eventually(is_taken_over)
        assert (await desk.ask("GET", "/key/list", key=first))[0] == 401
        assert (await desk.ask("GET", "/v1/models", key=secret))[0] == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 20)
    assert records_folder(tmp_path, spec.fabric, spec.name).joinpath(COPY_FILE).exists()


class Unreliable:
    """A real store whose next write is lost: before it is made, after it, or because others are always faster; and
    that can be held up.
    """

    def __init__(self, store):
        self.store, self.lost, self.writes = store, "", 0
        self.goes, self.hangs = threading.Event(), threading.Event()
        self.goes.set()

    def read_keys(self, fabric, since):
        if not self.goes.is_set():
            self.hangs.set()
        self.goes.wait()
        return self.store.read_keys(fabric, since)

    def write_keys(self, fabric, states):
        self.writes += 1
        if self.lost == "crossed":
            return 0
        revision = 0 if self.lost == "before" else self.store.write_keys(fabric, states)
        if self.lost:
            raise StoreAwayError(Problem("FT8120", "the connection was lost", transient=True))
        return revision


async def test_a_write_whose_answer_is_lost_is_found_again_or_told(desk):
    issued = desk.bed.gateway._keyring.more
    issued._store = store = Unreliable(issued._store)
    made = await desk.make(key_alias="res-1")
    store.lost = "after"
    second = await desk.make(key_alias="res-2")
    assert [await desk.status_of(its["key"]) for its in (made, second)] == [200, 200]
    status, renewed = await desk.ask("POST", f"/key/{made['token']}/regenerate", {})
    assert (status, await desk.status_of(made["key"]), await desk.status_of(renewed["key"])) == (200, 401, 200)
    assert (await desk.ask("POST", "/key/delete", {"keys": [second["token"]]}))[0] == 200
    assert await desk.status_of(second["key"]) == 401
    for store.lost in ("before", "crossed"):
        store.writes = 0
        assert error_of(await desk.ask("POST", "/key/generate", {"key_alias": "res-3"})) == (503, "FT8143")
        assert error_of(await desk.ask("POST", "/key/block", {"key": renewed["token"]})) == (503, "FT8143")
        assert store.writes == {"before": 2, "crossed": 2 * ATTEMPTS}[store.lost]
    assert await desk.status_of(renewed["key"]) == 200
    assert [record["key_alias"] for record in await desk.listed("res-")] == ["res-1"]
    store.lost = ""
    await desk.make(key_alias="res-3")


async def test_requests_do_not_wait_for_a_store_that_hangs_and_calls_only_so_long(desk, monkeypatch):
    made = await desk.make(key_alias="res-1")
    issued = desk.bed.gateway._keyring.more
    issued._store = store = Unreliable(issued._store)
    monkeypatch.setattr("fabrictool.gateway.issued.TURN_S", 0.05)
    store.goes.clear()
    try:
        await until(store.hangs.is_set)  # whoever reads there has the turn, and no earlier one
        assert issued._turn.locked()
        assert error_of(await desk.ask("POST", "/key/block", {"key": made["token"]})) == (503, "FT8143")
        assert (await desk.ask("GET", "/health/readiness"))[0] == 503
        assert await desk.status_of(made["key"]) == 200
    finally:
        store.goes.set()

    async def is_back():
        return (await desk.ask("GET", "/health/readiness"))[0] == 200

    await eventually(is_back)


async def test_a_copy_that_cannot_be_read_is_told_and_the_store_is_asked(tmp_path, caplog):
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / COPY_FILE).write_text("{")
    desk = await KeyBed.start(folder)
    assert "the copy of the issued keys cannot be read" in caplog.text
    made = await desk.make()
    while not (folder / COPY_FILE).is_dir():  # the gateway may be writing it still
        (folder / COPY_FILE).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / COPY_FILE).mkdir()
    assert (await desk.ask("POST", "/key/block", {"key": made["token"]}))[0] == 200, "the store has it"
    assert "issued keys cannot be copied" in caplog.text
    (folder / COPY_FILE).rmdir()
    await until((folder / COPY_FILE).exists, 20)
    await desk.stop()
