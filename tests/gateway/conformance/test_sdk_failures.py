"""What goes wrong, as the SDKs tell it to programs: types of errors, retries, deadlines, streams that are cut."""

import asyncio

import anthropic
import openai
import pytest

from fabrictool.domain.terms import KeyLimits
from tests.gateway.conftest import until
from tests.gateway.scripted import CHUNKS, MESSAGE_EVENTS, RESPONSE_EVENTS, USER, dies, event, says, streams

pytestmark = pytest.mark.asyncio
CHAT = {"model": "m", "messages": [USER]}
MESSAGES = {"model": "m", "max_tokens": 5, "messages": [USER]}
BEGUN = event(CHUNKS[0]) + event(CHUNKS[1])


def openai_at(bed, key=None, **more):
    return openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=key or bed.KEY, **{"max_retries": 0} | more)


def anthropic_at(bed, key=None, **more):
    return anthropic.AsyncAnthropic(base_url=bed.url, api_key=key or bed.KEY, **{"max_retries": 0} | more)


@pytest.fixture
def naps(monkeypatch):
    """For how long the SDKs would have slept."""
    listed = []

    async def sleep(seconds):
        listed.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr("anyio.sleep", sleep)
    return listed


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"api_key": "wrong"}, openai.AuthenticationError, "invalid_api_key"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
        ({"extra_headers": {"x-fabric-providers": "beta"}}, openai.PermissionDeniedError, "no_allowed_provider"),
        ({"extra_headers": {"x-fabric-min-context": "1"}}, openai.UnprocessableEntityError, "requirement_not_met"),
        ({"extra_headers": {"x-fabric-min-context": "x"}}, openai.BadRequestError, "requirement_not_met"),
        ({"extra_headers": {"x-fabric-priority": "x"}}, openai.BadRequestError, "invalid_header"),
        ({"model": 3}, openai.BadRequestError, "invalid_json"),
        ({"extra_body": {"pad": "x" * (33 << 20)}}, openai.APIStatusError, "request_too_large"),
    ],
    ids=["key", "model", "provider", "requirement", "header", "priority", "type", "size"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_gateway_have_openais_types(bed, change, error, code, stream):
    change = dict(change)
    async with openai_at(bed, change.pop("api_key", None)) as client:
        with pytest.raises(error) as refused:
            await client.chat.completions.create(**CHAT | {"stream": stream} | change)
    assert refused.value.code == code
    assert refused.value.request_id
    assert refused.value.body["fabric_code"].startswith("FT81")


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"api_key": "wrong"}, anthropic.AuthenticationError, "authentication_error"),
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
        ({"model": 3}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_headers": {"x-fabric-providers": "beta"}}, anthropic.PermissionDeniedError, "permission_error"),
        ({"extra_body": {"pad": "x" * (33 << 20)}}, anthropic.RequestTooLargeError, "request_too_large"),
    ],
    ids=["key", "model", "type", "provider", "size"],
)
async def test_errors_of_the_gateway_have_anthropics_types(bed, change, error, kind):
    change = dict(change)
    async with anthropic_at(bed, change.pop("api_key", None)) as client:
        with pytest.raises(error) as refused:
            await client.messages.create(**MESSAGES | change)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == kind


async def test_a_limit_is_a_rate_limit_error(bed, sdk, claude):
    bed.gateway.accounts.limit_models({"m": KeyLimits(requests_per_minute=1)})
    await sdk.chat.completions.create(**CHAT)
    with pytest.raises(openai.RateLimitError) as limited:
        await sdk.chat.completions.create(**CHAT)
    assert limited.value.code == "rate_limit_exceeded"
    assert limited.value.response.headers["retry-after"] == "60"
    with pytest.raises(anthropic.RateLimitError) as theirs:
        await claude.messages.create(**MESSAGES)
    assert theirs.value.body["error"]["type"] == "rate_limit_error"


ENGINES_ERRORS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    413: openai.APIStatusError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    501: openai.InternalServerError,
    503: openai.InternalServerError,
}


@pytest.mark.parametrize("status", ENGINES_ERRORS)
async def test_errors_of_an_engine_pass_as_they_are(bed, sdk, engine, status):
    text = {"error": {"message": "of the engine", "type": "BadRequestError", "param": "x", "code": status}}
    engine.script.append(says(text, status=status))
    with pytest.raises(ENGINES_ERRORS[status]) as refused:
        await sdk.chat.completions.create(**CHAT)
    assert (refused.value.status_code, refused.value.body) == (status, text["error"])
    assert (bed.records[0].status, bed.records[0].end) == (status, "answered")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, anthropic.BadRequestError),
        (413, anthropic.RequestTooLargeError),
        (429, anthropic.RateLimitError),
        (529, anthropic.OverloadedError),
    ],
)
async def test_errors_of_an_engine_pass_to_anthropics_sdk(claude, engine, status, error):
    text = {"type": "error", "error": {"type": "some_error", "message": "of the engine"}}
    engine.script.append(says(text, status=status))
    with pytest.raises(error) as refused:
        await claude.messages.create(**MESSAGES)
    assert (refused.value.status_code, refused.value.body) == (status, text)


@pytest.mark.parametrize("status", [429, 503])
async def test_openais_sdk_tries_again_when_the_engine_says(bed, engine, naps, status):
    engine.script += [says({"error": {"message": "busy"}}, status=status, retry_after="7")] * 2
    async with openai_at(bed, max_retries=2) as client:
        raw = await client.chat.completions.with_raw_response.create(**CHAT)
    assert (raw.status_code, raw.retries_taken) == (200, 2)
    assert naps == [7.0, 7.0]


@pytest.mark.parametrize("status", [429, 529])
async def test_anthropics_sdk_tries_again_when_the_engine_says(bed, engine, naps, status):
    text = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    engine.script += [says(text, status=status, retry_after="7")] * 2
    async with anthropic_at(bed, max_retries=2) as client:
        raw = await client.messages.with_raw_response.create(**MESSAGES)
    assert (raw.status_code, raw.retries_taken) == (200, 2)
    assert naps == [7.0, 7.0]


async def test_what_says_whether_and_when_to_try_again_passes(bed, engine, naps):
    """Also the SDK's own words: milliseconds, and "do not"."""
    busy = {"error": {"message": "busy"}}
    engine.script += [says(busy, status=429, retry_after_ms="1500"), says(busy, status=429, x_should_retry="false")]
    async with openai_at(bed, max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(**CHAT)
    assert naps == [1.5]
    assert len(engine.bodies) == 2


async def test_a_model_that_loads_is_waited_for(bed, naps):
    bed.gateway.plan_for({"later": (0,)})
    async with openai_at(bed, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(**CHAT | {"model": "later"})
    assert refused.value.code == "model_not_ready"
    assert naps == [5.0, 5.0]


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"model": "later"}, anthropic.InternalServerError, "overloaded_error"),
        ({}, anthropic.InternalServerError, "api_error"),
    ],
    ids=["loads", "gone"],
)
async def test_what_the_gateway_cannot_help_has_anthropics_words(bed, claude, engine, change, error, kind):
    bed.gateway.plan_for({"later": (0,)})
    await engine.stop()
    with pytest.raises(error) as refused:
        await claude.messages.create(**MESSAGES | change)
    assert refused.value.body["error"]["type"] == kind


async def test_a_limit_is_waited_for(bed, naps):
    bed.gateway.accounts.limit_models({"m": KeyLimits(requests_per_minute=1)})
    async with openai_at(bed, max_retries=1) as client:
        await client.chat.completions.create(**CHAT)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(**CHAT)
    assert naps == [60.0]


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_mistake_is_not_tried_again(bed, engine, naps, status):
    engine.script.append(says({"error": {"message": "no"}}, status=status))
    async with openai_at(bed, max_retries=5) as client:
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(**CHAT)
    assert (naps, len(engine.bodies)) == ([], 1)


async def test_nobody_there_is_a_connection_error(bed):
    async with openai_at(bed) as client:
        await bed.gateway.drain(0.1)
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(**CHAT)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_deadline_frees_the_engine(bed, engine, stream):
    engine.script.append(engine.hang())
    async with openai_at(bed, timeout=1.0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**CHAT, stream=stream)
    await engine.cancelled.wait()
    await until(lambda: [(r.status, r.end) for r in bed.records] == [(499, "cancelled")])


async def test_anthropics_deadline_frees_the_engine(bed, engine):
    engine.script.append(engine.hang())
    async with anthropic_at(bed, timeout=1.0) as client:
        with pytest.raises(anthropic.APITimeoutError):
            await client.messages.create(**MESSAGES)
    await engine.cancelled.wait()
    await until(lambda: [r.end for r in bed.records] == ["cancelled"])


async def test_a_stream_that_falls_silent_meets_the_clients_deadline(bed, engine):
    engine.script.append(engine.hang(BEGUN))
    said = []
    async with openai_at(bed, timeout=1.0) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APITimeoutError):
            said += [part.choices[0].delta.content async for part in stream]
    await engine.cancelled.wait()
    await until(lambda: [(r.status, r.end) for r in bed.records] == [(200, "cancelled")])


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_a_chat_given_up_in_mid_stream_frees_the_engine(bed, sdk, engine, how):
    engine.script.append(engine.hang(BEGUN))
    heard = asyncio.Event()

    async def listen():
        async for part in await sdk.chat.completions.create(**CHAT, stream=True):
            if part.choices[0].delta.content == "Hé":
                heard.set()

    if how == "close":
        async with await sdk.chat.completions.create(**CHAT, stream=True) as stream:
            assert (await anext(stream)).choices[0].delta.role == "assistant"
    else:
        listening = asyncio.create_task(listen())
        await heard.wait()
        listening.cancel()
    await engine.cancelled.wait()
    await until(lambda: [(r.status, r.end, r.counted) for r in bed.records] == [(200, "cancelled", False)])


async def test_a_response_given_up_in_mid_stream_frees_the_engine(bed, sdk, engine):
    engine.script.append(engine.hang(event(RESPONSE_EVENTS[0], "response.created")))
    async with await sdk.responses.create(model="m", input="x", stream=True) as stream:
        assert (await anext(stream)).type == "response.created"
    await engine.cancelled.wait()
    await until(lambda: [r.end for r in bed.records] == ["cancelled"])


async def test_a_message_given_up_in_mid_stream_frees_the_engine(bed, claude, engine):
    engine.script.append(engine.hang(event(MESSAGE_EVENTS[0], "message_start")))
    async with claude.messages.stream(**MESSAGES) as stream:
        assert (await anext(stream)).type == "message_start"
    await engine.cancelled.wait()
    await until(lambda: [r.end for r in bed.records] == ["cancelled"])


async def test_a_chat_whose_replica_dies_ends_in_an_error(bed, sdk, engine):
    engine.script.append(dies(BEGUN))
    stream = await sdk.chat.completions.create(**CHAT, stream=True)
    said = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert said == ["", "Hé"]
    with pytest.raises(openai.APIError) as broken:
        await anext(stream)
    assert broken.value.code == "upstream_failed"
    assert bed.records[0].end == "broken"


async def test_a_completion_whose_replica_dies_ends_in_an_error(sdk, engine):
    engine.script.append(dies(event({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}]})))
    with pytest.raises(openai.APIError) as broken:
        _ = [part async for part in await sdk.completions.create(model="m", prompt="x", stream=True)]
    assert broken.value.code == "upstream_failed"


async def test_a_response_whose_replica_dies_ends_in_an_error(sdk, engine):
    engine.script.append(dies(event(RESPONSE_EVENTS[0], "response.created")))
    with pytest.raises(openai.APIError) as broken:
        _ = [part async for part in await sdk.responses.create(model="m", input="x", stream=True)]
    assert broken.value.code == "upstream_failed"


async def test_a_response_helper_whose_replica_dies_ends_in_an_error(sdk, engine):
    engine.script.append(dies(event(RESPONSE_EVENTS[0], "response.created")))
    with pytest.raises(openai.APIError):
        async with sdk.responses.stream(model="m", input="x") as stream:
            _ = [part async for part in stream]


async def test_a_message_whose_replica_dies_ends_in_an_error(claude, engine):
    engine.script.append(dies(event(MESSAGE_EVENTS[0], "message_start")))
    with pytest.raises(anthropic.APIStatusError) as broken:
        async with claude.messages.stream(**MESSAGES) as stream:
            _ = [part async for part in stream]
    assert broken.value.body["error"]["type"] == "api_error"
    assert "FT8106" in broken.value.body["error"]["message"]


async def test_an_error_in_an_engines_stream_passes_as_it_is(bed, sdk, engine):
    """As vLLM tells of what goes wrong after its head."""
    engine.script.append(
        streams(BEGUN, event({"error": {"message": "out of memory", "code": 500}}), b"data: [DONE]\n\n")
    )
    with pytest.raises(openai.APIError, match="out of memory"):
        _ = [part async for part in await sdk.chat.completions.create(**CHAT, stream=True)]
    assert bed.records[0].status == 200


async def test_the_sdk_gives_a_message_in_words_a_person_can_use(bed):
    async with openai_at(bed, "wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="the API key is not valid: send Authorization"):
            await client.models.list()
