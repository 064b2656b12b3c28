"""A real vLLM whose engine process stands still: its health page answers, its requests do not, and that is seen."""

import asyncio
import os
import signal

import psutil
import pytest

from fabrictool.agent.supervisor import Supervisor
from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.engines.protocol import EngineInstall
from tests.agent.test_supervisor import stopped, until
from tests.vllm.conftest import READY_S, VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio, pytest.mark.timeout(900)]

OPTIONS = {
    "load-format": "dummy", "enforce-eager": "true", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def command(model, at, ports):
    launch = EngineLaunch(
        engine="vllm", model=str(model), served_name="m", host="127.0.0.1", port=at.port or ports.api, socket=at.socket,
        inner_port=ports.inner, precision="bf16", context=2048, install=EngineInstall(venv=str(VLLM)), options=OPTIONS,
    )  # fmt: skip
    return adapter("vllm").command(launch)


async def asked(http, url, tokens):
    body = {"model": "m", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        return answer.status


async def test_a_stopped_engine_process_is_noticed_though_its_health_page_answers(random_model):
    supervisor = Supervisor(
        adapter("vllm"),
        lambda at, ports: command(random_model, at, ports),
        "m",
        lambda: None,
        start_timeout_s=READY_S,
        hang_s=15.0,
    )
    running = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: supervisor.state == "ready" or running.done(), READY_S)
        assert not running.done(), running.exception()
        async with supervisor.address.http(READY_S) as http:
            url = supervisor.address.url
            assert await asked(http, url, 200) == 200
            await until(lambda: not supervisor.running)
            assert supervisor.restarts == 0
            asking = asyncio.create_task(asked(http, url, 1900))
            await until(lambda: supervisor.running == 1)
            started = psutil.Process(supervisor.pid).children(recursive=True)
            (core,) = [process for process in started if "EngineCore" in " ".join(process.cmdline())]
            os.kill(core.pid, signal.SIGSTOP)
            async with http.get(f"{url}/health") as answer:
                assert answer.status == 200
            await until(lambda: supervisor.restarts == 1, 120)
            assert "got no further for 15 s: it hangs" in supervisor.progress
            await asyncio.gather(asking, return_exceptions=True)
    finally:
        await stopped(supervisor, running)
