"""Schemathesis against a gateway: whatever is sent, it answers at once, in OpenAI's words, and never with a 5xx."""

import asyncio
import dataclasses
import json
import random
import sys
from collections import Counter

import aiohttp
import jsonschema
import pytest

from fabrictool.engines.paths import MODEL_PATHS
from tests.gateway.conformance.document import ERROR, document
from tests.gateway.conformance.published import published
from tests.gateway.scripted import WHOLE
from tests.seeds import seeds

ENGINES_BUSINESS = "negative_data_rejection"
"""What the engine would refuse is passed on, and this one refuses nothing."""


LARGEST = "/v1/responses"
"""Its 190 schemas take the phase in which each bound is tried a quarter of a minute."""


async def schemathesis(bed, folder, *arguments, of=document):
    """Run its program; its output where it has complaints."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(of()))
    given = [
        "run", str(path), f"--url={bed.url}", f"--header=Authorization: Bearer {bed.KEY}", "--request-timeout=10",
        f"--exclude-checks={ENGINES_BUSINESS}", "--generation-database=none", "--warnings=off",
    ]  # fmt: skip
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *given, *arguments, cwd=folder, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return "" if process.returncode == 0 else output.decode()


USUAL = [("--phases=coverage,fuzzing", f"--exclude-path={LARGEST}"), ("--phases=fuzzing", f"--include-path={LARGEST}")]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", USUAL, ids=["small", "responses"])
async def test_what_schemathesis_sends_is_answered_as_the_document_says(bed, tmp_path, how):
    complaints = await schemathesis(bed, tmp_path, "--seed=7", "--max-examples=30", *how)
    assert not complaints, complaints
    assert {record.status for record in bed.records} >= {200, 400, 404}


@pytest.mark.asyncio
async def test_what_schemathesis_sends_is_answered_as_openais_own_document_says(bed, tmp_path):
    how = ("--phases=coverage,fuzzing", "--seed=7", "--max-examples=30")
    complaints = await schemathesis(bed, tmp_path, *how, of=published)
    assert not complaints, complaints
    assert {record.status for record in bed.records} >= {200, 400, 404}


@pytest.mark.asyncio
@pytest.mark.timeout(900)
@pytest.mark.parametrize("of", [document, published])
@seeds(0, drawn=0, long=3)
async def test_what_schemathesis_sends_anew_is_answered_so_too(bed, tmp_path, of, seed):
    how = ("--phases=coverage,fuzzing", f"--seed={seed}", "--max-examples=1000")
    complaints = await schemathesis(bed, tmp_path, *how, of=of)
    assert not complaints, complaints


BODY = b'{"model": "%s", "stream": %s, "messages": [{"role": "user", "content": "hi"}], "prompt": "x", "input": [1.5]}'
ODD = [
    b"", b"{", b"}", b'"', b"\\", b"\\ud800", b"\x00", b"\xff", b"\xef\xbb\xbf", b"NaN", b"-0", b"1e999", b"[" * 2000,
    b'{"a":' * 1500, b"9" * 5000, b'"stream_options": null,', b'"stream_options": {"include_usage": 1},', b'"n": 1e3,',
    b'"max_tokens": 99999999999999999999,', b'"max_tokens": -1,', b'"model": "m",', b'"previous_response_id": "x",',
    b'"messages": null,', b'"messages": [[]],', b"/* */", b"\r\n", b"\xe2\x80\xa8",
]  # fmt: skip
HEADERS = {
    "x-fabric-min-bits": ["8", "-1", "x", "9" * 400], "x-fabric-priority": ["batch", "\xe9"], "traceparent": ["00-x"],
    "x-fabric-max-wait": ["0", "1e9"], "content-type": ["text/plain", "application/json; charset=utf-16"],
    "x-fabric-continue": ["yes"], "x-request-id": ["\xff", "a" * 4000], "accept": ["text/event-stream", "*/*"],
    "x-fabric-labels": [",", ",,a"], "x-fabric-providers": ["alpha"],
}  # fmt: skip


def spoiled(rng):
    """A body of which some octets were lost, changed, doubled, or made to something odd."""
    name = rng.choice([b"m", b"m", b"alias", b"nope"])
    body = bytearray(BODY % (name, rng.choice([b"true", b"false", b"null"])))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        at, upto = sorted(rng.choices(range(len(body) + 1), k=2))
        kind = rng.randrange(5)
        if kind == 0:
            del body[at : min(upto, at + 5)]
        elif kind == 1:
            body[at:at] = body[at:upto]
        elif kind == 2 and at < len(body):
            body[at] = rng.randrange(256)
        else:
            at = rng.choice([at, 1, len(body)])
            body[at:at] = rng.choice(ODD)
    return bytes(body)


@pytest.mark.asyncio
@pytest.mark.timeout(600)
@seeds(2, drawn=0, long=40)
async def test_whatever_octets_come_the_answer_is_json_or_a_stream_and_no_5xx(bed, seed):
    rng = random.Random(seed)
    rules = dataclasses.replace(bed.gateway._rules, aliases={"alias": "m"})
    bed.gateway.reload(rules, bed.gateway._keyring, {})
    served = sorted(MODEL_PATHS & WHOLE.keys())
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
        for number in range(500):
            path, body = rng.choice(served), spoiled(rng)
            headers = {
                name: rng.choice(HEADERS[name]) for name in rng.sample(sorted(HEADERS), rng.choice([0, 0, 0, 1, 2]))
            }
            headers.setdefault("content-type", "application/json")
            what = (number, path, body, headers)
            async with asyncio.timeout(10), session.post(bed.url + path, data=body, headers=headers) as answer:
                text = await answer.read()
                assert answer.status < 500, what
                if answer.status == 200 and answer.content_type == "text/event-stream":
                    assert text.endswith(b"\n\n"), what
                    continue
                assert answer.content_type == "application/json", what
                said = json.loads(text)
            if answer.status != 200 and not path.startswith("/v1/messages"):
                jsonschema.validate(said, ERROR)
            elif answer.status != 200:
                assert said.keys() >= {"type", "error"} or said["error"]["type"] == "BadRequestError", what
    statuses = Counter(record.status for record in bed.records)
    assert min(statuses[200], statuses[400], statuses[404]) > 25, "all ways out are tried"
