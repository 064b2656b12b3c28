"""An issuer on a real socket, and its count of uses."""

import asyncio
import contextlib
import json
import ssl
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fabrictool.agent import admission
from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.identity import IdentityVerifier, create_root, fingerprint, issue_provider, issue_session
from fabrictool.mesh.issuing import ask_for
from fabrictool.mesh.jointoken import JoinToken, read_token, write_token
from fabrictool.state import issuer as issuer_module
from fabrictool.state.issuer import BURST, MAX_BODY_OCTETS, MAX_CONNECTIONS, TOKENS_KEPT, Issuer, RequestRate
from fabrictool.state.tokenuses import TokenUses
from fabrictool.state.truststore import TrustStore
from tests.manual_clock import ManualClock

pytestmark = pytest.mark.timeout(60)


class Door:
    """An issuer of provider beta, and tokens for it."""

    def __init__(self, folder):
        self.clock = ManualClock(wall=time.time())
        self.root = create_root("t", now=self.clock.wall())
        self.beta = issue_provider(self.root, "beta", now=self.clock.wall())
        self.uses = TokenUses(folder / "uses.sqlite")
        self.revoked = set()
        self.issuer = Issuer(self.beta, self.uses, self.clock, self.root.chain[0], self.revoked.__contains__)
        self.address = HostPort("127.0.0.1", 0)
        self.count = 0

    def token(self, **changes):
        self.count += 1
        now = self.clock.wall()
        fields = {"fabric": "t", "root": self.root.chain[0], "signer": self.beta.chain[0], "issuer": self.address}
        fields |= {"gateways": (HostPort("g", 1),), "uses": 1, "created": now, "expires": now + 3600}
        return write_token(JoinToken(id=f"{self.count:032x}", **fields | changes), self.beta)

    @contextlib.asynccontextmanager
    async def open(self):
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self.issuer.serve("127.0.0.1", 0, ready.set_result))
        self.address = HostPort("127.0.0.1", int((await ready).rpartition(":")[2]))
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def ask(self, text):
        token = read_token(text).token
        return await asyncio.to_thread(admission.ask_issuer, token, text, ends_at=None, shown="")

    async def connect(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=self.root.chain[0])
        return await asyncio.open_connection("127.0.0.1", self.address.port, ssl=context)

    async def raw(self, octets):
        reader, writer = await self.connect()
        writer.write(octets)
        try:
            return await reader.read()
        finally:
            writer.close()


@pytest.fixture
def door(tmp_path):
    return Door(tmp_path)


def body_of(text, key=None):
    return msgspec.json.encode(ask_for(text, key or Ed25519PrivateKey.generate(), ends_at=None, shown=""))


def code_of(answer):
    status, body = answer
    return status, json.loads(body).get("code", "")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ""),
        ({"fabric": "other"}, "FT6402"),
        ({"bound": "x" * 64}, "FT6406"),
        ({"created": 1.0, "expires": 2.0}, "FT6404"),
    ],
)
def test_which_tokens_apply_can_start_sessions_with(door, tmp_path, changes, code):
    store = TrustStore(tmp_path / "trust")
    store.folder.mkdir()
    (store.folder / "root.crt").write_bytes(door.root.chain_pem())
    with pytest.raises(FabrictoolError) if code else contextlib.nullcontext() as refused:
        store.accept(door.token(models=("small",), **changes), "t", now=door.clock.wall())
    if code:
        assert refused.value.problems[0].code == code
        return
    store.check_sessions("beta", "agent", "small", now=door.clock.wall())
    for model, role in (("large", "agent"), ("", "gateway")):
        with pytest.raises(FabrictoolError):
            store.check_sessions("beta", role, model, now=door.clock.wall())
    with pytest.raises(FabrictoolError):
        store.check_sessions("beta", "agent", now=door.clock.wall() + 86400)
    revoked = store.folder / "revoked" / f"{fingerprint(door.beta.chain[0]).hex()}.txt"
    revoked.parent.mkdir()
    revoked.touch()
    with pytest.raises(FabrictoolError, match="was revoked"):
        store.check_sessions("beta", "agent", now=door.clock.wall())


@pytest.mark.asyncio
async def test_a_key_that_never_travels_is_signed_and_the_token_is_spent(door, caplog):
    caplog.set_level("INFO", "fabrictool.issuer")
    async with door.open():
        text = door.token()
        session = await door.ask(text)
        verified = IdentityVerifier(door.root.chain[0]).verify(session.chain, now=door.clock.wall())
        assert (verified.claims.provider, verified.claims.role) == ("beta", "agent")
        with pytest.raises(FabrictoolError) as refused:
            await door.ask(text)
        assert refused.value.problems[0].code == "FT6405"
    assert verified.claims.session[:8] in caplog.text
    assert "FT6405" in caplog.text
    assert text not in caplog.text


def test_of_many_at_once_as_many_get_a_session_as_the_token_allows_and_a_restart_forgets_none(door, tmp_path):
    text = door.token(uses=3)
    bodies = [body_of(text) for _ in range(12)]
    others = Issuer(door.beta, TokenUses(tmp_path / "uses.sqlite"), door.clock, door.root.chain[0])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: code_of((door.issuer, others)[n % 2].answer(bodies[n], "a")), range(12)))
    assert sorted(answers) == [(200, "")] * 3 + [(403, "FT6405")] * 9
    again = Issuer(door.beta, TokenUses(tmp_path / "uses.sqlite"), door.clock, door.root.chain[0])
    assert [again.answer(body, "a")[0] for body in bodies] == [status for status, _ in answers]
    assert stat.S_IMODE((tmp_path / "uses.sqlite").stat().st_mode) == 0o600


def test_who_asks_again_with_the_same_key_gets_the_same_certificate(door):
    text, key = door.token(), Ed25519PrivateKey.generate()
    first, second = (door.issuer.answer(body_of(text, key), "a") for _ in range(2))
    assert first == second
    assert first[0] == 200


def test_nothing_is_signed_without_the_count_of_uses(door, tmp_path):
    (tmp_path / "uses.sqlite").write_bytes(b"no database" * 100)
    assert code_of(door.issuer.answer(body_of(door.token()), "a")) == (500, "FT6411")


@pytest.mark.asyncio
async def test_an_issuer_that_cannot_sign_is_one_that_does_not_answer(door, tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "PAUSE_S", 0.0)
    (tmp_path / "uses.sqlite").write_bytes(b"no database" * 100)
    async with door.open():
        with pytest.raises(UnreachableError) as refused:
            await door.ask(door.token())
    assert refused.value.problems[0].code == "FT6411"
    assert str(tmp_path) not in str(refused.value), "what its files are called stays there"


def test_uses_of_tokens_that_are_long_over_are_forgotten(door, tmp_path):
    import sqlite3

    assert door.issuer.answer(body_of(door.token(expires=door.clock.wall() + 60)), "a")[0] == 200
    door.clock.advance(3600)
    assert door.issuer.answer(body_of(door.token()), "a")[0] == 200
    with contextlib.closing(sqlite3.connect(tmp_path / "uses.sqlite")) as base:
        assert base.execute("SELECT count(*) FROM uses").fetchone() == (1,)


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 10_000, b'{"token":"ftjoin1.a.b"}', b"\xff\xfe"])
def test_what_is_no_request_is_refused(door, body):
    assert code_of(door.issuer.answer(body, "a")) == (403, "FT6408")


@pytest.mark.asyncio
async def test_the_door_is_narrow(door):
    async with door.open():
        post = b"POST /v1/session HTTP/1.1\r\n"
        assert (await door.raw(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert (await door.raw(post + b"\r\n")).startswith(b"HTTP/1.1 400")
        too_long = b"content-length: %d\r\n\r\n" % (MAX_BODY_OCTETS + 1)
        assert (await door.raw(post + too_long)).startswith(b"HTTP/1.1 400")
        two = b"content-length: 1\r\ncontent-length: 2\r\n\r\n"
        assert (await door.raw(post + two)).startswith(b"HTTP/1.1 400")
        assert await door.raw(post + b"x: " + b"y" * 100_000) == b"", "a head without end"
        assert await door.ask(door.token()), "it still answers"


@pytest.mark.asyncio
async def test_who_says_nothing_is_shown_out(door, monkeypatch):
    monkeypatch.setattr(issuer_module, "REQUEST_S", 0.3)
    async with door.open():
        assert await door.raw(b"POST /v1/session HTTP/1.1\r\n") == b""


@pytest.mark.asyncio
async def test_a_crowd_fills_the_house_and_no_more(door):
    async with door.open():
        crowd = [await door.connect() for _ in range(MAX_CONNECTIONS)]
        try:
            with pytest.raises(ConnectionError):
                await door.connect()
        finally:
            for _, writer in crowd:
                writer.close()
        assert await door.ask(door.token()), "it asks again until there is room"


@pytest.mark.asyncio
async def test_a_token_is_not_sent_to_who_is_not_its_issuer(door, tmp_path):
    now = door.clock.wall()
    others = {
        "an agent": issue_session(door.beta, "agent", now=now),
        "another provider": issue_session(issue_provider(door.root, "alpha", now=now), "issuer", now=now),
        "another federation": issue_session(
            issue_provider(create_root("t", now=now), "beta", now=now), "issuer", now=now
        ),
    }
    for name, credential in others.items():
        heard = bytearray()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (tmp_path / "key").write_bytes(credential.key_pem())
        (tmp_path / "chain").write_bytes(credential.chain_pem())
        context.load_cert_chain(tmp_path / "chain", tmp_path / "key")

        async def listen(reader, writer, heard=heard):
            heard += await reader.read()
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
        async with server:
            door.address = HostPort("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(FabrictoolError) as refused:
                await door.ask(door.token())
        assert refused.value.problems[0].code == "FT6412", name
        assert not heard, name


def test_a_token_has_its_uses_and_a_burst_and_then_one_a_second_and_the_list_of_them_is_bounded():
    rate = RequestRate()
    assert [rate.take("a", 0.0, uses=5) for _ in range(BURST + 6)] == [True] * (BURST + 5) + [False]
    assert rate.take("b", 0.0)
    assert [rate.take("a", 1.0, uses=5), rate.take("a", 1.0, uses=5)] == [True, False]
    for number in range(TOKENS_KEPT + 10):
        rate.take(f"n{number}", 2.0)
    assert len(rate._left) == TOKENS_KEPT


@pytest.mark.asyncio
async def test_too_many_requests_with_one_token_are_told_to_wait_and_the_others_behind_the_same_nat_are_not(door):
    async with door.open():

        async def status(text):
            body = body_of(text)
            answer = await door.raw(b"POST /v1/session HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            return answer.split()[1], answer

        greedy = door.token()
        answers = [await status(greedy) for _ in range(BURST + 2)]
        assert [code for code, _ in answers] == [b"200"] + [b"403"] * BURST + [b"429"]
        assert b"FT6409" in answers[-1][1]
        assert [(await status(door.token()))[0] for _ in range(BURST + 2)] == [b"200"] * (BURST + 2)
        door.clock.advance(1)
        assert (await status(greedy))[0] == b"403"


@pytest.mark.asyncio
async def test_who_has_not_finished_a_handshake_takes_a_place_and_not_for_long(door, monkeypatch):
    monkeypatch.setattr(issuer_module, "HANDSHAKE_S", 6.0)
    async with door.open():
        crowd = [await asyncio.open_connection("127.0.0.1", door.address.port) for _ in range(MAX_CONNECTIONS)]
        late, writer = await asyncio.open_connection("127.0.0.1", door.address.port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(late.read(), 5.0) == b"", "there is no room for one more"
        for reader, shy in crowd:
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 30)
            shy.close()
        writer.close()
        assert (await door.raw(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404"), "they were shown out"
