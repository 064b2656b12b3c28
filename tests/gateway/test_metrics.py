"""The series that a gateway has, those that its reference lists, and those that the dashboard draws are the same."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fabrictool.gateway.keeping import spooling
from fabrictool.gateway.storeprocess import StoreProcess

DOCS = Path(__file__).parents[2] / "docs"
NAMES = re.compile(r"fabric_\w+")
SUFFIXES = ("_bucket", "_total", "_count", "_sum")


def family(name):
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


async def scraped(bed):
    headers = {"authorization": f"Bearer {bed.KEY}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession(headers=headers) as http:
        for stream in (False, True):
            async with http.post(bed.url + "/v1/chat/completions", json=body | {"stream": stream}) as answer:
                await answer.read()
        text = bed.gateway.exposition().decode()
    return {entry.name: entry for entry in text_string_to_metric_families(text)}


@pytest.mark.asyncio
async def test_the_reference_lists_what_there_is_and_the_dashboard_draws_nothing_else(bed, tmp_path):
    process = StoreProcess(lambda: str(tmp_path / "r.db"))
    async with spooling(tmp_path, process, "f", "g") as spool:
        bed.gateway.record_in(spool, opt_out=False)
        series = await scraped(bed)
    process.close()
    there = {name for name in series if not name.endswith("_created")}
    assert there == {family(name) for name in NAMES.findall((DOCS / "reference" / "metrics.md").read_text())}
    dashboard = json.loads((DOCS / "how-to" / "grafana-gateways.json").read_text())
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(drawn) > 15
    assert {family(name) for expression in drawn for name in NAMES.findall(expression)} == there


@pytest.mark.asyncio
async def test_replicas_are_told_of_while_they_are_there(bed):
    bed.a.mode = "reset"
    series = await scraped(bed)
    by_replica = {
        (s.labels["replica"], s.labels["model"]): s.value for s in series["fabric_replica_failures"].samples if s.value
    }
    assert set(by_replica) == {(f"127.0.0.1:{bed.a.port}", "m")}
    assert sum(s.value for s in series["fabric_replica_requests"].samples) == sum(by_replica.values()) + 2
    assert {s.labels["model"]: s.value for s in series["fabric_candidates"].samples} == {"m": 2, "only-a": 1}
    assert sum(s.value for s in series["fabric_clients"].samples) == 1
    bed.gateway.directory.replace([])
    after = {entry.name: entry for entry in text_string_to_metric_families(bed.gateway.exposition().decode())}
    assert not after["fabric_replica_inflight"].samples
    assert not after["fabric_candidates"].samples


@pytest.mark.asyncio
async def test_what_is_refused_at_once_is_counted_by_its_status(bed):
    """Who tries keys is seen, and so is who speaks no HTTP."""
    key = {"authorization": f"Bearer {bed.KEY}"}
    async with aiohttp.ClientSession() as http:
        for method, path, headers in (
            ("POST", "/v1/chat/completions", {}),
            ("POST", "/v1/chat/completions", {"authorization": "Bearer guessed"}),
            ("GET", "/nothing", key),
            ("POST", "/nothing", key),
            ("GET", "/v1/chat/completions", key),
            ("DELETE", "/v1/models", key),
        ):
            async with http.request(method, bed.url + path, headers=headers, json={}) as answer:
                await answer.read()
    reader, writer = await asyncio.open_connection("127.0.0.1", bed.port)
    writer.write(b"nonsense\r\n\r\n")
    await reader.read()
    writer.close()
    series = {f.name: f for f in text_string_to_metric_families(bed.gateway.exposition().decode())}
    counted = {s.labels["code"]: s.value for s in series["fabric_requests"].samples if s.name.endswith("_total")}
    assert counted == {"401": 2, "404": 2, "405": 2, "400": 1}
    assert bed.gateway.status().totals.requests == 7
