"""The engine's HTTP: OpenAI routes, `/health`, `/metrics`. Up from the first moment, so that loading can be watched."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from fabrictool.base.ids import random_id
from fabrictool.engines.protocol import FULL_HEADER
from fabrictool.engines.reference.api import ApiError, Ask, Reply, error_body, is_chat, parse
from fabrictool.engines.reference.stats import exposition
from fabrictool.status.elastic import figures

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answering import ComputeThread
    from fabrictool.engines.reference.answers import AnsweredModel, GenerationEvent

_MAX_BODY = 16 << 20
_BROKEN = ("error", "cancelled", "dropped")
"""What ends a request without an answer."""


class _Mode(msgspec.Struct):
    merged: bool | None


class EngineServer:
    """Routes over an engine that may still be loading."""

    def __init__(self, clock: Clock, *, max_waiting: int) -> None:
        self._answering: Mapping[str, AnsweredModel] = {}
        self._clock = clock
        self._max_waiting = max_waiting
        self._created = int(clock.wall())
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine: ComputeThread | None = None
        self.progress = 0
        """Percent loaded."""
        self.stopping = False

    def serve(self, engine: ComputeThread, models: Mapping[str, AnsweredModel]) -> None:
        """From now on: an engine that has loaded, and whom it answers for, by their names in the API."""
        self._answering, self._engine = models, engine

    def application(self) -> web.Application:
        """The routes; run it with ``handler_cancellation=True``, so that a client that leaves cancels its request."""
        app = web.Application(middlewares=[self._envelope], client_max_size=_MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/fabric/state", self._state),
                web.post("/fabric/mode", self._mode),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/tokenize", self._tokenize),
            ]
        )
        return app

    async def drain(self, grace_s: float) -> None:
        """Take no new requests and wait for those in progress, at most `grace_s` seconds."""
        self.stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    # -- routes -----------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine is None:
            return web.json_response({"status": "loading", "progress": self.progress}, status=503)
        if self._engine.failure is not None:
            return web.json_response({"status": "failed", "reason": self._engine.failure}, status=500)
        if self.stopping:
            return web.json_response({"status": "stopping"}, status=503)
        return web.json_response({"status": "ready"})

    async def _metrics(self, _: web.Request) -> web.Response:
        state = self._loaded().state()
        text = exposition(
            {name: model.stats for name, model in self._answering.items()}, [] if state is None else figures(state)
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _state(self, _: web.Request) -> web.Response:
        """Of replicas that merge: their groups. Of models that share: what is in memory."""
        state = self._loaded().state()
        if state is None:
            message = "this engine has one model and one replica: nothing of it changes"
            raise ApiError(404, message, code="not_elastic")
        return web.json_response(state, dumps=_dumps)

    async def _mode(self, request: web.Request) -> web.Response:
        """``{"merged": true | false | null}``: one group of all, none, or as the load wants it."""
        engine = self._loaded()
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Mode)
        except msgspec.DecodeError as error:
            raise ApiError(400, f'the body is not {{"merged": true, false or null}}: {error}') from error
        if not engine.merge(wanted.merged):
            raise ApiError(404, "nothing here merges: one model is served with --replicas for that", code="one_replica")
        return web.json_response(engine.state(), dumps=_dumps)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._description(name) for name in self._answering]})

    async def _model(self, request: web.Request) -> web.Response:
        self._loaded()
        name = request.match_info["name"]
        if name not in self._answering:
            raise ApiError(404, f"the model {name!r} does not exist here", code="model_not_found")
        return web.json_response(self._description(name))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _tokenize(self, request: web.Request) -> web.Response:
        """The prompt of a chat or of a completion, as vLLM answers it."""
        self._loaded()
        raw = await request.read()
        ask = await asyncio.to_thread(parse, raw, chat=is_chat(raw), models=self._answering)
        prompt = ask.request.prompt
        return web.json_response(
            {"count": len(prompt), "max_model_len": self._answering[ask.model].context, "tokens": list(prompt)},
            dumps=_dumps,
        )

    # -- internals --------------------------------------------------------------------------------------------

    def _description(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "fabrictool",
            "max_model_len": self._answering[name].context,
        }

    def _loaded(self) -> ComputeThread:
        if self._engine is None:
            raise ApiError(503, f"the model is loading, {self.progress} % done", code="loading")
        return self._engine

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        self._loaded()
        if self.stopping:
            raise ApiError(503, "the engine is stopping", code="stopping")
        if self._active >= self._max_waiting + sum(model.limits.max_seqs for model in self._answering.values()):
            raise ApiError(429, f"the queue is full: {self._active} requests are open", code="queue_full")
        self._active += 1
        self._idle.clear()
        try:
            # In a thread: tokenising a long prompt must not hold up the streams of others.
            raw = await request.read()
            ask = await asyncio.to_thread(parse, raw, chat=chat, models=self._answering)
            reply = Reply(
                f"{'chatcmpl' if chat else 'cmpl'}-{random_id(12)}",
                int(self._clock.wall()),
                ask.model,
                chat,
                len(ask.request.prompt),
                ask.include_usage,
            )
            events = _events(self._answering[ask.model], ask)
            async with contextlib.aclosing(events):
                return await (_stream(request, reply, events) if ask.stream else _collect(reply, events))
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    @web.middleware
    async def _envelope(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            again = {"Retry-After": "1"} if error.status in (429, 503) else {}
            return web.json_response(error.body, status=error.status, headers=again | error.headers)
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason.lower()}"
            return web.json_response(error_body(error.status, message), status=error.status)


async def _events(model: AnsweredModel, ask: Ask) -> AsyncGenerator[GenerationEvent, None]:
    """The events of one request; leaving early cancels it and frees its blocks."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[GenerationEvent] = asyncio.Queue()

    def emit(event: GenerationEvent) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, event)

    number = model.submit(ask.request, emit)
    finished = False
    try:
        while not finished:
            event = await queue.get()
            finished = event.finish is not None
            yield event
    finally:
        if not finished:
            model.cancel(number)


async def _collect(reply: Reply, events: AsyncGenerator[GenerationEvent, None]) -> web.Response:
    parts: list[str] = []
    tokens, finish = 0, "error"
    async for event in events:
        parts.append(event.text)
        tokens, finish = event.tokens, event.finish or finish
    if finish in _BROKEN:
        raise _broken(finish)
    return web.json_response(reply.whole("".join(parts), finish, tokens), dumps=_dumps)


async def _stream(
    request: web.Request, reply: Reply, events: AsyncGenerator[GenerationEvent, None]
) -> web.StreamResponse:
    # The first event comes before the headers: what fails until then has a status of its own.
    first = await anext(events)
    if first.finish in _BROKEN:
        raise _broken(first.finish)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    if reply.chat:
        await response.write(_sse(reply.opening()))
    event = first
    while True:
        if event.finish in _BROKEN:
            await response.write(_sse(_broken(event.finish).body))
            return response
        if event.text or event.finish is not None:
            await response.write(_sse(reply.piece(event.text, event.finish)))
        if event.finish is not None:
            break
        event = await anext(events)
    if reply.include_usage:
        await response.write(_sse(reply.closing(event.tokens)))
    await response.write(b"data: [DONE]\n\n")
    return response


def _broken(finish: str) -> ApiError:
    if finish == "cancelled":
        return ApiError(503, "the engine is stopping", code="stopping")
    if finish == "dropped":
        full = ApiError(503, "nobody could begin this request in time", code="no_room_in_time")
        full.headers[FULL_HEADER] = "yes"
        return full
    return ApiError(500, "the engine failed", code="engine_failed")


def _dumps(document: object) -> str:
    return msgspec.json.encode(document).decode()


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
