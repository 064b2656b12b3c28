"""A gateway between the SDKs of OpenAI and Anthropic and a scripted server, which keeps what it was sent."""

import anthropic
import openai
import pytest_asyncio

from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.scripted import ScriptedEngine


@pytest_asyncio.fixture
async def engine():
    started = ScriptedEngine()
    await started.start()
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def bed(make_bed, engine):
    started = await make_bed().start(nodes=[StaticNode(engine.url, ["m", "org/name"], "alpha")])
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
