"""The pages at ``/login``: sign in at the provider, see one's keys, make one, end one.

Starlette and Authlib do what is known how to do: routing, a signed session in a cookie, discovery, state, nonce, PKCE
and the checks of an ID token. Nothing is kept here between two requests, so any gateway with the same key API can
answer any of them, and nobody can fill its memory by beginning to sign in. They run in the slow lane: a request comes
whole, its answer goes out whole, and requests for models never wait for either but for their turn in the loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import httpx2 as httpx
import msgspec
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.starlette_client import OAuth
from joserfc.errors import JoseError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.calls import CoroutineAnswer
from fabrictool.gateway.keyfields import KeyRefusal
from fabrictool.gateway.keys import KEY_DIGITS
from fabrictool.gateway.login.bridge import answered, as_answer
from fabrictool.gateway.login.pages import Pages
from fabrictool.gateway.login.people import OwnKeys, Person, label_of, person_of
from fabrictool.gateway.openai import GatewayResponse, error_response, not_allowed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import LoginSpec
    from fabrictool.gateway.http import ClientConnection, ClientRequest
    from fabrictool.gateway.issued import IssuedKeys
    from fabrictool.gateway.keys import Keyring

SESSION_S = 3600
COOKIE = "fabrictool_login"
FORM_OCTETS = 4096
AT_ONCE = 32
"""Sign-ins and forms that are worked on; each takes a few milliseconds, and some wait for the provider."""
BEGUN_KEPT = 4
"""Sign-ins that a browser may have begun and not ended, each in its tab."""
PROVIDER_S = 10.0
_PATHS = {
    "/login": ("GET",),
    "/login/callback": ("GET",),
    "/login/keys": ("GET", "POST"),
    "/login/keys/end": ("POST",),
    "/login/out": ("POST",),
}
_log = logging.getLogger("fabrictool.gateway")


class LoginPages:
    """A `PathOwner`: `admit` a head, `call` for the whole request."""

    # Wide: whose keys they become, by which provider, and who hears of it.
    def __init__(
        self,
        spec: LoginSpec,
        issued: IssuedKeys,
        clock: Clock,
        *,
        fabric: str,
        secret: str,
        note: Callable[[str, str, str], None],
    ) -> None:
        """`secret`: of the client at the provider; empty for a public one."""
        self._spec = spec
        self._keys = OwnKeys(issued, spec)
        self._clock = clock
        self._fabric = fabric
        self._note = note
        self._address = urlsplit(spec.url)
        self._pages = Pages(fabric, spec.url, self._address.path)
        self._working = 0
        self._oauth = OAuth()
        self._oauth.register(
            "provider",
            client_id=spec.client,
            client_secret=secret or None,
            server_metadata_url=f"{spec.issuer}/.well-known/openid-configuration",
            client_kwargs={
                "scope": " ".join(("openid", "profile", *spec.scopes)),
                "code_challenge_method": "S256",
                "token_endpoint_auth_method": "client_secret_basic" if secret else "none",
                "timeout": PROVIDER_S,
            },
        )
        self._app: Starlette | None = None

    def attach(self, keyring: Keyring) -> None:
        """Sessions are signed by what all gateways with this key API know, and nobody else."""
        if not keyring.admin:
            self._app = None
            return
        signing = hmac.digest(keyring.admin.encode(), f"fabrictool login {self._fabric}".encode(), "sha256").hex()
        session = Middleware(
            SessionMiddleware,
            secret_key=signing,
            session_cookie=COOKIE,
            max_age=SESSION_S,
            path=f"{self._address.path}/login",
            same_site="lax",
            https_only=self._address.scheme == "https",
        )
        pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/login": self._begin,
            "/login/callback": self._end_sign_in,
            "/login/keys": self._own_keys,
            "/login/keys/end": self._end_key,
            "/login/out": self._sign_out,
        }
        routes = [Route(path, page, methods=list(_PATHS[path])) for path, page in pages.items()]
        self._app = Starlette(routes=routes, middleware=[session])

    def serves(self, path: str) -> bool:
        return path in _PATHS

    def admit(self, request: ClientRequest) -> GatewayResponse | None:
        """Anybody may come here: what is taken of them is small, and a few at a time."""
        allowed = _PATHS[request.path]
        if request.method not in (*allowed, "HEAD" if "GET" in allowed else ""):
            return not_allowed(request.method, request.path, ", ".join(allowed))
        size = request.header("content-length") or "0"
        if "transfer-encoding" in request.fields or not size.isdigit() or int(size) > FORM_OCTETS:
            return error_response(413, "FT8108", f"a form here has {FORM_OCTETS >> 10} KiB at most")
        return None

    def call(self, request: ClientRequest, connection: ClientConnection) -> CoroutineAnswer:
        """Of an admitted request; it is not started yet."""
        return CoroutineAnswer(self._answer(request), connection)

    async def _answer(self, request: ClientRequest) -> GatewayResponse:
        app = self._app
        if app is None or self._working >= AT_ONCE:
            return as_answer(self._pages.problem(503, "FT8175", "too many people sign in at this moment"))
        self._working += 1
        try:
            port = self._address.port or (443 if self._address.scheme == "https" else 80)
            return await answered(app, request, self._address.scheme, self._address.hostname or "", port)
        finally:
            self._working -= 1

    # -- pages ------------------------------------------------------------------------------------------------

    async def _begin(self, request: Request) -> Response:
        if self._person(request) is not None:
            return self._to("/login/keys")
        begun = [name for name in request.session if name.startswith("_state_")]  # Authlib's
        for name in begun[: -BEGUN_KEPT + 1]:  # a cookie has 4 KB, and browsers drop a larger one
            del request.session[name]
        provider = self._oauth.create_client("provider")
        try:
            async with asyncio.timeout(PROVIDER_S):
                answer: Response = await provider.authorize_redirect(request, f"{self._spec.url}/login/callback")
        except (httpx.HTTPError, TimeoutError, AuthlibBaseError, ValueError, KeyError, RuntimeError) as error:
            return self._provider_away(error)
        answer.headers["cache-control"] = "no-store"
        return answer

    async def _end_sign_in(self, request: Request) -> Response:
        """The provider sent the browser back, with a code or with a reason why there is none."""
        provider = self._oauth.create_client("provider")
        try:
            async with asyncio.timeout(2 * PROVIDER_S):
                token = await provider.authorize_access_token(request, claims_options=self._expected())
                claims = dict(token["userinfo"])  # there is none without an ID token
                if self._spec.claim not in claims:
                    more = await provider.userinfo(token=token)
                    claims = {**more, **claims} if more.get("sub") == claims.get("sub") else claims
        except (AuthlibBaseError, JoseError, ValueError, KeyError, TypeError) as error:
            _log.warning("a sign-in did not work: %s: %s", type(error).__name__, str(error)[:300])
            text = "the provider did not say who you are, or this sign-in was not begun in this browser"
            return self._pages.problem(400, "FT8170", text)
        except (httpx.HTTPError, TimeoutError, RuntimeError) as error:
            return self._provider_away(error)
        person = person_of(self._spec, claims)
        request.session.clear()
        if person is None:
            _log.info("a person without a group signed in; claims: %s", ", ".join(sorted(claims)))
            return self._pages.problem(403, "FT8172", "you are in none of the groups that may make keys")
        until = self._clock.wall() + SESSION_S
        request.session.update(msgspec.to_builtins(person) | {"until": until, "form": secrets.token_urlsafe(16)})
        return self._to("/login/keys")

    def _expected(self) -> dict[str, dict[str, Any]]:
        """Of an ID token: by the provider of the blueprint, whatever it calls itself, and for us. Authlib alone would
        believe the former's own words, and let `azp` stand for the latter.
        """
        issuers = [self._spec.issuer, f"{self._spec.issuer}/"]  # some write a slash at the end
        audience = {"essential": True, "value": self._spec.client}
        return {"iss": {"essential": True, "values": issuers}, "aud": audience}

    async def _own_keys(self, request: Request) -> Response:
        person = self._person(request)
        if person is None:
            return self._to("/login")
        secret = label = ""
        try:
            if request.method == "POST":
                form = await self._form(request)
                secret, state = await self._keys.make(person, form.get("name", ""), self._clock.wall())
                label = label_of(state)
                self._note("key-made", state.sha256[:KEY_DIGITS], state.key.tenant)
            keys = await self._keys.of(person, self._clock.wall())
        except KeyRefusal as refusal:
            return self._pages.problem(refusal.status, refusal.code, refusal.text, back=True)
        except FabrictoolError as error:
            return self._store_away(error)
        form_token = request.session["form"]
        return self._pages.keys(person, keys, self._spec.keys, form_token, secret=secret, label=label)

    async def _end_key(self, request: Request) -> Response:
        person = self._person(request)
        if person is None:
            return self._to("/login")
        try:
            form = await self._form(request)
            state = await self._keys.end(person, form.get("key", ""))
        except KeyRefusal as refusal:
            return self._pages.problem(refusal.status, refusal.code, refusal.text, back=True)
        except FabrictoolError as error:
            return self._store_away(error)
        self._note("key-deleted", state.sha256[:KEY_DIGITS], state.key.tenant)
        return self._to("/login/keys")

    async def _sign_out(self, request: Request) -> Response:
        if self._person(request) is not None:
            try:
                await self._form(request)
            except KeyRefusal as refusal:
                return self._pages.problem(refusal.status, refusal.code, refusal.text, back=True)
        request.session.clear()
        return self._pages.signed_out()

    # -- internals --------------------------------------------------------------------------------------------

    def _person(self, request: Request) -> Person | None:
        """Who this browser's session is of, if it has not ended."""
        session = request.session
        if not isinstance(session.get("until"), float) or self._clock.wall() >= session["until"]:
            return None
        try:
            return msgspec.convert({field: session.get(field) for field in ("id", "name", "group")}, Person)
        except msgspec.ValidationError:
            return None

    async def _form(self, request: Request) -> dict[str, str]:
        """The fields of a form of ours. Raises KeyRefusal FT8174 for any other."""
        try:
            sent = parse_qs((await request.body()).decode(), max_num_fields=10)
        except ValueError:
            sent = {}
        fields = {name: values[0] for name, values in sent.items()}
        origin = request.headers.get("origin")
        ours = f"{self._address.scheme}://{self._address.netloc}"
        token = str(request.session.get("form", ""))
        same = bool(token) and hmac.compare_digest(fields.get("form", "").encode(), token.encode())
        if origin not in (None, ours) or not same:
            raise KeyRefusal(403, "FT8174", "this form did not come from the page that you signed in to")
        return fields

    def _to(self, path: str) -> Response:
        return RedirectResponse(f"{self._spec.url}{path}", 303, headers={"cache-control": "no-store"})

    def _provider_away(self, error: BaseException) -> Response:
        _log.warning("the login's provider cannot be asked: %s: %s", type(error).__name__, str(error)[:300])
        return self._pages.problem(503, "FT8171", "the place where people sign in cannot be reached")

    def _store_away(self, error: FabrictoolError) -> Response:
        _log.warning("keys of a person cannot be looked up: %s", error)
        text = "keys cannot be looked up or changed now; those that exist go on working"
        return self._pages.problem(503, "FT8143", text, back=True)
