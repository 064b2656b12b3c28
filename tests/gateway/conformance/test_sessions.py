"""Sessions as agents have them, and what must come through octet for octet."""

import base64
import json
import random
import re

import pytest

from tests.gateway.scripted import PICTURE, RESPONSE, RESPONSE_EVENTS, TOOL, USER, event, streams

pytestmark = pytest.mark.asyncio
SYSTEM = "You are a coding agent; be careful with the user's files. " * 700
"""Some 10,000 tokens, which all sessions share."""
SOUND = base64.b64encode(random.Random(7).randbytes(200_000)).decode()


async def test_a_session_in_chat(bed, sdk, engine):
    """A tool's call and its result in each turn, streams, and a picture at the end."""
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "fix it"}]
    for turn in range(4):
        stream = await sdk.chat.completions.create(
            model="m", messages=talk, tools=[TOOL], stream=True, parallel_tool_calls=False
        )
        assert [c async for c in stream][-1].choices[0].finish_reason == "tool_calls"
        called = {"id": f"call_{turn}", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
        talk += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "x" * 5000},
        ]
    talk.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]})
    await sdk.chat.completions.create(model="m", messages=talk)
    assert json.loads(engine.bodies[-1])["messages"] == talk
    assert [r.end for r in bed.records] == ["answered"] * 5


async def test_a_session_in_messages(bed, claude, engine):
    """Tools by their streamed arguments, a marked system prompt, the count before each turn; nothing is rewritten."""
    tool = {"name": "read_file", "input_schema": {"type": "object"}}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    talk = [{"role": "user", "content": "fix it"}]
    for _ in range(4):
        asked = {"model": "m", "system": system, "messages": talk, "tools": [tool]}
        assert (await claude.messages.count_tokens(**asked)).input_tokens == 12
        async with claude.messages.stream(max_tokens=1000, **asked) as stream:
            said = await stream.get_final_message()
        assert said.content[0].input == {"path": "/etc/hosts"}
        result = {"type": "tool_result", "tool_use_id": said.content[0].id, "content": "x" * 5000}
        block = {"type": "tool_use", "id": said.content[0].id, "name": "read_file", "input": said.content[0].input}
        talk = [*talk, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    async with claude.messages.stream(model="m", max_tokens=1000, system=system, messages=talk) as stream:
        assert (await stream.get_final_message()).content[-1].text == "Hello"
    assert json.loads(engine.bodies[-1])["messages"] == talk
    assert [(r.end, r.status) for r in bed.records] == [("answered", 200)] * 9


async def test_a_session_in_responses(bed, sdk, engine):
    """Each turn continues the answer before it; what the model thought goes back as it came."""
    thought = {"type": "reasoning", "id": "r1", "summary": [], "encrypted_content": "b3BhcXVl"}
    called = {
        "type": "function_call", "id": "f1", "call_id": "c1", "name": "read_file", "arguments": "{}",
        "status": "completed",
    }  # fmt: skip
    follows, items = None, [{"role": "user", "content": "fix it"}]
    for turn in range(4):
        answer = RESPONSE | {"id": f"resp_{turn}", "output": [thought, called]}
        last = event(RESPONSE_EVENTS[-1] | {"response": answer}, "response.completed")
        engine.script.append(streams(event(RESPONSE_EVENTS[0], "response.created"), last))
        more = {} if follows is None else {"previous_response_id": follows}
        stream = await sdk.responses.create(model="m", input=items, instructions=SYSTEM, stream=True, **more)
        ended = [e async for e in stream][-1].response
        assert [item.type for item in ended.output] == ["reasoning", "function_call"]
        assert ended.output[0].encrypted_content == "b3BhcXVl"
        follows = ended.id
        items = [thought, {"type": "function_call_output", "call_id": "c1", "output": "x" * 5000}]
    sent = [json.loads(body) for body in engine.bodies]
    assert [body.get("previous_response_id") for body in sent] == [None, "resp_0", "resp_1", "resp_2"]
    assert sent[-1]["input"] == items
    assert [r.end for r in bed.records] == ["answered"] * 4


PARTS = {
    "picture": {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}},
    "sound": {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
    "film": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + SOUND}},
    "file": {"type": "file", "file": {"filename": "ü.pdf", "file_data": "data:application/pdf;base64," + SOUND}},
}


@pytest.mark.parametrize("kind", PARTS)
async def test_parts_of_a_message_arrive_octet_for_octet(sdk, engine, kind):
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, PARTS[kind]]}]
    raw = await sdk.chat.completions.with_raw_response.create(model="m", messages=messages)
    assert engine.bodies[0] == raw.http_request.content
    assert json.loads(engine.bodies[0])["messages"] == messages


async def test_parts_of_a_response_arrive_octet_for_octet(sdk, engine):
    content = [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}, {"type": "input_text", "text": "é"}]
    raw = await sdk.responses.with_raw_response.create(model="m", input=[{"role": "user", "content": content}])
    assert engine.bodies[0] == raw.http_request.content


async def test_twenty_megabytes_of_pictures(sdk, engine):
    url = "data:image/png;base64," + "A" * (20 << 20)
    content = [{"type": "image_url", "image_url": {"url": url}}]
    await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    assert json.loads(engine.bodies[0])["messages"][0]["content"] == content


async def test_a_streamed_request_differs_by_the_wish_for_figures_alone(sdk, engine):
    raw = await sdk.chat.completions.with_raw_response.create(model="m", messages=[USER], stream=True)
    sent, arrived = json.loads(raw.http_request.content), json.loads(engine.bodies[0])
    assert arrived == sent | {"stream_options": {"include_usage": True}}


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
