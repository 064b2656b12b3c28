"""An upstream that speaks every API that the gateway passes on, by script; it is no model."""

import asyncio
import base64
import json

from aiohttp import web

USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
ENGINES_ERROR = {"type": "BadRequestError", "param": None, "code": "400"}
PICTURE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 16).decode()


class ScriptedEngine:
    """Speaks every API that the gateway passes on, by script; it is no model. Keeps what it was sent, byte for byte."""

    def __init__(self):
        self.bodies, self.headers, self.paths = [], [], []
        self.script = []
        """What the next requests are answered, in place of the usual: `request -> response`."""
        self.release, self.cancelled = asyncio.Event(), asyncio.Event()

    async def start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{tail:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self):
        self.release.set()
        await self.runner.cleanup()

    async def answer(self, request):
        raw = await request.read()
        self.bodies.append(raw)
        self.headers.append(request.headers)
        self.paths.append(request.path)
        if self.script:
            return await self.script.pop(0)(request)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": {"message": str(error)} | ENGINES_ERROR}, status=400)
        return await self.usual(request, body)

    async def usual(self, request, body):
        """As an engine answers that has all APIs."""
        if request.path == "/v1/messages" and body.get("stream"):
            return await events(request, MESSAGE_TOOL_EVENTS if body.get("tools") else MESSAGE_EVENTS, named=True)
        if body.get("stream") and request.path == "/v1/responses":
            return await events(request, RESPONSE_EVENTS, named=True)
        if body.get("stream") and request.path == "/v1/completions":
            return await events(request, TEXT_CHUNKS, done=True)
        if body.get("stream"):
            wants = (body.get("stream_options") or {}).get("include_usage")
            chunks = TOOL_CHUNKS if body.get("tools") else CHUNKS
            return await events(request, [*chunks, *([USAGE_CHUNK] if wants else [])], done=True)
        whole = WHOLE[request.path]
        return web.json_response(whole | ({"model": body["model"]} if "model" in whole else {}))

    def hang(self, begun=b""):
        """Say `begun` and nothing more until the client goes away or the test lets go."""

        async def handler(request):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            if begun:
                await response.prepare(request)
                await response.write(begun)
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return response

        return handler


def says(value, status=200, **headers):
    """A whole answer."""

    async def handler(_):
        return web.json_response(value, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


def streams(*pieces):
    """These octets, each written by itself, and the end of the answer."""

    async def handler(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    return handler


def dies(*pieces):
    """These octets, and then the connection is closed, although its chunks have no end."""

    async def handler(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        request.transport.close()
        return response

    return handler


def event(value, name=""):
    """Of a stream, as octets."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


async def events(request, listed, *, named=False, done=False):
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    await response.prepare(request)
    for value in listed:
        await response.write(event(value, value["type"] if named else ""))
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def chunk(delta, finish=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call(arguments, **more):
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments} | more.pop("function", {})} | more]}


USAGE = {
    "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 8},
}  # fmt: skip
CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hé"}),
    chunk({"content": "llo"}),
    chunk({}, "stop"),
]
TOOL_CHUNKS = [
    chunk(call("", id="call_1", type="function", function={"name": "read_file"})),
    chunk(call('{"path": ')), chunk(call('"/etc/hosts"}')), chunk({}, "tool_calls"),
]  # fmt: skip
TEXT_CHUNKS = [
    {
        "id": "c1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
    }
    for text, finish in (("Hel", None), ("lo", "stop"))
]
USAGE_CHUNK = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": USAGE}
MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
    "stop_sequence": None,
    "content": [{"type": "thinking", "thinking": "hm", "signature": "sig"}, {"type": "text", "text": "Hello"}],
    "usage": {"input_tokens": 12, "output_tokens": 3, "cache_read_input_tokens": 8},
}  # fmt: skip
MESSAGE_EVENTS = [
    {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "sig"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "content_block_stop", "index": 1},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    },
    {"type": "message_stop"},
]
MESSAGE_TOOL_EVENTS = [
    {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}},
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {}},
    },
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"path": '}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '"/etc/hosts"}'}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    },
    {"type": "message_stop"},
]
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "error": None,
    "output": [{
        "id": "o1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
    }],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "usage": {
        "input_tokens": 12, "output_tokens": 3, "total_tokens": 15,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}  # fmt: skip
RESPONSE_EVENTS = [
    {"type": "response.created", "sequence_number": 0, "response": RESPONSE | {"status": "in_progress", "usage": None}},
    {
        "type": "response.output_text.delta", "sequence_number": 1, "item_id": "o1", "output_index": 0,
        "content_index": 0, "delta": "Hello", "logprobs": [],
    },
    {"type": "response.completed", "sequence_number": 2, "response": RESPONSE},
]  # fmt: skip
WHOLE = {
    "/v1/chat/completions": {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Héllo"}, "finish_reason": "stop"}],
    },
    "/v1/completions": {
        "id": "c1", "object": "text_completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}],
    },
    "/v1/embeddings": {
        "object": "list", "model": "m", "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}],
    },
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"input_tokens": 12},
}  # fmt: skip
