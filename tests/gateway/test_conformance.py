"""What the SDKs of OpenAI and Anthropic, and agents' habits, need of a gateway; upstream a scripted server.

That real engines behind it answer, tests/e2e shows with the reference engine and `make test-vllm` with vLLM.
"""

import base64
import json
import re

import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.gateway.directory import StaticNode

pytestmark = pytest.mark.asyncio
USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
PICTURE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 16).decode()


class ScriptedEngine:
    """Speaks every API that the gateway passes on, by script; it is no model. Keeps what it was sent, byte for byte."""

    def __init__(self):
        self.bodies, self.headers, self.paths = [], [], []

    async def start(self):
        app = web.Application()
        app.router.add_post("/{tail:.*}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def answer(self, request):
        raw = await request.read()
        body = json.loads(raw)
        self.bodies.append(raw)
        self.headers.append(request.headers)
        self.paths.append(request.path)
        if request.path == "/v1/messages" and body.get("stream"):
            return await events(request, MESSAGE_EVENTS, named=True)
        if body.get("stream") and request.path == "/v1/responses":
            return await events(request, RESPONSE_EVENTS, named=True)
        if body.get("stream"):
            wants = (body.get("stream_options") or {}).get("include_usage")
            chunks = TOOL_CHUNKS if body.get("tools") else CHUNKS
            return await events(request, [*chunks, *([USAGE_CHUNK] if wants else [])], done=True)
        return web.json_response(
            WHOLE[request.path] | ({"model": body["model"]} if "model" in WHOLE[request.path] else {})
        )


async def events(request, listed, *, named=False, done=False):
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    )
    await response.prepare(request)
    for event in listed:
        name = f"event: {event['type']}\n".encode() if named else b""
        await response.write(name + b"data: " + json.dumps(event).encode() + b"\n\n")
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
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "error": None,
    "output": [{
        "id": "o1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
    }],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "usage": {
        "input_tokens": 12, "output_tokens": 3, "total_tokens": 15, "input_tokens_details": {"cached_tokens": 8},
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


@pytest_asyncio.fixture
async def engine():
    started = ScriptedEngine()
    await started.start()
    yield started
    await started.runner.cleanup()


@pytest_asyncio.fixture
async def bed(make_bed, engine):
    started = await make_bed().start(nodes=[StaticNode(engine.url, ["m", "org/name"], "alpha")])
    started.records = []
    started.gateway.sinks.append(started.records.append)
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def sdk(bed):
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def claude(bed):
    async with anthropic.AsyncAnthropic(base_url=bed.url, api_key=bed.KEY, max_retries=0) as client:
        yield client


def tokens(bed):
    return [(r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.counted) for r in bed.records]


async def test_openai_chat_whole(bed, sdk):
    answer = await sdk.chat.completions.create(model="m", messages=[USER])
    assert answer.choices[0].message.content == "Héllo"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert tokens(bed) == [(12, 8, 3, True)]


@pytest.mark.parametrize("wants", [True, False])
async def test_openai_chat_streamed(bed, sdk, wants):
    more = {"stream_options": {"include_usage": True}} if wants else {}
    chunks = [c async for c in await sdk.chat.completions.create(model="m", messages=[USER], stream=True, **more)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo"
    assert [c.usage is not None for c in chunks if not c.choices] == ([True] if wants else [])
    assert chunks[-2 if wants else -1].choices[0].finish_reason == "stop"
    assert tokens(bed) == [(12, 8, 3, True)]


async def test_openai_tools_streamed(sdk, engine):
    stream = await sdk.chat.completions.create(model="m", messages=[USER], tools=[TOOL], stream=True)
    calls = [c.choices[0].delta.tool_calls[0] async for c in stream if c.choices and c.choices[0].delta.tool_calls]
    assert calls[0].function.name == "read_file"
    assert json.loads("".join(c.function.arguments for c in calls)) == {"path": "/etc/hosts"}
    assert json.loads(engine.bodies[0])["tools"] == [TOOL]


async def test_an_agents_session_of_several_turns(bed, sdk, engine):
    """A shared prompt of some 10,000 tokens, a tool's call and its result, streams, and a picture at the end."""
    talk = [{"role": "system", "content": "You are a coding agent. " * 2000}, {"role": "user", "content": "fix it"}]
    for turn in range(4):
        stream = await sdk.chat.completions.create(
            model="m", messages=talk, tools=[TOOL], stream=True, parallel_tool_calls=False
        )
        assert [c async for c in stream][-1].choices[0].finish_reason == "tool_calls"
        made = {"id": f"call_{turn}", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
        talk += [
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "x" * 5000},
        ]
    talk.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]})
    await sdk.chat.completions.create(model="m", messages=talk)
    assert json.loads(engine.bodies[-1])["messages"] == talk
    assert [r.end for r in bed.records] == ["answered"] * 5


async def test_openai_completions_embeddings_and_lists(bed, sdk):
    assert (await sdk.completions.create(model="m", prompt="x")).choices[0].text == "Hello"
    listed = await sdk.embeddings.create(model="m", input=["x"], encoding_format="float")
    assert listed.data[0].embedding == [0.5, -0.25]
    assert [m.id async for m in sdk.models.list()] == ["m", "org/name"]
    assert (await sdk.models.retrieve("org/name")).id == "org/name"
    assert tokens(bed) == [(12, 8, 3, True), (12, 0, 0, True)]


async def test_openai_responses(bed, sdk):
    assert (await sdk.responses.create(model="m", input="x")).output_text == "Hello"
    seen = [e async for e in await sdk.responses.create(model="m", input="x", stream=True)]
    assert [e.type for e in seen] == ["response.created", "response.output_text.delta", "response.completed"]
    assert tokens(bed) == [(12, 8, 3, True)] * 2


async def test_anthropic_messages_whole_and_streamed(bed, claude):
    asked = {"model": "m", "max_tokens": 50, "messages": [USER]}
    answer = await claude.messages.create(**asked)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.content[0].signature == "sig", "thinking blocks come through whole"
    assert final.content[1].text == "Hello"
    assert (await claude.messages.count_tokens(model="m", messages=[USER])).input_tokens == 12
    assert tokens(bed)[:2] == [(12, 8, 3, True)] * 2


async def test_bodies_arrive_as_they_were_sent(bed, engine):
    """But for the wish for figures, octet for octet: key order, spaces and escapes are the client's."""
    for path, body in (
        ("/v1/messages", b'{ "b":1,"model":"m" , "a":"\\u00e9"}'),
        (
            "/v1/chat/completions",
            '{"z": [1.0, 1e3], "model" :"m", "messages":[{"role":"user","content":"é"}]}'.encode(),
        ),
        ("/v1/chat/completions", b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}'),
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bed.KEY}\r\nconnection: close\r\n"
        await bed.raw(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert engine.bodies[-1] == body
        assert "authorization" not in engine.headers[-1]


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"api_key": "wrong"}, openai.AuthenticationError, "invalid_api_key"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
        ({"extra_headers": {"x-fabric-providers": "beta"}}, openai.PermissionDeniedError, "no_allowed_provider"),
        ({"extra_headers": {"x-fabric-min-context": "1"}}, openai.UnprocessableEntityError, "requirement_not_met"),
        ({"extra_headers": {"x-fabric-min-context": "x"}}, openai.BadRequestError, "requirement_not_met"),
        ({"model": 3}, openai.BadRequestError, "invalid_json"),
        ({"extra_body": {"pad": "x" * (33 << 20)}}, openai.APIStatusError, "request_too_large"),
    ],
    ids=["key", "model", "provider", "requirement", "header", "type", "size"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_errors_have_their_types(bed, change, error, code, stream):
    change = dict(change)
    key = change.pop("api_key", bed.KEY)
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(error) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": [USER], "stream": stream} | change)
    assert refused.value.code == code
    assert refused.value.request_id
    assert refused.value.body["fabric_code"].startswith("FT81")


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"api_key": "wrong"}, anthropic.AuthenticationError, "authentication_error"),
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_headers": {"x-fabric-providers": "beta"}}, anthropic.PermissionDeniedError, "permission_error"),
    ],
    ids=["key", "model", "provider"],
)
async def test_anthropic_errors_have_their_types(bed, change, error, kind):
    change = dict(change)
    key = change.pop("api_key", bed.KEY)
    async with anthropic.AsyncAnthropic(base_url=bed.url, api_key=key, max_retries=0) as client:
        with pytest.raises(error) as refused:
            await client.messages.create(**{"model": "m", "max_tokens": 5, "messages": [USER]} | change)
    assert refused.value.body["error"]["type"] == kind


async def test_what_is_added_to_a_request_and_an_answer_is_little(bed, engine):
    """Octets of head: 450 and 120 in paper 001."""
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    kept = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nhost: x\r\n"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {bed.KEY}\r\nconnection: close\r\n{kept}\r\n"
    answer = await bed.raw(head.encode() + body)
    passed = sum(len(name) + len(value) + 4 for name, value in engine.headers[0].items())
    assert passed - len(kept) <= 200
    lines = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")[1:]
    engines_own = (b"content-type", b"content-length", b"connection")
    assert sum(len(line) + 2 for line in lines if not line.startswith(engines_own)) <= 120
    assert any(re.fullmatch(rb"server-timing: engine;dur=\d+", line) for line in lines)
