"""What OpenAI's SDK needs of a gateway; upstream a scripted server.

That real engines behind it answer, tests/e2e shows with the reference engine and `make test-vllm` with vLLM.
"""

import asyncio
import base64
import json
import struct

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.scripted import CHUNKS, RESPONSE, TOOL, USAGE_CHUNK, USER, WHOLE, chunk, event, says, streams

pytestmark = pytest.mark.asyncio
CHAT = WHOLE["/v1/chat/completions"]
DONE = b"data: [DONE]\n\n"


class Place(BaseModel):
    city: str
    country: str


def tokens(bed):
    return [(r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.counted) for r in bed.records]


def says_in_chat(**message):
    choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": "stop"}
    return says(CHAT | {"choices": [choice]})


async def test_chat_whole(bed, sdk):
    answer = await sdk.chat.completions.create(model="m", messages=[USER])
    assert answer.choices[0].message.content == "Héllo"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert tokens(bed) == [(12, 8, 3, True)]


@pytest.mark.parametrize("wants", [True, False, None])
async def test_chat_streamed(bed, sdk, wants):
    more = {} if wants is None else {"stream_options": {"include_usage": wants}}
    chunks = [c async for c in await sdk.chat.completions.create(model="m", messages=[USER], stream=True, **more)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo"
    assert [c.usage is not None for c in chunks if not c.choices] == ([True] if wants else [])
    assert chunks[-2 if wants else -1].choices[0].finish_reason == "stop"
    assert tokens(bed) == [(12, 8, 3, True)], "who wants no figures is counted all the same"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_synchronous_client(bed, stream):
    def ask():
        with openai.OpenAI(base_url=bed.url + "/v1/", api_key=bed.KEY, max_retries=0) as client:
            answer = client.chat.completions.create(model="m", messages=[USER], stream=stream)
            return "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message

    answer = await asyncio.to_thread(ask)
    assert (answer if stream else answer.content) == "Héllo"


async def test_the_head_of_a_raw_response(bed, sdk):
    raw = await sdk.chat.completions.with_raw_response.create(model="m", messages=[USER])
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.headers["x-fabric-provider"] == "alpha"
    assert raw.headers["x-fabric-replica"]
    assert raw.headers["server-timing"].startswith("engine;dur=")
    assert raw.parse()._request_id == raw.headers["x-request-id"] == bed.records[0].id


async def test_the_lines_of_a_streaming_response(sdk):
    asked = sdk.chat.completions.with_streaming_response.create(model="m", messages=[USER], stream=True)
    async with asked as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.headers["cache-control"] == "no-cache"
        lines = [line async for line in raw.iter_lines()]
    assert [line[:6] for line in lines if line] == ["data: "] * (len(CHUNKS) + 1)
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_the_stream_helper_merges_what_was_said(sdk):
    async with sdk.chat.completions.stream(model="m", messages=[USER]) as stream:
        seen = [e.type async for e in stream]
        whole = await stream.get_final_completion()
    assert whole.choices[0].message.content == "Héllo"
    assert seen.count("content.delta") == 3
    assert "content.done" in seen


async def test_the_stream_helper_merges_a_tools_arguments(sdk):
    async with sdk.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:
        seen = [e async for e in stream]
    ended = next(e for e in seen if e.type == "tool_calls.function.arguments.done")
    assert (ended.name, json.loads(ended.arguments)) == ("read_file", {"path": "/etc/hosts"})


async def test_tools_streamed(sdk, engine):
    stream = await sdk.chat.completions.create(model="m", messages=[USER], tools=[TOOL], stream=True)
    calls = [c.choices[0].delta.tool_calls[0] async for c in stream if c.choices and c.choices[0].delta.tool_calls]
    assert calls[0].function.name == "read_file"
    assert json.loads("".join(c.function.arguments for c in calls)) == {"path": "/etc/hosts"}
    assert json.loads(engine.bodies[0])["tools"] == [TOOL]


async def test_several_tools_called_at_once(sdk, engine):
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "read_file", "arguments": f'{{"path": "{n}"}}'}}
        for n in range(3)
    ]
    engine.script.append(says_in_chat(tool_calls=calls))
    answer = await sdk.chat.completions.create(model="m", messages=[USER], tools=[TOOL], tool_choice="required")
    assert [c.id for c in answer.choices[0].message.tool_calls] == ["call_0", "call_1", "call_2"]
    assert json.loads(engine.bodies[0])["tool_choice"] == "required"


async def test_structured_output_is_parsed(sdk, engine):
    engine.script.append(says_in_chat(content='{"city": "Zürich", "country": "CH"}'))
    answer = await sdk.chat.completions.parse(model="m", messages=[USER], response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Zürich", country="CH")
    asked = json.loads(engine.bodies[0])["response_format"]
    assert asked["json_schema"]["schema"]["properties"].keys() == {"city", "country"}


async def test_a_refusal_is_told(sdk, engine):
    engine.script.append(says_in_chat(refusal="I will not."))
    answer = await sdk.chat.completions.parse(model="m", messages=[USER], response_format=Place)
    assert answer.choices[0].message.refusal == "I will not."
    assert answer.choices[0].message.parsed is None


async def test_several_choices_streamed_keep_apart(sdk, engine):
    pieces = [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    listed = [
        event(chunk({}) | {"choices": [{"index": n, "delta": {"content": text}, "finish_reason": None}]})
        for n, text in pieces
    ]
    engine.script.append(streams(*listed, DONE))
    said = {0: "", 1: ""}
    async for part in await sdk.chat.completions.create(model="m", messages=[USER], n=2, stream=True):
        for choice in part.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "ab", 1: "xy"}


async def test_log_probabilities(sdk, engine):
    top = {"token": "Hi", "logprob": -0.25, "bytes": [72, 105]}
    logprobs = {"content": [top | {"top_logprobs": [top]}], "refusal": None}
    engine.script.append(says(CHAT | {"choices": [CHAT["choices"][0] | {"logprobs": logprobs}]}))
    answer = await sdk.chat.completions.create(model="m", messages=[USER], logprobs=True, top_logprobs=1)
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25


async def test_what_only_an_engine_knows_comes_through(sdk, engine):
    """vLLM's own fields, both ways."""
    engine.script.append(says_in_chat(reasoning_content="hm", content="ja"))
    extra = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": True}, "min_p": 0.125}
    answer = await sdk.chat.completions.create(model="m", messages=[USER], extra_body=extra)
    assert answer.choices[0].message.reasoning_content == "hm"
    assert json.loads(engine.bodies[0]).items() >= extra.items()


async def test_parameters_reach_the_engine_as_they_are(sdk, engine):
    asked = {
        "temperature": 0.30000000000000004, "seed": 2**53 + 1, "stop": ["\n\n", "é"], "logit_bias": {"50256": -100},
        "metadata": {"a": "b"}, "user": "u", "max_completion_tokens": 7, "presence_penalty": -2, "top_p": 1e-9,
        "reasoning_effort": "low", "service_tier": "auto", "store": False,
    }  # fmt: skip
    await sdk.chat.completions.create(model="m", messages=[USER], **asked)
    assert json.loads(engine.bodies[0]) == {"model": "m", "messages": [USER]} | asked


@pytest.mark.parametrize("cut", [1, 7, 64])
async def test_a_stream_in_pieces_of_any_size(sdk, engine, cut):
    """Also within the octets of a letter, CRLF for LF, with comments between: what proxies and engines make of it."""
    said = ["😀", "é", "漢字", "x\r\ny"]
    listed = [json.dumps(chunk({"content": text}), ensure_ascii=False).encode() for text in said]
    data = b"retry: 5\r\n" + b": ping\r\n\r\n".join(b"data: " + text + b"\r\n\r\n" for text in listed) + DONE
    engine.script.append(streams(*(data[at : at + cut] for at in range(0, len(data), cut))))
    stream = await sdk.chat.completions.create(model="m", messages=[USER], stream=True)
    assert [c.choices[0].delta.content async for c in stream] == said


async def test_figures_with_every_event(bed, sdk, engine):
    """vLLM's `continuous_usage_stats`."""
    listed = [event(c | {"usage": USAGE_CHUNK["usage"] | {"completion_tokens": n}}) for n, c in enumerate(CHUNKS)]
    engine.script.append(streams(*listed, DONE))
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await sdk.chat.completions.create(model="m", messages=[USER], stream=True, stream_options=options)
    assert [c.usage.completion_tokens async for c in stream] == [0, 1, 2, 3]
    assert tokens(bed) == [(12, 8, 3, True)]
    assert json.loads(engine.bodies[0])["stream_options"] == options


async def test_a_hundred_requests_at_a_time_get_their_own_answers(bed, sdk, engine):
    async def echo(request):
        body = await request.json()
        await asyncio.sleep(0.001 * (len(engine.bodies) % 7))
        return await says_in_chat(content=body["messages"][0]["content"])(request)

    engine.script += [echo] * 100
    asked = [sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{n}"}]) for n in range(100)]
    answers = await asyncio.gather(*asked)
    assert [a.choices[0].message.content for a in answers] == [f"{n}" for n in range(100)]
    assert len({record.id for record in bed.records}) == 100


async def test_an_answer_of_many_megabytes(bed, sdk, engine):
    """More than is held for another attempt."""
    text = "x" * (20 << 20)
    engine.script.append(says_in_chat(content=text))
    answer = await sdk.chat.completions.create(model="m", messages=[USER])
    assert answer.choices[0].message.content == text
    assert bed.records[0].end == "answered"


async def test_neither_keys_nor_accounts_reach_the_engine(bed, engine):
    more = {"organization": "org-1", "project": "proj-1", "default_headers": {"cookie": "c=1", "x-api-key": "k"}}
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0, **more) as client:
        await client.chat.completions.create(model="m", messages=[USER])
    seen = {name.lower() for name in engine.headers[0]}
    assert not seen & {"authorization", "openai-organization", "openai-project", "cookie", "x-api-key"}
    assert engine.headers[0]["user-agent"].startswith("AsyncOpenAI/Python")


async def test_a_client_chooses_its_requests_id(bed, sdk, engine):
    asked = sdk.chat.completions.with_raw_response.create
    raw = await asked(model="m", messages=[USER], extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == engine.headers[0]["x-request-id"] == "mine"
    assert bed.records[0].id != "mine", "what a client says is no key of the books"


async def test_completions_whole(bed, sdk):
    assert (await sdk.completions.create(model="m", prompt="x")).choices[0].text == "Hello"
    assert tokens(bed) == [(12, 8, 3, True)]


async def test_completions_streamed(sdk):
    stream = await sdk.completions.create(model="m", prompt="x", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hello"


@pytest.mark.parametrize(
    "prompt", ["x", ["x", "y"], [1, 2, 3], [[1, 2], [3]]], ids=["text", "texts", "tokens", "lists"]
)
async def test_completions_of_any_kind_of_prompt(sdk, engine, prompt):
    await sdk.completions.create(model="m", prompt=prompt, echo=True, best_of=2, n=2, suffix="end")
    assert json.loads(engine.bodies[0])["prompt"] == prompt


async def test_embeddings_as_numbers(bed, sdk):
    listed = await sdk.embeddings.create(model="m", input=["x"], encoding_format="float")
    assert listed.data[0].embedding == [0.5, -0.25]
    assert tokens(bed) == [(12, 0, 0, True)]


async def test_embeddings_as_the_sdk_asks_by_itself(sdk, engine):
    """In base64, of which it makes numbers."""
    coded = base64.b64encode(struct.pack("<3f", 0.5, -0.25, 2.0)).decode()
    whole = WHOLE["/v1/embeddings"]
    engine.script.append(says(whole | {"data": [{"object": "embedding", "index": 0, "embedding": coded}]}))
    listed = await sdk.embeddings.create(model="m", input="x", dimensions=3)
    assert listed.data[0].embedding == [0.5, -0.25, 2.0]
    assert json.loads(engine.bodies[0])["encoding_format"] == "base64"


async def test_embeddings_of_a_batch_keep_their_order(sdk, engine):
    data = [{"object": "embedding", "index": n, "embedding": [float(n)]} for n in range(500)]
    engine.script.append(says(WHOLE["/v1/embeddings"] | {"data": data}))
    listed = await sdk.embeddings.create(model="m", input=[[n] for n in range(500)], encoding_format="float")
    assert [entry.embedding for entry in listed.data] == [[float(n)] for n in range(500)]


async def test_the_list_of_models(sdk):
    page = await sdk.models.list()
    assert [m.id async for m in page] == ["m", "org/name"]
    assert page.object == "list"
    assert not page.has_next_page()
    assert {(m.object, m.owned_by) for m in page.data} == {("model", "alpha")}
    assert all(m.created > 0 for m in page.data)


@pytest.mark.parametrize("name", ["m", "org/name"])
async def test_a_model_by_its_name(sdk, name):
    assert (await sdk.models.retrieve(name)).id == name


async def test_a_model_that_is_not_there(sdk):
    with pytest.raises(openai.NotFoundError) as refused:
        await sdk.models.retrieve("org/other")
    assert refused.value.code == "model_not_found"


async def test_responses_whole(bed, sdk):
    answer = await sdk.responses.create(model="m", input="x")
    assert (answer.output_text, answer.status) == ("Hello", "completed")
    assert tokens(bed) == [(12, 8, 3, True)]


async def test_responses_streamed(bed, sdk):
    seen = [e async for e in await sdk.responses.create(model="m", input="x", stream=True)]
    assert [e.type for e in seen] == ["response.created", "response.output_text.delta", "response.completed"]
    assert tokens(bed) == [(12, 8, 3, True)]


async def test_responses_parsed(sdk, engine):
    said = {"type": "output_text", "text": '{"city": "Bern", "country": "CH"}', "annotations": []}
    output = [{"id": "o1", "type": "message", "role": "assistant", "status": "completed", "content": [said]}]
    engine.script.append(says(RESPONSE | {"output": output}))
    answer = await sdk.responses.parse(model="m", input="x", text_format=Place)
    assert answer.output_parsed == Place(city="Bern", country="CH")


async def test_responses_call_tools_and_go_on(sdk, engine):
    called = {"type": "function_call", "id": "f1", "call_id": "c1", "name": "read_file", "arguments": '{"path": "x"}'}
    engine.script.append(says(RESPONSE | {"output": [called | {"status": "completed"}]}))
    first = await sdk.responses.create(model="m", input="x", tools=[{"type": "function", "name": "read_file"}])
    assert first.output[0].call_id == "c1"
    result = {"type": "function_call_output", "call_id": "c1", "output": "text"}
    second = await sdk.responses.create(model="m", input=[result], previous_response_id=first.id)
    assert second.output_text == "Hello"
    assert json.loads(engine.bodies[1])["previous_response_id"] == "resp_1"


@pytest.mark.parametrize(
    "ask",
    [
        lambda sdk: sdk.responses.retrieve("resp_1"),
        lambda sdk: sdk.moderations.create(input="x"),
        lambda sdk: sdk.images.generate(prompt="x"),
        lambda sdk: sdk.audio.speech.create(model="m", input="x", voice="alloy"),
        lambda sdk: sdk.audio.transcriptions.create(model="m", file=b"RIFF"),
        lambda sdk: sdk.files.list(),
        lambda sdk: sdk.batches.retrieve("batch_1"),
        lambda sdk: sdk.fine_tuning.jobs.retrieve("job_1"),
        lambda sdk: sdk.vector_stores.retrieve("vs_1"),
    ],
    ids=["response", "moderation", "image", "speech", "transcription", "files", "batch", "tuning", "store"],
)
async def test_apis_that_are_not_served_say_so(sdk, engine, ask):
    with pytest.raises(openai.NotFoundError) as refused:
        await ask(sdk)
    assert refused.value.code == "not_found"
    assert engine.bodies == []


@pytest.mark.parametrize("call", ["models.delete", "responses.delete"])
async def test_nothing_can_be_deleted(sdk, call):
    api, verb = call.split(".")
    with pytest.raises(openai.APIStatusError) as refused:
        await getattr(getattr(sdk, api), verb)("m")
    assert (refused.value.status_code, refused.value.code) in ((405, "not_found"), (404, "not_found"))
