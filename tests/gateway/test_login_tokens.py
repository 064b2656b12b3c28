"""ID tokens that no honest provider gives: a provider of the test's own, which can be told to spoil them."""

import time
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from aiohttp import web
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.gateway.test_login import LoginBed, code_in

pytestmark = pytest.mark.asyncio


class SpoiltProvider:
    """Signs what `spoil` makes of an ID token, with `key`, and calls itself `named`."""

    def __init__(self):
        self.published = RSAKey.generate_key(2048, {"kid": "k"})
        self.key, self.spoil, self.algorithm, self.named = self.published, dict, "RS256", None
        self.nonce = ""

    async def start(self):
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._metadata)
        app.router.add_get("/jwks", self._jwks)
        app.router.add_post("/token", self._token)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self):
        await self._runner.cleanup()

    async def _metadata(self, request):
        paths = {"authorization_endpoint": "/auth", "token_endpoint": "/token", "jwks_uri": "/jwks"}
        about = {name: f"{self.url}{path}" for name, path in paths.items()}
        signed_by = {"id_token_signing_alg_values_supported": ["RS256", "none"]}
        return web.json_response({"issuer": self.named or self.url} | about | signed_by)

    async def _jwks(self, request):
        return web.json_response({"keys": [self.published.as_dict(private=False)]})

    async def _token(self, request):
        now = int(time.time())
        claims = {"iss": self.named or self.url, "aud": "fabric", "sub": "1", "iat": now, "exp": now + 60}
        claims = self.spoil(claims | {"nonce": self.nonce, "groups": ["hpc-staff"]})
        answer = {"access_token": "a", "token_type": "Bearer"}
        if claims:
            head = {"alg": self.algorithm} | ({} if self.algorithm == "none" else {"kid": "k"})
            key = None if self.algorithm == "none" else self.key
            answer["id_token"] = jwt.encode(head, claims, key, algorithms=[self.algorithm])
        return web.json_response(answer)


@pytest_asyncio.fixture
async def come_back(tmp_path):
    provider = await SpoiltProvider().start()
    beds = []

    async def sign_in(**about):
        vars(provider).update(about)
        beds.append(await LoginBed(tmp_path).start(SimpleNamespace(url=provider.url, stop=lambda: None)))
        async with beds[-1].browser() as anna:
            await anna.open(f"{beds[-1].url}/login", follow=False)
            if anna.status != 302:
                return code_in(anna)
            asked = parse_qs(urlsplit(anna.headers["location"]).query)
            provider.nonce = provider.nonce or asked["nonce"][0]
            await anna.open(f"{beds[-1].url}/login/callback?code=c&state={asked['state'][0]}", follow=False)
            return anna.status, code_in(anna)[1] or anna.headers.get("location", "")

    yield sign_in
    for bed in beds:
        await bed.stop()
    await provider.stop()


async def test_a_token_that_is_right_signs_in(come_back):
    status, there = await come_back()
    assert (status, there.endswith("/login/keys")) == (303, True)


SPOILT = {
    "for another client": {"spoil": lambda claims: claims | {"aud": "other"}},
    "for another client, asked for by ours": {"spoil": lambda claims: claims | {"aud": ["other"], "azp": "fabric"}},
    "of another issuer": {"spoil": lambda claims: claims | {"iss": "https://evil.example"}},
    "expired": {"spoil": lambda claims: claims | {"iat": 1000, "exp": 2000}},
    "without a nonce": {"spoil": lambda claims: {name: claims[name] for name in claims if name != "nonce"}},
    "with another nonce": {"nonce": "another"},
    "not there": {"spoil": lambda claims: {}},
    "without a subject": {"spoil": lambda claims: {name: claims[name] for name in claims if name != "sub"}},
    "signed by somebody else": {"key": RSAKey.generate_key(2048, {"kid": "k"})},
    "not signed": {"algorithm": "none"},
    "of a provider that calls itself otherwise": {"named": "https://other.example"},
}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_token_that_is_spoilt_signs_nobody_in(come_back, how):
    status, code = await come_back(**SPOILT[how])
    assert (status, code) in {(400, "FT8170"), (503, "FT8171")}
