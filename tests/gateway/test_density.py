"""Estimates of prompts of which no engine says what they took."""

import aiohttp
import pytest

from fabrictool.gateway.density import TokenDensity


def test_what_a_prompt_is_thought_to_take():
    """By what engines said of the same model and path; pictures say nothing of text, nor text of pictures."""
    density = TokenDensity()
    assert density.tokens("m", "chat", 3000, 0) == 1000, "nothing is known"
    for _ in range(10):
        density.learn("m", "chat", 1_400_000, 1300)
    assert density.tokens("m", "chat", 3000, 0) == 1000, "that was no text"
    for _ in range(100):
        density.learn("m", "chat", 4000, 1000)
    assert density.tokens("m", "chat", 100_000, 131_072) == 25_000
    assert density.tokens("m", "chat", 1_400_000, 131_072) == 1300
    assert density.tokens("m", "embeddings", 3000, 0) == density.tokens("n", "chat", 3000, 0) == 1000
    for _ in range(10_000):
        density.learn("m", "chat", 4000, 500)
    assert density.tokens("m", "chat", 8000, 0) in range(1000, 1020), "what was long ago is forgotten"


@pytest.mark.asyncio
@pytest.mark.interpreted
async def test_what_a_client_writes_behind_a_path_is_not_kept(bed):
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        for number in range(20):
            url = f"{bed.url}/v1/chat/completions?mine={number}"
            async with http.post(url, json={"model": "m", "messages": []}) as answer:
                assert answer.status == 200
    density = bed.gateway._metrics.density
    assert len({**density._texts, **density._others}) == 1
