"""People who sign in: a real OpenID provider, a gateway on sockets with a store, and what a browser sends."""

import asyncio
import contextlib
import re
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from fabrictool.domain.specs import LoginSpec
from fabrictool.domain.terms import BudgetTerms, KeyLimits, Terms
from fabrictool.gateway.keeping import RECORDS_FILE, budgeting, issuing, spooling
from fabrictool.gateway.keys import hash_key
from fabrictool.gateway.login.login import COOKIE, FORM_OCTETS, SESSION_S
from fabrictool.gateway.login.people import Person, person_of
from fabrictool.gateway.storeprocess import StoreProcess
from tests.gateway.conftest import Bed
from tests.gateway.openid import SECRET, Browser, OpenIdProvider

ADMIN = "admin-key-of-the-centre-0123"
GROUPS = (("hpc-staff", "everyone"), ("students", "alpha-only"))
SECRET_SHOWN = re.compile(r'<pre id="secret">(sk-[A-Za-z0-9_-]{43})</pre>')


class LoginBed:
    """A gateway with a login; its provider runs."""

    def __init__(self, folder, **spec):
        self.folder, self.more = folder, spec
        self._stack = contextlib.AsyncExitStack()

    async def start(self, provider=None, url=""):
        self.bed = await Bed().start()
        self._stack.push_async_callback(self.bed.stop)
        self.url = url or self.bed.url
        if provider is None:
            provider = OpenIdProvider(f"{self.url}/login/callback", self.more.pop("client_secret", SECRET))
            self._stack.callback(provider.stop)
        self.provider = provider
        secret = self.folder / "secret"
        secret.write_text(SECRET + "\n")
        secret.chmod(0o600)
        usual = {"scopes": ("groups",), "groups": GROUPS, "secret": f"secret://file/{secret}", "keys": 2}
        self.spec = LoginSpec(provider.url, "fabric", self.url, **(usual | self.more))
        store = StoreProcess(lambda: str(self.folder / RECORDS_FILE))
        self._stack.callback(store.close)
        spool = await self._stack.enter_async_context(spooling(self.folder, store, "test", "g"))
        self.records = []
        self.bed.gateway.record_in(spool, opt_out=False)
        self.bed.gateway.sinks.append(self.records.append)
        self.bed.gateway._keyring.admin = hash_key(ADMIN)
        more = {"fabric": "test", "group": "alpha-only", "login": self.spec, "look_s": 0.05}
        await self._stack.enter_async_context(issuing(self.bed.gateway, store, self.folder, self.bed.clock, **more))
        await self._stack.enter_async_context(budgeting(self.bed.gateway.accounts, store))
        return self

    async def stop(self):
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def browser(self, name=""):
        browser = Browser()
        try:
            yield await browser.sign_in(self.url, name) if name else browser
        finally:
            await browser.close()

    async def make(self, browser, name="laptop"):
        await browser.send("/login/keys", name=name)
        return (SECRET_SHOWN.search(browser.text) or ["", ""])[1]

    async def status_of(self, key, model="m", **fields):
        headers, body = {"authorization": f"Bearer {key}"}, {"model": model, "messages": []} | fields
        url = f"{self.bed.url}/v1/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as answer:
            await answer.read()
            return answer.status


@pytest.fixture(scope="module")
def openid_provider():
    """Of most tests: each has a browser of its own, and a gateway at an address of its own."""
    provider = OpenIdProvider("http://127.0.0.1/login/callback")
    yield provider
    provider.stop()


@pytest_asyncio.fixture
async def beds(tmp_path, openid_provider):
    started = []

    async def start(provider=None, url="", **spec):
        """With a provider of its own where something is said of the client's secret."""
        if provider is None and not spec.keys() & {"client_secret", "secret"}:
            provider = openid_provider
        started.append(await LoginBed(tmp_path, **spec).start(provider, url))
        return started[-1]

    yield start
    for bed in reversed(started):
        await bed.stop()


def code_in(browser):
    seen = re.search(r"<code>(FT\d+)</code>", browser.text)
    return browser.status, seen and seen[1]


@pytest.mark.asyncio
async def test_somebody_signs_in_makes_a_key_uses_it_and_ends_it(beds):
    bed = await beds()
    async with bed.browser("anna") as anna:
        assert (anna.status, anna.url.path) == (200, "/login/keys")
        assert "anna" in anna.text
        assert "(everyone)" in anna.text
        key = await bed.make(anna)
        assert key
        assert await bed.status_of(key, max_tokens=4) == 200
        record = bed.records[-1]
        assert record.tenant.startswith("login/anna~")
        await anna.open(f"{bed.url}/login/keys")
        assert key not in anna.text, "it was shown once"
        assert record.key in anna.text
        await anna.send("/login/keys/end")
        assert "You have none yet" in anna.text
        assert await bed.status_of(key) == 401
        await anna.open(f"{bed.url}/login")
        assert anna.url.path == "/login/keys", "who is signed in is not sent to the provider"
        await anna.send("/login/out")
        assert "signed out" in anna.text
        await anna.open(f"{bed.url}/login/keys", follow=False)
        assert (anna.status, anna.headers["location"]) == (303, f"{bed.url}/login")


@pytest.mark.asyncio
async def test_the_pages_cannot_be_kept_framed_or_scripted_and_the_cookie_is_the_logins_alone(beds):
    bed = await beds()
    async with bed.browser() as anna:
        await anna.open(f"{bed.url}/login", follow=False)
        cookie = anna.headers["set-cookie"].lower()
        assert cookie.startswith(f"{COOKIE}=")
        assert {"httponly", "samesite=lax", "path=/login"} <= {part.strip() for part in cookie.split(";")}
        query = parse_qs(urlsplit(anna.headers["location"]).query)
        assert (query["code_challenge_method"], query["response_type"]) == (["S256"], ["code"])
        assert query["state"] != query["nonce"]
        await anna.sign_in(bed.url, "anna")
        policy = anna.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert (anna.headers["cache-control"], anna.headers["referrer-policy"]) == ("no-store", "same-origin")
        assert "<script" not in anna.text


@pytest.mark.asyncio
async def test_the_groups_of_the_provider_decide_what_a_key_may_do(beds):
    bed = await beds()
    async with bed.browser("ben") as ben, bed.browser("carl") as carl:
        key = await bed.make(ben)
        assert "(alpha-only)" in ben.text
        assert await bed.status_of(key, "only-a") == 200
        for _ in range(4):
            assert await bed.status_of(key, "m") == 200
        assert {record.provider for record in bed.records} == {"alpha"}
        assert code_in(carl) == (403, "FT8172")
        await carl.open(f"{bed.url}/login/keys", follow=False)
        assert carl.status == 303, "no session was begun"


@pytest.mark.asyncio
async def test_everybody_else_is_let_in_where_there_is_a_group_for_them(beds):
    bed = await beds(group="alpha-only")
    async with bed.browser("carl") as carl:
        assert "(alpha-only)" in carl.text
        assert await bed.status_of(await bed.make(carl), "only-a") == 200


@pytest.mark.asyncio
async def test_nobody_sees_or_ends_the_keys_of_another(beds):
    bed = await beds()
    async with bed.browser("anna") as anna, bed.browser("ben") as ben:
        key = await bed.make(anna)
        await ben.open(f"{bed.url}/login/keys")
        assert hash_key(key)[:12] not in ben.text
        await bed.make(ben, "mine")
        target, hidden = ben.fields("/login/keys/end")
        await ben.open(target, data=hidden | {"key": hash_key(key)})
        assert code_in(ben) == (404, "FT8141")
        assert await bed.status_of(key) == 200


@pytest.mark.asyncio
async def test_a_person_has_so_many_keys_with_names_of_their_own(beds):
    bed = await beds()
    async with bed.browser("anna") as anna:
        await bed.make(anna, "<b>one</b>")
        assert "&lt;b&gt;one&lt;" in anna.text
        assert "<b>" not in anna.text
        target, hidden = anna.fields("/login/keys")
        await anna.open(target, data=hidden | {"name": "<b>one</b>"})
        assert code_in(anna) == (409, "FT8174")
        await anna.open(target, data=hidden | {"name": " \u202e"})
        assert code_in(anna) == (400, "FT8174")
        await anna.open(target, data=hidden | {"name": "two"})
        assert "as many as one may have" in anna.text
        await anna.open(target, data=hidden | {"name": "three"})
        assert code_in(anna) == (409, "FT8173")
        bed.bed.clock.advance(bed.spec.keep_s + 1)
        await anna.sign_in(bed.url, "anna")
        assert await bed.make(anna, "two"), "those whose time is over count no more, and give their names back"


@pytest.mark.asyncio
async def test_a_keys_time_ends_and_a_session_earlier(beds):
    bed = await beds()
    async with bed.browser("anna") as anna:
        key = await bed.make(anna)
        bed.bed.clock.advance(SESSION_S + 1)
        await anna.open(f"{bed.url}/login/keys", follow=False)
        assert anna.status == 303
        assert await bed.status_of(key) == 200
        bed.bed.clock.advance(bed.spec.keep_s)
        assert await bed.status_of(key) == 401


@pytest.mark.asyncio
async def test_what_a_person_may_ask_for_counts_for_all_of_their_keys(beds):
    terms = Terms(limits=KeyLimits(requests_per_minute=3), budget=BudgetTerms(10**6, "total"))
    bed = await beds(terms=terms)
    async with bed.browser("anna") as anna:
        first, second = await bed.make(anna, "a"), await bed.make(anna, "b")
        statuses = [await bed.status_of(key, max_tokens=4) for key in (first, second, first, second)]
        assert statuses[:3] == [200] * 3
        assert statuses[3] == 429
        await anna.send("/login/keys/end")
        third = await bed.make(anna, "c")
        assert await bed.status_of(third, max_tokens=4) == 429, "another key is no other limit"


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["no token", "wrong token", "other site", "no site", "another's token"])
async def test_a_form_from_elsewhere_changes_nothing(beds, how):
    bed = await beds()
    async with bed.browser("anna") as anna, bed.browser("ben") as ben:
        target, hidden = anna.fields("/login/keys")
        _, others = ben.fields("/login/keys")
        token = {"no token": {}, "wrong token": {"form": "x"}, "another's token": others}.get(how, hidden)
        origins = {"other site": "https://evil.example", "no site": "null"}
        headers = {"origin": origins[how]} if how in origins else {}
        await anna.open(target, data=token | {"name": "laptop"}, headers=headers)
        assert code_in(anna) == (403, "FT8174")
        await anna.open(f"{bed.url}/login/keys")
        assert "You have none yet" in anna.text


@pytest.mark.asyncio
async def test_a_sign_in_belongs_to_the_browser_that_began_it_and_works_once(beds):
    bed = await beds()
    async with bed.browser("anna") as anna, bed.browser() as thief:
        callback = next(step for step in anna.way if "/login/callback" in step)
        await thief.open(callback)
        assert code_in(thief) == (400, "FT8170"), "without the cookie of who began"
        await thief.open(f"{bed.url}/login", follow=False)
        await thief.open(callback)
        assert code_in(thief) == (400, "FT8170"), "with the cookie of another beginning"
        await anna.open(callback)
        assert code_in(anna) == (400, "FT8170"), "a second time"
        await thief.open(f"{bed.url}/login/callback?error=access_denied&state=x")
        assert code_in(thief) == (400, "FT8170")
        await thief.open(f"{bed.url}/login/keys", follow=False)
        assert thief.status == 303


@pytest.mark.asyncio
async def test_who_begins_again_and_again_can_end_it(beds):
    bed = await beds()
    async with bed.browser() as anna:
        for _ in range(30):
            await anna.open(f"{bed.url}/login", follow=False)
        cookie = next(c.value for c in anna.http.cookie_jar if c.key == COOKIE)
        assert len(cookie) < 3000, "browsers drop a cookie of over 4096"
        await anna.sign_in(bed.url, "anna")
        assert anna.url.path == "/login/keys"


@pytest.mark.asyncio
async def test_a_code_of_another_sign_in_is_refused_with_the_right_state(beds):
    """What somebody who lures a browser would send: their own code, with the victim's state."""
    bed = await beds()
    async with bed.browser() as anna, bed.browser("ben") as ben:
        theirs = parse_qs(urlsplit(next(step for step in ben.way if "/login/callback" in step)).query)
        await anna.open(f"{bed.url}/login", follow=False)
        state = parse_qs(urlsplit(anna.headers["location"]).query)["state"][0]
        await anna.open(f"{bed.url}/login/callback?code={theirs['code'][0]}&state={state}")
        assert code_in(anna) == (400, "FT8170")


@pytest.mark.asyncio
async def test_a_cookie_that_was_made_up_or_changed_is_none(beds):
    bed = await beds()
    async with bed.browser("anna") as anna, bed.browser() as forger:
        cookie = next(c.value for c in anna.http.cookie_jar if c.key == COOKIE)
        for value in ("x", "e30=.x.y", cookie[:-2], "A" + cookie[1:], cookie.replace(".", "", 1)):
            headers = {"cookie": f"{COOKIE}={value}"}
            await forger.open(f"{bed.url}/login/keys", headers=headers, follow=False)
            assert forger.status == 303


@pytest.mark.asyncio
async def test_another_gateway_with_the_same_key_api_goes_on_with_a_session(beds):
    """Behind one name any of them may be asked; a successor has the same keys, too."""
    first = await beds()
    second = await beds(first.provider, first.url)
    async with first.browser("anna") as anna:
        page = await anna.open(f"{second.bed.url}/login/keys")
        assert "anna" in page.text
        target, hidden = anna.fields("/login/keys")
        await anna.open(target, data=hidden | {"name": "laptop"}, headers={"origin": first.url})
        key = SECRET_SHOWN.search(anna.text)[1]
        assert await second.status_of(key) == 200


@pytest.mark.asyncio
async def test_a_public_client_proves_itself_by_pkce_alone(beds):
    bed = await beds(client_secret="", secret="")
    async with bed.browser("anna") as anna:
        assert anna.url.path == "/login/keys"


@pytest.mark.asyncio
async def test_a_wrong_client_secret_is_told_without_being_shown(beds, caplog):
    bed = await beds(client_secret="another-secret-of-the-client")
    async with bed.browser("anna") as anna:
        assert code_in(anna) == (400, "FT8170")
    assert SECRET not in caplog.text
    assert "invalid_client" in caplog.text


@pytest.mark.asyncio
async def test_a_provider_that_is_away_is_told_and_keys_go_on(beds):
    bed = await beds(client_secret=SECRET)
    async with bed.browser("anna") as anna, bed.browser() as ben, bed.browser() as late:
        key = await bed.make(anna)
        await ben.sign_in(bed.url, "ben", stop_before="provider")
        state = parse_qs(urlsplit(ben.way[-1] if "state=" in ben.way[-1] else ben.way[0]).query).get("state")
        if state is None:
            state = parse_qs(urlsplit(next(step for step in ben.way if "state=" in step)).query)["state"]
        bed.provider.process.kill()
        bed.provider.process.wait()
        await ben.open(f"{bed.url}/login/callback?code=x&state={state[0]}")
        assert code_in(ben) == (503, "FT8171")
        await late.open(f"{bed.url}/login", follow=False)
        assert late.status in (302, 503), "where to go is known by heart, or it is told that nobody is there"
        await anna.open(f"{bed.url}/login/keys")
        assert "laptop" in anna.text
        assert await bed.status_of(key) == 200


@pytest.mark.asyncio
async def test_a_provider_that_was_never_there_is_told(beds):
    bed = await beds(SimpleNamespace(url="http://127.0.0.1:1", stop=lambda: None))
    async with bed.browser() as anna:
        await anna.open(f"{bed.url}/login")
        assert code_in(anna) == (503, "FT8171")


@pytest.mark.asyncio
async def test_who_has_no_key_can_send_little_and_only_where_there_is_a_page(beds):
    bed = await beds()
    async with bed.browser() as anybody:
        await anybody.open(f"{bed.url}/login/keys", data=b"x" * (FORM_OCTETS + 1))
        assert anybody.status == 413
        await anybody.open(f"{bed.url}/login", data=b"x")
        assert anybody.status == 405
        await anybody.open(f"{bed.url}/login/other")
        assert anybody.status == 401
        await anybody.open(f"{bed.url}/login/keys", data={"name": "x"}, follow=False)
        assert (anybody.status, anybody.headers["location"]) == (303, f"{bed.url}/login")

        async def chunks():
            yield b"name=x"

        await anybody.open(f"{bed.url}/login/keys", data=chunks())
        assert anybody.status == 413


@pytest.mark.asyncio
async def test_keys_of_people_are_seen_and_ended_by_who_has_the_admin_key(beds):
    bed = await beds()
    async with bed.browser("anna") as anna, aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as http:
        key = await bed.make(anna)
        query = {"user_id": "anna", "return_full_object": "true"}
        async with http.get(f"{bed.bed.url}/key/list", params=query) as answer:
            (listed,) = (await answer.json())["keys"]
        assert listed["key_alias"].endswith("/laptop")
        async with http.post(f"{bed.bed.url}/key/delete", json={"keys": [listed["token"]]}) as answer:
            assert answer.status == 200
        assert await bed.status_of(key) == 401


@pytest.mark.asyncio
async def test_many_who_begin_to_sign_in_leave_nothing_behind(beds):
    bed = await beds()
    login = bed.bed.gateway._owners[1]

    async def begin():
        async with bed.browser() as somebody:
            await somebody.open(f"{bed.url}/login", follow=False)
            return somebody.status

    statuses = await asyncio.gather(*(begin() for _ in range(60)))
    assert set(statuses) <= {302, 503}
    assert statuses.count(302) >= 32
    assert login._working == 0


def test_who_somebody_is_follows_issuer_and_subject_alone():
    spec = LoginSpec("https://a", "c", "https://g", groups=GROUPS)
    claims = {"sub": "1", "preferred_username": "anna", "groups": ["x", "students", "hpc-staff"]}
    anna = person_of(spec, claims)
    assert anna.group == "everyone", "the blueprint's order counts"
    assert person_of(spec, claims | {"preferred_username": "new"}).id == anna.id
    assert person_of(spec, claims | {"sub": "2"}).id != anna.id
    assert person_of(msgspec.structs.replace(spec, issuer="https://b"), claims).id != anna.id
    assert person_of(spec, claims | {"groups": "students"}).group == "alpha-only", "a claim may be one word"
    for wrong in (None, [], ["x"], 7, {"students": 1}, [["students"]]):
        assert person_of(spec, claims | {"groups": wrong}) is None
    assert person_of(spec, claims | {"sub": ""}) is None
    named = person_of(spec, claims | {"preferred_username": "a~b/c\n\u202e" + "x" * 100})
    assert named == Person(anna.id, ("abc" + "x" * 100)[:60], "everyone")
