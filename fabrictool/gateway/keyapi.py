"""The small part of LiteLLM's key API by which a marketplace such as Waldur orders keys and bills their use.

It is served on the clients' listener, to the one who has the admin key. What a call reads or changes is the store's;
the event loop waits for none of it.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import secrets
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.ids import random_id
from fabrictool.gateway.calls import CoroutineAnswer
from fabrictool.gateway.keyfields import (
    SECRET_PREFIX,
    KeyFields,
    KeyNames,
    KeyRefusal,
    changed,
    described,
    hash_of,
)
from fabrictool.gateway.keyrecords import IssuedKey, KeyState
from fabrictool.gateway.keys import KEY_DIGITS, hash_key, presented_key
from fabrictool.gateway.openai import GatewayResponse, error_response, json_response, not_allowed
from fabrictool.gateway.spending import daily_activity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from fabrictool.base.clock import Clock
    from fabrictool.gateway.http import ClientConnection, ClientRequest
    from fabrictool.gateway.issued import IssuedKeys
    from fabrictool.gateway.keyrecords import KeyUsage
    from fabrictool.gateway.keys import Keyring

BODY_OCTETS = 256 * 1024
PAGE_MOST = 100
DAYS_MOST = 400
RETRY_S = 5
_REGENERATE = re.compile(r"/key/([^/]+)/regenerate")

_Body = TypeVar("_Body", KeyFields, KeyNames)


class UsageStore(Protocol):
    """It blocks, and raises FabrictoolError."""

    def key_usage(self, fabric: str, since: float, until: float) -> list[KeyUsage]:
        """Sums over ``since <= at < until``, wall seconds."""


class KeyApi:
    """`admit` a head, `call` for the whole request."""

    # Wide: what it changes, what it reads, and who hears of it.
    def __init__(
        self,
        issued: IssuedKeys,
        usage: UsageStore,
        clock: Clock,
        *,
        fabric: str,
        note: Callable[[str, str, str], None],
    ) -> None:
        """`note` is told kind, subject and text of each change."""
        self._issued = issued
        self._usage = usage
        self._clock = clock
        self._fabric = fabric
        self._note = note
        self._admin = ""
        self._calls: Mapping[tuple[str, str], Callable[[ClientRequest], Awaitable[GatewayResponse]]] = {
            ("POST", "/key/generate"): self._generate,
            ("GET", "/key/list"): self._list,
            ("GET", "/key/info"): self._info,
            ("POST", "/key/update"): self._update,
            ("POST", "/key/block"): self._block,
            ("POST", "/key/unblock"): self._block,
            ("POST", "/key/delete"): self._delete,
            ("POST", "/key/regenerate"): self._regenerate,
            ("GET", "/health/readiness"): self._readiness,
            ("GET", "/user/daily/activity"): self._activity,
        }
        self._paths = frozenset(path for _, path in self._calls)

    def attach(self, keyring: Keyring) -> None:
        """From now on its admin key is the key of this API."""
        self._admin = keyring.admin

    def serves(self, path: str) -> bool:
        return path.startswith("/key/") or path in self._paths

    def admit(self, request: ClientRequest) -> GatewayResponse | None:
        """The refusal of a head, or None."""
        path = request.path
        key = presented_key(request.header("authorization"))
        if not self._admin or not hmac.compare_digest(hash_key(key), self._admin):
            header = (("www-authenticate", 'Bearer realm="fabrictool keys"'),)
            text = "this path needs the admin key of the key API: send Authorization: Bearer KEY"
            return error_response(401, "FT8102", text, headers=header)
        if self._call_for(request) is not None:
            return None
        if _REGENERATE.fullmatch(path):
            return not_allowed(request.method, path, "POST")
        if path in self._paths:
            return not_allowed(request.method, path, ", ".join(method for method, at in self._calls if at == path))
        return error_response(404, "FT8107", f"there is nothing at {path}")

    def call(self, request: ClientRequest, connection: ClientConnection) -> CoroutineAnswer:
        """Of an admitted request; it is not started yet."""
        return CoroutineAnswer(self._answer(request), connection)

    # -- internals --------------------------------------------------------------------------------------------

    def _call_for(self, request: ClientRequest) -> Callable[[ClientRequest], Awaitable[GatewayResponse]] | None:
        method = "GET" if request.method == "HEAD" else request.method
        if method == "POST" and _REGENERATE.fullmatch(request.path):
            return self._regenerate
        return self._calls.get((method, request.path))

    async def _answer(self, request: ClientRequest) -> GatewayResponse:
        call = self._call_for(request)
        if call is None:  # `admit` said so
            return error_response(404, "FT8107", f"there is nothing at {request.path}")
        if len(request.body) > BODY_OCTETS:
            return error_response(413, "FT8108", f"the request's body is over {BODY_OCTETS >> 10} KiB")
        try:
            answer = await call(request)
            headers = (*answer.headers, ("cache-control", "no-store"))
            return GatewayResponse(answer.status, answer.body, answer.content_type, headers)
        except KeyRefusal as refusal:
            return error_response(refusal.status, refusal.code, refusal.text, param=refusal.param)
        except FabrictoolError as error:
            text = f"keys cannot be looked up or changed now: {error.problems[0].message}"
            return error_response(503, "FT8143", text, headers=(("retry-after", str(RETRY_S)),))

    async def _generate(self, request: ClientRequest) -> GatewayResponse:
        fields = _body(request, KeyFields)
        if fields.key is not None:
            raise KeyRefusal(400, "FT8140", "keys are made here: leave out `key`", param="key")
        now, secret = self._clock.wall(), ""

        def make(live: Mapping[str, KeyState]) -> list[KeyState]:
            nonlocal secret
            secret = new_secret()
            key = changed(IssuedKey(id=random_id(16), created_at=now, changed_at=now), fields, now)
            _check_alias(key, live)
            return [KeyState(hash_key(secret), key)]

        (state,) = await self._issued.change(make)
        self._say("key-made", state)
        return json_response({"key": secret} | described(state))

    async def _update(self, request: ClientRequest) -> GatewayResponse:
        fields = _body(request, KeyFields)
        state = await self._change(_named(fields.key), fields)
        self._say("key-changed", state)
        return json_response(described(state) | {"key": state.sha256})

    async def _block(self, request: ClientRequest) -> GatewayResponse:
        blocked = request.path == "/key/block"
        state = await self._change(_named(_body(request, KeyFields).key), KeyFields(blocked=blocked))
        self._say("key-blocked" if blocked else "key-unblocked", state)
        return json_response(described(state))

    async def _change(self, sha256: str, fields: KeyFields) -> KeyState:
        now = self._clock.wall()

        def make(live: Mapping[str, KeyState]) -> list[KeyState]:
            state = _live(sha256, live)
            key = changed(state.key, fields, now)
            _check_alias(key, live)
            return [msgspec.structs.replace(state, key=key)]

        (state,) = await self._issued.change(make)
        return state

    async def _regenerate(self, request: ClientRequest) -> GatewayResponse:
        """Another secret; what was used with the former one stays the same key's."""
        match = _REGENERATE.fullmatch(request.path)
        fields = _body(request, KeyFields) if request.body else KeyFields()
        sha256, now, secret = hash_of(match[1]) if match else _named(fields.key), self._clock.wall(), ""

        def make(live: Mapping[str, KeyState]) -> list[KeyState]:
            nonlocal secret
            secret, former = new_secret(), _live(sha256, live)
            key = changed(former.key, fields, now)
            _check_alias(key, live)
            return [msgspec.structs.replace(former, ended=True), KeyState(hash_key(secret), key)]

        _, state = await self._issued.change(make)
        self._say("key-regenerated", state)
        return json_response({"key": secret} | described(state))

    async def _delete(self, request: ClientRequest) -> GatewayResponse:
        names = _body(request, KeyNames)
        if not names.keys and not names.key_aliases:
            raise KeyRefusal(400, "FT8140", "`keys` or `key_aliases` says which keys end")

        def make(live: Mapping[str, KeyState]) -> list[KeyState]:
            by_alias = {state.key.alias: state for state in live.values()} if names.key_aliases else {}
            ends = {sha256: _live(sha256, live) for sha256 in map(hash_of, names.keys or ())}
            for alias in names.key_aliases or ():
                state = by_alias.get(alias) if alias else None
                if state is None:
                    raise KeyRefusal(404, "FT8141", f"there is no key with the alias {alias!r}")
                ends[state.sha256] = state
            return [msgspec.structs.replace(state, ended=True) for state in ends.values()]

        states = await self._issued.change(make)
        for state in states:
            self._say("key-deleted", state)
        return json_response({"deleted_keys": [state.sha256 for state in states]})

    async def _info(self, request: ClientRequest) -> GatewayResponse:
        name = _query(request).get("key", "")
        await self._issued.refresh()
        state = _live(_named(name), self._issued.live)
        return json_response({"key": state.sha256, "info": described(state)})

    async def _list(self, request: ClientRequest) -> GatewayResponse:
        query = _query(request)
        page, size = _number(query, "page", 1, 10**6), _number(query, "size", 10, PAGE_MOST)
        await self._issued.refresh()
        states = sorted(
            (state for state in self._issued.live.values() if _listed(state, query)),
            key=lambda state: (state.key.created_at, state.key.id),
        )
        shown = states[(page - 1) * size : page * size]
        whole = _is_true(query.get("return_full_object", ""))
        return json_response(
            {
                "keys": [described(state) if whole else state.sha256 for state in shown],
                "total_count": len(states),
                "current_page": page,
                "total_pages": math.ceil(len(states) / size),
            }
        )

    async def _readiness(self, request: ClientRequest) -> GatewayResponse:
        try:
            await self._issued.refresh()
        except FabrictoolError:
            return GatewayResponse(503, b'{"status":"unhealthy","db":"Not connected"}')
        return GatewayResponse(200, b'{"status":"healthy","db":"connected"}')

    async def _activity(self, request: ClientRequest) -> GatewayResponse:
        query = _query(request)
        first, last = _day(query, "start_date"), _day(query, "end_date")
        if not first <= last <= first + timedelta(days=DAYS_MOST):
            raise KeyRefusal(400, "FT8140", f"`end_date` is to be {DAYS_MOST} days after `start_date` at most")
        page, size = _number(query, "page", 1, 10**6), _number(query, "page_size", 50, 1000)
        begin = datetime(first.year, first.month, first.day, tzinfo=UTC).timestamp()
        until = datetime(last.year, last.month, last.day, tzinfo=UTC).timestamp() + 86400.0
        sha256 = hash_of(query["api_key"]) if query.get("api_key") else ""
        wanted = {"model": query.get("model", ""), "user_id": query.get("user_id", "")}

        def add_up() -> GatewayResponse:
            usage = [
                entry
                for entry in self._usage.key_usage(self._fabric, begin, until)
                if sha256 in ("", entry.sha256)
                and wanted["model"] in ("", entry.model)
                and wanted["user_id"] in ("", entry.key.user_id)
            ]
            return json_response(daily_activity(usage, page, size))

        return await asyncio.to_thread(add_up)

    def _say(self, kind: str, state: KeyState) -> None:
        self._note(kind, state.sha256[:KEY_DIGITS], state.key.alias)


def new_secret() -> str:
    """256 random bits, by the prefix as LiteLLM's."""
    return SECRET_PREFIX + secrets.token_urlsafe(32)


def _body(request: ClientRequest, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except msgspec.ValidationError as error:
        raise KeyRefusal(400, "FT8140", f"the request is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyRefusal(400, "FT8140", f"the body is not valid JSON: {error}") from error


def _query(request: ClientRequest) -> dict[str, str]:
    """The first of each name."""
    try:
        fields = parse_qs(request.target.partition("?")[2], max_num_fields=100)
    except ValueError as error:
        raise KeyRefusal(400, "FT8140", "the query has too many fields") from error
    return {name: values[0] for name, values in fields.items()}


def _number(query: Mapping[str, str], name: str, usual: int, most: int) -> int:
    text = query.get(name, str(usual))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise KeyRefusal(400, "FT8140", f"`{name}` is a number from 1 to {most}", param=name)
    return int(text)


def _day(query: Mapping[str, str], name: str) -> date:
    try:
        return date.fromisoformat(query.get(name, ""))
    except ValueError as error:
        raise KeyRefusal(400, "FT8140", f"`{name}` is a day such as 2026-11-23", param=name) from error


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "yes", "on")


def _listed(state: KeyState, query: Mapping[str, str]) -> bool:
    key, alias = state.key, query.get("key_alias", "")
    matches = alias in key.alias if _is_true(query.get("substring_matching", "")) else alias in ("", key.alias)
    return (
        matches
        and query.get("user_id", "") in ("", key.user_id)
        and query.get("team_id", "") in ("", key.team_id)
        and ("key_hash" not in query or hash_of(query["key_hash"]) == state.sha256)
    )


def _named(name: str | None) -> str:
    """The hash of the key that a call is about."""
    if not name:
        raise KeyRefusal(400, "FT8140", "`key` says which key is meant: its hash, or itself", param="key")
    return hash_of(name)


def _live(sha256: str, live: Mapping[str, KeyState]) -> KeyState:
    state = live.get(sha256)
    if state is None:
        raise KeyRefusal(404, "FT8141", "Key not found.", param="key")
    return state


def _check_alias(key: IssuedKey, live: Mapping[str, KeyState]) -> None:
    if key.alias and any(state.key.alias == key.alias and state.key.id != key.id for state in live.values()):
        text = f"there is a key with the alias {key.alias!r}: two keys with one name could not be told apart in a bill"
        raise KeyRefusal(400, "FT8142", text, param="key_alias")
