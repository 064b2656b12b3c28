"""What programs of LangChain need of a gateway; upstream a scripted server."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.gateway.scripted import CHUNKS, PICTURE, WHOLE, dies, event, says

pytestmark = pytest.mark.asyncio
CHAT = WHOLE["/v1/chat/completions"]
USAGE = (12, 3, 15)


class Place(BaseModel):
    """A town, and where it is."""

    city: str
    country: str


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return f"the text of {path}"


def says_in_chat(**message):
    choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": "stop"}
    return says(CHAT | {"choices": [choice]})


def calls(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def figures(usage):
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]


@pytest_asyncio.fixture
async def ways(bed):
    """How to reach the gateway, by connections that end with the test: LangChain keeps its own for good."""
    async with openai.DefaultAsyncHttpxClient() as theirs:
        with openai.DefaultHttpxClient() as others:
            yield {
                "base_url": bed.url + "/v1", "api_key": bed.KEY, "http_async_client": theirs, "http_client": others,
            }  # fmt: skip


@pytest.fixture
def chat(ways):
    return lambda **more: ChatOpenAI(**ways | {"model": "m", "max_retries": 0} | more)


async def test_an_answer(chat):
    answer = await chat().ainvoke("hello")
    assert answer.content == "Héllo"
    assert figures(answer.usage_metadata) == USAGE
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 8
    assert answer.response_metadata["model_name"] == "m"


async def test_an_answer_without_an_event_loop(chat):
    assert (await asyncio.to_thread(chat().invoke, "hello")).content == "Héllo"


@pytest.mark.parametrize("wants", [True, False])
async def test_a_stream(chat, wants):
    pieces = [piece async for piece in chat(stream_usage=wants).astream("hello")]
    whole = sum(pieces[1:], pieces[0])
    assert whole.content == "Héllo"
    assert (whole.usage_metadata and figures(whole.usage_metadata)) == (USAGE if wants else None)


async def test_a_streams_events(chat):
    kinds = [seen["event"] async for seen in chat().astream_events("hello", version="v2")]
    assert (kinds[0], kinds[-1]) == ("on_chat_model_start", "on_chat_model_end")
    assert kinds.count("on_chat_model_stream") >= len(CHUNKS)


async def test_a_batch(chat, engine):
    asked = [f"{n}" for n in range(8)]
    answers = await chat().abatch(asked)
    assert [answer.content for answer in answers] == ["Héllo"] * 8
    assert sorted(json.loads(body)["messages"][0]["content"] for body in engine.bodies) == asked


async def test_a_tool_in_several_turns(chat, engine):
    model = chat().bind_tools([read_file])
    engine.script.append(says_in_chat(tool_calls=[calls("read_file", {"path": "x"})]))
    talk = [SystemMessage("You read files."), HumanMessage("what is in x?")]
    asked = await model.ainvoke(talk)
    assert asked.tool_calls[0]["args"] == {"path": "x"}
    told = await read_file.ainvoke(asked.tool_calls[0])
    assert isinstance(told, ToolMessage)
    answer = await model.ainvoke([*talk, asked, told])
    assert answer.content == "Héllo"
    sent = json.loads(engine.bodies[1])["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[-1] | {"tool_call_id": "call_1", "content": "the text of x"} == sent[-1]


async def test_a_streamed_tool_call(chat):
    pieces = [piece async for piece in chat().bind_tools([read_file]).astream("hello")]
    whole = sum(pieces[1:], pieces[0])
    assert whole.tool_calls[0]["args"] == {"path": "/etc/hosts"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(chat, engine, method):
    text = {"city": "Chur", "country": "CH"}
    message = {"tool_calls": [calls("Place", text)]} if method == "function_calling" else {"content": json.dumps(text)}
    engine.script.append(says_in_chat(**message))
    assert await chat().with_structured_output(Place, method=method).ainvoke("where?") == Place(**text)
    sent = json.loads(engine.bodies[0])
    assert ("tools" in sent) == (method == "function_calling")


async def test_callbacks_are_told_the_tokens(chat):
    handler = UsageMetadataCallbackHandler()
    model = chat(callbacks=[handler])
    await model.ainvoke("hello")
    _ = [piece async for piece in model.astream("hello", stream_usage=True)]
    assert {name: figures(usage) for name, usage in handler.usage_metadata.items()} == {"m": (24, 6, 30)}


async def test_a_picture(chat, engine):
    content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    await chat().ainvoke([HumanMessage(content)])
    assert json.loads(engine.bodies[0])["messages"][0]["content"] == content


async def test_the_responses_api(chat):
    answer = await chat(use_responses_api=True).ainvoke("hello")
    assert answer.text == "Hello"
    assert figures(answer.usage_metadata) == USAGE


async def test_the_responses_api_streamed(chat):
    pieces = [piece async for piece in chat(use_responses_api=True).astream("hello")]
    assert sum(pieces[1:], pieces[0]).text == "Hello"


async def test_embeddings(ways):
    embeddings = OpenAIEmbeddings(model="m", check_embedding_ctx_length=False, **ways)
    assert await embeddings.aembed_documents(["x"]) == [[0.5, -0.25]]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"api_key": "wrong"}, openai.AuthenticationError),
        ({"model": "nope"}, openai.NotFoundError),
        ({"default_headers": {"x-fabric-providers": "beta"}}, openai.PermissionDeniedError),
    ],
    ids=["key", "model", "provider"],
)
async def test_errors_have_their_types(chat, change, error):
    with pytest.raises(error):
        await chat(**change).ainvoke("hello")


async def test_a_stream_that_breaks_is_an_error(chat, engine):
    engine.script.append(dies(event(CHUNKS[0]), event(CHUNKS[1])))
    with pytest.raises(openai.APIError):
        _ = [piece async for piece in chat().astream("hello")]


async def test_a_fallback_takes_over(chat):
    answer = await chat(model="nope").with_fallbacks([chat()]).ainvoke([AIMessage("a"), HumanMessage("b")])
    assert answer.content == "Héllo"
