"""What Anthropic's SDK needs of a gateway; upstream a scripted server."""

import asyncio
import json

import anthropic
import pytest

from tests.gateway.scripted import MESSAGE, MESSAGE_EVENTS, PICTURE, USER, event, says, streams

pytestmark = pytest.mark.asyncio
ASKED = {"model": "m", "max_tokens": 50, "messages": [USER]}
TOOL = {"name": "read_file", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}


def tokens(bed):
    return [(r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.counted) for r in bed.records]


async def test_messages_whole(bed, claude):
    answer = await claude.messages.create(**ASKED)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.usage.cache_read_input_tokens == 8
    assert tokens(bed) == [(20, 8, 3, True)]


async def test_messages_streamed(bed, claude):
    async with claude.messages.stream(**ASKED) as stream:
        final = await stream.get_final_message()
    assert final.content[0].signature == "sig", "thinking blocks come through whole"
    assert final.content[1].text == "Hello"
    assert final.stop_reason == "end_turn"
    assert tokens(bed) == [(20, 8, 3, True)]


async def test_the_text_of_a_stream(claude):
    async with claude.messages.stream(**ASKED) as stream:
        assert [text async for text in stream.text_stream] == ["Hello"]


async def test_the_events_of_a_stream(claude):
    seen = [e.type async for e in await claude.messages.create(**ASKED, stream=True)]
    assert seen == [e["type"] for e in MESSAGE_EVENTS]


async def test_a_tools_arguments_streamed(claude):
    async with claude.messages.stream(**ASKED, tools=[TOOL]) as stream:
        final = await stream.get_final_message()
    assert (final.content[0].name, final.content[0].input) == ("read_file", {"path": "/etc/hosts"})
    assert final.stop_reason == "tool_use"


async def test_the_synchronous_client(bed):
    def ask():
        with (
            anthropic.Anthropic(base_url=bed.url, api_key=bed.KEY, max_retries=0) as client,
            client.messages.stream(**ASKED) as stream,
        ):
            return stream.get_final_text()

    assert await asyncio.to_thread(ask) == "Hello"


async def test_tokens_are_counted(bed, claude):
    counted = await claude.messages.count_tokens(model="m", messages=[USER], system="s", tools=[TOOL])
    assert counted.input_tokens == 12
    assert [(r.path, r.status) for r in bed.records] == [("/v1/messages/count_tokens", 200)]


async def test_models_are_listed(claude):
    assert [m.id async for m in await claude.models.list()] == ["m", "org/name"]


async def test_a_model_by_its_name(claude):
    assert (await claude.models.retrieve("org/name")).id == "org/name"


async def test_a_bearer_token_is_a_key_too(bed):
    async with anthropic.AsyncAnthropic(base_url=bed.url, auth_token=bed.KEY, max_retries=0) as client:
        assert (await client.messages.create(**ASKED)).content[1].text == "Hello"


async def test_the_head_of_a_raw_response(bed, claude):
    raw = await claude.messages.with_raw_response.create(**ASKED)
    assert raw.headers["x-fabric-provider"] == "alpha"
    assert raw.headers["x-request-id"] == bed.records[0].id


async def test_versions_and_betas_reach_the_engine_and_the_key_does_not(claude, engine):
    betas = ["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]
    raw = await claude.beta.messages.with_raw_response.create(**ASKED, betas=betas)
    sent = engine.headers[0]
    assert sent["anthropic-version"] == raw.http_request.headers["anthropic-version"] > "2023"
    assert sent["anthropic-beta"] == "context-1m-2025-08-07,interleaved-thinking-2025-05-14"
    assert not {"x-api-key", "authorization"} & {name.lower() for name in sent}


async def test_marks_of_the_cache_thinking_and_pictures_arrive_as_they_were_sent(claude, engine):
    picture = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    document = {"type": "text", "media_type": "text/plain", "data": "é"}
    content = [
        {"type": "image", "source": picture},
        {"type": "document", "source": document, "citations": {"enabled": True}},
        {"type": "text", "text": "what is it?", "cache_control": {"type": "ephemeral"}},
    ]
    raw = await claude.messages.with_raw_response.create(
        model="m",
        max_tokens=5000,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": content}],
    )
    assert engine.bodies[0] == raw.http_request.content
    assert json.loads(engine.bodies[0])["messages"][0]["content"] == content


async def test_pings_and_unknown_events_pass(claude, engine):
    listed = [event({"type": "ping"}, "ping"), event({"type": "later", "x": 1}, "later")]
    engine.script.append(streams(listed[0], *(event(e, e["type"]) for e in MESSAGE_EVENTS), *listed))
    async with claude.messages.stream(**ASKED) as stream:
        assert await stream.get_final_text() == "Hello"


@pytest.mark.parametrize("reason", ["max_tokens", "stop_sequence", "tool_use", "refusal", "pause_turn"])
async def test_why_it_stopped(claude, engine, reason):
    engine.script.append(says(MESSAGE | {"stop_reason": reason}))
    assert (await claude.messages.create(**ASKED)).stop_reason == reason
