"""A gateway as a unit of a fabric: what it needs to start, and what it says while it runs."""

import asyncio
import os
import signal

import aiohttp
import msgspec
import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import InvalidInputError
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import GatewaySpec, HostPort
from fabrictool.gateway.keys import KeyRow, encode_keys, hash_key
from fabrictool.gateway.run import run_on_mesh
from tests.gateway.conftest import until
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio


def unit(folder, **options):
    """A run folder with an identity in it, and a spec."""
    federation = Federation(folder)
    federation.node("run/identity", role="gateway", **options)
    about = {"fabric": "t", "provider": "alpha", "site": "s", "cluster": "c", "name": "g"}
    anywhere = HostPort("127.0.0.1", 0)
    return RunFolder(folder / "run"), GatewaySpec(**about, listen=anywhere, mesh=anywhere, tenants={"anna": "all"})


async def test_a_gateway_whose_tenants_keys_are_missing_does_not_start(tmp_path):
    folder, spec = unit(tmp_path)
    with pytest.raises(InvalidInputError) as refused:
        await run_on_mesh(spec, folder, SystemClock())
    assert refused.value.problems[0].code == "FT8005"


async def test_status_and_metrics_are_on_loopback_and_warn_of_a_certificate_that_ends(tmp_path):
    folder, spec = unit(tmp_path, seconds=3600)
    keys = folder.path / "keys.json"
    keys.write_bytes(encode_keys([KeyRow("anna", hash_key("k" * 20), "all")]))
    keys.chmod(0o600)
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or (folder.path / "process.json").exists())
    document = msgspec.json.decode((folder.path / "process.json").read_bytes())
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://{document['listen']}/status") as answer:
            assert answer.status == 401
        async with http.get(document["status"].replace("/status", "/metrics")) as answer:
            assert "fabric_inflight 0.0" in await answer.text()
        status, warnings = {}, []
        while not warnings:
            async with http.get(document["status"]) as answer:
                status = await answer.json()
            warnings = [e["text"] for e in status["events"] if e["kind"] == "certificate-ends"]
            await asyncio.sleep(0.05)
    assert len(warnings) == 1
    assert "fabrictool apply" in warnings[0]
    (row,) = status["nodes"]
    assert 0 < row["certificate_ends_at"] - status["at"] < 2 * 3600
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == "signal SIGTERM"
